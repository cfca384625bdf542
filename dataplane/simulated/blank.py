"""A runner that computes nothing: ids follow from positions alone. For benchmarks of the control plane, where a
device's time is planned (``ScriptedRunner``) and the host's should be spent on nothing else."""

import numpy as np
from numpy.typing import NDArray

from ...control.wire import Sample
from ..batch import Computed, Finished, ModelInfo, StageBatch, compute_now


class BlankRunner:
    """One stage. Implements ``dataplane.batch.Runner``; a context costs it nothing, however long. It makes up no
    log-probabilities."""

    def __init__(self, stage: int, stages: int, info: ModelInfo) -> None:
        self._last = stage == stages - 1
        self._info = info
        self._finished: Finished

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def done(self) -> None:
        return None

    def start(self, num_blocks: int) -> None:
        """There is nothing to forget."""

    def profile(self, tokens: int) -> list[Sample]:
        return []

    def warm_up(self, tokens: int) -> None:
        """There is nothing that gets faster."""

    def launch(self, batch: StageBatch, hidden: NDArray[np.uint8] | None) -> None:
        self._finished = compute_now(self.run, batch, hidden)

    def collect(self) -> Finished:
        return self._finished

    def run(self, batch: StageBatch, hidden: NDArray[np.uint8] | None) -> Computed:
        if not self._last:
            return np.zeros((batch.num_tokens, self._info.hidden_bytes), np.uint8), ()
        assert batch.sampling is not None
        return 1 + batch.sampling.position % (self._info.vocab_size - 1), ()
