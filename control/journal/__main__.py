"""``python -P -m evenflow.control.journal``: writes the journal of a control process. Started by it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec
import structlog
from setproctitle import setproctitle

from ... import __version__
from ..logs import configure
from .recorder import decode_items
from .ring import RingClosed, RingReader
from .writer import JournalStop, Writer

log = structlog.get_logger("evenflow.journal")

#: What was recorded is in the file after so many seconds, also if the machine fails then.
FLUSH_S = 1.0


def main(argv: list[str] | None = None) -> int:
    """Write until the control process has ended; returns the exit code."""
    parser = argparse.ArgumentParser(prog="evenflow.control.journal", description="Writes a journal.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--size", type=int, required=True, help="most bytes of the file and the one before it")
    parser.add_argument("--ring", type=int, nargs=3, required=True, help="descriptors: memory, heard, told")
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args(argv)
    configure(args.log_level)
    setproctitle("evenflow journal")
    # It may wait; whoever decides and computes may not.
    os.nice(10)
    writer = Writer(args.file, args.size, os.urandom(16), __version__)
    ring = RingReader(*args.ring)
    flushed, told = time.monotonic(), False
    try:
        while True:
            try:
                for message in ring.messages(FLUSH_S / 2):
                    writer.take(decode_items(message))
            except RingClosed:
                break
            if time.monotonic() - flushed >= FLUSH_S:
                writer.flush()
                flushed = time.monotonic()
            if writer.note and not told:
                told = True
                log.error("the journal cannot be replayed", difference=writer.note)
        writer.close()
    except (JournalStop, OSError, msgspec.MsgspecError) as error:
        log.error("the journal cannot be written", file=str(args.file), problem=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
