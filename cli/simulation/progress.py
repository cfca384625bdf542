"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """Shows how many of ``total`` (None: unknown) are done, on stderr. A context manager."""

    def __init__(self, title: str, total: int | None, quiet: bool = False) -> None:
        self._shown = None
        if not quiet and sys.stderr.isatty():
            self._shown = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._shown.add_task(title, total=total)

    def __enter__(self) -> Bar:
        if self._shown is not None:
            self._shown.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.stop()

    def show(self, done: int, title: str | None = None, total: int | None = None) -> None:
        if self._shown is not None:
            self._shown.update(self._task, completed=done, description=title, total=total)
