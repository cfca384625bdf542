"""A process that answers lines of JSON with others: a rival in an environment of its own, or clients beside it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Child:
    """``name`` is for messages. What it prints on standard error goes to ``log``, if that is given; an answer
    may take ``patience`` seconds."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        patience: float = 900.0,
    ) -> None:
        self.name = name
        self._log = log
        self._patience = patience
        self._unread = b""
        with contextlib.ExitStack() as stack:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if log is None else stack.enter_context(log.open("w")),
                env={**os.environ, **(environment or {})},
                cwd=directory,
                start_new_session=True,
            )

    def ask(self, **asked: object) -> dict[str, Any]:
        """The answer. Raises ``RuntimeError`` if there is none, or if it is ``{"error": …}``."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line that it says, asked or not."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], self._patience)
            part = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                said = "" if self._log is None else self._log.read_text(errors="replace")
                raise RuntimeError("\n".join([f"{self.name} gave no answer", *said.splitlines()[-5:]]))
            self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Its input ends, and so should it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
