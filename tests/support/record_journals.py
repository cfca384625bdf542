"""Records anew the journals that the suite replays, after a change of scheduling that is meant.

Run: python tests/support/record_journals.py
Each is of a run of the fault simulator, by one control process: clients, workers and their faults are those of the
seed, the plans are those of this tree. Without a change of scheduling the files come out as they are.
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parent / "control" / "journal" / "recorded"
#: Every policy and admission order, lanes, replicas, budgets in tokens and in seconds; with ids and without.
SEEDS = (1, 3, 5, 10, 11, 13, 20, 23, 26, 39)


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent / "faults")]
    from evenflow.control.journal.files import JournalFile, frame, head
    from evenflow.control.journal.records import Closed, Opening
    from faultsim.scenario import draw
    from recorded import EVENTS, record

    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.journal"):
        old.unlink()
    patch = pytest.MonkeyPatch()
    for seed in SEEDS:
        limits = draw(seed, EVENTS).limits
        (writer,) = record(seed, FOLDER, patch, ids=seed == 10)
        records = list(JournalFile(writer.path))
        writer.path.unlink()
        assert isinstance(records[0], Opening)
        path = FOLDER / f"{limits.policy}-{limits.admission}-{seed}.journal"
        path.write_bytes(head() + frame(records[:1]) + frame([*records[1:], Closed()]))
        print(f"{path.name}: {len(records)} records, {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
