"""The child's side of an offline measurement: JSON lines in, JSON lines out. Standard library only, since it runs in
the environment of each engine.

``{"work": "prefill", "tokens": n, "seed": s}`` asks for the seconds from a prompt of n random ids to its first
token; ``{"work": "decode", "batch": b, "context": c, "steps": k, "seed": s}`` for those of each of k iterations in
which b sequences of c tokens and more get one token each. The answer is ``{"seconds": [...]}``, or ``{"error":
text}``.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable

#: Ids between these are ordinary text in the vocabulary of SmolLM2.
FIRST_ID, LAST_ID = 1000, 40_000


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Random ids: no two prompts share a prefix."""
    draw = random.Random(seed)
    return [[draw.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)] for _ in range(count)]


def serve(
    load: Callable[[], tuple[Callable[[list[int]], float], Callable[[list[list[int]], int], list[float]]]],
) -> None:
    """``load`` makes the engine and returns (prefill, decode). What the engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, object]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    prefill, decode = load()
    answer({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["work"] == "prefill":
                answer({"seconds": [prefill(prompts(1, asked["tokens"], asked["seed"])[0])]})
            else:
                batch = prompts(asked["batch"], asked["context"], asked["seed"])
                answer({"seconds": decode(batch, asked["steps"])})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
