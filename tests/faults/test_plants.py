"""That the simulator can find things: mistakes put into the product on purpose, one at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent


def test_planted_mistakes_are_found() -> None:
    """Each by one of the first 300 seeds."""
    command = [sys.executable, PROGRAM, "--hunt", "--seeds", "300", "--json"]
    environment = {**os.environ, "EVENFLOW_PURE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [entry["plant"] for entry in found if entry["found"] is None]
    assert done.returncode == 0 and len(found) >= 10, done.stderr
