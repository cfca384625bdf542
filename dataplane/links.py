"""What connects the stages of one replica on one host, for one epoch.

Stage *s* hands hidden states to stage *s* + 1 through a ring of entries in a shared-memory file and rings a
bell (one small ZeroMQ message) for each; the last stage sends sampled ids to the first over ZeroMQ alone. So
every worker has one inbound and one outbound socket, and a replica of one stage has none.

    stage 0  --ring, bell-->  stage 1  --ring, bell-->  stage 2
       ^------------------------- ids -------------------'

The receiver makes the file and the socket, then reports itself started; the sender opens the file when it
first sends, which is after every stage has started, and removes its name at once: no death leaves memory
behind. Names carry the epoch, so nothing of an older life is met.

Control has at most stages + 1 plans out. The ring has one entry more, so an entry is read before it is
written again without any acknowledgement; the reader's count of finished entries, at the head of the file, is
only there to turn a breach of that rule into ``LinkBroken``.
"""

import contextlib
import mmap
import os
import struct
from collections import deque
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from ..control.wire import Start
from ..control.wire.sockets import Socket, bind_pull, dial_push, ipc_endpoint
from .executor import SampledIds

#: Bytes before the first entry: a u64 with the number of entries that the reader is done with, and padding.
_HEAD = 4096
#: Step, tokens, entry index.
_BELL = struct.Struct("<III")
#: Step, number of ids.
_IDS = struct.Struct("<II")


class LinkBroken(Exception):
    """The neighbouring stage does not keep to the protocol or is not there. The epoch cannot go on."""


class HiddenRing:
    """A ring of ``depth`` entries of ``tokens`` × ``width`` bytes in a file that two processes map."""

    def __init__(self, path: Path, depth: int, tokens: int, width: int, *, create: bool) -> None:
        self.depth = depth
        self._tokens = tokens
        self._width = width
        size = _HEAD + depth * tokens * width
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                # Not only sized: a file system without room must fail here, not kill a later write.
                os.posix_fallocate(descriptor, 0, size)
            elif os.fstat(descriptor).st_size != size:
                raise LinkBroken(f"{path}: not the {size} bytes that were expected")
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        memory = np.frombuffer(self._map, np.uint8)
        self._done = memory[:8].view(np.uint64)
        self._entries = memory[_HEAD:].reshape(depth, tokens, width)

    @property
    def done(self) -> int:
        """Entries that the reader is done with."""
        return int(self._done[0])

    def finish(self) -> None:
        """Reader: one more entry may be written again."""
        self._done[0] += np.uint64(1)

    def entry(self, index: int, tokens: int) -> NDArray[np.uint8]:
        """The first ``tokens`` rows of an entry, in place."""
        if index >= self.depth or not 0 < tokens <= self._tokens:
            raise LinkBroken(f"entry {index} of {self.depth} with {tokens} tokens of {self._tokens}")
        return self._entries[index, :tokens]

    def close(self) -> None:
        """Give the memory up. A view that is still in use keeps it until it is gone."""
        del self._done, self._entries
        with contextlib.suppress(BufferError):
            self._map.close()


class StageLinks:
    """The links of one stage during one epoch."""

    def __init__(self, context: zmq.Context[Socket], start: Start, stage: int, hidden_bytes: int) -> None:
        stages = start.stages
        self._first = stage == 0
        self._last = stage == stages - 1
        self._geometry = (stages + 2, start.token_budget, hidden_bytes)
        self._inbound: Socket | None = None
        self._outbound: Socket | None = None
        self._reading: HiddenRing | None = None
        self._writing: HiddenRing | None = None
        self._written = 0
        self._bells: deque[tuple[int, int, int]] = deque()
        self._ids: deque[SampledIds] = deque()
        if stages == 1:
            return
        directory = Path(start.links)
        prefix = f"e{start.epoch}-"
        self._ring_in = directory / f"{prefix}{stage}.ring"
        self._ring_out = directory / f"{prefix}{stage + 1}.ring"
        inbound = ipc_endpoint(directory / f"{prefix}{stage}.bell")
        outbound = ipc_endpoint(directory / f"{prefix}{(stage + 1) % stages}.bell")
        try:
            if not self._first:
                self._reading = HiddenRing(self._ring_in, *self._geometry, create=True)
            self._inbound = bind_pull(context, inbound)
            self._outbound = dial_push(context, outbound)
        except BaseException:
            self.close()
            raise

    @property
    def inbound(self) -> Socket | None:
        """The socket to watch; ``drain`` when it is readable. None with one stage."""
        return self._inbound

    def drain(self) -> None:
        """Take in what lies in the inbound socket."""
        while self._inbound is not None:
            try:
                frame = self._inbound.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if self._first:
                self._ids.append(decode_ids(frame))
            elif len(frame) == _BELL.size:
                self._bells.append(_BELL.unpack(frame))
            else:
                raise LinkBroken(f"a bell of {len(frame)} bytes")

    # -- hidden states ---------------------------------------------------------------------------------------

    def send_hidden(self, step: int, hidden: NDArray[np.uint8]) -> None:
        """Copy the hidden states of ``step`` into the ring and ring the bell."""
        ring = self._writing or self._open()
        if self._written - ring.done >= ring.depth:
            raise LinkBroken(f"step {step}: the next stage has {ring.depth} batches unread")
        index = self._written % ring.depth
        ring.entry(index, len(hidden))[:] = hidden
        self._written += 1
        self._send(_BELL.pack(step, len(hidden), index))

    def _open(self) -> HiddenRing:
        try:
            self._writing = HiddenRing(self._ring_out, *self._geometry, create=False)
            self._ring_out.unlink()
        except FileNotFoundError:
            raise LinkBroken(f"{self._ring_out} is missing: the next stage has not started") from None
        return self._writing

    def has_hidden(self, step: int | None) -> bool:
        """Whether the hidden states of ``step`` are here. Raises ``LinkBroken`` if those of another step are
        next.
        """
        if step is None or not self._bells:
            return False
        if self._bells[0][0] != step:
            raise LinkBroken(f"hidden states of step {self._bells[0][0]} came, {step} is next")
        return True

    def hidden(self) -> NDArray[np.uint8]:
        """The oldest hidden states, in place: valid until ``finish_hidden``."""
        assert self._reading is not None
        _, tokens, index = self._bells[0]
        return self._reading.entry(index, tokens)

    def finish_hidden(self) -> None:
        """The oldest hidden states were used."""
        assert self._reading is not None
        self._bells.popleft()
        self._reading.finish()

    # -- sampled ids -----------------------------------------------------------------------------------------

    def send_ids(self, sampled: SampledIds) -> None:
        self._send(encode_ids(sampled))

    def take_ids(self) -> SampledIds | None:
        """The oldest ids that have come and were not taken."""
        return self._ids.popleft() if self._ids else None

    def _send(self, frame: bytes) -> None:
        assert self._outbound is not None
        try:
            self._outbound.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise LinkBroken("the next stage does not read") from None

    def close(self) -> None:
        """Leave the epoch. Idempotent."""
        for socket in (self._inbound, self._outbound):
            if socket is not None:
                socket.close(0)
        self._inbound = self._outbound = None
        if self._reading is not None:
            # Still there if the sender never opened it.
            self._ring_in.unlink(missing_ok=True)
        for ring in (self._reading, self._writing):
            if ring is not None:
                ring.close()
        self._reading = self._writing = None


def encode_ids(sampled: SampledIds) -> bytes:
    return b"".join(
        (
            _IDS.pack(sampled.step, len(sampled.slots)),
            sampled.slots.astype("<u2").tobytes(),
            sampled.generations.astype("<u4").tobytes(),
            sampled.ids.astype("<u4").tobytes(),
        )
    )


def decode_ids(frame: bytes) -> SampledIds:
    """Raises ``LinkBroken``."""
    if len(frame) < _IDS.size:
        raise LinkBroken(f"sampled ids in {len(frame)} bytes")
    step, count = _IDS.unpack_from(frame)
    if len(frame) != _IDS.size + 10 * count:
        raise LinkBroken(f"{count} sampled ids in {len(frame)} bytes")
    at = _IDS.size
    slots = np.frombuffer(frame, "<u2", count, at)
    generations = np.frombuffer(frame, "<u4", count, at + 2 * count)
    ids = np.frombuffer(frame, "<u4", count, at + 6 * count)
    return SampledIds(step, slots.astype(np.int64), generations.astype(np.int64), ids.astype(np.int64))
