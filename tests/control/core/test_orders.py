"""The admission orders: who is taken, who makes way, and for how long anybody can be kept waiting."""

from itertools import pairwise

import pytest
from evenflow.control.core.events import Delivered, Due, SendPlan
from evenflow.control.core.fair import OUTPUT_COST, PROMPT_COST
from evenflow.control.core.sequence import Phase
from inprocess import InProcess
from shadow_server import advance, only, prompt, shadow_server, wanted


def running(server: InProcess) -> list[int]:
    return sorted(seq.key for seq in only(server).running)


def starts(server: InProcess) -> list[int]:
    """Requests in the order in which workers first heard of them."""
    names = [int(r.request) if isinstance(r.request, str) else r.request for p in server.plans for r in p.registers]
    return list(dict.fromkeys(names))


# ---- priority ------------------------------------------------------------------------------------------------


def two_long_ones(admission: str, priority: int) -> InProcess:
    server = shadow_server(seqs=2, admission=admission)
    for key in range(2):
        server.submit(key, prompt(20, seed=key), 300, priority=priority)
    advance(server, 30)
    assert running(server) == [0, 1]
    return server


def test_sch_8_a_more_urgent_request_preempts_at_the_next_iteration() -> None:
    server = two_long_ones("priority", priority=5)
    plans = len(server.plans)
    server.submit(2, prompt(20, seed=2), 10, priority=0)
    while 2 not in running(server):
        advance(server, 1)
    assert len(server.plans) <= plans + 1, "it is in the first plan made after it came"
    assert running(server) == [0, 2], "the last of the less urgent made way"
    server.run()
    for key, count in ((0, 300), (1, 300), (2, 10)):
        assert server.tokens(key) == wanted(prompt(20, seed=key), count)
    assert only(server).preemptions == 1
    server.assert_idle()


def test_sch_8_also_where_every_token_of_the_budget_decodes() -> None:
    server = shadow_server(seqs=2, budget=2, admission="priority")
    for key in range(2):
        server.submit(key, prompt(5, seed=key), 100, priority=1)
    advance(server, 40)
    server.submit(2, prompt(5, seed=2), 3, priority=0)
    advance(server, 6)
    assert 2 in running(server)
    server.run()
    assert [server.tokens(key) for key in range(2)] == [wanted(prompt(5, seed=key), 100) for key in range(2)]
    server.assert_idle()


def test_a_request_of_the_same_priority_waits_its_turn() -> None:
    server = two_long_ones("priority", priority=0)
    server.submit(2, prompt(20, seed=2), 10)
    advance(server, 30)
    assert running(server) == [0, 1]
    server.run()
    assert only(server).preemptions == 0


def test_ties_are_first_come_first_served() -> None:
    server = shadow_server(seqs=1, admission="priority", up=False)
    server.pace = 0.0  # they all come at the same time
    for key, priority in enumerate([1, 0, 1, 0, -3]):
        server.submit(key, prompt(10, seed=key), 3, priority=priority)
    server.bring_up(0)
    order: list[int] = []
    while server.actions():
        order += [key for key in running(server) if key not in order]
        advance(server, 1)
    assert order == [4, 1, 3, 0, 2]


def test_a_request_that_lacks_blocks_preempts_only_if_that_helps() -> None:
    server = shadow_server(blocks=12, block_size=8, caching=False, admission="priority")
    server.submit(0, prompt(40, seed=0), 30, priority=0)
    server.submit(1, prompt(30, seed=1), 30, priority=1)
    advance(server, 6)
    assert running(server) == [0, 1]
    server.submit(2, prompt(70, seed=2), 5, priority=0)  # would not fit beside request 0 alone
    advance(server, 3)
    assert running(server) == [0, 1] and only(server).preemptions == 0
    server.abort(2)
    server.submit(3, prompt(30, seed=3), 5, priority=0)
    advance(server, 3)
    assert running(server) == [0, 3] and only(server).preemptions == 1
    server.run()
    assert server.tokens(1) == wanted(prompt(30, seed=1), 30)
    server.assert_idle()


def test_what_has_aged_is_safe_and_goes_first() -> None:
    """A step of priority is worth ``patience`` seconds: nothing that comes later than that passes or preempts."""
    server = shadow_server(seqs=1, admission="priority", patience=10.0)
    server.pace = 0.01
    server.submit(0, prompt(20, seed=0), 200, priority=1)
    advance(server, 4)
    server.submit(1, prompt(20, seed=1), 5, priority=1)
    server.now += 11.0
    server.submit(2, prompt(20, seed=2), 5, priority=0)
    advance(server, 6)
    assert running(server) == [0] and [seq.key for seq in only(server).waiting] == [1, 2]
    server.run()
    assert only(server).preemptions == 0 and starts(server) == [0, 1, 2]


@pytest.mark.parametrize("priority", [1, 3])
def test_an_endless_stream_of_urgent_requests_starves_nobody(priority: int) -> None:
    server = shadow_server(seqs=2, budget=64, admission="priority", patience=5.0)
    server.pace = 0.05
    server.submit(0, prompt(20, seed=0), 60, priority=priority)
    key, came = 1, server.now
    while server.reason(0) is None:
        while len(only(server).waiting) < 3:
            server.submit(key, prompt(20, seed=key), 10)
            key += 1
        advance(server, 1)
        assert server.now - came < priority * 5.0 + 30.0
    assert only(server).preemptions <= 1 and key > 20
    assert server.tokens(0) == wanted(prompt(20, seed=0), 60)
    server.run()
    server.assert_idle()


def test_nobody_is_preempted_by_whom_it_made_way_for() -> None:
    """Twenty requests of five priorities over room for two."""
    server = shadow_server(seqs=2, blocks=40, block_size=8, admission="priority", patience=50.0)
    for key in range(20):
        server.submit(key, prompt(20, seed=key), 20, priority=(7 * key) % 5)
        advance(server, 3)
    server.run()
    assert only(server).preemptions <= 20
    assert [server.tokens(key) for key in range(20)] == [wanted(prompt(20, seed=key), 20) for key in range(20)]
    server.assert_idle()


@pytest.mark.parametrize("admission", ["fcfs", "deadline", "fair"])
def test_a_priority_is_refused_where_it_would_do_nothing(admission: str) -> None:
    server = shadow_server(admission=admission)
    server.submit(0, prompt(20), 5, priority=-1)
    (rejected,) = server.rejected
    assert (rejected.code, rejected.field) == ("invalid", "priority") and admission in rejected.message
    assert not server.engine.requests


# ---- deadline ------------------------------------------------------------------------------------------------


def test_the_earliest_deadline_is_first_and_those_without_do_not_starve() -> None:
    server = shadow_server(seqs=1, admission="deadline", patience=40.0, up=False)
    server.pace = 0.0
    for key, seconds in enumerate([0, 90, 20, 60, 10]):
        server.submit(key, prompt(10, seed=key), 3, deadline_ms=1000 * seconds)
    server.now = 35.0
    server.submit(5, prompt(10, seed=5), 3, deadline_ms=30_000)
    server.bring_up(0)
    server.run()
    assert [server.reason(key) for key in range(6)] == [
        "length",
        "length",
        "deadline",
        "length",
        "deadline",
        "length",
    ]
    assert starts(server) == [0, 3, 5, 1], "due at 40 (none named), 60, 65 and 90"


def test_deadlines_end_requests_wherever_they_are() -> None:
    """Waiting, being read, decoding, with results in flight, behind a leader, and without any replica."""
    server = shadow_server(seqs=3, budget=32, block_size=16, stages=2)
    server.pace = 0.0
    server.submit(0, prompt(20, seed=0), 500, deadline_ms=1000)  # decodes
    server.submit(1, prompt(20, seed=1), 2)
    advance(server, 12)
    server.submit(2, prompt(3000, seed=2), 5, deadline_ms=1000)  # is being read
    server.submit(3, prompt(3000, seed=2), 5, leader=2, deadline_ms=1000)  # parked
    server.submit(4, prompt(20, seed=4), 500)
    advance(server, 8)
    server.submit(5, prompt(20, seed=5), 5, deadline_ms=1000)
    phases = {key: seq.phase for key, seq in server.engine.requests[0].items()}
    assert phases[0] is Phase.DECODE and phases[2] is Phase.PREFILL and server.engine.parked
    assert server.wake_at == 2.0, "all came at 1.0"
    server.now = 2.0
    server.step(Due())
    assert [server.reason(key) for key in (0, 2, 3, 5)] == ["deadline"] * 4
    assert running(server) == [4] and only(server).pool.held == 2 and not server.engine.parked
    server.run()
    assert server.tokens(4) == wanted(prompt(20, seed=4), 500)
    got = server.tokens(0)
    assert got == wanted(prompt(20, seed=0), 500)[: len(got)]
    server.assert_idle()
    server.crash(0)
    server.submit(6, prompt(20, seed=6), 5, deadline_ms=500)
    assert server.engine.homeless and server.wake_at == 2.5
    server.now = 2.5
    server.step(Due())
    assert server.reason(6) == "deadline" and not server.engine.requests


def test_a_settling_sequence_ends_at_its_deadline() -> None:
    server = shadow_server(blocks=8, block_size=8, caching=False)
    server.pace = 0.0
    server.submit(0, prompt(14), 40)
    server.submit(1, prompt(14, seed=2), 40, deadline_ms=1000)
    while not only(server).settling:
        advance(server, 1)
    assert [seq.key for seq in only(server).settling] == [1]
    server.now = 2.0
    server.step(Due())
    assert server.reason(1) == "deadline"
    server.run()
    assert server.tokens(0) == wanted(prompt(14), 40)
    server.assert_idle()


def test_the_queue_timeout_is_for_those_that_never_ran() -> None:
    server = shadow_server(seqs=1, queue_timeout=5.0)
    server.pace = 0.0
    server.submit(0, prompt(20, seed=0), 300)
    server.submit(1, prompt(20, seed=1), 5)
    server.submit(2, prompt(20, seed=2), 40, received=wanted(prompt(20, seed=2), 7))
    assert server.wake_at == 6.0
    server.now = 6.0
    server.step(Due())
    assert [server.reason(key) for key in range(3)] == [None, "queue_timeout", None]
    reason, message = server.clients[0].ended[1]
    assert reason == "queue_timeout" and "5.0 s" in message
    server.run()
    assert server.tokens(0) == wanted(prompt(20, seed=0), 300)
    assert server.tokens(2) == wanted(prompt(20, seed=2), 40)
    server.assert_idle()


def test_no_plan_names_a_request_after_its_deadline() -> None:
    server = shadow_server()
    server.pace = 0.0
    server.submit(0, prompt(20), 500, deadline_ms=1000)
    advance(server, 20)
    effects = server.engine.step(Due(), 2.0)
    assert not any(isinstance(effect, SendPlan) and effect.decodes for effect in effects)
    (end,) = [end for effect in effects if isinstance(effect, Delivered) for end in effect.ends]
    assert end.reason == "deadline"


# ---- fair ----------------------------------------------------------------------------------------------------


class Service:
    """What each tenant was given, from the plans alone: prompt tokens planned and output tokens sampled."""

    def __init__(self, server: InProcess, tenants: dict[int, str]) -> None:
        self.server = server
        self.tenants = tenants
        self.given = dict.fromkeys(tenants.values(), 0.0)
        self._read: dict[int, int] = {}

    def look(self) -> None:
        given = dict.fromkeys(self.given, 0.0)
        for key, seq in self.server.engine.requests.get(0, {}).items():
            # Tokens counted once, also if they are computed again.
            done = max(self._read.get(key, 0), seq.planned)
            self._read[key] = done
        for key, done in self._read.items():
            size = self.sizes[key]
            output = max(len(self.server.tokens(key)), done - size)
            given[self.tenants[key]] += PROMPT_COST * min(done, size) + OUTPUT_COST * output
        self.given = given

    sizes: dict[int, int]


def flood(
    admission: str, *, blocks: int, weights: tuple[tuple[str, float], ...] = (), **kind: int
) -> list[list[float]]:
    """Two tenants, the first sends ten requests for each of the other's; both always have some waiting.

    Returns (service of the first, of the second) after every event while both wait.
    """
    size, count = kind["size"], kind["count"]
    server = shadow_server(
        budget=64, block_size=8, blocks=blocks, seqs=8, caching=False, admission=admission, tenant_weights=weights
    )
    server.check = False
    tenants: dict[int, str] = {}
    service = Service(server, tenants)
    service.sizes = {}
    key = 0
    for _ in range(12):
        for tenant in ["many"] * 10 + ["few"]:
            tenants[key] = tenant
            service.sizes[key] = size + (key * 7) % 23
            server.submit(key, prompt(service.sizes[key], seed=key), count, tenant=tenant)
            key += 1
    service.given = {"many": 0.0, "few": 0.0}
    history: list[list[float]] = []
    while {tenants[seq.key] for seq in only(server).waiting} == {"many", "few"}:
        advance(server, 1)
        service.look()
        history.append([service.given["many"], service.given["few"]])
    return history


def widest(history: list[list[float]], weights: tuple[float, float] = (1.0, 1.0)) -> float:
    """The largest difference of service over any interval: the spread of the difference so far."""
    ahead = [many / weights[0] - few / weights[1] for many, few in history]
    return max(ahead) - min(ahead)


@pytest.mark.parametrize(("size", "count"), [(40, 30), (150, 10), (10, 60)])
def test_service_of_two_backlogged_tenants_differs_by_a_bounded_amount(size: int, count: int) -> None:
    """Sheng et al., Theorem 4.4, with one chunk more, as prompts are computed in chunks."""
    blocks, budget = 40, 64
    bound = 2 * max(PROMPT_COST * (size + 22), OUTPUT_COST * blocks * 8) + PROMPT_COST * budget
    history = flood("fair", blocks=blocks, size=size, count=count)
    assert widest(history) <= bound
    total = sum(history[-1])
    assert total > 3 * bound / 2, "long enough for the bound to mean something"
    many, few = history[-1]
    assert abs(many - few) <= bound


def test_first_come_first_served_is_not_fair() -> None:
    """The same load under the default order: what is measured above can fail."""
    fair, fcfs = (flood(order, blocks=40, size=40, count=30) for order in ("fair", "fcfs"))
    assert widest(fcfs) > 5 * widest(fair)


def test_weights_divide_the_service() -> None:
    weights = (("few", 3.0),)
    history = flood("fair", blocks=40, weights=weights, size=40, count=30)
    many, few = history[-1]
    assert 2.0 <= few / many <= 4.5


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    server = shadow_server(seqs=1, admission="fair", caching=False)
    server.submit(0, prompt(20, seed=0), 2, tenant="idle")
    server.run()
    for key in range(1, 8):
        server.submit(key, prompt(20, seed=key), 20, tenant="busy")
    advance(server, 150)
    assert server.reason(3) is not None
    for key in range(8, 14):
        server.submit(key, prompt(20, seed=key), 20, tenant="idle")
    server.run()
    later = [key >= 8 for key in starts(server) if key in (5, 6, 7) or key >= 8]
    assert any(not idle for idle in later[:4]), "they take turns from now on"
    assert sum(a != b for a, b in pairwise(later)) >= 4


def test_output_is_charged_by_count_and_the_prompt_without_what_was_cached() -> None:
    server = shadow_server(admission="fair", block_size=16)
    server.submit(0, prompt(40), 12, tenant="a")
    server.run()
    ledger = server.engine.ledger
    assert ledger is not None and ledger.floor == 0.0
    assert ledger.accounts["a"].counter == 40 * PROMPT_COST + 12 * OUTPUT_COST
    server.submit(1, prompt(40), 12, tenant="a")
    server.run()
    assert ledger.accounts["a"].counter == 48 * PROMPT_COST + 24 * OUTPUT_COST


def test_without_a_name_the_client_is_the_tenant() -> None:
    server = shadow_server(seqs=1, admission="fair")
    for key in range(6):
        server.submit(key, prompt(20, seed=key), 5, owner=0)
    server.submit(6, prompt(20, seed=6), 5, owner=1)
    server.run()
    assert starts(server).index(6) <= 2


def test_accounts_of_tenants_that_are_gone_are_forgotten() -> None:
    server = shadow_server(admission="fair", caching=False)
    for key in range(300):
        server.submit(key, prompt(10, seed=key), 2, tenant=f"t{key}")
        if key % 10 == 0:
            server.submit(1000 + key, prompt(40, seed=key), 4, tenant="steady")
        server.run()
    ledger = server.engine.ledger
    assert ledger is not None and len(ledger.accounts) < 50
    server.assert_idle()


def test_a_tenant_far_ahead_makes_way_for_one_that_waits() -> None:
    """What runs for long is within the bound, too: a tenant cannot keep its place for ever."""
    server = shadow_server(seqs=2, budget=16, block_size=8, blocks=16, admission="fair", caching=False)
    server.check = False
    for key in range(2):
        server.submit(key, prompt(8, seed=key), 100, tenant="long")
    advance(server, 8)
    server.submit(2, prompt(90, seed=2), 20, tenant="short")
    ledger = server.engine.ledger
    assert ledger is not None
    most = 0.0
    while server.reason(2) is None:
        advance(server, 1)
        if [seq.key for seq in only(server).waiting] == [2]:
            most = max(most, ledger.accounts["long"].counter - ledger.accounts["short"].counter)
    assert most <= OUTPUT_COST * 16 * 8 + 2 * OUTPUT_COST * 2
    server.run()
    assert server.tokens(2) == wanted(prompt(90, seed=2), 20)


# ---- preemption for blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("admission", "how", "victim"),
    [
        ("fcfs", [{}, {}, {}], 2),
        ("priority", [{"priority": 0}, {"priority": 2}, {"priority": 1}], 1),
        ("deadline", [{"deadline_ms": 9_000_000}, {"deadline_ms": 90_000}, {"deadline_ms": 900_000}], 0),
        ("fair", [{"tenant": "a"}, {"tenant": "b"}, {"tenant": "a"}], 2),
    ],
)
def test_the_last_in_the_order_is_preempted(admission: str, how: list[dict[str, int]], victim: int) -> None:
    server = shadow_server(blocks=8, block_size=8, caching=False, admission=admission, up=False)
    server.pace = 0.001
    for key, fields in enumerate(how):
        server.submit(key, prompt(15, seed=key), 30, **fields)  # pyright: ignore[reportArgumentType]
    server.bring_up(0)
    while not only(server).preemptions:
        advance(server, 1)
    (seq, *_) = [*only(server).settling, *only(server).waiting]
    assert seq.key == victim
    server.run()
    assert [server.tokens(key) for key in range(3)] == [wanted(prompt(15, seed=key), 30) for key in range(3)]
    server.assert_idle()


# ---- Retry-After ---------------------------------------------------------------------------------------------


def test_retry_after_is_when_the_queue_will_have_a_place() -> None:
    """Requests leave at a steady rate in virtual time: a refused one is told the time until the next has left."""
    server = shadow_server(seqs=1, max_queued=4)
    server.pace = 0.25
    key = 0
    waits: list[float] = []
    refused: set[int] = set()
    begun: list[float] = []
    while key < 120:
        before = len(server.rejected)
        server.submit(key, prompt(20, seed=key), 4)
        if len(server.rejected) > before:
            waits.append(server.rejected[-1].retry_after_ms / 1000)
            refused.add(key)
        key += 1
        departed = only(server).waiting.departures
        advance(server, 2)
        begun += [server.now] * (only(server).waiting.departures - departed)
    gaps = [b - a for a, b in pairwise(begun[len(begun) // 2 :])]
    mean = sum(gaps) / len(gaps)
    late = waits[len(waits) // 2 :]
    assert late and all(mean / 2 <= wait <= 2 * mean for wait in late), (mean, late)


def test_retry_after_is_bounded() -> None:
    server = shadow_server(seqs=1, max_queued=1)
    server.pace = 0.0
    for key in range(3):
        server.submit(key, prompt(20, seed=key), 500)
    assert server.rejected[-1].retry_after_ms == 1000, "nothing has been measured yet"
    for _ in range(30):
        server.now += 1.0
        server.step(Due())
    server.submit(3, prompt(20), 5)
    assert server.rejected[-1].retry_after_ms == 60_000, "nothing has left the queue"
    assert server.engine.retry_ms() == 60_000


def test_retry_after_knows_tokens_from_requests() -> None:
    server = shadow_server(seqs=1, max_queued_tokens=300)
    server.pace = 0.0
    for key in range(40):
        server.now = float(key)
        server.submit(key, prompt(100, seed=key), 1)
        server.run()
    server.submit(100, prompt(100, seed=100), 100)
    server.submit(101, prompt(250, seed=101), 1)
    server.submit(102, prompt(250, seed=102), 1)
    (rejected,) = server.rejected
    assert rejected.field == "max_queued_tokens"
    assert 1500 <= rejected.retry_after_ms <= 2500, "200 tokens too many, at 100 a second"
