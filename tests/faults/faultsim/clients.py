"""Gateways: the real ``ClientState``, driven as ``AsyncClient`` drives it, and what each of its requests must get."""

from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from evenflow.control.client_state import ClientState, Request, pack_ids
from evenflow.control.wire import Sampling, decode_to_client, encode
from evenflow.dataplane.simulated.shadow import shadow_tokens

from .clock import Clock, Entry
from .network import Dealer, Network

TIMER_S = 0.25
BURST = 64
#: Fields that a request may have, if the client's own interface takes them.
_TAKEN = frozenset(signature(ClientState.submit).parameters)


class Violation(AssertionError):
    """Something that must never happen did."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the scenario. ``number`` names it on the command line."""

    number: int
    client: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    salt: bytes = b""
    leader: int | None = None
    abort_after: float | None = None
    #: Fields of ``Submit`` for the admission order and the budget, as far as clients can set them.
    extras: tuple[tuple[str, Any], ...] = ()


@dataclass(slots=True, eq=False)
class Asked:
    """What became of it: ``wanted`` is what an undisturbed run gives, and why that ends."""

    ask: Ask
    request: Request
    wanted: list[int]
    reason: str
    at: float
    checked: int = 0
    aborted: bool = False
    over: bool = False

    def look(self, now: float, longest: int, epochs_lost: int, may_refuse: bool) -> None:
        """Check what has come since. Raises ``Violation``."""
        request, ask = self.request, self.ask
        received = request.received
        count = len(received)
        if self.over:
            raise Violation(f"request {ask.number} goes on after its end")
        if received[self.checked :].tolist() != self.wanted[self.checked : count]:
            raise Violation(
                f"request {ask.number}: tokens {self.checked} to {count} are {received[self.checked :].tolist()},"
                f" an undisturbed run gives {self.wanted[self.checked : count]}"
            )
        self.checked = count
        finish = request.finish
        if finish is None:
            return
        self.over = True
        if finish.output_tokens != count:
            raise Violation(f"request {ask.number} ended with {finish.output_tokens} tokens, {count} came")
        if finish.reason in ("stop", "length"):
            if count != len(self.wanted) or finish.reason != self.reason:
                raise Violation(
                    f"request {ask.number} ended by {finish.reason} after {count} tokens,"
                    f" not by {self.reason} after {len(self.wanted)}"
                )
            return
        if finish.reason == "abort" and self.aborted:
            return
        if finish.code == "too_long" and len(ask.prompt) >= longest and not count:
            return
        if finish.code == "overloaded" and may_refuse and not count and not request.accepted:
            return
        if finish.reason == "error" and "a worker died" in finish.message and epochs_lost >= 3:
            return
        deadline = dict(ask.extras).get("deadline_ms", 0)
        if deadline and finish.reason not in ("stop", "length", "abort") and now >= self.at + deadline / 1000 - 0.001:
            return
        raise Violation(f"request {ask.number} ended without a cause: {finish}")


class Client:
    """One gateway process. ``reports`` to the world what its requests get."""

    def __init__(self, clock: Clock, net: Network, name: str, report: Any) -> None:
        self.state = ClientState(name)
        self.asked: dict[int, Asked] = {}  #: by the ask's number
        self.alive, self.stopped = True, False
        self._by_key: dict[int, Asked] = {}
        self._clock, self._net, self._report = clock, net, report
        self._connection = -1
        self._pump: Entry | None = None
        self.dealer: Dealer
        self.state.start(clock.now)
        self.turn()
        clock.after(TIMER_S, self._timer)

    def ask(self, ask: Ask, longest: int, vocab_size: int) -> Asked:
        count = min(ask.max_tokens or longest, longest - len(ask.prompt))
        wanted = shadow_tokens(
            ask.prompt,
            max(count, 0),
            ask.sampling,
            vocab_size=vocab_size,
            stop_ids=ask.stop_ids,
            min_len=len(ask.prompt) + ask.min_tokens,
        )
        stops = bool(wanted) and wanted[-1] in ask.stop_ids and len(wanted) >= ask.min_tokens
        leader = None if ask.leader is None else self.asked.get(ask.leader)
        request = self.state.submit(
            pack_ids(ask.prompt),
            name=f"r{ask.number}",
            max_tokens=ask.max_tokens,
            sampling=ask.sampling,
            stop_ids=ask.stop_ids,
            min_tokens=ask.min_tokens,
            salt=ask.salt,
            leader=None if leader is None else leader.request,
            **{name: value for name, value in (*ask.extras, ("now", self._clock.now)) if name in _TAKEN},
        )
        asked = Asked(ask, request, wanted, "stop" if stops else "length", self._clock.now)
        self.asked[ask.number] = self._by_key[request.key] = asked
        if ask.abort_after is not None:
            self._clock.after(ask.abort_after, self._abort, asked)
        if not self.stopped:
            self.turn()
        return asked

    def _abort(self, asked: Asked) -> None:
        if self.alive and not self.stopped and not asked.over:
            asked.aborted = True
            self.state.abort(asked.request)
            self.turn()

    # ---- life ------------------------------------------------------------------------------------------------

    def die(self, *, unnoticed: bool = False) -> None:
        self.alive = False
        self.dealer.close(unnoticed=unnoticed)

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        if self.alive and self.stopped:
            self.stopped = False
            self._timer()

    # ---- the driver, as ``AsyncClient`` ----------------------------------------------------------------------

    def _timer(self) -> None:
        if not self.alive or self.stopped:
            return
        more = self._receive()
        if self.dealer.losses and not more:
            self.dealer.losses = 0
            self.state.disconnected(self._clock.now)
        self.state.on_timer(self._clock.now)
        self._clock.after(TIMER_S, self._timer)
        self.turn()

    def _told(self) -> None:
        if self.alive and not self.stopped:
            self.turn()

    def turn(self) -> None:
        """Send what is due, take what has come, look at what it says."""
        more = True
        for _ in range(4):
            sent = self._send()
            more = self._receive()
            if not more and (not sent or not self.state.outbox):
                break
        for request in self.state.touched:
            request.touched = False
            asked = self._by_key.get(request.key)
            if asked is not None:
                self._report(self, asked)
        self.state.touched.clear()
        self.state.replies.clear()
        if more and (self._pump is None or self._pump[2] is None):
            self._pump = self._clock.after(0.0, self._again)

    def _again(self) -> None:
        self._pump = None
        self._told()

    def _send(self) -> bool:
        state = self.state
        if state.connection != self._connection:
            if self._connection >= 0:
                self.dealer.close()
            self._connection = state.connection
            self.dealer = Dealer(self._net, "clients", self._told)
        count = len(state.outbox)
        for message in state.outbox:
            self.dealer.send([encode(message)])
        state.outbox.clear()
        return count > 0

    def _receive(self) -> bool:
        inbox = self.dealer.inbox
        for _ in range(BURST):
            if self.state.connection != self._connection:
                return True
            if not inbox:
                return False
            self.state.receive(decode_to_client(inbox.popleft()[0]), self._clock.now)
        return True
