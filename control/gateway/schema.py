"""The JSON of requests and responses.

A field that is null is a field that is absent: every optional one has None as its default. Ranges are not here but
in ``limits``, so that an error can name the whole range.
"""

from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType


class StreamOptions(Struct):
    include_usage: bool | None = None
    #: With ``include_usage``: the usage so far in every chunk, of the chunk's choice.
    continuous_usage_stats: bool | None = None


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
    n: int | None = None
    best_of: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    #: A class of the time between tokens, or a target in milliseconds.
    slo: str | int | None = None
    tenant: str | None = None
    user: str | None = None


class CompletionRequest(CommonFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ChatRequest(CommonFields, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
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


class CompletionLogprobs(Struct, frozen=True):
    """Columns with one entry a token; a prompt's first token has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatTopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Message(Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: Message
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class Delta(Struct, frozen=True, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class DeltaChoice(Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None


class Answer(Struct, frozen=True):
    """A whole answer, and each chunk of a streamed one; ``usage`` is left out where nobody asked for it.

    ``prompt_logprobs`` is chat's; completions have it in each choice, as each may be of another prompt.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice] | list[DeltaChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TokenizeAnswer(Struct, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeAnswer(Struct, frozen=True):
    prompt: str


TopLevel = dict[str, Raw]
