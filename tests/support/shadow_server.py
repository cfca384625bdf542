"""``InProcess`` servers over shadow-KV workers, and prompts for them: what the tests of the control plane share."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

from evenflow.control.core.events import Limits
from evenflow.control.core.replica import Replica
from evenflow.dataplane.simulated.made_up import Row
from evenflow.dataplane.simulated.shadow import DEFAULT_VOCAB, ShadowRunner, shadow_logprobs, shadow_tokens
from inprocess import InProcess


def shadow_server(
    *,
    budget: int = 256,
    block_size: int = 16,
    blocks: int = 512,
    stages: int = 1,
    replicas: int = 1,
    seqs: int = 64,
    num_slots: int | None = None,
    max_model_len: int = 8192,
    caching: bool = True,
    tile: int = 0,
    share: float = 0.25,
    overtakes: int = 32,
    max_queued: int = 4096,
    max_queued_tokens: int = 8 << 20,
    check: bool = True,
    up: bool = True,
    policy: str = "stall-free",
    admission: str = "fcfs",
    patience: float = 60.0,
    tenant_weights: tuple[tuple[str, float], ...] = (),
    queue_timeout: float = 0.0,
) -> InProcess:
    """A server whose pool has ``blocks`` blocks; ``num_slots`` leaves room for fenced slots unless given."""
    limits = Limits(
        token_budget=budget,
        max_num_seqs=seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        prefix_caching=caching,
        tile=tile,
        share=share,
        overtakes=overtakes,
        max_queued=max_queued,
        max_queued_tokens=max_queued_tokens,
        policy=policy,
        admission=admission,
        patience=patience,
        tenant_weights=tenant_weights,
        queue_timeout=queue_timeout,
    )

    def runner(stage: int, count: int) -> ShadowRunner:
        return ShadowRunner(stage, count, block_size=block_size, num_blocks=blocks, max_model_len=max_model_len)

    slots = num_slots if num_slots is not None else seqs + max(8, seqs // 2)
    return InProcess(limits, runner, stages=stages, replicas=replicas, num_slots=slots, check=check, up=up)


def prompt(size: int, seed: int = 1) -> list[int]:
    """``size`` varied token ids; prompts of different seeds differ from the first token on."""
    return [(seed * 7919 + (i + 1) * (i + seed) * 31) % 49_999 for i in range(size)]


@cache
def _wanted(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(shadow_tokens(tokens, count))


def wanted(tokens: Sequence[int], count: int) -> list[int]:
    """The greedy output of an undisturbed run."""
    return list(_wanted(tuple(tokens), count))


def logprob_of(tokens: Sequence[int], index: int, width: int, vocab_size: int = DEFAULT_VOCAB) -> Row:
    """What is reported of token ``index`` of a sequence, with ``width`` alternatives."""
    return _logprobs(tuple(tokens), width, vocab_size)[index - 1]


@lru_cache(maxsize=64)
def _logprobs(tokens: tuple[int, ...], width: int, vocab_size: int) -> list[Row]:
    return shadow_logprobs(tokens, 1, width, vocab_size=vocab_size)


def scrambled(seed: int) -> Callable[[int], int]:
    """A ``choose`` for ``InProcess.run``: device actions in an order that only ``seed`` decides."""
    state = seed

    def choose(count: int) -> int:
        nonlocal state
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        return (state >> 8) % count

    return choose


def only(server: InProcess) -> Replica:
    """The scheduler of the only replica."""
    (replica,) = server.engine.replicas.values()
    return replica


def device_side(server: InProcess, steps: int = 1_000_000) -> None:
    """Let the workers run and the ids reach the first stage, but keep the results on their way to control."""
    for _ in range(steps):
        actions = [action for action in server.actions() if action[0] != server._return]
        if not actions:
            return
        action, replica, stage = actions[0]
        action(replica, stage)


def advance(server: InProcess, count: int) -> None:
    """At most ``count`` actions of the device side, results first."""
    for _ in range(count):
        actions = server.actions()
        if not actions:
            return
        action, replica, stage = actions[-1]
        action(replica, stage)
