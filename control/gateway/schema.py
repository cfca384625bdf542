"""The JSON of requests and responses.

A field that is null is a field that is absent: every optional one has None as its default. Ranges are not here but
in ``limits``, so that an error can name the whole range.
"""

from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType


class StreamOptions(Struct):
    include_usage: bool | None = None


class CommonFields(Struct, kw_only=True):
    """What completions and chat share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None


class CompletionRequest(CommonFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    add_special_tokens: bool | None = None


class ChatRequest(CommonFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None


class Message(Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: Message
    finish_reason: str | None
    logprobs: None = None


class Delta(Struct, frozen=True, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class DeltaChoice(Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: None = None


class Answer(Struct, frozen=True):
    """A whole answer, and each chunk of a streamed one; ``usage`` is left out where nobody asked for it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice] | list[DeltaChoice]
    usage: Usage | UnsetType | None = UNSET


class TokenizeAnswer(Struct, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeAnswer(Struct, frozen=True):
    prompt: str


TopLevel = dict[str, Raw]
