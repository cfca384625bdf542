"""The control process: sockets and time around the core.

One thread, one event loop. Messages become events of the core; its effects become messages, plans before tokens. The
sockets are read without futures: the loop watches their descriptors, and each wake-up empties them.
"""

from __future__ import annotations

import asyncio
import os
import signal

import structlog

from .bubbles import modelled_costs
from .core.engine import Engine
from .core.events import (
    Aborted,
    Delivered,
    Due,
    Event,
    OutOfStep,
    OwnerLost,
    Rejected,
    ReplicaLost,
    ReplicaUp,
    Returned,
    SendPlan,
    Submitted,
    Wake,
)
from .core.integrity import IntegrityError, check_integrity
from .delivery import Delivery
from .early import EarlyRequests
from .host import Host, Timer
from .journal.link import JournalLink, writer_command
from .journal.recorder import Recorder
from .loop_host import LoopHost
from .merging import RETRY_S
from .options import ControlOptions
from .promises import Complaints
from .refusals import refuse_frame
from .sessions import MAX_CLIENTS, MAX_SUBSCRIBERS, Session, Sessions
from .status import describe_service, request_rows, snapshot
from .supervision import Action, Occur, Supervisor
from .telemetry import Telemetry
from .wire import (
    PROTOCOL_VERSION,
    Abort,
    ClientHello,
    Refused,
    Result,
    Status,
    StatusReply,
    Submit,
    Subscribe,
    Unknown,
    WireError,
    decode_from_client,
    decode_from_worker,
    encode,
)

log = structlog.get_logger("evenflow.control")

TICK_S = 0.25


class ControlServer:
    """Runs until it is told to stop. Use ``serve``. ``host`` is all that it knows of time, chance and sockets."""

    def __init__(self, options: ControlOptions, host: Host, journal: Recorder | None = None) -> None:
        self.options = options
        self.journal = journal
        self.instance = host.draw(63)
        self.engine: Engine | None = None
        self.sessions = Sessions(lambda: host.draw(62) + 1)
        self.telemetry = Telemetry()
        self.supervisor = Supervisor(
            options.limits,
            replicas=options.replicas,
            stages=options.stages,
            links=options.links,
            instance=self.instance,
            # Epochs of an earlier life are smaller: it is at least a tenth of a second older than each of ours.
            epoch=int(host.wall() * 10) & 0x7FFFFFFF,
            hang_timeout=options.hang_timeout,
            model_len=options.max_model_len,
            external=options.external,
        )
        self.draining = False
        self.bad_frames = 0
        self.replies_lost = 0  #: answers to peers without a session that could not be sent
        self.stopped = asyncio.Event()
        self._early = EarlyRequests(options.limits)
        self._check = os.environ.get("EVENFLOW_CHECK") == "1"
        self._busy = False
        self._told_ready = False
        self._complained = 0.0
        self._complaints = Complaints()
        self._second = 0.0
        self._now = host.now
        self._ticked = host.now()
        self._deadline: float | None = None
        self._host = host
        self._care_at: Timer | None = None
        self._due_at: Timer | None = None
        self._ports = host.open(options, self._from_worker, self._from_client)
        self._workers, self._clients = self._ports.workers, self._ports.clients
        self._events, self.gatekeeper = self._ports.events, self._ports.guard
        self.delivery = Delivery(self.sessions, self._clients.send, self._wake)

    # ---- workers ---------------------------------------------------------------------------------------------

    def _from_worker(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            message = decode_from_worker(frames[0] if len(frames) == 1 else b"")
        except WireError as error:
            self._complain("workers", error)
            return
        now = self._now()
        self._act(self.supervisor.take(identity, message, now))
        if self.telemetry.watched and type(message) is Result:
            self._publish(identity, message, now)

    def _publish(self, identity: bytes, result: Result, now: float) -> None:
        place = self.supervisor.place_of(identity)
        record = None if place is None else self.telemetry.returned(*place, result, now)
        if record is not None and self._events is not None:
            self._events.publish(encode(record))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Occur):
                if self.engine is None:
                    assert self.supervisor.limits is not None
                    self.engine = Engine(self.supervisor.limits)
                    if self.journal is not None:
                        self.journal.opened(self.supervisor.limits, self._host.wall(), self._now())
                self._step(action.event)
                for owner, submit in self._early.take(self._now()):
                    self._step(Submitted(owner, submit))
            else:
                self._post(action.identity, [encode(action.message)])
        if self.supervisor.ready != self._told_ready:
            self._welcome_all()

    def _post(self, identity: bytes, frames: list[bytes]) -> None:
        if self._workers.send(identity, frames) != "sent":
            # Not now: tokens that the core has given out are still to be told, before their slots change hands.
            self._host.call_soon(self._gone, identity)

    def _gone(self, identity: bytes) -> None:
        self._act(self.supervisor.gone(identity, self._now()))

    # ---- the core --------------------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        engine = self.engine
        assert engine is not None
        now = self._now()
        telemetry = self.telemetry
        if type(event) is Submitted:
            telemetry.submitted(event, now)
        effects = engine.step(event, now)
        journal = self.journal
        if journal is not None:
            journal.took(event, now)
        for effect in effects:
            kind = type(effect)
            if kind is SendPlan:
                self._send_plan(effect, now)  # pyright: ignore[reportArgumentType]
            elif kind is Delivered:
                self.delivery.deliver(effect, now)  # pyright: ignore[reportArgumentType]
                lane = event.result.lane if type(event) is Returned else 0
                telemetry.delivered(effect, lane, now)  # pyright: ignore[reportArgumentType]
            elif isinstance(effect, Rejected):
                telemetry.rejected(effect)
                if journal is not None:
                    journal.turned(effect.code)
                session = self.sessions.by_owner.get(effect.owner)
                if session is not None:
                    refused = Refused(effect.key, effect.code, effect.field, effect.message, effect.retry_after_ms)
                    self._tell(session, encode(refused))
            elif isinstance(effect, Wake):
                if self._due_at is not None:
                    self._due_at.cancel()
                self._due_at = self._host.call_at(effect.at, self._step, Due())
            elif isinstance(effect, OutOfStep):
                log.error("result contradicts the plans", replica=effect.replica, reason=effect.reason)
                self._act(self.supervisor.out_of_step(effect.replica, effect.reason, now))
        if type(event) is ReplicaLost:
            telemetry.epoch_over(event.replica)
        elif type(event) is ReplicaUp:
            model = engine.replicas[event.replica].balance.model
            self.supervisor.sites[event.replica].bubbles.costs = modelled_costs(model)
        if self._check:
            check_integrity(engine)
        if engine.requests:
            self._busy = True
        elif self._busy:
            self._busy = False
            self._idle(engine)

    def _send_plan(self, send: SendPlan, now: float) -> None:
        frames = [encode(register) for register in send.registers]
        frames.append(encode(send.plan))
        if self.journal is not None:
            self.journal.planned(send, frames)
        if self.supervisor.sites[send.replica].epoch != send.plan.epoch:
            return
        self.supervisor.sent(send, now)
        for identity in self.supervisor.identities(send.replica):
            self._post(identity, frames)
        assert self.engine is not None
        replica = self.engine.replicas.get(send.replica)
        if replica is not None:
            self.telemetry.planned(send, replica, now, self._now() if self.telemetry.watched else now)

    def _idle(self, engine: Engine) -> None:
        try:
            check_integrity(engine)
        except IntegrityError as error:
            log.error("integrity check failed", problem=str(error))
        self._finish_if_idle()

    # ---- clients ---------------------------------------------------------------------------------------------

    def _from_client(self, identity: bytes, frames: list[bytes]) -> None:
        now = self._now()
        session = self.sessions.by_identity.get(identity)
        if session is not None:
            session.seen = now
        try:
            message = decode_from_client(frames[0] if len(frames) == 1 else b"")
        except WireError as error:
            self._complain("clients", error)
            self._reply(identity, encode(refuse_frame(frames[0] if len(frames) == 1 else b"", error)))
            return
        if isinstance(message, ClientHello):
            self._hello(identity, message, now)
        elif session is None:
            self._reply(identity, encode(Unknown(self.instance)))
        elif isinstance(message, Submit):
            self._submit(session, message)
        elif isinstance(message, Abort):
            self._early.drop(session.owner, message.key)
            if self.engine is not None:
                self._step(Aborted(session.owner, message.key))
        elif isinstance(message, Status):
            self._tell(session, encode(self._status(message.nonce, message.rows)))
        elif isinstance(message, Subscribe):
            self._subscribe(session, message, now)

    def _hello(self, identity: bytes, hello: ClientHello, now: float) -> None:
        if hello.version != PROTOCOL_VERSION:
            text = f"protocol version {hello.version}, this control process speaks {PROTOCOL_VERSION}"
            self._complain("clients", WireError(text))
            self._reply(identity, encode(Refused(None, "protocol", "version", text)))
            return
        known = identity in self.sessions.by_identity
        if not known and len(self.sessions.by_owner) >= MAX_CLIENTS:
            text = f"{MAX_CLIENTS} clients are connected, the most that may"
            self._reply(identity, encode(Refused(None, "overloaded", "", text, 1000)))
            return
        session, before = self.sessions.open(identity, hello.name, now, hello.session)
        for old in before:
            self._lost(old)
        self._describe(session, "welcome", self._welcome(session))

    def _subscribe(self, session: Session, message: Subscribe, now: float) -> None:
        if message.interval_ms and not session.interval and self.sessions.subscribers >= MAX_SUBSCRIBERS:
            text = f"{MAX_SUBSCRIBERS} clients have subscribed, the most that may: ask with Status instead"
            self._tell(session, encode(Refused(None, "overloaded", "interval_ms", text)))
            return
        session.interval, session.due, session.rows = message.interval_ms / 1000, now, message.rows

    def _submit(self, session: Session, submit: Submit) -> None:
        if self.draining:
            seconds = max(1, round(self.options.drain_timeout))
            refused = Refused(submit.key, "draining", "", "the server is shutting down", seconds * 1000)
            self._refuse(session, refused)
        elif self._unfinished(session) >= self.options.max_requests:
            most = self.options.max_requests
            text = f"this client has {most} unfinished requests, the most that one client may have"
            retry = 1000 if self.engine is None else self.engine.retry_ms()
            self._refuse(session, Refused(submit.key, "overloaded", "key", text, retry))
        elif self.engine is None:
            early_refused = self._early.add(session.owner, submit, self._now())
            if early_refused is not None:
                self._refuse(session, early_refused)
        else:
            self._step(Submitted(session.owner, submit))

    def _refuse(self, session: Session, refused: Refused) -> None:
        self.telemetry.count_refusal(refused.code)
        self._tell(session, encode(refused))

    def _lost(self, session: Session) -> None:
        self._early.drop(session.owner)
        if self.engine is not None:
            self._step(OwnerLost(session.owner))
        self.delivery.forget(session)

    def _unfinished(self, session: Session) -> int:
        if self.engine is not None:
            return len(self.engine.requests.get(session.owner, ()))
        return self._early.count(session.owner)

    def _tell(self, session: Session, frame: bytes) -> None:
        self.delivery.answer(session, frame, self._now())

    def _describe(self, session: Session, what: str, frame: bytes) -> None:
        self.delivery.describe(session, what, frame, self._now())

    def _wake(self) -> None:
        if self._care_at is None:
            self._care_at = self._host.call_later(0 if self.delivery.doomed else RETRY_S, self._care)
        elif self.delivery.doomed:
            self._care_at.cancel()
            self._care_at = self._host.call_later(0, self._care)

    def _care(self) -> None:
        """Cut off who is doomed, and try again the queues that were full."""
        self._care_at = None
        delivery = self.delivery
        delivery.retry(self._now())
        doomed, delivery.doomed = delivery.doomed, []
        for session, why, reason in doomed:
            if self.sessions.by_owner.get(session.owner) is session:
                say = log.info if why == "gone" else log.warning
                say("client cut off", client=session.name, reason=reason, requests=self._unfinished(session))
                self.sessions.close(session)
                self._lost(session)
        if delivery.slow or delivery.doomed:
            self._wake()
        self._finish_if_idle()

    def _reply(self, identity: bytes, frame: bytes) -> None:
        """An answer to somebody without a session: it may be lost."""
        if self._clients.send(identity, [frame]) != "sent":
            self.replies_lost += 1

    def _welcome(self, session: Session) -> bytes:
        welcome = describe_service(
            self.supervisor,
            instance=self.instance,
            name=self.options.model_name,
            draining=self.draining,
            max_sequence=0 if self.engine is None else self.engine.max_sequence,
            session=session.secret,
            max_requests=self.options.max_requests,
            events="" if self._events is None else self._events.endpoint,
        )
        return encode(welcome)

    def _welcome_all(self) -> None:
        self._told_ready = self.supervisor.ready
        for session in list(self.sessions.by_owner.values()):
            self._describe(session, "welcome", self._welcome(session))

    def _status(self, nonce: int, rows: int = 0) -> StatusReply:
        now = self._now()
        model = self.supervisor.model
        return StatusReply(
            nonce,
            self.instance,
            self.options.model_name or ("" if model is None else model.model),
            self.supervisor.ready,
            self.draining,
            self._values(now),
            [site.state for site in self.supervisor.sites],
            request_rows(self.engine, self.telemetry, rows, now),
        )

    def _values(self, now: float) -> dict[str, float]:
        clients = len(self.sessions.by_owner)
        values = snapshot(self.engine, self.supervisor, self.telemetry, clients, self.bad_frames, now)
        values["refused_connections_total"] = 0 if self.gatekeeper is None else self.gatekeeper.refused
        return {**values, **self.delivery.figures(), "client_replies_lost_total": self.replies_lost}

    # ---- time and end ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Everything that is due by time; called every ``TICK_S`` seconds."""
        now = self._now()
        # A process that was held up itself first hears what came meanwhile, before it calls anyone silent.
        late = now - self._ticked > 4 * TICK_S
        self._ticked = now
        if not late:
            self._act(self.supervisor.tick(now))
        statuses: dict[int, bytes] = {}  #: by rows of requests
        for session in list(self.sessions.by_owner.values()):
            if session.interval and now >= session.due:
                session.due = now + session.interval
                if session.rows not in statuses:
                    statuses[session.rows] = encode(self._status(0, session.rows))
                self._describe(session, "status", statuses[session.rows])
        if now - self._second >= 1.0:
            self._second = now
            self._act(self.supervisor.beat())
            self._welcome_all()
            for session in [] if late else self.sessions.silent(now):
                self.delivery.doom(session, "silent", f"it said nothing for {now - session.seen:.0f} s")
        if self._deadline is not None and now >= self._deadline:
            log.warning("drain limit reached: what still runs is ended")
            self._finish()
        for owner, overdue in self._early.overdue(now):
            self._refuse(self.sessions.by_owner[owner], overdue)
        if self._events is not None:
            self.telemetry.watch(self._events.watched())
        if self.engine is not None and self.options.limits.slo is not None:
            self._complaints.look(self.engine, now)
        if self.journal is not None:
            self.journal.flush()
        # A descriptor that signals changes only may have signalled while nobody looked.
        self._workers.kick()
        self._clients.kick()
        if self.gatekeeper is not None:
            self.gatekeeper.kick()

    def drain(self) -> None:
        """Refuse what is new, finish what runs, then stop. A second call stops at once."""
        if self.draining:
            self._finish()
            return
        self.draining = True
        self._deadline = self._now() + self.options.drain_timeout
        log.info("draining", requests=0 if self.engine is None else sum(map(len, self.engine.requests.values())))
        self._welcome_all()
        self._finish_if_idle()

    def _finish_if_idle(self) -> None:
        """The end of draining: nothing runs, and nothing that can still be told waits."""
        if self.draining and not self.delivery.slow and (self.engine is None or not self.engine.requests):
            self._finish()

    def _finish(self) -> None:
        if not self.stopped.is_set():
            for session in list(self.sessions.by_owner.values()):
                self._refuse_unfinished(session)
            self.stopped.set()

    def _refuse_unfinished(self, session: Session) -> None:
        requests = {} if self.engine is None else self.engine.requests.get(session.owner, {})
        for key in list(requests):
            self._tell(session, encode(Refused(key, "draining", "", "the server was shut down")))

    def _complain(self, socket: str, error: WireError) -> None:
        self.bad_frames += 1
        now = self._now()
        if now - self._complained >= 1.0:
            self._complained = now
            log.warning("bad message dropped", socket=socket, problem=str(error)[:200], so_far=self.bad_frames)

    def close(self) -> None:
        if self._due_at is not None:
            self._due_at.cancel()
        self._ports.close()
        if self.journal is not None:
            self.journal.close()


#: Time for the last tokens to leave, since sockets are closed without lingering.
PARTING_S = 0.2


async def serve(options: ControlOptions) -> None:
    """Run the control process until SIGTERM or SIGINT has been obeyed."""
    loop = asyncio.get_running_loop()
    link, journal = None, None
    if options.journal:
        link = JournalLink(writer_command(options.journal, options.journal_size, options.log_level))
        journal = Recorder(link.hand, options.journal_ids)
    server = ControlServer(options, LoopHost(loop), journal)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.drain)
    try:
        while not server.stopped.is_set():
            server.tick()
            try:
                async with asyncio.timeout(TICK_S):
                    await server.stopped.wait()
            except TimeoutError:
                continue
        await asyncio.sleep(PARTING_S)
    finally:
        server.close()
        if link is not None:
            link.close()
