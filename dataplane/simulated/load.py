"""Loads: request lengths and arrival times, drawn or from a trace. The same seed gives the same load.

Lengths and arrivals have generators of their own, so another rate sends the same requests, at times that are scaled.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from .world import Arrival


class Entry(NamedTuple):
    """One request of a trace. ``at``: seconds, None if it has no time. ``hashes``: one a block of ``hashed`` tokens
    of the prompt; equal ones mean equal prompts up to there."""

    prompt: int
    output: int
    at: float | None = None
    hashes: tuple[int, ...] = ()
    hashed: int = 0


def shuffled(entries: Sequence[Entry], seed: int, requests: int | None = None) -> list[Entry]:
    """The entries in an order that ``seed`` decides, the first ``requests`` of it."""
    order = list(entries)
    random.Random(f"{seed}/trace").shuffle(order)
    return order if requests is None else order[:requests]


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start, without end: ``rate`` a second."""
    chance = random.Random(f"{seed}/arrivals")
    at = 0.0
    while True:
        yield at / rate
        at += chance.expovariate(1.0)


def constant(rate: float) -> Iterator[float]:
    """Seconds from the start, without end: ``rate`` a second, evenly."""
    return (number / rate for number in count())


def arrivals(entries: Iterable[Entry], times: Iterable[float], most: int) -> Iterator[Arrival]:
    """Requests of ``entries`` at ``times``. Sequences are cut to ``most`` tokens: first the prompt to one less."""
    for entry, at in zip(entries, times, strict=False):
        yield arrival(entry, at, most)


def traced(entries: Sequence[Entry], most: int, pace: float = 1.0) -> Iterator[Arrival]:
    """Requests at the trace's own times, ``pace`` times as fast."""
    for entry in sorted(entries, key=lambda entry: entry.at or 0.0):
        yield arrival(entry, (entry.at or 0.0) / pace, most)


def arrival(entry: Entry, at: float, most: int) -> Arrival:
    """One request of a trace at ``at`` seconds."""
    prompt = max(1, min(entry.prompt, most - 1))
    output = max(1, min(entry.output, most - prompt))
    tokens = hashed_tokens(entry.hashes, entry.hashed, prompt) if entry.hashes else None
    return Arrival(round(at * 1e6), prompt, output, tokens)


def hashed_tokens(hashes: Sequence[int], size: int, length: int) -> bytes:
    """Token ids of a prompt of which blocks of ``size`` tokens are known by their hashes only: equal hashes give
    equal ids. What no hash covers repeats the last."""
    parts = [array("I", [number & 0xFFFFFFFF]).tobytes() * size for number in hashes]
    short = length - size * len(hashes)
    if short > 0:
        parts.append(array("I", [hashes[-1] & 0xFFFFFFFF]).tobytes() * short)
    return b"".join(parts)[: 4 * length]
