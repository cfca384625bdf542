"""The grammar of journals: the flags of ``serve`` that write one, and what is done with one."""

from pathlib import Path
from typing import Annotated

import typer

from .flags import env

JournalFile = Annotated[
    Path | None,
    typer.Option("--journal", envvar=env("journal"), metavar="FILE", help="Record events and plans: docs/journal.md"),
]
JournalIds = Annotated[
    bool,
    typer.Option("--journal-ids", envvar=env("journal_ids"), help="Record token ids, too, not only hashes."),
]
JournalSize = Annotated[
    str,
    typer.Option(
        "--journal-size",
        envvar=env("journal_size"),
        metavar="BYTES",
        help="Most that FILE and FILE.1, the one before, may take together.",
    ),
]


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A journal of serve --journal.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Feed a journal's events to the scheduler of this program: exit code 1 if a plan is not the recorded one."""
    from .replay import run_replay

    raise typer.Exit(run_replay(file, as_json))
