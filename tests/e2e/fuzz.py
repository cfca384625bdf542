"""A million hostile frames to every socket of a running system (case SEC-1). ``make fuzz`` runs it; the suite sends
some of them in ``test_fuzz.py``. ``tests/support/fuzz_server.py`` says what must hold at the end.

Run: python tests/e2e/fuzz.py [--frames 1000000] [--seed 0] [--only clients,workers]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from fuzz_server import command, fuzz
from live_server import Interrupted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="sockets, by their names")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end earlier, after this time")
    options = parser.parse_args()
    try:
        report = fuzz(options.frames, options.seed, options.only, options.seconds, out=True)
    except Interrupted as interrupted:
        print("fuzz: ended by", interrupted)
        return interrupted.code
    print(*report.lines(), sep="\n")
    print("fuzz:", f"failed; again: {command(options.frames, options.seed)}" if report.wrong else "passed")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
