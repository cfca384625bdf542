"""What a client of the control process knows and decides, without sockets and without a clock.

``control.async_client`` drives it: it feeds in decoded messages and the time (seconds, monotonic), sends what lies
in ``outbox`` and wakes the readers of ``touched``. The life of a connection::

    joining --Welcome--> joined --disconnected, or no message for 3 s--> lost --Welcome--> joined
                           |  Unknown, or a gap in the ticks                                 ^
                           +------------------> joining ---------------Welcome---------------+

Invariants: a token is appended to its request exactly once; after every join all unfinished requests are
submitted again with the tokens received so far, so a restart of the control process neither loses nor repeats
one. Whenever ``joined`` is left, ``connection`` grows and the driver goes on with a new socket: what was under
way on the old one, in either direction, can then reach nobody.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from .token_logprobs import LogprobColumns
from .wire import (
    PROTOCOL_VERSION,
    Abort,
    ClientHello,
    ClientPing,
    End,
    FromClient,
    Merged,
    Refused,
    Sampling,
    Status,
    StatusReply,
    Submit,
    Subscribe,
    Tick,
    ToClient,
    TokenLogprobs,
    Welcome,
)

Phase = Literal["joining", "joined", "lost"]

#: A peer that was silent for this long is gone.
SILENCE_S = 3.0
#: Pings when joined, hellos when not.
INTERVAL_S = 1.0
#: A continuation that is refused for the moment is tried again after this long, unless the refusal says.
RETRY_S = 0.5
#: A timer that comes this late shows that this process itself was held up.
LATE_S = 1.0
#: Codes of ``Refused`` that pass by themselves.
PASSING = frozenset({"overloaded"})

#: The set bits of each byte.
_BITS = tuple(tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256))


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended: ``reason`` as in ``End``, or ``error`` with the ``code`` of a refusal."""

    reason: str
    output_tokens: int
    cached_tokens: int = 0
    message: str = ""
    code: str = ""
    field: str = ""
    retry_after_ms: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request and what has come of it. ``received`` only grows; ``finish`` is set once and last."""

    key: int
    name: str
    prompt: bytes
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    min_tokens: int
    salt: bytes
    received: "array[int]" = field(default_factory=lambda: array("I"))
    finish: Finish | None = None
    cached_tokens: int = 0
    #: The slot whose tokens are this request's, and its replica, while it has one.
    slot: tuple[int, int] | None = None
    #: The control process has worked on it, so a later refusal is not final.
    accepted: bool = False
    touched: bool = False
    #: Aborted from this side; the control process has not yet confirmed, and said what was cached.
    unconfirmed: bool = False
    tenant: str = ""
    priority: int = 0
    #: Class of the time between tokens, or a target in milliseconds.
    slo: str | int = ""
    #: When it ends although it is not finished (as ``now``), or None.
    deadline: float | None = None
    #: The key of the request whose prompt blocks this one shares.
    leader: int | None = None
    #: Of the output, and of the prompt from its second token on; None if they were not asked for.
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None

    def __post_init__(self) -> None:
        if self.sampling.logprobs >= 0:
            self.logprobs = LogprobColumns(self.sampling.logprobs)
        if self.sampling.prompt_logprobs >= 0:
            self.prompt_logprobs = LogprobColumns(self.sampling.prompt_logprobs)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt) // 4


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as a u32 little-endian buffer. Raises ``OverflowError`` for an id outside u32."""
    return array("I", ids).tobytes()


class ClientState:
    """One connection's state. See the module's docstring for how it is driven."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.phase: Phase = "joining"
        #: Which socket to use: when it grows, the old one is closed and ``outbox`` goes to a new one.
        self.connection = 0
        self.welcome: Welcome | None = None
        self.status: StatusReply | None = None
        #: Why the control process does not let this client join, if it said so.
        self.problem: str | None = None
        self.requests: dict[int, Request] = {}
        self.outbox: list[FromClient] = []
        #: Requests with new tokens or a finish since the caller last cleared the list.
        self.touched: list[Request] = []
        #: Status replies since the caller last cleared the list.
        self.replies: list[StatusReply] = []
        self._owners: dict[int, dict[int, Request]] = {}
        self._aborted: dict[int, Request] = {}
        self._expected = 0
        self._next_key = 1
        self._heard_at = 0.0
        self._spoke_at = 0.0
        self._timer_at = 0.0
        #: What the control process calls this client's session, to be named in the next hello.
        self._session = 0
        self._subscribed = Subscribe(0)
        #: Refused for the moment: when each is to be sent again.
        self._retries: dict[Request, float] = {}

    def start(self, now: float) -> None:
        """Say hello. Called once, when the socket is connected."""
        self._heard_at = self._timer_at = now
        self._hello(now)

    @property
    def connected(self) -> bool:
        return self.phase == "joined"

    def submit(
        self,
        prompt: bytes,
        *,
        name: str,
        max_tokens: int = 0,
        sampling: Sampling,
        stop_ids: tuple[int, ...] = (),
        min_tokens: int = 0,
        salt: bytes = b"",
        leader: Request | None = None,
        tenant: str = "",
        priority: int = 0,
        deadline_ms: int = 0,
        slo: str | int = "",
        now: float = 0.0,
    ) -> Request:
        """Take a request on; it is sent at once when joined, else with the next join. ``now`` is looked at only if
        there is a deadline."""
        request = Request(self._next_key, name, prompt, max_tokens, sampling, stop_ids, min_tokens, salt)
        request.leader = None if leader is None else leader.key
        request.tenant, request.priority, request.slo = tenant, priority, slo
        if deadline_ms:
            request.deadline = now + deadline_ms / 1000
        self._next_key += 1
        self.requests[request.key] = request
        if self.phase == "joined":
            self._send_submit(request, now)
        return request

    def abort(self, request: Request) -> None:
        """End a request from this side. Idempotent; nothing is delivered to it afterwards."""
        if request.key not in self.requests:
            return
        self._finish(request, Finish("abort", len(request.received), request.cached_tokens))
        if self.phase == "joined":
            self.outbox.append(Abort(request.key))
            request.unconfirmed = True
            self._aborted[request.key] = request

    def ask_status(self, nonce: int, rows: int = 0) -> None:
        """Ask for one ``StatusReply`` with this nonce, and at most ``rows`` unfinished requests."""
        self.outbox.append(Status(nonce, rows))

    def subscribe(self, interval_ms: int, rows: int = 0) -> None:
        """Have ``status`` renewed every so often, also after a restart of the control process."""
        self._subscribed = Subscribe(interval_ms, rows)
        if self.phase == "joined":
            self.outbox.append(self._subscribed)

    def fail_all(self, message: str, code: str) -> None:
        """End everything from this side with an error, as when the client is closed."""
        for request in list(self.requests.values()):
            self._finish(request, Finish("error", len(request.received), request.cached_tokens, message, code))
            if self.phase == "joined":
                self.outbox.append(Abort(request.key))

    def on_timer(self, now: float) -> None:
        """What is due by time alone. To be called at least four times a second."""
        if now - self._timer_at >= LATE_S:
            # This process was stopped: what came meanwhile is still to be read, so the peer is not silent yet.
            self._heard_at = max(self._heard_at, now - SILENCE_S + LATE_S)
        self._timer_at = now
        if self.phase == "joined" and now - self._heard_at >= SILENCE_S:
            self._rejoin(now, "lost")
        if now - self._spoke_at >= INTERVAL_S:
            if self.phase == "joined":
                self._spoke_at = now
                self.outbox.append(ClientPing())
            else:
                self._hello(now)
        if self._retries and self.phase == "joined":
            for request in [request for request, at in self._retries.items() if at <= now]:
                del self._retries[request]
                if request.key in self.requests:
                    self._send_submit(request, now)

    def disconnected(self, now: float) -> None:
        """The connection has ended, whether there is another by now or not: what was under way on it is lost."""
        if self.phase == "joined":
            self._rejoin(now, "lost")

    def receive(self, message: ToClient, now: float) -> None:
        """Take in one message from the control process."""
        self._heard_at = now
        if isinstance(message, Tick):
            self._tick(message, now)
        elif isinstance(message, Merged):
            self._merged(message, now)
        elif isinstance(message, Welcome):
            self._welcomed(message, now)
        elif isinstance(message, Refused):
            self._refused(message, now)
        elif isinstance(message, StatusReply):
            self.status = message
            self.replies.append(message)
        elif self.phase == "joined":
            self._rejoin(now)

    def _welcomed(self, welcome: Welcome, now: float) -> None:
        known = self.welcome
        self.welcome = welcome
        self._session = welcome.session
        if self.phase == "joined":
            if known is not None and known.instance != welcome.instance:
                self._rejoin(now)
            return
        self.phase = "joined"
        self.problem = None
        if self._subscribed.interval_ms:
            self.outbox.append(self._subscribed)
        for request in list(self.requests.values()):
            self._continue(request, now)

    def _continue(self, request: Request, now: float) -> None:
        """Submit again, unless the tokens received already complete the request."""
        count = len(request.received)
        if count and count >= request.min_tokens and request.received[-1] in request.stop_ids:
            self._finish(request, Finish("stop", count, request.cached_tokens))
        elif count and request.max_tokens and count >= request.max_tokens:
            self._finish(request, Finish("length", count, request.cached_tokens))
        else:
            self._send_submit(request, now)

    def _send_submit(self, request: Request, now: float) -> None:
        sampling, told = request.sampling, request.prompt_logprobs
        if told is not None and len(told) == request.prompt_len - 1:
            # All are here: this time the prompt may come from the prefix cache.
            sampling = replace(sampling, prompt_logprobs=-1)
        self.outbox.append(
            Submit(
                key=request.key,
                request=request.name,
                tokens=request.prompt + request.received.tobytes(),
                prompt_len=request.prompt_len,
                max_tokens=request.max_tokens,
                sampling=sampling,
                stop_ids=request.stop_ids,
                min_tokens=request.min_tokens,
                salt=request.salt,
                leader=request.leader,
                tenant=request.tenant,
                priority=request.priority,
                # What is left of it: the control process counts from when it hears of the request.
                deadline_ms=0 if request.deadline is None else max(1, round((request.deadline - now) * 1000)),
                slo=request.slo if isinstance(request.slo, str) else "",
                tbt_ms=0 if isinstance(request.slo, str) else request.slo,
            )
        )

    def _tick(self, tick: Tick, now: float) -> None:
        if self.phase != "joined":
            return
        uneven = len(tick.ids) % 4 or len(tick.start_slots) % 2 or len(tick.start_keys) % 8
        if uneven or tick.sequence != self._expected:
            self._rejoin(now)
            return
        self._expected += 1
        owners = self._owners.setdefault(tick.replica, {})
        requests = self.requests
        if tick.start_slots:
            slots, keys = memoryview(tick.start_slots).cast("H"), memoryview(tick.start_keys).cast("Q")
            for slot, key in zip(slots, keys, strict=False):
                owners.pop(slot, None)
                # A key that is not known was aborted here: its tokens go to nobody.
                if owner := requests.get(key):
                    self._release(owner)
                    owner.accepted = True
                    owner.slot = (tick.replica, slot)
                    owners[slot] = owner
        ids = memoryview(tick.ids).cast("I")
        touched = self.touched
        dense = tick.dense
        position = 0
        for base, byte in enumerate(tick.live):
            if not byte:
                continue
            for bit in _BITS[byte]:
                slot = base * 8 + bit
                index = slot if dense else position
                position += 1
                request = owners.get(slot)
                if request is None:
                    continue
                if index >= len(ids):
                    self._rejoin(now)
                    return
                request.received.append(ids[index])
                if not request.touched:
                    request.touched = True
                    touched.append(request)
        if tick.logprobs:
            self._take_logprobs(tick.logprobs)
        for end in tick.ends:
            self._end(end)

    def _merged(self, merged: Merged, now: float) -> None:
        if self.phase != "joined":
            return
        uneven = any(len(run.ids) % 4 for run in merged.runs)
        uneven = uneven or any(len(o.slots) % 2 or len(o.keys) != 4 * len(o.slots) for o in merged.owned)
        if uneven or merged.sequence != self._expected:
            self._rejoin(now)
            return
        self._expected += 1
        for run in merged.runs:
            if request := self.requests.get(run.key):
                request.accepted = True
                request.received.frombytes(run.ids)
                self._touch(request)
        if merged.logprobs:
            self._take_logprobs(merged.logprobs)
        for end in merged.ends:
            self._end(end)
        for request in self.requests.values():
            request.slot = None
        self._owners.clear()
        for owned in merged.owned:
            owners = self._owners[owned.replica] = {}
            slots, keys = memoryview(owned.slots).cast("H"), memoryview(owned.keys).cast("Q")
            for slot, key in zip(slots, keys, strict=True):
                if request := self.requests.get(key):
                    request.accepted = True
                    request.slot = (owned.replica, slot)
                    owners[slot] = request

    def _take_logprobs(self, entries: list[TokenLogprobs]) -> None:
        for told in entries:
            request = self.requests.get(told.key)
            if request is None:
                continue
            if told.start >= request.prompt_len:
                if request.logprobs is not None:
                    request.logprobs.extend(told, told.start - request.prompt_len)
            elif request.prompt_logprobs is not None:
                request.prompt_logprobs.extend(told, told.start - 1)

    def _end(self, end: End) -> None:
        request = self.requests.get(end.key)
        if request is None:
            request = self._aborted.pop(end.key, None)
            if request is None:
                return
            request.unconfirmed = False
            request.cached_tokens = min(max(request.cached_tokens, end.cached_tokens), request.prompt_len)
            return
        self._release(request)
        request.cached_tokens = min(max(request.cached_tokens, end.cached_tokens), request.prompt_len)
        if end.reason != "paused":
            count = len(request.received)
            self._finish(request, Finish(end.reason, count, request.cached_tokens, end.message))

    def _refused(self, refused: Refused, now: float) -> None:
        if refused.key is None:
            self.problem = refused.message
            return
        request = self.requests.get(refused.key)
        if request is None:
            if aborted := self._aborted.pop(refused.key, None):
                aborted.unconfirmed = False
            return
        if refused.code in PASSING and (request.accepted or request.received):
            wait = refused.retry_after_ms / 1000 if refused.retry_after_ms else RETRY_S
            self._retries.setdefault(request, now + wait)
            return
        count = len(request.received)
        self._finish(
            request,
            Finish(
                "error",
                count,
                request.cached_tokens,
                refused.message,
                refused.code,
                refused.field,
                refused.retry_after_ms,
            ),
        )

    def _finish(self, request: Request, finish: Finish) -> None:
        self.requests.pop(request.key, None)
        self._retries.pop(request, None)
        self._release(request)
        request.finish = finish
        self._touch(request)

    def _touch(self, request: Request) -> None:
        if not request.touched:
            request.touched = True
            self.touched.append(request)

    def _release(self, request: Request) -> None:
        if request.slot is not None:
            replica, slot = request.slot
            if self._owners[replica].get(slot) is request:
                del self._owners[replica][slot]
            request.slot = None

    def _rejoin(self, now: float, phase: Phase = "joining") -> None:
        self.phase = phase
        self.connection += 1
        self._expected = 0
        self._owners.clear()
        self._retries.clear()
        self.outbox.clear()
        for request in self.requests.values():
            request.slot = None
        for request in self._aborted.values():
            request.unconfirmed = False
        self._aborted.clear()
        self._hello(now)

    def _hello(self, now: float) -> None:
        self._spoke_at = now
        self.outbox.append(ClientHello(PROTOCOL_VERSION, self.name, self._session))
