"""Keeps the processes of one server alive, and ends them in order. Used by the launcher only.

A child that dies is started again: at once the first time, then after 0.5, 1, 2, … 10 s. A child that fails
before it was ever ready would only fail again: the server is given up and the first cause is what the user
reads last. Phases go one way: ``running`` → ``draining`` (what runs is finished, new requests are refused)
→ ``stopping``.
"""

import asyncio
import signal
from collections.abc import Callable

from .child import Child, describe
from .children import ChildSpec, Plan

#: Seconds a child lives before its earlier deaths are forgotten.
FORGIVEN_AFTER = 60.0
LONGEST_WAIT = 10.0
#: Deaths by a signal before a child was ever ready, after which the server is given up.
MOST_KILLS_AT_START = 3
#: A worker that control does not hear of has so many seconds to load, or so many times what loading took before.
LONGEST_LOAD = 60.0
LOAD_MARGIN = 3.0
#: Seconds that control has to end after it was asked a second time.
INSIST_SECONDS = 1.0
#: Seconds that gateway and workers have after control has ended, before SIGKILL.
GRACE_SECONDS = 3.0


def wait_before_start(failures: int) -> float:
    """Seconds before the next life after ``failures`` deaths in a row."""
    return 0.0 if failures <= 1 else min(LONGEST_WAIT, 0.5 * 2 ** min(failures - 2, 10))


def gives_up(ever_ready: bool, status: int, failures: int) -> bool:
    """Whether a death means that the server cannot be started as asked."""
    return not ever_ready and (status >= 0 or failures >= MOST_KILLS_AT_START)


def overdue(age: float, loaded_in: float | None) -> bool:
    """Whether a worker that is ``age`` seconds old and not known to control must hang. ``loaded_in``: seconds that
    the slowest worker took until it was ready; None if none was yet."""
    return loaded_in is not None and age > max(LONGEST_LOAD, LOAD_MARGIN * loaded_in)


class Supervisor:
    """The children of one launcher.

    ``on_worker_exit(replica, stage, pid, status)`` is told of each death of a worker. ``failure`` resolves
    to the cause when the server must be given up.
    """

    def __init__(
        self,
        plan: Plan,
        say: Callable[[str], None],
        on_worker_exit: Callable[[int, int, int, int], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._plan = plan
        self._say = say
        self._on_worker_exit = on_worker_exit
        self._children: dict[str, Child] = {}
        self._failures: dict[str, int] = {}
        self._ready: set[str] = set()
        self._loaded_in: float | None = None
        self._restarts: dict[str, asyncio.TimerHandle] = {}
        self.phase = "running"
        self.failure: asyncio.Future[str] = self._loop.create_future()
        #: Set at each start of the gateway: a probe whose connection was lost tries the next life.
        self.gateway_started = asyncio.Event()
        #: How often control was started.
        self.control_lives = 0

    def start(self) -> None:
        for spec in (self._plan.control, self._plan.gateway, *self._plan.workers):
            self._start(spec)

    def mark_ready(self, *names: str) -> None:
        """These children (all, without names) have been ready once: from now on they are always restarted."""
        specs = (self._plan.control, self._plan.gateway, *self._plan.workers)
        self._ready.update(names or (spec.name for spec in specs))
        if self._loaded_in is None and all(spec.name in self._ready for spec in self._plan.workers):
            ages = [self._loop.time() - child.started_at for child in self._children.values() if child.spec.worker]
            self._loaded_in = max(ages, default=0.0)

    def give_up(self, cause: str) -> None:
        if not self.failure.done():
            self.failure.set_result(cause)

    def kill_worker(self, replica: int, stage: int, pid: int) -> None:
        """SIGKILL, if ``pid`` still is that worker; with ``pid`` 0 if it should have dialled in by now."""
        for child in self._children.values():
            if child.spec.worker != (replica, stage) or not child.alive:
                continue
            if child.pid == pid or (not pid and overdue(self._loop.time() - child.started_at, self._loaded_in)):
                self._say(f"{child.spec.name} (process {child.pid}) is killed: it hangs or is out of step")
                child.kill()

    def kill_all(self) -> None:
        """SIGKILL to everything, at once."""
        self._stop_restarting()
        for child in self._children.values():
            child.kill()

    async def killed(self, timeout: float) -> None:
        """Kill everything and wait until it is gone."""
        self.kill_all()
        await asyncio.gather(*(child.wait(timeout) for child in self._children.values()))

    async def drain(self, patience: float, stop_listening: Callable[[], None]) -> int:
        """End in order: control and gateway when what runs is finished, then the workers, which compute it.

        ``patience``: seconds until control is asked again, which ends what still runs. ``stop_listening`` is
        called when nobody answers new connections any more. Returns the exit code.
        """
        self.phase = "draining"
        control = self._children.get(self._plan.control.name)
        gateway = self._children.get(self._plan.gateway.name)
        # Both at once: control takes nothing new, and the gateway says so from this moment. It is told only
        # once, since the second signal would cut its streams.
        for child in (control, gateway):
            if child is not None:
                child.terminate()
                if child.spec.name in self._restarts:
                    self._restarts.pop(child.spec.name).cancel()
        closing = asyncio.ensure_future(self._close_with(gateway, stop_listening))
        code = 0
        if control is not None:
            if not await control.wait(patience):
                control.terminate()
                if not await control.wait(INSIST_SECONDS):
                    self._say("control did not end in time and is killed")
                    control.kill()
                    await control.wait(1.0)
            # Ended by our own signal: it was not even listening for it yet.
            code = 0 if control.status in (0, -signal.SIGTERM) else 1
        self._stop_restarting()
        for child in self._children.values():
            if child.spec.worker is not None:
                child.terminate()
        await asyncio.gather(*(self._ended(child) for child in self._children.values()))
        await closing
        return code

    async def _close_with(self, gateway: Child | None, stop_listening: Callable[[], None]) -> None:
        if gateway is not None:
            await gateway.ended.wait()
        stop_listening()

    async def _ended(self, child: Child) -> None:
        """Wait for it to end by itself, a little."""
        if not await child.wait(GRACE_SECONDS):
            child.kill()
            await child.wait(1.0)

    def reap(self) -> None:
        """Last resort, without an event loop: nothing outlives the launcher."""
        for child in self._children.values():
            child.reap(1.0)

    def _stop_restarting(self) -> None:
        self.phase = "stopping"
        for timer in self._restarts.values():
            timer.cancel()
        self._restarts.clear()

    def _start(self, spec: ChildSpec) -> None:
        self._restarts.pop(spec.name, None)
        try:
            self._children[spec.name] = Child(spec, self._loop, self._say, self._exited)
        except OSError as error:
            self.give_up(f"{spec.name} cannot be started: {error}")
            return
        if spec is self._plan.control:
            self.control_lives += 1
        if spec is self._plan.gateway:
            self.gateway_started.set()

    def _exited(self, child: Child, status: int) -> None:
        spec = child.spec
        if spec.worker is not None:
            self._on_worker_exit(*spec.worker, child.pid, status)
        if self.phase == "stopping":
            return
        # While draining, a worker is still needed for what runs; control and the gateway were told to end.
        if self.phase == "draining" and spec.worker is None:
            return
        if self._loop.time() - child.started_at > FORGIVEN_AFTER:
            self._failures[spec.name] = 0
        failures = self._failures[spec.name] = self._failures.get(spec.name, 0) + 1
        how = describe(status)
        words = f": {child.last_words}" if child.last_words else ""
        if gives_up(spec.name in self._ready, status, failures):
            self.phase = "stopping"
            self.give_up(f"{spec.name} failed at start ({how}){words}")
            return
        delay = wait_before_start(failures)
        when = "at once" if delay == 0 else f"in {delay:g} s"
        self._say(f"{spec.name} (process {child.pid}) ended by {how}; it is started again {when}")
        self._restarts[spec.name] = self._loop.call_later(delay, self._start, spec)
