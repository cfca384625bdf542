"""The client's state under a random control process: restarts, lost ticks, pauses, reused slots, refusals.

The control process here gives each request, as its next token, the number of tokens that it has: a token that were
lost, repeated or given to the wrong request would break the row. The same holds for log-probabilities, of which those
of the prompt come anew with each submission that asks for them.
"""

from array import array

from evenflow.control.client_state import ClientState, Request
from evenflow.control.merging import Waiting
from evenflow.control.wire import (
    PROTOCOL_VERSION,
    Abort,
    ClientHello,
    End,
    FromClient,
    Refused,
    Sampling,
    Submit,
    Tick,
    ToClient,
    TokenLogprobs,
    Unknown,
    Welcome,
    decode_to_client,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

SLOTS = 3
LENGTH = 12


def logprobs(key: int, start: int, count: int) -> TokenLogprobs:
    """Of ``count`` tokens, each with one alternative; its value is the token's index."""
    values = array("f", range(start, start + count))
    ranks = array("I", range(start, start + count))
    return TokenLogprobs(key, start, values.tobytes(), ranks.tobytes(), ranks.tobytes(), values.tobytes())


class Job:
    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.tokens = len(submit.tokens) // 4
        self.slot: int | None = None
        #: The prompt's first token without log-probabilities.
        self.told = 1 if submit.sampling.prompt_logprobs >= 0 else submit.prompt_len


class Connection:
    """What the control process keeps of one identity, and the two queues in between."""

    def __init__(self) -> None:
        self.known = False
        self.jobs: dict[int, Job] = {}
        self.sequence = 0
        #: Who owned which slot after each tick.
        self.owned: dict[int, dict[tuple[int, int], int]] = {}
        self.to_control: list[FromClient] = []
        self.to_client: list[ToClient] = []


class ClientAndControl(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.instance = 1
        self.state = ClientState("test")
        self.connections = {0: Connection()}
        self.asked: list[Request] = []
        self.state.start(self.now)

    def current(self) -> Connection:
        return self.connections.setdefault(self.state.connection, Connection())

    def send(self) -> None:
        self.current().to_control += self.state.outbox
        self.state.outbox.clear()

    @rule(prompt=st.integers(1, 5), wanted=st.booleans())
    def submit(self, prompt: int, wanted: bool) -> None:
        if len(self.state.requests) < 5:
            tokens = array("I", [7] * prompt).tobytes()
            sampling = Sampling(logprobs=1, prompt_logprobs=1) if wanted else Sampling()
            self.asked.append(self.state.submit(tokens, name="r", max_tokens=LENGTH, sampling=sampling))

    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        if which < len(self.asked):
            self.state.abort(self.asked[which])

    @rule(count=st.integers(1, 4), refuse=st.booleans())
    def control_reads(self, count: int, refuse: bool) -> None:
        self.send()
        connection = self.current()
        for _ in range(min(count, len(connection.to_control))):
            message = connection.to_control.pop(0)
            if isinstance(message, ClientHello):
                connection.known, connection.sequence = True, 0
                connection.jobs.clear()
                connection.to_client.append(self.welcome())
            elif not connection.known:
                connection.to_client.append(Unknown(self.instance))
            elif isinstance(message, Submit):
                assert message.key not in connection.jobs
                continued = len(message.tokens) // 4 > message.prompt_len
                if refuse and continued:
                    connection.to_client.append(Refused(message.key, "overloaded", "", "full", 10))
                else:
                    connection.jobs[message.key] = Job(message)
            elif isinstance(message, Abort):
                connection.jobs.pop(message.key, None)

    @rule(lanes=st.integers(1, (1 << SLOTS) - 1), dense=st.booleans(), lost=st.integers(0, 9))
    def control_ticks(self, lanes: int, dense: bool, lost: int) -> None:
        connection = self.current()
        if not connection.known:
            return
        starts: dict[int, int] = {}
        live: dict[int, int] = {}
        ends: list[End] = []
        told: list[TokenLogprobs] = []
        owners = {job.slot: job for job in connection.jobs.values() if job.slot is not None}
        for slot in range(SLOTS):
            if not lanes >> slot & 1:
                continue
            job = owners.get(slot)
            if job is None:
                job = next((job for job in connection.jobs.values() if job.slot is None), None)
                if job is None:
                    continue
                if job.told < job.submit.prompt_len:
                    # A chunk of the prompt.
                    count = min(2, job.submit.prompt_len - job.told)
                    told.append(logprobs(job.submit.key, job.told, count))
                    job.told += count
                    continue
                job.slot = slot
                starts[slot] = job.submit.key
            live[slot] = 1000 + job.tokens
            if job.submit.sampling.logprobs >= 0:
                told.append(logprobs(job.submit.key, job.tokens, 1))
            job.tokens += 1
            made = job.tokens - job.submit.prompt_len
            if made == LENGTH:
                ends.append(End(job.submit.key, slot, "length", made))
                del connection.jobs[job.submit.key]
        if not live and not told:
            return
        size = max(live, default=-1) + 1
        ids = [live.get(slot, 0xFFFF) for slot in range(size)] if dense else [live[slot] for slot in sorted(live)]
        tick = Tick(
            connection.sequence,
            0,
            bytes([sum(1 << slot for slot in live)]),
            dense,
            array("I", ids).tobytes(),
            array("H", starts.keys()).tobytes(),
            array("Q", starts.values()).tobytes(),
            ends,
            logprobs=told,
        )
        self.told(connection, tick, bool(lost))

    def told(self, connection: Connection, tick: Tick, arrives: bool = True) -> None:
        jobs = connection.jobs.values()
        connection.owned[tick.sequence] = {(0, job.slot): job.submit.key for job in jobs if job.slot is not None}
        connection.sequence += 1
        if arrives:
            connection.to_client.append(tick)

    @rule()
    def control_merges(self) -> None:
        """The last ticks that the client has not read become one, if none of them was lost."""
        connection = self.current()
        ticks: list[Tick] = []
        while connection.to_client and isinstance(last := connection.to_client[-1], Tick):
            if last.sequence != connection.sequence - 1 - len(ticks):
                break
            ticks.insert(0, last)
            connection.to_client.pop()
        if not ticks:
            return
        first = ticks[0].sequence
        waiting = Waiting(0.0, connection.owned[first], ticks[0], first)
        for tick in ticks[1:]:
            waiting.hold(tick)
        waiting.flush(lambda frame: connection.to_client.append(decode_to_client(frame)) is None, 0.0)
        connection.sequence = waiting.sequence

    @rule(which=st.integers(0, 4))
    def control_pauses(self, which: int) -> None:
        connection = self.current()
        running = [job for job in connection.jobs.values() if job.slot is not None]
        if connection.known and which < len(running):
            job = running[which]
            assert job.slot is not None
            end = End(job.submit.key, job.slot, "paused")
            job.slot = None
            self.told(connection, Tick(connection.sequence, 0, b"", False, b"", ends=[end]))

    @rule()
    def control_restarts(self) -> None:
        self.instance += 1
        for connection in self.connections.values():
            connection.known = False
            connection.jobs.clear()

    @rule()
    def control_beats(self) -> None:
        if self.current().known:
            self.current().to_client.append(self.welcome())

    @rule(count=st.integers(1, 4))
    def client_reads(self, count: int) -> None:
        connection = self.current()
        before = self.state.connection
        for _ in range(min(count, len(connection.to_client))):
            self.state.receive(connection.to_client.pop(0), self.now)
            if self.state.connection != before:
                break

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.5]))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 0.25, until)
            self.state.on_timer(self.now)

    @invariant()
    def every_row_is_exact(self) -> None:
        for request in self.asked if hasattr(self, "asked") else []:
            first = 1000 + request.prompt_len
            assert request.received.tolist() == list(range(first, first + len(request.received)))
            if request.finish is not None and request.finish.reason == "length":
                assert len(request.received) == LENGTH
            if request.logprobs is not None and request.prompt_logprobs is not None:
                end = request.prompt_len + len(request.received)
                assert request.logprobs.values.tolist() == list(range(request.prompt_len, end))
                told = request.prompt_logprobs.values.tolist()
                assert told == list(range(1, 1 + len(told)))
                if request.received:
                    assert len(told) == request.prompt_len - 1

    def teardown(self) -> None:
        if not hasattr(self, "asked"):
            return
        for _ in range(400):
            if not self.state.requests:
                break
            self.control_reads(4, False)
            self.control_ticks((1 << SLOTS) - 1, True, 1)
            self.client_reads(4)
            self.time_passes(0.3)
        assert not self.state.requests
        self.every_row_is_exact()

    def welcome(self) -> Welcome:
        return Welcome(PROTOCOL_VERSION, self.instance, "m", True, 100, 5000, 16, 100, 8, 8)


TestClientAndControl = ClientAndControl.TestCase
TestClientAndControl.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_prompt_whose_logprobs_all_came_is_continued_without_them() -> None:
    """So that it may be read from the prefix cache."""
    state = ClientState("test")
    state.start(0.0)
    state.receive(Welcome(PROTOCOL_VERSION, 1, "m", True, 100, 5000, 16, 100, 8, 8), 0.0)
    sampling = Sampling(1.0, seed=5, logprobs=1, prompt_logprobs=1)
    request = state.submit(array("I", [7, 8, 9]).tobytes(), name="r", sampling=sampling)
    leader = state.submit(array("I", [7, 8, 9]).tobytes(), name="r", sampling=sampling, leader=request)
    state.receive(Tick(0, 0, b"", False, b"", logprobs=[logprobs(request.key, 1, 1)]), 0.0)
    for instance, first, wanted in [(2, 1, 1), (3, 2, -1)]:
        state.outbox.clear()
        state.receive(Unknown(), 0.0)
        state.receive(Welcome(PROTOCOL_VERSION, instance, "m", True, 100, 5000, 16, 100, 8, 8), 0.0)
        submits = [message for message in state.outbox if isinstance(message, Submit)]
        assert [(s.key, s.leader, s.sampling.prompt_logprobs) for s in submits] == [
            (request.key, None, wanted),
            (leader.key, request.key, 1),
        ]
        assert submits[0].sampling.seed == 5 and submits[0].sampling.logprobs == 1
        state.receive(Tick(0, 0, b"", False, b"", logprobs=[logprobs(request.key, first, 3 - first)]), 0.0)
    assert request.prompt_logprobs is not None and request.prompt_logprobs.ranks.tolist() == [1, 2]
    found = request.prompt_logprobs.read([8, 9], 0)
    assert [(row.id, row.logprob, row.rank, row.top) for row in found] == [
        (8, 1.0, 1, ((1, 1.0),)),
        (9, 2.0, 2, ((2, 2.0),)),
    ]


def test_a_continuation_has_what_is_left_of_its_deadline() -> None:
    state = ClientState("test")
    state.start(0.0)
    welcome = Welcome(PROTOCOL_VERSION, 1, "m", True, 100, 5000, 16, 100, 8, 8)
    state.receive(welcome, 0.0)
    tokens = array("I", [7, 8]).tobytes()
    for deadline_ms in (5000, 0, 1000):
        state.submit(tokens, name="r", sampling=Sampling(), deadline_ms=deadline_ms, now=0.5)
    for instance, now, wanted in ((2, 1.0, [4500, 0, 500]), (3, 4.0, [1500, 0, 1])):
        state.outbox.clear()
        state.receive(Unknown(), now)
        state.receive(replace(welcome, instance=instance), now)
        assert [m.deadline_ms for m in state.outbox if isinstance(m, Submit)] == wanted


def test_logprobs_that_contradict_themselves_are_left_out() -> None:
    state = ClientState("test")
    state.start(0.0)
    state.receive(Welcome(PROTOCOL_VERSION, 1, "m", True, 100, 5000, 16, 100, 8, 8), 0.0)
    request = state.submit(array("I", [7, 8]).tobytes(), name="r", sampling=Sampling(logprobs=1))
    four = b"\0" * 4
    wrong = [
        TokenLogprobs(request.key, 2, four, b""),
        TokenLogprobs(request.key, 2, four, four, four * 2, four * 2),
        TokenLogprobs(request.key, 2, four[:3], four[:3], four[:3], four[:3]),
        TokenLogprobs(request.key, 3, four, four, four, four),
        TokenLogprobs(request.key, 1, four, four, four, four),
        TokenLogprobs(99, 2, four, four, four, four),
    ]
    state.receive(Tick(0, 0, b"", False, b"", logprobs=wrong), 0.0)
    assert state.connected and request.logprobs is not None and not len(request.logprobs)


def test_sec_1_a_server_that_refuses_for_the_moment_again_and_again_is_asked_once() -> None:
    """Each refusal once asked for another submission, and for memory of it."""
    state = ClientState("test")
    state.start(0.0)
    state.receive(Welcome(1, 7, "m", True, 64, 100, 16, 64, 8, 64), 0.0)
    request = state.submit(array("I", [5]).tobytes(), name="r", max_tokens=LENGTH, sampling=Sampling())
    request.accepted = True
    state.outbox.clear()
    for n in range(1000):
        state.receive(Refused(request.key, "overloaded", "", "full", 10 + n), 0.1)
    state.on_timer(0.2)
    assert [type(message) for message in state.outbox] == [Submit]
    state.receive(Refused(request.key, "overloaded", "", "full", (1 << 32) - 1), 0.3)
    state.abort(request)
    assert not state._retries
