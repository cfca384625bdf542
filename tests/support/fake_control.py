"""A scripted control process for tests of clients: a ROUTER in the test's own event loop.

Each submitted request gets the ids that ``script`` gives for it, one a tick, with made-up log-probabilities. Ticks
are made by hand with ``tick`` or by themselves with ``auto``.
"""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from evenflow.control.wire import (
    NO_SLOT,
    PROTOCOL_VERSION,
    Abort,
    ClientHello,
    ClientPing,
    End,
    FromClient,
    Refused,
    Status,
    StatusReply,
    Submit,
    Tick,
    ToClient,
    TokenLogprobs,
    Unknown,
    Welcome,
    decode_from_client,
    encode,
)
from evenflow.control.wire.sockets import WireContext, bind_router, close_context, new_context

Script = Callable[[Submit], list[int]]


def logprobs(key: int, start: int, ids: list[int], width: int) -> TokenLogprobs:
    """Made up: the token at index i has -i/8 and rank 1; its alternatives are itself and the ids after it."""
    values = [-(start + i) / 8 for i in range(len(ids))]
    return TokenLogprobs(
        key,
        start,
        array("f", values).tobytes(),
        array("I", [1] * len(ids)).tobytes(),
        array("I", [token + j for token in ids for j in range(width)]).tobytes(),
        array("f", [value - j for value in values for j in range(width)]).tobytes(),
    )


@dataclass
class Job:
    submit: Submit
    ids: list[int]
    slot: int
    sent: int = 0
    started: bool = False


@dataclass
class Peer:
    jobs: dict[int, Job] = field(default_factory=dict)
    sequence: int = 0


class FakeControl:
    """``async with FakeControl(endpoint, script) as control``."""

    def __init__(
        self,
        endpoint: str,
        script: Script,
        *,
        instance: int = 1,
        max_model_len: int = 4096,
        vocab_size: int = 49_152,
        auto: bool = True,
        dense: bool = False,
        step_s: float = 0.0,
        eos_ids: tuple[int, ...] = (),
        refuse: Refused | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.script = script
        self.instance = instance
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.auto = auto
        self.dense = dense
        self.step_s = step_s
        self.eos_ids = eos_ids
        self.refuse = refuse
        self.ready = True
        self.draining = False
        #: The workers report log-probabilities, as they should.
        self.reports = True
        self.silent = False
        self.values: dict[str, float] = {}
        self.cached_tokens = 0
        #: Slots are given from here on, so that tests choose whether two requests share one.
        self.next_slot = 3
        self.fixed_slot: int | None = None
        self.submits: list[Submit] = []
        self.aborts: list[int] = []
        self.messages: list[FromClient] = []
        self.peers: dict[bytes, Peer] = {}
        self._context: WireContext | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "FakeControl":
        self._context = new_context()
        self.router = bind_router(self._context, self.endpoint)
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """As if the process were killed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._context is not None:
            close_context(self._context)
            self._context = None

    async def until(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        """Wait until something that a client sent made ``condition`` true."""
        async with asyncio.timeout(timeout):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def send(self, peer: bytes, message: ToClient) -> None:
        try:
            self.router.send_multipart([peer, encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError:
            self.peers.pop(peer, None)

    def welcome(self) -> Welcome:
        return Welcome(
            version=PROTOCOL_VERSION,
            instance=self.instance,
            model="fake",
            ready=self.ready,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            block_size=16,
            max_sequence=self.max_model_len,
            max_num_seqs=256,
            token_budget=256,
            eos_ids=self.eos_ids,
        )

    def tick(self) -> None:
        """One iteration: each request gets its next id."""
        for identity, peer in list(self.peers.items()):
            self._tick_peer(identity, peer)

    def pause(self, key: int) -> None:
        """Preempt a request: its slot is free, it goes on under another one."""
        for identity, peer in self.peers.items():
            job = peer.jobs.get(key)
            if job is not None and job.started:
                end = End(key, job.slot, "paused", job.sent)
                self.send(identity, Tick(peer.sequence, 0, b"", False, b"", ends=[end]))
                peer.sequence += 1
                job.started = False
                job.slot = self._slot()

    def end(self, key: int, reason: str, message: str = "") -> None:
        """End a request before its time."""
        for identity, peer in self.peers.items():
            job = peer.jobs.pop(key, None)
            if job is not None:
                slot = job.slot if job.started else NO_SLOT
                end = End(key, slot, reason, job.sent, self.cached_tokens, message)
                self.send(identity, Tick(peer.sequence, 0, b"", False, b"", ends=[end]))
                peer.sequence += 1

    def _slot(self) -> int:
        if self.fixed_slot is not None:
            return self.fixed_slot
        self.next_slot += 5
        return self.next_slot

    def _tick_peer(self, identity: bytes, peer: Peer) -> None:
        starts, live, ends = [], {}, []
        told: list[TokenLogprobs] = []
        for key, job in list(peer.jobs.items()):
            if self.fixed_slot is not None and live:
                break
            if not job.started:
                starts.append((job.slot, key))
                job.started = True
                width = job.submit.sampling.prompt_logprobs
                prompt = array("I", job.submit.tokens).tolist()[: job.submit.prompt_len]
                if width >= 0 and len(prompt) > 1:
                    told.append(logprobs(key, 1, prompt[1:], width))
            total = len(job.submit.tokens) // 4 - job.submit.prompt_len + job.sent
            if job.sent >= len(job.ids):
                continue
            token = job.ids[job.sent]
            live[job.slot] = token
            if job.submit.sampling.logprobs >= 0 and self.reports:
                place = job.submit.prompt_len + total
                told.append(logprobs(key, place, [token], job.submit.sampling.logprobs))
            job.sent += 1
            limit = job.submit.max_tokens
            count = total + 1
            stopped = token in job.submit.stop_ids and count >= job.submit.min_tokens
            if stopped or (limit and count >= limit):
                reason = "stop" if stopped else "length"
                ends.append(End(key, job.slot, reason, count, self.cached_tokens))
                del peer.jobs[key]
        if not (starts or live or ends):
            return
        bitmap = bytearray(max(live, default=0) // 8 + 1)
        for slot in live:
            bitmap[slot // 8] |= 1 << slot % 8
        slots = sorted(live)
        if self.dense:
            ids = array("I", [live.get(slot, 0xFFFFFFFF) for slot in range(max(live, default=-1) + 1)])
        else:
            ids = array("I", [live[slot] for slot in slots])
        self.send(
            identity,
            Tick(
                sequence=peer.sequence,
                step=0,
                live=bytes(bitmap),
                dense=self.dense,
                ids=ids.tobytes(),
                start_slots=array("H", [slot for slot, _ in starts]).tobytes(),
                start_keys=array("Q", [key for _, key in starts]).tobytes(),
                ends=ends,
                logprobs=told,
            ),
        )
        peer.sequence += 1

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        descriptor = self.router.fileno()
        loop.add_reader(descriptor, readable.set)
        try:
            while True:
                try:
                    identity, frame = self.router.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    if self.auto and not self.silent and any(peer.jobs for peer in self.peers.values()):
                        self.tick()
                        await asyncio.sleep(self.step_s)
                        continue
                    readable.clear()
                    if not self.router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                        await readable.wait()
                    continue
                self._receive(identity, decode_from_client(frame))
        finally:
            loop.remove_reader(descriptor)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            if not self.silent:
                for identity in list(self.peers):
                    self.send(identity, self.welcome())

    def _receive(self, identity: bytes, message: FromClient) -> None:
        if self.silent:
            return
        self.messages.append(message)
        if isinstance(message, ClientHello):
            self.peers[identity] = Peer()
            self.send(identity, self.welcome())
        elif identity not in self.peers:
            self.send(identity, Unknown(self.instance))
        elif isinstance(message, Submit):
            self.submits.append(message)
            if self.refuse is not None:
                refuse = self.refuse
                self.send(
                    identity, Refused(message.key, refuse.code, refuse.field, refuse.message, refuse.retry_after_ms)
                )
            else:
                ids = self.script(message)
                self.peers[identity].jobs[message.key] = Job(message, ids, self._slot())
        elif isinstance(message, Abort):
            self.aborts.append(message.key)
            peer = self.peers[identity]
            if job := peer.jobs.pop(message.key, None):
                end = End(message.key, job.slot, "abort", job.sent, self.cached_tokens)
                self.send(identity, Tick(peer.sequence, 0, b"", False, b"", ends=[end]))
                peer.sequence += 1
        elif isinstance(message, Status):
            self.send(identity, self.status(message.nonce))
        elif not isinstance(message, ClientPing):
            self.send(identity, self.status(0))
        self._changed.set()

    def status(self, nonce: int) -> StatusReply:
        return StatusReply(nonce, self.instance, "fake", self.ready, self.draining, self.values)
