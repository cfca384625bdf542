"""The names of the policies and of the admission orders, and how many tokens the policies' iterations must hold."""

from __future__ import annotations

#: What may choose the contents of an iteration (see ``policies``).
POLICIES = ("stall-free", "prefill-first", "hybrid", "request-level", "chunked-only", "hybrid-only")
#: In which order requests may be admitted and, from its end, preempted (see ``orders``).
ADMISSIONS = ("fcfs", "priority", "deadline", "fair")
#: Those that compute a prompt in one iteration.
WHOLE_PROMPTS = frozenset({"prefill-first", "hybrid", "request-level", "hybrid-only"})
#: Those of them that do so beside the decodes of the lane.
BESIDE_DECODES = frozenset({"hybrid", "hybrid-only"})
#: Tokens of an iteration that a worker takes unless it is told to take more.
USUAL_TOKENS = 8192


def iteration_tokens(policy: str, token_budget: int, max_model_len: int, max_num_seqs: int) -> int:
    """The token budget that ``policy`` runs with when ``token_budget`` was asked for.

    A prompt that is computed whole must fit an iteration, and so must any sequence, which may have to be computed
    anew: such policies get the longest sequence's length at least, and the decodes beside it on top.
    """
    if policy not in WHOLE_PROMPTS:
        return token_budget
    return max(token_budget, max_model_len + (max_num_seqs if policy in BESIDE_DECODES else 0))


def worker_tokens(policy: str, token_budget: int, max_model_len: int | None, max_num_seqs: int) -> int:
    """The same before the model's length is known, if ``max_model_len`` does not say it either: what workers must be
    told to take, if that is more than usual. A longer model's sequences are then no longer than that."""
    return iteration_tokens(policy, token_budget, max(USUAL_TOKENS, max_model_len or 0), max_num_seqs)
