"""What all routes of one gateway share, and the way of a request from its fields to the control process."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..client import AsyncClient, draw_seed
from ..wire import Sampling, Welcome
from .chat_template import ChatTemplate, TemplateError
from .errors import ApiError, invalid, unavailable
from .fields import FieldReader, check_ranges
from .generation import Generation, Stopping
from .limits import CONNECT_SECONDS, INLINE_CHARS, MAX_STOP_CHARS, MAX_STOP_IDS, MAX_STOPS
from .metrics import Metrics
from .prompts import check_ids, check_size
from .schema import ChatRequest, CommonFields
from .tokenizer import TextModel

T = TypeVar("T")

#: Below this, dividing by the temperature overflows: the limit is greedy.
_MIN_TEMPERATURE = 1e-5
#: The limit of a nucleus of nothing is the one likeliest token.
_MIN_TOP_P = 1e-9
_MAX_WIRE_STOP_IDS = 64


class Service:
    """One gateway's connection, model and books."""

    def __init__(self, client: AsyncClient, model: TextModel, names: list[str]) -> None:
        self.client = client
        self.model = model
        #: Served model names; the first is the one that answers carry.
        self.names = names
        self.created = int(time.time())
        self.fields = FieldReader()
        self.metrics = Metrics(names[0], lambda: client.last_status, lambda: client.connected)
        #: Encoding and rendering of long texts; encoding releases the interpreter lock.
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="text")
        self.draining = False
        #: Requests for work that are under way.
        self.active = 0
        self.template: ChatTemplate | None = None
        self.template_error: str | None = None
        if model.chat_template is not None:
            try:
                self.template = ChatTemplate(model.chat_template, model.specials)
            except TemplateError as error:
                self.template_error = str(error)

    @property
    def ready(self) -> bool:
        """New requests would be served now."""
        client = self.client
        status = client.last_status
        draining = self.draining or (status is not None and status.draining)
        return client.connected and client.welcome is not None and client.welcome.ready and not draining

    async def limits(self) -> Welcome:
        """The service's limits. Waits for a control process that is being restarted, or that knows no worker yet."""
        client = self.client

        def known() -> bool:
            return client.connected and client.welcome is not None and client.welcome.max_model_len > 0

        try:
            await client.wait_for(known, CONNECT_SECONDS)
        except TimeoutError:
            what = "the model is not loaded yet" if client.connected else "the control process does not answer"
            raise unavailable(what, 2.0, "not_ready") from None
        assert client.welcome is not None
        return client.welcome

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Do ``work`` on a text of ``size`` characters: here if it is short, in a thread if it is not."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            served = ", ".join(self.names)
            raise ApiError(
                404,
                f"the model {name!r:.256} does not exist here; served: {served}",
                param="model",
                code="model_not_found",
            )

    def usable_template(self) -> ChatTemplate | None:
        if self.template_error is not None:
            raise invalid(self.template_error, "messages", "chat_template_error")
        return self.template

    async def encode(
        self, prompt: str | list[int], welcome: Welcome, param: str, *, add_special_tokens: bool
    ) -> list[int]:
        """Token ids of a text (or of ids, which are checked). Raises ``ApiError``."""
        if isinstance(prompt, list):
            await self.run(len(prompt), lambda: check_ids(prompt, welcome.vocab_size, param))
            return prompt
        check_size(prompt, self.model, welcome.max_model_len, param)
        ids = await self.run(len(prompt), lambda: self.model.encode(prompt, add_special_tokens=add_special_tokens))
        if not ids:
            raise invalid(f"{param} gives no tokens", param)
        return ids

    async def start(self, prompts: list[list[int]], request: CommonFields, name: str) -> list[Generation]:
        """Submit one request per prompt. Raises ``ApiError`` before any is submitted."""
        welcome = await self.limits()
        check_ranges(request)
        stopping = self._stopping(request, welcome)
        limit = output_limit(request)
        budgets = [self._max_tokens(len(ids), limit, request.min_tokens or 0, welcome) for ids in prompts]
        salt = hashlib.sha256(request.cache_salt.encode()).digest() if request.cache_salt else b""
        seed = draw_seed() if request.seed is None else request.seed & ((1 << 63) - 1)
        temperature = 1.0 if request.temperature is None else request.temperature
        greedy = temperature < _MIN_TEMPERATURE
        generations: list[Generation] = []
        for index, (ids, budget) in enumerate(zip(prompts, budgets, strict=True)):
            sampling = Sampling(
                temperature=0.0 if greedy else temperature,
                top_k=max(0, request.top_k or 0),
                top_p=max(_MIN_TOP_P, 1.0 if request.top_p is None else request.top_p),
                # 0 would ask the client library for another one.
                seed=seed or 1 << 62,
            )
            stream = await self.client.submit(
                ids,
                max_tokens=budget,
                sampling=sampling,
                stop_ids=sorted(stopping.ids),
                min_tokens=stopping.min_tokens,
                salt=salt,
                request=name if len(prompts) == 1 else f"{name}-{index}",
            )
            generations.append(Generation(stream, self.model, stopping, self.metrics, len(ids)))
        return generations

    def _max_tokens(self, prompt: int, limit: int | None, min_tokens: int, welcome: Welcome) -> int:
        longest = context_length(welcome)
        pool = "" if longest == welcome.max_model_len else " (as many as its KV cache can hold)"
        requested = 1 if limit is None else limit
        if prompt + requested > longest:
            completion = "" if limit is None else f" and {limit} for the completion"
            raise ApiError(
                400,
                f"this model's maximum context length is {longest} tokens{pool}, but {prompt + (limit or 0)} were"
                f" requested: {prompt} in the prompt{completion};"
                f" the prompt may have at most {longest - requested}",
                param="max_tokens" if limit is not None and prompt < longest else "prompt",
                code="context_length_exceeded",
            )
        budget = longest - prompt if limit is None else limit
        if min_tokens > budget:
            raise invalid(f"min_tokens must be at most max_tokens, {budget}, got {min_tokens}", "min_tokens")
        return budget

    def _stopping(self, request: CommonFields, welcome: Welcome) -> Stopping:
        stop_ids = request.stop_token_ids or []
        if len(stop_ids) > MAX_STOP_IDS:
            raise invalid(
                f"stop_token_ids may hold at most {MAX_STOP_IDS} ids, got {len(stop_ids)}", "stop_token_ids"
            )
        check_ids(stop_ids, welcome.vocab_size, "stop_token_ids")
        ends = set() if request.ignore_eos else {*welcome.eos_ids, *self.model.eos_ids}
        return Stopping(
            strings=_stop_strings(request.stop),
            ids=frozenset(sorted({*ends, *stop_ids})[:_MAX_WIRE_STOP_IDS]),
            min_tokens=request.min_tokens or 0,
            skip_special_tokens=request.skip_special_tokens is not False,
        )


def context_length(welcome: Welcome) -> int:
    """The longest sequence that can be served; 0 while it is not known."""
    return min(welcome.max_model_len, welcome.max_sequence or welcome.max_model_len)


def output_limit(request: CommonFields) -> int | None:
    """The wanted number of output tokens, or None. Raises ``ApiError`` if two fields disagree."""
    limit = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if limit is not None and limit != request.max_completion_tokens:
            raise invalid(
                f"max_tokens ({limit}) and max_completion_tokens ({request.max_completion_tokens}) disagree:"
                " send only one of them",
                "max_completion_tokens",
            )
        return request.max_completion_tokens
    return limit


def check_stream_options(request: CommonFields) -> bool:
    """Whether a usage chunk is wanted. Raises ``ApiError`` for options without a stream."""
    if request.stream_options is None:
        return False
    if not request.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    return bool(request.stream_options.include_usage)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOPS:
        raise invalid(f"stop may hold at most {MAX_STOPS} texts, got {len(strings)}", "stop")
    for index, text in enumerate(strings):
        param = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise invalid(f"{param} must have between 1 and {MAX_STOP_CHARS} characters, got {len(text)}", param)
    return tuple(dict.fromkeys(strings))
