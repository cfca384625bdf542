"""What a live server did is done again in the simulator: the same requests, when they came, on iterations that take
as long as they took and sample what they sampled, give the same plans. Nothing of the recorded plans is told it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from evenflow.control.core.events import Returned, SendPlan
from evenflow.control.journal.records import Answered, Came, Planned, Up
from evenflow.control.journal.replay import Journal
from evenflow.control.wire import BatchPlan, Register, Result, decode_to_worker
from evenflow.dataplane.simulated.fitted import FittedCost
from evenflow.dataplane.simulated.world import Arrival, ReplicaModel, World
from live_server import LiveServer, live
from msgspec import structs

Messages = list[Register | BatchPlan]


@dataclass
class Recorded:
    """What a journal holds. Times are microseconds from its first event, each later than the one before."""

    journal: Journal
    ups: list[Up] = field(default_factory=list[Up])
    arrivals: list[Arrival] = field(default_factory=list[Arrival])
    #: By replica and step: when it came back, and with what times and ids.
    returned: dict[tuple[int, int], tuple[int, Result]] = field(default_factory=dict)
    plans: list[tuple[int, Messages]] = field(default_factory=list[tuple[int, Messages]])


def read(path: Path) -> Recorded:
    found = Recorded(Journal(path))
    last, start = -1, 0.0
    for step in found.journal.steps():
        event = step.event
        start = start or event.now
        last = max(last + 1, round((event.now - start) * 1e6))
        if isinstance(event, Up):
            assert not found.arrivals
            found.ups.append(event)
        elif isinstance(event, Came):
            submit = event.submit
            found.arrivals.append(Arrival(last, submit.prompt_len, submit.max_tokens, submit=submit))
        else:
            assert isinstance(event, Answered), event
            found.returned[event.replica, event.result.step] = last, event.result
        for outcome in step.outcomes:
            assert isinstance(outcome, Planned)
            found.plans.append((outcome.replica, same_epoch(list(map(decode_to_worker, outcome.frames)))))
    return found


def same_epoch(messages: list[object]) -> Messages:
    return [structs.replace(m, epoch=1) if isinstance(m, BatchPlan) else m for m in messages]  # type: ignore[misc]


class Relived(World):
    """Its iterations end when the recorded ones did."""

    def __init__(self, recorded: Recorded) -> None:
        self.plans: list[tuple[int, Messages]] = []
        self._returned = recorded.returned
        model = [
            ReplicaModel(FittedCost([1.0] * 5), up.stages, up.num_blocks, tuple(up.profile)) for up in recorded.ups
        ]
        super().__init__(recorded.journal.limits, model, slots=recorded.ups[0].num_slots)

    def _plan(self, send: SendPlan) -> None:
        self.plans.append((send.replica, same_epoch([*send.registers, send.plan])))
        number = send.replica, send.plan.step
        assert number in self._returned, "there was no such plan"
        when, result = self._returned[number]
        assert when > self.now, "the recorded plan of this number ended before it was made"
        self.at(when, Returned(send.replica, structs.replace(result, epoch=send.plan.epoch)))


def ask(server: LiveServer, model: str, number: int, more: int) -> None:
    prompt = " ".join(
        ["the same beginning of several words"] * (number % 5) + [f"word{number}"] * (7 + 11 * number % 90)
    )
    tokens = 5 + 7 * number % 40 + more
    fields = {"model": model, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0}
    assert server.post("/v1/completions", **fields).json()["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize(
    ("model", "flags", "preempts"),
    [
        ("scripted", ["--step-ms", "3"], False),
        ("scripted", ["--step-ms", "3", "--stages", "2", "--worker-arg=--num-blocks=24"], True),
        ("mistral-7b", ["--simulate", "h100", "--replicas", "2"], False),
    ],
    ids=["one stage", "two stages, few blocks", "two replicas on a modelled device"],
)
def test_a_recorded_live_schedule_is_planned_again(
    model: str, flags: list[str], preempts: bool, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    # Answers long enough to be under way together, and so outgrow the few blocks, however late each request comes.
    more = 40 if preempts else 0
    with live(model, *flags, "--token-budget", "64", "--journal", str(path), "--journal-ids") as server:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: ask(server, model, number, more), range(24)))
        assert server.stop() == 0
    recorded = read(path)
    assert len(recorded.arrivals) == 24 and len(recorded.plans) > 100
    world = Relived(recorded)
    world.feed(recorded.arrivals)
    assert world.run()
    assert world.plans == recorded.plans
    assert world.record.finished == 24
    assert (sum(replica.preemptions for replica in world.engine.replicas.values()) > 0) is preempts
