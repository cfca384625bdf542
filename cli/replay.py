"""``evenflow replay``: does this program's scheduler still plan what a journal recorded?

Exit code 0 if every plan is the same, 1 with the first difference if not, 2 if the file is no journal.
"""

import json
import sys
import time
from pathlib import Path

from ..control.journal.files import JournalError
from ..control.journal.replay import Journal, replay


def run_replay(path: Path, as_json: bool) -> int:
    """Returns the exit code."""
    start = time.perf_counter()
    try:
        journal = Journal(path)
        done = replay(journal)
    except JournalError as error:
        if as_json:
            print(json.dumps({"file": str(path), "error": str(error)}))
        else:
            print(f"evenflow: {error}", file=sys.stderr)
        return 2
    took = time.perf_counter() - start
    opening = journal.opening
    if as_json:
        print(
            json.dumps(
                {
                    "file": str(path),
                    "same": not done.problem,
                    "program": opening.program,
                    "ids": opening.ids,
                    "part": opening.part,
                    "events": done.events,
                    "plans": done.plans,
                    "submissions": done.submissions,
                    "refusals": done.refusals,
                    "seconds": done.seconds,
                    "took_seconds": took,
                    "difference": done.problem,
                    "note": done.note,
                }
            )
        )
    else:
        for line in done.problem:
            print(line)
        if done.note:
            print(f"note: {done.note}")
        verdict = "they part" if done.problem else "the same, byte for byte"
        what = "plans" if opening.ids else "plans (of prompts, lengths)"
        print(
            f"{done.events} events, {done.plans} {what}, {done.seconds:.1f} s of serving in {took:.2f} s: {verdict}"
        )
    return 1 if done.problem else 0
