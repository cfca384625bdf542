"""Which worker may take which place: a stage of a replica. Pure functions of what it says and of what is known."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from .core.events import Limits
from .wire import PROTOCOL_VERSION, Hello, Probe

#: A place that is taken is refused to another worker unless the one that has it turns out to be gone by then.
CLAIM_S = 2.0


@dataclass(frozen=True, slots=True)
class Layout:
    """The places that there are. ``external``: replicas whose workers are started by hand and dial in."""

    replicas: int
    stages: int
    external: Set[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker waits for a place that is taken. ``since``: when it first asked."""

    identity: bytes
    hello: Hello
    since: float


def host_name(host: str) -> str:
    """The part of ``Hello.host`` that people know."""
    return host.partition("/")[0] or "an unknown host"


def no_such_place(asked: Hello | Probe, layout: Layout) -> str | None:
    """Why nobody can have the place that is asked for, or None."""
    if asked.version != PROTOCOL_VERSION:
        return f"protocol version {asked.version}, this control process speaks {PROTOCOL_VERSION}"
    # A probe that leaves the number of stages open wants to be told.
    stages = asked.stages or (layout.stages if isinstance(asked, Probe) else 0)
    if asked.replica >= layout.replicas or asked.stage >= layout.stages or stages != layout.stages or asked.rank:
        return (
            f"replica {asked.replica}, stage {asked.stage} of {stages}, rank {asked.rank} does not exist"
            f" here: {layout.replicas} replicas of {layout.stages} stages, one rank each"
        )
    by_hand = asked.external if isinstance(asked, Hello) else True
    if by_hand and asked.replica not in layout.external:
        places = ", ".join(map(str, sorted(layout.external)))
        rest = f"replicas for workers started by hand: {places}" if places else "none is for workers started by hand"
        return f"replica {asked.replica} is started by the launcher; {rest}"
    if not by_hand and asked.replica in layout.external:
        return f"replica {asked.replica} is for workers started by hand"
    return None


def misfit(hello: Hello, model: Hello | None, limits: Limits | None, mates: Iterable[Hello]) -> str | None:
    """Why a worker cannot serve with the others, or None. ``model``: one of them; ``mates``: those of its replica."""
    for name in ("vocab_size", "block_size", "num_blocks", "num_slots", "max_tokens", "max_model_len"):
        if getattr(hello, name) < 1:
            return f"{name} is {getattr(hello, name)}: a worker has at least one"
    if model is not None and (model.model, model.vocab_size) != (hello.model, hello.vocab_size):
        return f"model {hello.model} with {hello.vocab_size} ids, but {model.model} is being served"
    if model is not None and model.block_size != hello.block_size:
        return f"block size {hello.block_size}, but {model.block_size} is in use"
    if limits is not None and hello.max_tokens < limits.token_budget:
        return f"at most {hello.max_tokens} tokens an iteration, but the token budget is {limits.token_budget}"
    if limits is not None and hello.max_model_len < limits.max_model_len:
        return f"sequences of {hello.max_model_len} tokens, but {limits.max_model_len} are allowed"
    for mate in mates:
        if hello.host and mate.host and hello.host != mate.host and hello.stage != mate.stage:
            return (
                f"stage {hello.stage} on {host_name(hello.host)} shares no memory with stage {mate.stage} on"
                f" {host_name(mate.host)}: the stages of one replica must be on one host"
            )
    return None
