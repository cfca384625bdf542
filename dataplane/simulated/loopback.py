"""All stages of one replica in one process, without sockets: for property and equality tests.

``submit`` gives a plan to every stage, ``run_one`` runs the oldest plan through all of them. For schedules in
which stages run ahead of each other, ``run_stage`` advances one stage at a time and ``deliver_ids`` decides
when sampled ids reach the first stage.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...control.wire import Hello, Result, Start
from ..batch import Runner
from ..executor import Limits, SampledIds, StageExecutor


class LoopbackReplica:
    """``runners``: one per stage, in stage order."""

    def __init__(self, runners: Sequence[Runner], limits: Limits | None = None) -> None:
        self.executors = [StageExecutor(runner, stage, len(runners), limits) for stage, runner in enumerate(runners)]
        self._hidden: list[deque[tuple[int, NDArray[np.uint8]]]] = [deque() for _ in runners]
        self._ids: deque[SampledIds] = deque()

    def hellos(self, replica: int = 0) -> list[Hello]:
        return [executor.hello(replica) for executor in self.executors]

    def start(self, start: Start) -> None:
        """Begin an epoch on all stages. Raises ``PlanRefused``."""
        for queue in self._hidden:
            queue.clear()
        self._ids.clear()
        for executor in self.executors:
            executor.start(start)

    def submit(self, frames: Sequence[bytes]) -> None:
        """Give a plan (REGISTER frames, then the PLAN) to all stages. One that cannot be followed is
        refused when its turn comes.
        """
        for executor in self.executors:
            executor.accept(frames)

    def can_run(self, stage: int) -> bool:
        executor = self.executors[stage]
        awaited = executor.awaited_step()
        queue = self._hidden[stage]
        return executor.can_run(bool(queue) and queue[0][0] == awaited)

    def run_stage(self, stage: int) -> Result | None:
        """Run the oldest plan of one stage, None if its inputs are not there. Ids wait for ``deliver_ids``."""
        if not self.can_run(stage):
            return None
        executor = self.executors[stage]
        hidden = self._hidden[stage].popleft()[1] if executor.awaited_step() is not None else None
        outcome = executor.execute(hidden)
        if outcome.hidden is not None:
            self._hidden[stage + 1].append((outcome.step, outcome.hidden.copy()))
        if outcome.sampled is not None and not executor.first:
            self._ids.append(outcome.sampled)
        return outcome.result()

    def deliver_ids(self) -> bool:
        """Let the oldest sampled ids reach the first stage. False if none are on their way."""
        if not self._ids:
            return False
        self.executors[0].take_ids(self._ids.popleft())
        return True

    def run_one(self) -> list[Result]:
        """Run the oldest plan through all stages and deliver its ids.

        Returns the results by stage (the last one has the ids); empty if no plan is queued. Raises
        ``PlanRefused``.
        """
        if not self.executors[-1].queued:
            return []
        results: list[Result] = []
        for stage in range(len(self.executors)):
            result = self.run_stage(stage)
            if result is None:
                raise RuntimeError(f"stage {stage} waits for inputs that no earlier plan makes")
            results.append(result)
        while self.deliver_ids():
            pass
        return results
