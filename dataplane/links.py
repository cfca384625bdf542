"""What connects the stages of one replica on one host, for one epoch.

Stage *s* hands hidden states to stage *s* + 1 through a ring of entries in a shared-memory file and rings a
bell (a few bytes in a named pipe) for each; the last stage sends sampled ids to the first through a pipe alone.
So every worker has one inbound and one outbound pipe, and a replica of one stage has none. A pipe wakes the
reader directly, where a ZeroMQ socket wakes an I/O thread on either side first: on a slow machine that took a
millisecond of every hop.

    stage 0  --ring, bell-->  stage 1  --ring, bell-->  stage 2
       ^------------------------- ids -------------------'

The receiver makes the file and the pipe, then reports itself started; the sender opens the file when it
first sends, which is after every stage has started, and removes its name at once: no death leaves memory
behind. Names carry the epoch, so nothing of an older life is met.

Control has at most stages + 1 plans out. The ring has one entry more, so an entry is read before it is
written again without any acknowledgement; the reader's count of finished entries, at the head of the file, is
only there to turn a breach of that rule into ``LinkBroken``.
"""

import contextlib
import fcntl
import mmap
import os
import select
import struct
import time
from collections import deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..control.wire import Start
from .executor import SampledIds

#: Bytes before the first entry: a u64 with the number of entries that the reader is done with, and padding.
_HEAD = 4096
#: Capacity of a pipe: more than the ids of all plans that may be out.
_PIPE_BYTES = 1 << 20
#: Read at a time: more than usually comes, and not so much that the buffer costs more than the reading.
_READ_BYTES = 1 << 16
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


class Inlet:
    """The reading end of a named pipe, which it makes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        os.mkfifo(path, 0o600)
        # Open for writing too: the pipe then has no end of file when the writer is gone or not yet there.
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)
        # A user with many pipes may be left with the usual 64 KiB: enough for 1,600 ids at a time.
        with contextlib.suppress(PermissionError):
            fcntl.fcntl(self.descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def read(self) -> bytes:
        """What has come."""
        data = b""
        while True:
            try:
                part = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return data
            data = data + part if data else part
            if len(part) < _READ_BYTES:
                return data

    def filled(self) -> bool:
        """Whether there is something to read."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        os.close(self.descriptor)
        self._path.unlink(missing_ok=True)


class Outlet:
    """The writing end of the next stage's pipe, opened at the first write: every stage has started by then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def write(self, frame: bytes) -> None:
        """Raises ``LinkBroken`` if the next stage has not started or does not read."""
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            written = os.write(self._descriptor, frame)
        except BrokenPipeError:
            # The next stage's process is gone. Control hears of that by itself, and ends the epoch.
            return
        except BlockingIOError:
            written = 0
        except OSError as error:
            raise LinkBroken(f"{self._path}: the next stage has not started ({error.strerror})") from None
        if written < len(frame):
            raise LinkBroken("the next stage does not read")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class StageLinks:
    """The links of one stage during one epoch."""

    def __init__(self, start: Start, stage: int, hidden_bytes: int) -> None:
        stages = start.stages
        self._first = stage == 0
        self._geometry = (stages + 2, start.token_budget, hidden_bytes)
        self._inlet: Inlet | None = None
        self._outlet: Outlet | None = None
        self._reading: HiddenRing | None = None
        self._writing: HiddenRing | None = None
        self._written = 0
        self._unread = b""
        self._bells: deque[tuple[int, int, int]] = deque()
        self._ids: deque[SampledIds] = deque()
        if stages == 1:
            return
        directory = Path(start.links)
        prefix = f"e{start.epoch}-"
        self._ring_in = directory / f"{prefix}{stage}.ring"
        self._ring_out = directory / f"{prefix}{stage + 1}.ring"
        try:
            if not self._first:
                self._reading = HiddenRing(self._ring_in, *self._geometry, create=True)
            self._inlet = Inlet(directory / f"{prefix}{stage}.pipe")
            self._outlet = Outlet(directory / f"{prefix}{(stage + 1) % stages}.pipe")
        except BaseException:
            self.close()
            raise

    @property
    def inbound(self) -> int | None:
        """The descriptor to watch; ``drain`` when it is readable. None with one stage."""
        return None if self._inlet is None else self._inlet.descriptor

    def drain(self) -> None:
        """Take in what has come. Raises ``LinkBroken``."""
        if self._inlet is None:
            return
        frame = self._unread + self._inlet.read()
        at = 0
        if self._first:
            while (size := ids_size(frame, at)) <= len(frame) - at:
                self._ids.append(decode_ids(frame[at : at + size]))
                at += size
        else:
            while len(frame) - at >= _BELL.size:
                self._bells.append(_BELL.unpack_from(frame, at))
                at += _BELL.size
        self._unread = frame[at:]

    def spin(self, limit_us: int) -> bool:
        """Look for inputs for so long without sleeping, leaving the core to whoever else wants it. Whether some came,
        which ``drain`` takes in.
        """
        if self._inlet is None:
            return False
        deadline = time.monotonic_ns() + 1000 * limit_us
        while not self._inlet.filled():
            if time.monotonic_ns() >= deadline:
                return False
            os.sched_yield()
        return True

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
        assert self._outlet is not None
        self._outlet.write(frame)

    def close(self) -> None:
        """Leave the epoch. Idempotent."""
        for end in (self._inlet, self._outlet):
            if end is not None:
                end.close()
        self._inlet = self._outlet = None
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


def ids_size(frame: bytes, at: int) -> int:
    """Bytes of the message of sampled ids that begins at ``at``; at least those of its head."""
    if len(frame) - at < _IDS.size:
        return _IDS.size
    return _IDS.size + 10 * _IDS.unpack_from(frame, at)[1]


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
