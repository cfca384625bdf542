"""Decodes a request's JSON and refuses what cannot be honoured, naming the field.

Known fields that are not implemented are accepted only with a value that asks for nothing; unknown ones are
accepted and warned of once per name. So no wish is dropped in silence, and no new client breaks.
"""

import re
from typing import Any, TypeVar

import msgspec
import structlog

from .errors import ApiError, invalid
from .limits import MAX_LOGIT_BIAS_BYTES, MAX_LOGIT_BIASES, RANGES
from .schema import TopLevel

log = structlog.get_logger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

#: Fields of OpenAI's interface and of its common extensions that are not implemented, with the values that ask for
#: nothing. Null is always one of them.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "kv_transfer_params": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "stream_interval": (1,),
}

#: Fields that change nothing of the answer.
IGNORED = frozenset(
    {
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "verbosity",
        "parallel_tool_calls",
        "request_id",
        "session_id",
        "include_reasoning",
    }
)

_MAX_WARNED = 1000
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")


class FieldReader:
    """Decodes request bodies; remembers which unknown names it has warned of."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def read(self, body: bytes, kind: type[T]) -> T:
        """The request in ``body``. Raises ``ApiError`` with status 400."""
        try:
            top = msgspec.json.decode(body, type=TopLevel)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise invalid(f"the body is not a JSON object: {error}") from None
        self._check_names(top, kind)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise _type_error(str(error)) from None

    def _check_names(self, top: TopLevel, kind: type[msgspec.Struct]) -> None:
        for name, raw in top.items():
            if name == "logit_bias" and len(raw) > MAX_LOGIT_BIAS_BYTES:
                raise invalid(f"logit_bias may have at most {MAX_LOGIT_BIASES} entries", "logit_bias")
            if name in kind.__struct_fields__ or name in IGNORED:
                continue
            if name in UNSUPPORTED:
                check_unsupported(name, raw)
            elif name not in self._warned and len(self._warned) < _MAX_WARNED:
                self._warned.add(name)
                log.warning("unknown field in a request, ignored", field=name[:64])


def check_unsupported(name: str, raw: msgspec.Raw) -> None:
    """Refuse the field unless its value asks for nothing."""
    if len(raw) <= 64:
        value = msgspec.json.decode(raw)
        # In Python False equals 0 and True equals 1: the kinds must agree, too.
        if value is None or any(
            value == noop and isinstance(value, bool) == isinstance(noop, bool) for noop in UNSUPPORTED[name]
        ):
            return
    raise invalid(f"{name} is not supported by this server", name, "unsupported_parameter")


def check_ranges(request: msgspec.Struct) -> None:
    """Every number of the request is inside its range of ``limits``. Raises ``ApiError``."""
    for name, span in RANGES.items():
        if name not in request.__struct_fields__:
            continue
        value = getattr(request, name)
        if isinstance(value, int | float) and value not in span:
            raise invalid(f"{name} must be {span}, got {value}", name, "invalid_value")


def _type_error(text: str) -> ApiError:
    found = _PATH.search(text)
    param = found.group(1) if found else None
    message = text[: found.start()] if found else text
    if missing := _MISSING.search(message):
        name = missing.group(1)
        param = f"{param}.{name}" if param else name
        return invalid(f"{param} is required", param, "missing_required_parameter")
    message = message.replace("`", "")
    return invalid(f"{param}: {message}" if param else message, param or None, "invalid_type")
