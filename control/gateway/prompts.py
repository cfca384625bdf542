"""From a request's fields to prompts of token ids, with every check that can be made before the work is queued."""

from typing import Any

from .chat_template import ChatTemplate, TemplateError
from .errors import ApiError, invalid
from .limits import MAX_MESSAGES, MAX_PARTS, MAX_PROMPTS
from .tokenizer import TextModel


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a completion request: a text, several texts, token ids, or several lists of ids."""
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = [[item for item in prompt if isinstance(item, int)]]
    else:
        if len(prompt) > MAX_PROMPTS:
            raise invalid(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
        kinds = {type(item) for item in prompt}
        if len(kinds) > 1:
            raise invalid("prompt must hold only texts, only token ids or only lists of token ids", "prompt")
        prompts = [item for item in prompt if not isinstance(item, int)]
    if not prompts:
        raise invalid("prompt must not be empty", "prompt")
    for index, item in enumerate(prompts):
        if not item:
            param = f"prompt[{index}]" if isinstance(prompt, list) else "prompt"
            raise invalid(f"{param} must not be empty", param)
    return prompts


def check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Every id names a row of the model's vocabulary."""
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise invalid(
                f"{param}[{index}] must be a token id between 0 and {vocab_size - 1}, got {token}",
                f"{param}[{index}]",
            )


def check_size(text: str, model: TextModel, max_model_len: int, param: str) -> None:
    """Refuse without tokenizing what cannot fit: a token stands for a bounded number of bytes."""
    most = max_model_len * model.max_token_bytes
    # Counting bytes costs more than counting characters, and each has one byte at least.
    if len(text) > most or len(text.encode("utf-8", "surrogatepass")) > most:
        raise ApiError(
            400,
            f"the text has {len(text)} characters, but this model's maximum context length is {max_model_len} tokens,"
            f" which is at most {most} bytes of text",
            param=param,
            code="context_length_exceeded",
        )


def normalize_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text parts joined, null content empty. Raises ``ApiError``."""
    if not messages:
        raise invalid("messages must not be empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid(f"messages may hold at most {MAX_MESSAGES} items, got {len(messages)}", "messages")
    return [_normalize_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize_message(message: dict[str, Any], param: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{param}.role is required and must be a text", f"{param}.role")
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise invalid(f"{param}.content is required", f"{param}.content")
        content = ""
    elif isinstance(content, list):
        content = _join_parts(content, f"{param}.content")
    elif not isinstance(content, str):
        raise invalid(f"{param}.content must be a text or a list of parts", f"{param}.content")
    # "developer" is OpenAI's newer name of the system role; templates know only the old one.
    kept = {name: value for name, value in message.items() if value is not None}
    return {**kept, "role": "system" if role == "developer" else role, "content": content}


def _join_parts(parts: list[Any], param: str) -> str:
    if len(parts) > MAX_PARTS:
        raise invalid(f"{param} may hold at most {MAX_PARTS} parts, got {len(parts)}", param)
    texts: list[str] = []
    for index, part in enumerate(parts):
        here = f"{param}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise invalid(
                f"{here}.type {kind!r:.64} is not supported, only 'text'", f"{here}.type", "unsupported_value"
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise invalid(f"{here}.text is required and must be a text", f"{here}.text")
        texts.append(text)
    return "\n".join(texts)


def message_chars(messages: list[dict[str, Any]]) -> int:
    """Characters in the messages' contents, for the choice between rendering inline and in a thread."""
    return sum(len(message["content"]) for message in messages)


def render_chat(
    template: ChatTemplate | None,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    variables: dict[str, Any] | None,
) -> str:
    """The conversation as text. Raises ``ApiError`` with the template's own words."""
    if template is None:
        raise invalid(
            "this model has no chat template: use /v1/completions, or start the server with a model that has one"
            " (chat_template.jinja, chat_template in tokenizer_config.json, or tokenizer.chat_template in GGUF)",
            "messages",
            "chat_template_missing",
        )
    try:
        text = template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)
    except TemplateError as error:
        raise invalid(str(error), "messages", "chat_template_error") from None
    if not text:
        raise invalid("the chat template renders these messages to nothing", "messages")
    return text
