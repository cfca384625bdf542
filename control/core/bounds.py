"""The names of the policies, and how many tokens their iterations must hold."""

from __future__ import annotations

#: What may choose the contents of an iteration (see ``policies``).
POLICIES = ("stall-free", "prefill-first", "hybrid", "request-level", "chunked-only", "hybrid-only")
#: Those that compute a prompt in one iteration.
WHOLE_PROMPTS = frozenset({"prefill-first", "hybrid", "request-level", "hybrid-only"})
#: Those of them that do so beside the decodes of the lane.
BESIDE_DECODES = frozenset({"hybrid", "hybrid-only"})


def iteration_tokens(policy: str, token_budget: int, max_model_len: int, max_num_seqs: int) -> int:
    """The token budget that ``policy`` runs with when ``token_budget`` was asked for.

    A prompt that is computed whole must fit an iteration, and so must any sequence, which may have to be computed
    anew: such policies get the longest sequence's length at least, and the decodes beside it on top.
    """
    if policy not in WHOLE_PROMPTS:
        return token_budget
    return max(token_budget, max_model_len + (max_num_seqs if policy in BESIDE_DECODES else 0))
