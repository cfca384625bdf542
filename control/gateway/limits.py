"""All bounds of the HTTP interface in one table. What is outside is refused before any work is done."""

from dataclasses import dataclass

from ..wire import MAX_BIASES, MAX_TOP_LOGPROBS, client

MIB = 1 << 20

MAX_BODY_BYTES = 8 * MIB
MAX_HEADER_BYTES = 64 << 10
MAX_REQUEST_ID = 128
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 32
#: Characters of a tenant's name.
MAX_TENANT = 256
#: Characters of the name of a class of the time between tokens.
MAX_SLO_NAME = 64
#: Choices of a request: its prompts times n.
MAX_CHOICES = 256
MAX_LOGIT_BIASES = MAX_BIASES
#: JSON of a ``logit_bias`` that could have so few entries: a longer one is refused unread.
MAX_LOGIT_BIAS_BYTES = 64 << 10
#: Log-probabilities reported of a request's prompts: their tokens, times the alternatives and one, times n.
MAX_PROMPT_LOGPROBS = 1 << 19
MAX_TEMPLATE_CHARS = 16 * MIB
TEMPLATE_SECONDS = 5.0
HEAD_SECONDS = 30.0
BODY_SECONDS = 30.0
#: Silence in a stream after which a comment keeps proxies from closing it.
KEEP_ALIVE_SECONDS = 15.0
#: How long a new request waits for a control process that is being restarted.
CONNECT_SECONDS = 10.0
#: After a refusal because the queue was full, new requests are refused unread for this long.
FULL_SECONDS = 1.0
#: Headers of a stream wait this long for the first token or a refusal.
HEADER_SECONDS = 2.0
#: An answer that a stop string ended waits this long for the number of its cached tokens.
SETTLE_SECONDS = 0.5
#: Texts and renderings above this many characters are handled in a thread.
INLINE_CHARS = 2048


@dataclass(frozen=True, slots=True)
class Range:
    """An inclusive range of a number."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"between {self.low:.12g} and {self.high:.12g}"


#: Inclusive, by field. top_k -1 and 0 both mean off; max_tokens 0 is for ``echo``; logit_bias is about its values.
RANGES: dict[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1),
    "top_k": Range(-1, (1 << 31) - 1),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 10),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "logit_bias": Range(-100, 100),
    "max_tokens": Range(0, 1 << 21),
    "max_completion_tokens": Range(1, 1 << 21),
    "min_tokens": Range(0, 1 << 21),
    "seed": Range(-(1 << 63), (1 << 63) - 1),
    "n": Range(1, 128),
    "best_of": Range(1, 128),
    "logprobs": Range(0, MAX_TOP_LOGPROBS),
    "top_logprobs": Range(0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_TOP_LOGPROBS),
    "priority": Range(-client.MAX_PRIORITY, client.MAX_PRIORITY),
    "deadline_ms": Range(1, client.MAX_DEADLINE_MS),
    "slo": Range(1, client.MAX_TBT_MS),
}
