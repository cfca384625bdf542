"""The client's state under a random control process: restarts, lost ticks, pauses, reused slots, refusals.

The control process here gives each request, as its next token, the number of tokens that it has: a token that were
lost, repeated or given to the wrong request would break the row.
"""

from array import array

from evenflow.control.client_state import ClientState, Request
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
    Unknown,
    Welcome,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

SLOTS = 3
LENGTH = 12


class Job:
    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.tokens = len(submit.tokens) // 4
        self.slot: int | None = None


class Connection:
    """What the control process keeps of one identity, and the two queues in between."""

    def __init__(self) -> None:
        self.known = False
        self.jobs: dict[int, Job] = {}
        self.sequence = 0
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

    @rule(prompt=st.integers(1, 3))
    def submit(self, prompt: int) -> None:
        if len(self.state.requests) < 5:
            tokens = array("I", [7] * prompt).tobytes()
            self.asked.append(self.state.submit(tokens, name="r", max_tokens=LENGTH, sampling=Sampling()))

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
        owners = {job.slot: job for job in connection.jobs.values() if job.slot is not None}
        for slot in range(SLOTS):
            if not lanes >> slot & 1:
                continue
            job = owners.get(slot)
            if job is None:
                job = next((job for job in connection.jobs.values() if job.slot is None), None)
                if job is None:
                    continue
                job.slot = slot
                starts[slot] = job.submit.key
            live[slot] = 1000 + job.tokens
            job.tokens += 1
            made = job.tokens - job.submit.prompt_len
            if made == LENGTH:
                ends.append(End(job.submit.key, slot, "length", made))
                del connection.jobs[job.submit.key]
        if not live:
            return
        size = max(live) + 1
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
        )
        connection.sequence += 1
        if lost:
            connection.to_client.append(tick)

    @rule(which=st.integers(0, 4))
    def control_pauses(self, which: int) -> None:
        connection = self.current()
        running = [job for job in connection.jobs.values() if job.slot is not None]
        if connection.known and which < len(running):
            job = running[which]
            assert job.slot is not None
            end = End(job.submit.key, job.slot, "paused")
            connection.to_client.append(Tick(connection.sequence, 0, b"", False, b"", ends=[end]))
            connection.sequence += 1
            job.slot = None

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
