"""What a seed stands for: the sizes of a server, the requests that come, and what goes wrong.

Everything is drawn before anything runs, and requests and faults come at numbered events, not at times: so a part
can be left out (``Cut``) while the rest stays what it was.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from evenflow.control.core import bounds
from evenflow.control.core.events import Limits
from evenflow.control.core.slo import Slo, SloClass
from evenflow.control.wire import Sampling
from evenflow.dataplane.simulated.shadow import shadow_tokens

from .clients import Ask
from .stage import Build

VOCAB = 997

#: All faults, with how often each is drawn.
FAULTS = {
    "worker dies": 6,
    "worker hangs": 2,
    "worker pauses": 3,
    "worker slows down": 3,
    "worker repeats itself": 2,
    "worker is cut off": 3,
    "control dies": 3,
    "control pauses": 2,
    "client dies": 3,
    "client vanishes": 2,
    "client pauses": 4,
    "client stops": 1,
    "client is cut off": 3,
    "launcher is cut off": 1,
    "clock jumps": 1,
    "messages crawl": 2,
    "records are watched": 1,
}


#: Where the core lists the values of a field of ``Limits``.
_REGISTRIES = {"policy": "POLICIES", "admission": "ADMISSIONS"}


def choices(name: str) -> tuple[Any, ...]:
    """The values that the core knows for a field of ``Limits``; empty if there is no such field."""
    if name not in Limits.__dataclass_fields__:
        return ()
    return tuple(getattr(bounds, _REGISTRIES[name]))


@dataclass(frozen=True, slots=True)
class Fault:
    """``where`` and ``size`` are from 0 to 1: which of those that there are, and how long or how much."""

    number: int
    kind: str
    where: float
    size: float


@dataclass(frozen=True, slots=True)
class Cut:
    """What is left out of a scenario: requests and faults by number."""

    requests: frozenset[int] = frozenset()
    faults: frozenset[int] = frozenset()

    @staticmethod
    def parse(words: Iterable[str]) -> "Cut":
        """``r3 f2``. Raises ``ValueError``."""
        found: dict[str, set[int]] = {"r": set(), "f": set()}
        for word in words:
            if word[:1] not in found or not word[1:].isdecimal():
                raise ValueError(f"{word!r} is neither a request (r3) nor a fault (f2)")
            found[word[0]].add(int(word[1:]))
        return Cut(frozenset(found["r"]), frozenset(found["f"]))

    def __str__(self) -> str:
        return " ".join([*(f"r{n}" for n in sorted(self.requests)), *(f"f{n}" for n in sorted(self.faults))])


@dataclass(slots=True)
class Scenario:
    seed: int
    events: int
    limits: Limits
    build: Build
    stages: int
    replicas: int
    clients: int
    step_s: float
    token_s: float
    hop_s: float
    latency_s: float
    spikes: float
    load_s: float
    hang_timeout: float
    capacity: int
    max_requests: int
    #: Event number to what happens then.
    happenings: list[tuple[int, Ask | Fault]] = field(default_factory=list[tuple[int, Ask | Fault]])

    def without(self, cut: Cut) -> "Scenario":
        self.happenings = [
            (at, what)
            for at, what in self.happenings
            if what.number not in (cut.requests if isinstance(what, Ask) else cut.faults)
        ]
        return self

    def describe(self) -> str:
        asks = [what for _, what in self.happenings if isinstance(what, Ask)]
        faults = [what.kind for _, what in self.happenings if isinstance(what, Fault)]
        limits = self.limits
        fields = {name: getattr(limits, name) for name in ("policy", "admission", "slo") if hasattr(limits, name)}
        return (
            f"{self.replicas} replicas of {self.stages} stages, {self.clients} clients, {len(asks)} requests;"
            f" budget {limits.token_budget}, {limits.max_num_seqs} sequences, {self.build.num_blocks} blocks of"
            f" {limits.block_size}, length {self.build.max_model_len}; {fields};"
            f" faults: {', '.join(faults) or 'none'}"
        )


def draw(seed: int, number_of_events: int) -> Scenario:
    """The scenario of ``seed``. Its first events do not depend on how many there are."""
    random = Random(f"evenflow {seed}")
    pick = random.choice
    stages = pick((1, 1, 1, 2, 2, 3, 4))
    replicas = pick((1, 1, 1, 2, 2, 3))
    block_size = pick((4, 8, 16))
    blocks = pick((12, 16, 24, 60))
    length = min(pick((48, 96, 160)), blocks * block_size)
    budget = pick((1, 3, 7, 16, 33, 64))
    seqs = pick((2, 4, 8, 16))
    options: dict[str, Any] = {name: pick(choices(name)) for name in ("policy", "admission") if choices(name)}
    step_s = 10 ** random.uniform(-2.5, -1.0)
    if random.random() < 0.25:
        tbt = step_s * pick((1.5, 4.0, 20.0))
        options["slo"] = Slo((SloClass("interactive", tbt, chunk=pick((0, 8))), SloClass("relaxed", 5 * tbt)))
    limits = Limits(
        token_budget=budget,
        max_num_seqs=seqs,
        max_model_len=length,
        block_size=block_size,
        prefix_caching=random.random() < 0.8,
        share=pick((0.0, 0.25, 0.5)),
        overtakes=pick((0, 2, 32)),
        max_queued=pick((4096, 4096, 4096, 3)),
        max_queued_tokens=pick((1 << 20, 1 << 20, 1 << 20, 40)),
        **options,
    )
    build = Build(
        block_size=block_size,
        num_blocks=blocks,
        # Policies that take whole prompts need iterations as long as a sequence.
        max_tokens=max(budget, length),
        num_slots=seqs + pick((0, 1, 8)),
        max_model_len=length,
        vocab_size=VOCAB,
        tile=pick((0, 0, 8, 16)),
    )
    scenario = Scenario(
        seed=seed,
        events=number_of_events,
        limits=limits,
        build=build,
        stages=stages,
        replicas=replicas,
        clients=pick((1, 1, 2, 3, 4)),
        step_s=step_s,
        token_s=pick((0.0, step_s / 50)),
        hop_s=10 ** random.uniform(-5, -3),
        latency_s=10 ** random.uniform(-4.5, -2.5),
        spikes=pick((0.0, 0.0, 0.01)),
        load_s=pick((0.05, 0.5, 2.0)),
        hang_timeout=pick((1.0, 3.0, 15.0)),
        capacity=pick((4, 32, 256, 512)),
        max_requests=pick((8192, 8192, 8192, 4)),
    )
    _draw_requests(scenario, Random(f"requests {seed}"))
    _draw_faults(scenario, Random(f"faults {seed}"))
    scenario.happenings.sort(key=lambda happening: happening[0])
    return scenario


def _draw_requests(scenario: Scenario, random: Random) -> None:
    """Bursts of requests, some with a common start, some twins, some siblings that follow a leader."""
    length, budget = scenario.build.max_model_len, scenario.limits.token_budget
    bases = [[random.randrange(1, VOCAB) for _ in range(length)] for _ in range(3)]
    usual = max(1, min(length - 2, random.choice((10, 40, 4 * budget))))
    gap = random.choice((6, 12, 25, 60))
    at, number = random.randrange(40), 0
    asks: list[Ask] = []
    while at < scenario.events:
        burst = 1 if random.random() < 0.7 else random.randrange(2, 10)
        for _ in range(burst):
            ask = _draw_ask(scenario, random, number, bases, usual, asks)
            asks.append(ask)
            scenario.happenings.append((at, ask))
            number += 1
        at += 1 + int(random.expovariate(1 / (gap * burst)))


def _draw_ask(
    scenario: Scenario, random: Random, number: int, bases: Sequence[list[int]], usual: int, before: Sequence[Ask]
) -> Ask:
    length = scenario.build.max_model_len
    size = 1 + min(length - 2, int(random.expovariate(1 / usual)))
    chance = random.random()
    client = random.randrange(scenario.clients)
    leader = None
    if before and chance < 0.15:
        twin = random.choice(before[-4:])
        prompt, client = twin.prompt, twin.client
        leader = twin.number if chance < 0.1 else None
    elif chance < 0.6:
        shared = random.randint(0, size)
        prompt = tuple(random.choice(bases)[:shared]) + tuple(
            random.randrange(1, VOCAB) for _ in range(size - shared)
        )
    else:
        prompt = tuple(random.randrange(1, VOCAB) for _ in range(size))
    if random.random() < 0.01:
        prompt = tuple(random.randrange(1, VOCAB) for _ in range(length))
    count = random.choice((0, 1, 1 + int(random.expovariate(0.05)), 1 + int(random.expovariate(0.05))))
    if count == 0 and random.random() < 0.8:
        count = 5
    sampling = Sampling(1.0, seed=random.getrandbits(63)) if random.random() < 0.3 else Sampling()
    stop_ids: tuple[int, ...] = ()
    min_tokens = 0
    if random.random() < 0.4:
        # One of the tokens that would come, else hardly any would ever stop.
        ahead = shadow_tokens(prompt, max(0, min(count or 20, length - len(prompt))), sampling, vocab_size=VOCAB)
        stop_ids = (random.choice(ahead or [1]), random.randrange(VOCAB))
        min_tokens = random.choice((0, 0, 3))
    extras: dict[str, Any] = {"tenant": random.choice(("", "a", "b"))}
    if scenario.limits.admission == "priority":
        extras["priority"] = random.choice((0, 0, -5, 3))
    if random.random() < 0.1:
        extras["deadline_ms"] = random.choice((100, 1000, 10_000))
    if scenario.limits.slo is not None:
        extras["slo"] = random.choice(("", *scenario.limits.slo.names))
    if random.random() < 0.2:
        slo = scenario.limits.slo
        least = 1 if slo is None else round(1e3 * min(found.tbt for found in slo.classes))
        extras["tbt_ms"] = max(least, random.choice((1, 50, 1000)))
    return Ask(
        number,
        client,
        prompt,
        count,
        sampling,
        stop_ids,
        min_tokens,
        random.choice((b"", b"", b"", b"salt")),
        leader,
        scenario.step_s * random.expovariate(0.1) if random.random() < 0.12 else None,
        tuple(extras.items()),
    )


def _draw_faults(scenario: Scenario, random: Random) -> None:
    gap = random.choice((40, 100, 100, 250, 1_000_000))
    kinds, weights = list(FAULTS), list(FAULTS.values())
    if random.random() < 0.3:
        # One kind alone, again and again: the others would only end what it has begun.
        kinds, weights = [random.choice(kinds)], [1]
    at, number = int(random.expovariate(1 / gap)), 0
    while at < scenario.events:
        fault = Fault(number, random.choices(kinds, weights)[0], random.random(), random.random())
        scenario.happenings.append((at, fault))
        number += 1
        at += 1 + int(random.expovariate(1 / gap))
