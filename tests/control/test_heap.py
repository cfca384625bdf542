"""Large pieces of memory that were freed are not kept, in a process of its own."""

import subprocess
import sys

import pytest

#: By how many MB a process has grown while sixteen pieces of 8 MB are there, and when they are gone and only a small
#: one that came after them is left.
PROGRAM = """
import psutil
from evenflow.control.heap import return_large

return_large()
memory = psutil.Process().memory_info
before = memory().rss
for _ in range(3):
    kept = []
    pieces = [bytearray(b"x") * (8 << 20) for _ in range(16)]
    kept.append(bytearray(b"y") * (900 << 10))
    most = memory().rss
    del pieces
print((most - before) >> 20, (memory().rss - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_large_pieces_that_were_freed_are_the_systems_again() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    most, left = map(int, run.stdout.split())
    assert most > 100 and left < 8
