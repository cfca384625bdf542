"""``evenflow chat``: a conversation with a running server, line by line.

On a terminal: line editing, Ctrl-C stops an answer, Ctrl-D ends. From a pipe: each line is a turn, only
answers are printed.
"""

import sys
from typing import Any

from .openai_http import Draw, ServerError, connect, first_model, stream


def _read_turn(interactive: bool) -> str | None:
    """The next line, or None at the end."""
    try:
        return input("> " if interactive else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def run_chat(url: str | None, model: str | None, system: str | None, draw: Draw) -> int:
    """Returns the exit code."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        import readline  # noqa: F401  # its import is what gives input() line editing and history
    messages: list[dict[str, str]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    try:
        with connect(url) as client:
            name = model or first_model(client)
            if interactive:
                print(f"{name} at {client.base_url}; Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
            while (turn := _read_turn(interactive)) is not None:
                if not turn.strip():
                    continue
                messages.append({"role": "user", "content": turn})
                body: dict[str, Any] = {"model": name, "messages": messages, **draw.fields()}
                answer = ""
                try:
                    for chunk in stream(client, "chat/completions", body):
                        for choice in chunk.get("choices") or ():
                            piece = choice.get("delta", {}).get("content") or ""
                            answer += piece
                            sys.stdout.write(piece)
                            sys.stdout.flush()
                except KeyboardInterrupt:
                    if not interactive:
                        raise
                except ServerError as error:
                    if not interactive:
                        raise
                    print(f"evenflow: {error}", file=sys.stderr)
                    messages.pop()
                    continue
                print()
                messages.append({"role": "assistant", "content": answer})
    except ServerError as error:
        print(f"evenflow: {error}", file=sys.stderr)
        return 1
    return 0
