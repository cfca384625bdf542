"""Mistakes put into the product on purpose, one at a time, to show that the simulator finds them.

They replace methods of the interpreted classes from outside (``EVENFLOW_PURE=1``, a process of its own each): nothing
in the product knows of them. ``hunt`` looks for each among the first seeds.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from evenflow.control.client_state import ClientState
from evenflow.control.core import admission
from evenflow.control.core.blocks import BlockPool
from evenflow.control.core.engine import Engine
from evenflow.control.core.replica import Replica
from evenflow.control.core.sequence import Phase
from evenflow.control.fanout import Fanout
from evenflow.control.server import ControlServer
from evenflow.control.supervision import Supervisor
from evenflow.control.vacancies import Vacancies
from msgspec.structs import replace

from .world import run


def _after(kind: type, name: str, does: Callable[..., object]) -> None:
    """Let ``does`` see the arguments of a method afterwards."""
    real = getattr(kind, name)

    def method(self: Any, *args: Any) -> Any:
        result = real(self, *args)
        does(self, *args)
        return result

    setattr(kind, name, method)


def _free_copies_at_once() -> None:
    def give_back(pool: BlockPool, seq: Any, _: int) -> None:
        pool.free += seq.dups
        seq.dups = []

    _after(BlockPool, "name", give_back)


def _keep_generation() -> None:
    real = admission.Register
    admission.Register = lambda slot, generation, *rest: real(slot, 1, *rest)  # type: ignore[assignment,misc]


def _keep_name() -> None:
    real = BlockPool._evict

    def evict(pool: BlockPool, *args: Any) -> None:
        first = pool.idle_nodes()[0]
        blocks, key = list(first.blocks), first.key
        real(pool, *args)
        if first in pool.idle_nodes():
            first.blocks, first.key = blocks, key

    BlockPool._evict = evict  # type: ignore[method-assign]


def _lose_aborts() -> None:
    real = Engine._aborted

    def aborted(engine: Engine, event: Any, effects: list[Any]) -> None:
        seq = engine.requests.get(event.owner, {}).get(event.key)
        if seq is None or seq.phase is Phase.DECODE:
            real(engine, event, effects)

    Engine._aborted = aborted  # type: ignore[method-assign]


def _accept_old_epochs() -> None:
    real = Supervisor._result

    def result(self: Supervisor, site: Any, peer: Any, message: Any, now: float) -> Any:
        return real(self, site, peer, replace(message, epoch=site.epoch), now)

    Supervisor._result = result  # type: ignore[method-assign]


def _reuse_slots_at_once() -> None:
    def drop(replica: Replica, slot: int) -> None:
        replica._released.append(slot)
        replica._free_slot(slot)

    Replica._drop_slot = drop  # type: ignore[method-assign]


def _readmit_at_once() -> None:
    def again(replica: Replica, seq: Any) -> None:
        if seq in replica.settling:
            replica._settled(seq, replica.ended)

    _after(Replica, "preempt", again)


def _forget_the_settling() -> None:
    real = Replica.evacuate

    def evacuate(replica: Replica) -> Any:
        settling = set(replica.settling)
        unfinished, ended = real(replica)
        return [seq for seq in unfinished if seq not in settling], ended

    Replica.evacuate = evacuate  # type: ignore[method-assign]


def _keep_ownership() -> None:
    real = Fanout._ends

    def ends(fanout: Fanout, ended: list[Any], replica: int) -> Any:
        return real(fanout, [end for end in ended if end.reason != "paused"], replica)

    Fanout._ends = ends  # type: ignore[method-assign]


def _leave_rows_live() -> None:
    real = Replica.remove

    def remove(replica: Replica, seq: Any) -> None:
        kept = [(record, bytes(record.live)) for record in replica.inflight]
        real(replica, seq)
        for record, live in kept:
            record.live[:] = live

    Replica.remove = remove  # type: ignore[method-assign]


def _continue_from_the_start() -> None:
    def shorten(state: ClientState, request: Any, *_: Any) -> None:
        for place, message in enumerate(state.outbox):
            if getattr(message, "key", None) == request.key and hasattr(message, "prompt_len"):
                state.outbox[place] = replace(message, tokens=request.prompt)  # type: ignore[type-var]

    _after(ClientState, "_send_submit", shorten)


def _keep_the_watermark() -> None:
    # Always something that seems to be held.
    BlockPool.held = property(lambda pool: 1 + pool.num_blocks - pool.available)  # type: ignore[assignment]


def _forget_the_early() -> None:
    real = ControlServer._act

    def act(server: ControlServer, actions: Any) -> None:
        if server.engine is None and any(hasattr(action, "event") for action in actions):
            server._early.take(0.0)
        real(server, actions)

    ControlServer._act = act  # type: ignore[method-assign]


def _leave_hangs_alone() -> None:
    Vacancies.orders = lambda self, layout, taken, now: []  # type: ignore[method-assign]


#: By name: what is done to the product.
PLANTS: dict[str, Callable[[], None]] = {
    "a block is freed early": _free_copies_at_once,
    "a generation is not raised": _keep_generation,
    "a name is kept when its block is reused": _keep_name,
    "an abort is lost": _lose_aborts,
    "a result of an old epoch is accepted": _accept_old_epochs,
    "a slot is used again before its fence": _reuse_slots_at_once,
    "a preempted sequence is readmitted at once": _readmit_at_once,
    "recovery forgets who waits for a last result": _forget_the_settling,
    "the end of ownership is not told": _keep_ownership,
    "a void row is delivered": _leave_rows_live,
    "a continuation forgets what was received": _continue_from_the_start,
    "the watermark applies to an idle pool": _keep_the_watermark,
    "early submissions are forgotten": _forget_the_early,
    "what hangs out of sight is left alone": _leave_hangs_alone,
}


def plant(name: str) -> None:
    """Put a mistake into the product, as far as this process is concerned."""
    if os.environ.get("EVENFLOW_PURE") != "1":
        sys.exit("a mistake can only be planted in the interpreted core: set EVENFLOW_PURE=1")
    PLANTS[name]()


def hunt(name: str, seeds: int, events: int) -> dict[str, Any] | None:
    """Plant a mistake in a process of its own: the first seed that finds it and what it says, None if none does."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        plant(name)
        found = None
        for seed in range(seeds):
            report = run(seed, events)
            if report.problem is not None:
                # A plant that does not fit the product any more has found nothing.
                assert "plants.py" not in "".join(report.trace.splitlines()[-4:]), report.trace
                found = {"seed": seed, "events": report.events, "problem": report.problem[:300]}
                break
        with os.fdopen(writing, "w") as told:
            json.dump(found, told)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(child, 0)
    return json.loads(text)
