"""``whatif`` against an oracle: a journal of one setting must foretell what another gives on the same device."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from evenflow.cli.errors import UsageError
from evenflow.cli.history import read_history
from evenflow.cli.whatif import Outcome, Wishes, imagine, recorded_setting, run_whatif, settle
from evenflow.control.core.events import Event, Limits, SendPlan
from evenflow.control.core.slo import parse_slo
from evenflow.control.journal.recorder import Recorder, decode_items
from evenflow.control.journal.replay import Journal
from evenflow.control.journal.writer import Writer
from evenflow.control.wire import Result, encode
from evenflow.dataplane.simulated.cost import Work
from evenflow.dataplane.simulated.figures import summarise
from evenflow.dataplane.simulated.fitted import Measured, fit, residuals
from evenflow.dataplane.simulated.world import Arrival, ReplicaModel, World

LIMITS = Limits(token_budget=256, max_num_seqs=32, max_model_len=2000, max_queued=1 << 40, max_queued_tokens=1 << 60)
LAW = (3000.0, 40.0, 0.02, 60.0, 0.05)
BLOCKS = 1200


class Device:
    """A law of cost. Implements ``Cost``."""

    def stage_us(self, stage: int, work: Work) -> int:
        terms = (1.0, work.tokens - work.decodes, work.attention, work.decodes, work.kv_tokens)
        return round(sum(c * x for c, x in zip(LAW, terms, strict=True)))

    def transfer_us(self, tokens: int) -> int:
        return 50


class RecordedWorld(World):
    """A world whose events and plans are recorded."""

    def __init__(self, recorder: Recorder, limits: Limits, *models: ReplicaModel) -> None:
        self._recorder = recorder
        recorder.opened(limits, 0.0, 0.0)
        super().__init__(limits, models, watch=self._saw)

    def _step(self, event: Event) -> None:
        self._recorder.took(event, self.now / 1e6)
        super()._step(event)

    def _saw(self, send: SendPlan, results: list[Result]) -> None:
        self._recorder.planned(send, [*map(encode, send.registers), encode(send.plan)])


def load(requests: int = 150) -> Iterator[Arrival]:
    draw = random.Random(5)
    at = 0.0
    for _ in range(requests):
        at += draw.expovariate(6.0)
        yield Arrival(round(at * 1e6), draw.randrange(20, 900), draw.randrange(5, 120))


def outcome(world: World) -> Outcome:
    preemptions = sum(replica.preemptions for replica in world.engine.replicas.values())
    return Outcome(summarise(world.record), preemptions, len(world.record.rejected), world.iterations)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a served load."""
    path = tmp_path_factory.mktemp("whatif") / "journal"
    writer = Writer(path, 1 << 30, b"key")
    recorder = Recorder(lambda data, soon: writer.take(decode_items(data)) if data else None)
    world = RecordedWorld(recorder, LIMITS, ReplicaModel(Device(), 1, BLOCKS))
    world.feed(load())
    world.run()
    recorder.close()
    writer.close()
    assert not writer.note
    return path


def near(found: Outcome, oracle: Outcome) -> None:
    assert found.figures.finished == oracle.figures.finished == oracle.figures.requests
    assert found.preemptions == pytest.approx(oracle.preemptions, rel=0.1, abs=2)
    for name in ("ttft", "tbt", "e2e"):
        for part in ("p50", "p99"):
            ours, theirs = getattr(getattr(found.figures, name), part), getattr(getattr(oracle.figures, name), part)
            assert ours == pytest.approx(theirs, rel=0.03, abs=0.002), f"{name} {part}"
    assert found.figures.tokens_per_second == pytest.approx(oracle.figures.tokens_per_second, rel=0.02)


@pytest.mark.parametrize(
    ("wishes", "limits", "replicas", "blocks"),
    [
        (Wishes(), LIMITS, 1, BLOCKS),
        (Wishes(token_budget=64), replace(LIMITS, token_budget=64), 1, BLOCKS),
        (
            Wishes(policy="prefill-first"),
            replace(LIMITS, policy="prefill-first", token_budget=2000),
            1,
            BLOCKS,
        ),
        (Wishes(max_num_seqs=6), replace(LIMITS, max_num_seqs=6), 1, BLOCKS),
        (Wishes(replicas=2), LIMITS, 2, BLOCKS),
        (Wishes(blocks=130), LIMITS, 1, 130),
        (
            Wishes(tbt_slo="40ms"),
            replace(LIMITS, token_budget=2048, slo=parse_slo("40ms")),
            1,
            BLOCKS,
        ),
    ],
    ids=["same", "budget", "policy", "seqs", "replicas", "blocks", "slo"],
)
def test_what_another_setting_gives_is_foretold(
    wishes: Wishes, limits: Limits, replicas: int, blocks: int, path: Path
) -> None:
    history = read_history(Journal(path))
    setting = settle(history, wishes)
    assert setting.blocks == blocks and setting.replicas == replicas
    assert replace(setting.limits, vocab_size=limits.vocab_size) == limits
    oracle = World(limits, [ReplicaModel(Device(), 1, blocks)] * replicas)
    oracle.feed(load())
    oracle.run()
    near(imagine(history, setting), outcome(oracle))


def test_what_was_recorded_is_told_as_it_was(path: Path) -> None:
    world = World(LIMITS, [ReplicaModel(Device(), 1, BLOCKS)])
    world.feed(load())
    world.run()
    history = read_history(Journal(path))
    assert history.figures == summarise(world.record)
    assert history.cost.coefficients == pytest.approx(LAW, rel=0.02, abs=0.01)
    assert history.residuals.iterations == world.iterations and history.residuals.p99 < 0.005
    assert history.residuals.explained > 0.999 and abs(history.residuals.bias) < 0.001
    assert recorded_setting(history).replicas == 1


def test_residuals_tell_of_scatter() -> None:
    draw = random.Random(1)
    batches = [
        (draw.randrange(300), draw.randrange(90_000), draw.randrange(40), draw.randrange(9000)) for _ in range(900)
    ]

    def measured(noise: float) -> list[Measured]:
        return [
            Measured(*b, sum(c * x for c, x in zip(LAW, (1.0, *b), strict=True)) * draw.uniform(1 - noise, 1 + noise))
            for b in batches
        ]

    for noise in (0.05, 0.3):
        rows = measured(noise)
        told = residuals(fit(rows), rows)
        assert told.mean == pytest.approx(noise / 2, rel=0.2)
        assert told.p50 == pytest.approx(noise / 2, rel=0.2) and noise * 0.85 < told.p99 < noise * 1.4
    # The same batch takes twice as long as any other: what no term says is left.
    odd = [Measured(10, 100, 1, 10, took) for took in (1000.0, 2000.0) * 50]
    assert residuals(fit(odd), odd).explained < 0.01
    assert residuals(fit(odd), []).iterations == 0


def test_the_report(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_whatif(path, Wishes(token_budget=64, replicas=2), True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["whatif"]["finished"] == told["recorded"]["finished"] == 150
    assert told["whatif"]["tbt"]["p99"] < told["recorded"]["tbt"]["p99"]
    assert told["model"]["ttft"]["p50"] == pytest.approx(told["recorded"]["ttft"]["p50"], rel=0.03)
    assert told["residuals"]["iterations"] == told["recorded"]["iterations"]
    assert run_whatif(path, Wishes(token_budget=64, replicas=2), False) == 0
    text = capsys.readouterr().out
    for words in ("TTFT p50, ms", "TBT p99, ms", "preemptions", "Residuals: mean ", "2 replicas", "budget 64"):
        assert words in text


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (Wishes(token_budget=0), "--token-budget"),
        (Wishes(blocks=0), "--blocks"),
        (Wishes(replicas=0), "--replicas"),
        (Wishes(max_num_seqs=1 << 20), "--max-num-seqs"),
        (Wishes(policy="hybrid", tbt_slo="50ms"), "--tbt-slo"),
        (Wishes(tbt_slo="soon"), "--tbt-slo"),
        (Wishes(ttft_slo="1s"), "--ttft-slo"),
    ],
)
def test_settings_that_cannot_be_are_refused(wishes: Wishes, words: str, path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        run_whatif(path, wishes, False)


def test_no_journal_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_whatif(tmp_path / "none", Wishes(), False) == 2
    assert "No such file" in capsys.readouterr().err
    assert run_whatif(tmp_path / "none", Wishes(), True) == 2
    assert "No such file" in json.loads(capsys.readouterr().out)["error"]
