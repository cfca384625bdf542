"""Eight streams that decode on a server of OpenAI's interface while long prompts arrive, one after the other."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
from host import Stolen

STREAMS = 8
PROMPTS = (1000, 4000, 7000)
MODEL = "smollm2-135m"
TOPICS = ("rivers", "bread", "bridges", "owls", "violins", "glass", "harbours", "chess")


@dataclass(slots=True)
class Observed:
    """When each token of each stream came, and when each prompt was being served (seconds), and the part of that time
    that the host took."""

    tokens: list[list[float]] = field(default_factory=lambda: [[] for _ in range(STREAMS)])
    windows: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    quiet: tuple[float, float] = (0.0, 0.0)
    stolen: dict[int, float] = field(default_factory=dict[int, float])

    def gaps(self, window: tuple[float, float]) -> list[float]:
        """Milliseconds between tokens, for all gaps that lie in the window at least in part."""
        start, end = window
        return [
            (after - before) * 1e3
            for times in self.tokens
            for before, after in pairwise(times)
            if after > start and before < end
        ]


async def _stream(http: httpx.AsyncClient, model: str, index: int, times: list[float]) -> None:
    body = {
        "model": model,
        "prompt": f"Here is a long and detailed story about {TOPICS[index]}, told slowly. Once upon a time",
        "max_tokens": 6000,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0.8,
        "seed": index,
    }
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                times.append(time.perf_counter())


async def observe(url: str, prompts: Sequence[int], quiet_s: float, model: str = MODEL) -> Observed:
    """Let the streams run by themselves for ``quiet_s``, and then beside each prompt."""
    seen = Observed()
    draw = random.Random(11)
    limits = httpx.Limits(max_connections=STREAMS + 4)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        streams = [asyncio.create_task(_stream(http, model, i, seen.tokens[i])) for i in range(STREAMS)]
        while any(len(times) < 4 for times in seen.tokens):
            await asyncio.sleep(0.05)
            for stream in streams:
                if stream.done():
                    stream.result()
        start, stolen = time.perf_counter(), Stolen()
        await asyncio.sleep(quiet_s)
        seen.quiet = (start, time.perf_counter())
        seen.stolen[0] = stolen.share()
        for size in prompts:
            body = {
                "model": model,
                "prompt": [draw.randrange(1000, 40_000) for _ in range(size)],
                "max_tokens": 1,
                "ignore_eos": True,
            }
            start, stolen = time.perf_counter(), Stolen()
            (await http.post("/v1/completions", json=body)).raise_for_status()
            seen.windows[size] = (start, time.perf_counter())
            seen.stolen[size] = stolen.share()
            await asyncio.sleep(1.0)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return seen
