"""Measuring: the runner is given the batches that were asked for; a device with a law is described by it."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from evenflow.dataplane.batch import Finished, StageBatch
from evenflow.dataplane.model_runner import load_runner
from evenflow.dataplane.profiling import TIMES, Bounds, Engine, describe, hop_us, measure, profile_model
from evenflow.dataplane.rehearsal import Batch, Rehearsal
from evenflow.dataplane.simulated.blank import BlankRunner
from evenflow.dataplane.simulated.shadow import ShadowRunner
from evenflow.dataplane.simulated.shape import KNOWN


class Lawful(BlankRunner):
    """Says that iterations took what a law says, and keeps their batches."""

    def __init__(self, length: int = 2048) -> None:
        super().__init__(0, 1, replace(ShadowRunner(num_blocks=64).info, max_model_len=length))
        self.batches: list[StageBatch] = []
        self._now = 10**9

    def collect(self) -> Finished:
        done = super().collect()
        batch = self.batches[-1]
        decodes = batch.num_decodes
        chunks = len(batch.slots) - decodes
        prefill = batch.num_tokens - decodes
        took = 5000 + 40 * batch.num_tokens + 70 * len(done.output)
        took += chunks * 90 + prefill * int(batch.kv_len[decodes:].sum() - prefill) // 20
        took += int(batch.kv_len[:decodes].sum()) // 5
        start = self._now + 250 + 3 * len(batch.slots)
        self._now = start + took
        return replace(done, started_us=start, ended_us=self._now)

    def launch(self, batch: StageBatch, hidden: np.ndarray | None) -> None:
        self.batches.append(batch)
        super().launch(batch, hidden)


def test_the_runner_computes_what_was_asked_for() -> None:
    runner = Lawful()
    timings = Rehearsal(runner, 64, 16).run(Batch(3, 100, 20, 500), 2)
    assert [timing.kv_tokens for timing in timings] == [3 * 102, 3 * 103]
    for batch in runner.batches[-2:]:
        assert batch.num_decodes == 3 and batch.num_tokens == 23 and batch.kv_len[3] == 520
        assert batch.positions[3:].tolist() == list(range(500, 520))
        assert batch.sampling is not None and batch.sampling.rows.tolist() == [0, 1, 2]
    last = Rehearsal(runner, 64, 16)
    last.run(Batch(0, chunk=64, last=True), 1)
    assert runner.batches[-1].sampling is not None and runner.batches[-1].sampling.rows.tolist() == [0]
    # One after the other, larger and smaller, on the same executor.
    for batch in (Batch(16, 30), Batch(1, 1), Batch(8, 2000, 56, 0)):
        assert len(last.run(batch, 3)) == 3


@pytest.mark.parametrize(
    "batch", [Batch(0), Batch(17, 9), Batch(3, 9, 64), Batch(2, 2046), Batch(0, chunk=9, before=2040)]
)
def test_what_does_not_fit_is_refused(batch: Batch) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Rehearsal(Lawful(), 64, 16).run(batch, 2)


def test_a_device_with_a_law_is_described_by_it() -> None:
    heard: list[tuple[int, int]] = []
    runner = Lawful()
    measured = measure(runner, Bounds(64, 16, 1e9), lambda *progress: heard.append(progress))
    assert not measured.left_out and heard[-1] == (len(heard), len(heard)) and len(measured.probes) > 10
    profile = describe(KNOWN["mistral-7b"], runner, 1, "float32", measured)
    assert profile.fit.p90 < 0.01 and profile.probes is not None and profile.probes.p90 < 0.01
    assert profile.between_us == pytest.approx(250, abs=3) and profile.between_row_us == pytest.approx(3, abs=0.5)
    assert profile.range.tokens == 64 and profile.range.decodes == 16 and profile.range.context > 1000
    assert profile.scatter < 0.01 and profile.blocks == 64


def test_time_is_kept_and_what_is_needed_is_measured() -> None:
    ticks = count(0, 100)
    runner = Lawful()
    measured = measure(runner, Bounds(64, 16, 1.0), clock=lambda: float(next(ticks)))
    assert len(measured.timed) == 4 and not measured.probes and measured.left_out > 40
    assert len(runner.batches) <= 4 * (TIMES + 2)
    assert describe(KNOWN["mistral-7b"], runner, 1, "float32", measured).probes is None


def test_a_real_model_is_measured() -> None:
    engine = Engine("random:layers=2", "float32", 16, 1 << 22, 1, "cpu")
    profile, left_out = profile_model(engine, Bounds(16, 4, 0.5))
    assert left_out >= 0 and profile.shape.layers == 2 and profile.fit.batches >= 4
    info = load_runner("random:layers=2", dtype="float32", kv_memory=1 << 22).info
    assert (profile.blocks, profile.shape.max_len) == (info.num_blocks, info.max_model_len)
    assert sum(us for _, us in profile.terms.tokens) > 0


def test_a_message_takes_time() -> None:
    assert 1 <= hop_us() < 1_000_000
