"""What is recorded under faults is planned again, byte for byte, from the start and from the middle, with ids and
without; and whatever is not the same is found and told."""

from array import array
from pathlib import Path

import pytest
from evenflow.control.journal.files import JournalFile, frame, head
from evenflow.control.journal.records import Answered, Came, Cancelled, Closed, Opening, Planned, Record, Turned
from evenflow.control.journal.replay import Journal, replay
from evenflow.control.journal.writer import Writer
from evenflow.control.wire import BatchPlan, decode_to_worker, encode
from faultsim.scenario import draw
from msgspec import structs
from recorded import EVENTS, record

#: Seeds of the fault simulator with many plans.
WHOLE, PARTED = (1, 4, 5, 10, 11, 13, 17, 25), (3, 16, 19, 23, 24, 26, 33, 39)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("seed", WHOLE)
def test_a_run_under_faults_is_planned_again(
    seed: int, ids: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = 0
    for writer in record(seed, tmp_path, monkeypatch, ids):
        assert writer.parts == 1
        done = replay(Journal(writer.path))
        assert done.problem == [] and "not closed" in done.note
        plans += done.plans
    assert plans > 50


@pytest.mark.parametrize("seed", PARTED)
def test_a_file_that_begins_in_the_middle_of_a_run_is_planned_again(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, taken = 0, 0

    def rotate(writer: Writer) -> None:
        nonlocal plans, taken
        taken += 1
        if taken % 4 == 0:
            writer.flush()
            done = replay(Journal(writer.path))
            assert done.problem == []
            plans += done.plans
            writer.next_part()

    writers = record(seed, tmp_path, monkeypatch, seed % 2 == 0, rotate)
    assert plans > 30 and max(writer.parts for writer in writers) > 1
    for writer in writers:
        assert replay(Journal(writer.path)).problem == []


def test_the_runs_are_of_every_kind() -> None:
    limits = [draw(seed, EVENTS).limits for seed in WHOLE + PARTED]
    assert {draw(seed, EVENTS).stages for seed in WHOLE + PARTED} >= {1, 2, 3, 4}
    assert len({found.policy for found in limits}) > 3 and len({found.admission for found in limits}) > 2
    assert any(found.slo is not None for found in limits)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """Of a run."""
    (writer, *_) = record(10, tmp_path, monkeypatch)
    return list(JournalFile(writer.path))


def journal_of(records: list[Record], path: Path) -> Journal:
    path.write_bytes(head() + b"".join(frame([part]) for part in records))
    return Journal(path)


def lonely_plan(records: list[Record]) -> int:
    """Where a plan is that is all that came of its event."""
    kinds = [isinstance(part, Planned | Turned) for part in records]
    return [i for i in range(20, len(records) - 1) if kinds[i - 1 : i + 2] == [False, True, False]][9]


def test_a_plan_that_is_another_is_told_by_its_fields(records: list[Record], tmp_path: Path) -> None:
    at = lonely_plan(records)
    planned = records[at]
    assert isinstance(planned, Planned)
    plan = decode_to_worker(planned.frames[-1])
    assert isinstance(plan, BatchPlan)
    other = structs.replace(plan, released=array("H", [7]).tobytes())
    records[at] = Planned(planned.replica, [*planned.frames[:-1], encode(other)], planned.digest)
    done = replay(journal_of(records, tmp_path / "other"))
    assert any(line.startswith("BatchPlan.released: recorded [7], made [") for line in done.problem)
    assert done.problem[0].startswith("event ") and "s from the start" in done.problem[0]


def test_a_plan_that_is_missing_and_one_too_many_are_told(records: list[Record], tmp_path: Path) -> None:
    at = lonely_plan(records)
    planned = records[at]
    fewer = replay(journal_of(records[:at] + records[at + 1 :], tmp_path / "fewer"))
    assert any(line == "recorded nothing" for line in fewer.problem)
    assert any(line.startswith("made     a plan: replica ") for line in fewer.problem)
    more = replay(journal_of([*records[:at], planned, *records[at:]], tmp_path / "more"))
    assert more.problem


@pytest.mark.parametrize("field", ["token_budget", "share"])
def test_other_limits_give_other_plans(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = 0
    for seed in (5, 10):
        for writer in record(seed, tmp_path, monkeypatch):
            parts = list(JournalFile(writer.path))
            opening = parts[0]
            assert isinstance(opening, Opening)
            value = max(1, opening.limits.token_budget // 2) if field == "token_budget" else 0.9
            changed = structs.replace(opening.limits, **{field: value})
            done = replay(journal_of([structs.replace(opening, limits=changed), *parts[1:]], tmp_path / "changed"))
            found += bool(done.problem)
    assert found


def test_without_ids_nothing_of_the_text_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a journal with ids has, the other has lengths, and the same wherever two sequences share a prefix."""
    (plain, *_), (hashed, *_) = (record(10, tmp_path / str(ids), monkeypatch, ids) for ids in (True, False))
    first, second = list(JournalFile(plain.path)), list(JournalFile(hashed.path))
    assert isinstance(second[0], Opening) and second[0].width < 4 and not second[0].ids
    prompts: list[tuple[bytes, bytes, bytes]] = []
    width = second[0].width
    for old, new in zip(first, second, strict=True):
        assert type(old) is type(new) or isinstance(new, Cancelled)
        if isinstance(old, Came) and isinstance(new, Came):
            assert len(new.submit.tokens) // width == len(old.submit.tokens) // 4
            assert new.submit.stop_ids == () and new.submit.sampling.bias_ids == b""
            prompts.append((old.submit.salt, old.submit.tokens, new.submit.tokens))
        elif isinstance(old, Answered) and isinstance(new, Answered):
            assert len(new.result.ids) // width == len(old.result.ids) // 4
            assert not any(entry.top_ids.strip(b"\0") for entry in new.result.logprobs)
        elif isinstance(old, Planned) and isinstance(new, Planned):
            assert old.frames[-1] == new.frames[-1]
    shared = 0
    for i, (salt, tokens, hashes) in enumerate(prompts):
        for other_salt, other, others in prompts[:i]:
            same = _common(tokens, other, 4) if salt == other_salt else 0
            # What is not shared looks alike only by chance.
            assert same <= _common(hashes, others, width) <= same + 2
            shared += same > 0
    assert len(prompts) > 5


def _common(a: bytes, b: bytes, width: int) -> int:
    count = 0
    while (part := a[count * width : (count + 1) * width]) and part == b[count * width : (count + 1) * width]:
        count += 1
    return count


def test_a_file_is_bounded_and_begins_with_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(writer: Writer) -> None:
        writer._most = 40_000
        writer.flush()

    writers = record(10, tmp_path, monkeypatch, False, small)
    writer = max(writers, key=lambda found: found.parts)
    before = writer.path.with_name(f"{writer.path.name}.1")
    assert writer.parts > 1
    assert before.stat().st_size < 2 * 40_000
    assert Journal(writer.path).opening.part == writer.parts - 1
    assert replay(Journal(before)).problem == []
    assert replay(Journal(writer.path)).problem == []


def test_refusals_are_compared_too(records: list[Record], tmp_path: Path) -> None:
    at = next(i for i, part in enumerate(records) if isinstance(part, Came))
    done = replay(journal_of([*records[: at + 1], Turned("overloaded"), *records[at + 1 :]], tmp_path / "refused"))
    assert done.problem and any("a refusal (overloaded)" in line for line in done.problem)


def test_a_proper_end_has_no_note(records: list[Record], tmp_path: Path) -> None:
    assert replay(journal_of([*records, Closed()], tmp_path / "closed")).note == ""
    assert replay(journal_of([*records, Closed("the disk is full")], tmp_path / "ended")).note == "the disk is full"
