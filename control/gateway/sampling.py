"""From a request's fields to what the control process is asked for: how tokens are drawn, and how many choices.

Everything here is checked before the prompt is tokenized.
"""

from array import array

from msgspec.structs import replace

from ..client import draw_seed
from ..wire import Sampling
from .defaults import SamplingDefaults
from .errors import invalid
from .limits import MAX_LOGIT_BIASES, RANGES
from .schema import ChatRequest, CommonFields, CompletionRequest

#: Below this, dividing by the temperature overflows: the limit is greedy.
_MIN_TEMPERATURE = 1e-5
#: The limit of a nucleus of nothing is the one likeliest token.
_MIN_TOP_P = 1e-9
#: The control process takes 0 for "draw one".
_SEED_OF_0 = 1 << 62


def count_choices(request: CommonFields) -> int:
    """Choices for each prompt. Raises ``ApiError``."""
    count = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != count:
        raise invalid(f"best_of must be absent or equal to n, {count}, got {request.best_of}", "best_of")
    return count


def wanted_logprobs(request: CommonFields) -> int:
    """Alternatives for each output token; -1 where no log-probabilities are wanted. Raises ``ApiError``."""
    if isinstance(request, ChatRequest):
        if not request.logprobs:
            if request.top_logprobs:
                raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
            return -1
        return request.top_logprobs or 0
    if isinstance(request, CompletionRequest):
        wanted = request.logprobs
        if wanted is True:
            raise invalid(f"logprobs must be a number {RANGES['logprobs']}, got true", "logprobs")
        return -1 if wanted is None or wanted is False else wanted
    return -1


def wanted_prompt_logprobs(request: CommonFields, logprobs: int) -> int:
    """The same for the prompt's tokens: asked for by their field, or by ``echo`` with ``logprobs``."""
    asked = request.prompt_logprobs
    if asked is not None and request.stream:
        raise invalid("prompt_logprobs is not available when stream is true", "prompt_logprobs")
    echoed = logprobs if isinstance(request, CompletionRequest) and request.echo else -1
    return max(echoed, -1 if asked is None else asked)


def read_sampling(request: CommonFields, vocab_size: int, defaults: SamplingDefaults) -> Sampling:
    """How the first choice is drawn; the others differ in ``index`` only. Raises ``ApiError``."""
    temperature = defaults.temperature if request.temperature is None else request.temperature
    top_k = defaults.top_k if request.top_k is None else request.top_k
    repetition = request.repetition_penalty
    seed = draw_seed() if request.seed is None else request.seed & ((1 << 63) - 1)
    bias_ids, bias_values = _read_biases(request.logit_bias or {}, vocab_size)
    logprobs = wanted_logprobs(request)
    return Sampling(
        temperature=0.0 if temperature < _MIN_TEMPERATURE else temperature,
        top_k=max(0, top_k),
        top_p=max(_MIN_TOP_P, defaults.top_p if request.top_p is None else request.top_p),
        seed=seed or _SEED_OF_0,
        min_p=defaults.min_p if request.min_p is None else request.min_p,
        repetition=defaults.repetition_penalty if repetition is None else repetition,
        presence=request.presence_penalty or 0.0,
        frequency=request.frequency_penalty or 0.0,
        bias_ids=bias_ids,
        bias_values=bias_values,
        logprobs=logprobs,
        prompt_logprobs=wanted_prompt_logprobs(request, logprobs),
    )


def of_choice(sampling: Sampling, index: int) -> Sampling:
    """The same request's choice ``index``. The prompt's log-probabilities are the first one's to report."""
    return replace(sampling, index=index, prompt_logprobs=-1) if index else sampling


def _read_biases(biases: dict[str, float], vocab_size: int) -> tuple[bytes, bytes]:
    if len(biases) > MAX_LOGIT_BIASES:
        raise invalid(f"logit_bias may have at most {MAX_LOGIT_BIASES} entries, got {len(biases)}", "logit_bias")
    span = RANGES["logit_bias"]
    found: dict[int, float] = {}
    for name, value in biases.items():
        # Not more digits than an id can have: int() takes long for very many.
        token = int(name) if name.isascii() and name.isdigit() and len(name) <= 10 else -1
        if not 0 <= token < vocab_size:
            text = f"logit_bias must name token ids between 0 and {vocab_size - 1}, got {name!r:.32}"
            raise invalid(text, "logit_bias")
        if token in found:
            raise invalid(f"logit_bias names token {token} twice", "logit_bias")
        if value not in span:
            raise invalid(f"logit_bias of token {token} must be {span}, got {value:g}", "logit_bias")
        found[token] = value
    return array("I", found).tobytes(), array("f", found.values()).tobytes()
