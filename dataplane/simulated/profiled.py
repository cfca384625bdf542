"""A device as it was measured with one model: ``evenflow profile`` writes it, ``evenflow simulate`` reads it.

An iteration takes what a table says of its tokens (linear layers), and another of the rows that sample (the head),
and so much for each chunk, for each pair of tokens that its attention looks at, among the chunk's own tokens and with
those before it, for each of those, and for each KV token that decodes read. Between two iterations of a worker the
host needs its time as well. Tables are linear between their knots; beyond the last one they go on as they came, which
is counted (``ProfiledCost.beyond``), since nothing of that kind was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, structs

from .cost import Chunk, Cost, Work
from .device import Device, device_names, load_device
from .fitted import Residuals, compared, least_squares
from .refusal import CannotSimulate
from .shape import ModelShape, load_shape

_Positive = Annotated[int, Meta(ge=1, le=1 << 40)]
_Time = Annotated[float, Meta(ge=0, le=1e12)]
#: Numbers of tokens or rows, ascending from 1, and the microseconds of each.
Table = Annotated[list[tuple[_Positive, _Time]], Meta(min_length=1, max_length=1000)]


class Terms(Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds of an iteration. ``own_pair``: of a chunk's token and one of the same chunk that it attends to;
    ``before_pair``: and one before the chunk; ``before_token``: of a token before a chunk, however long that is."""

    tokens: Table
    sampled: Table
    chunk: _Time
    own_pair: _Time
    before_pair: _Time
    before_token: _Time
    kv_token: _Time


class Range(Struct, frozen=True, forbid_unknown_fields=True):
    """The largest of each that was measured. ``context``: of a decode, and of tokens before a chunk."""

    tokens: _Positive
    decodes: _Positive
    context: _Positive
    kv_tokens: _Positive


class Fit(Struct, frozen=True, forbid_unknown_fields=True):
    """Relative errors, of the fit on ``batches`` that it was made from, or on others (``probes``)."""

    batches: int
    p50: float
    p90: float
    worst: float
    bias: float


class Profile(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="profile"):
    """A model of this ``shape`` on one worker of ``threads``. ``blocks`` of ``block_size`` tokens are its KV pool.
    ``between_us``: what the host needs between two iterations, and ``between_row_us`` for each row of a batch.
    ``hop_us``: of a message between two processes."""

    name: str
    title: str
    shape: ModelShape
    threads: _Positive
    dtype: str
    block_size: _Positive
    blocks: _Positive
    terms: Terms
    between_us: _Time
    between_row_us: _Time
    hop_us: _Positive
    #: How far iterations of the same batch lay apart, as a share of their median, in the middle case.
    scatter: _Time
    range: Range
    fit: Fit
    probes: Fit | None = None

    @property
    def validated(self) -> bool:
        """It was measured, all of it."""
        return True

    @property
    def measured(self) -> tuple[str, ...]:
        """As in ``Device``."""
        return ("linear", "elementwise", "prefill", "decode")


class Timed(NamedTuple):
    """A batch that was measured: what its cost depends on, microseconds of the device and of the host before it, and
    how far its iterations lay apart."""

    work: Work
    took_us: float
    between_us: float
    apart_us: float = 0.0


class ProfiledCost:
    """The cost of iterations of ``profile``. Implements ``cost.Cost``. ``speed``: 2 is twice as fast."""

    stages = 1
    ranks = 1

    def __init__(self, profile: Profile, speed: float = 1.0) -> None:
        if not 0.01 <= speed <= 100:
            raise CannotSimulate(f"a device's speed is from 0.01 to 100, not {speed:g}")
        self.profile = profile
        #: Iterations that were larger than any that was measured.
        self.beyond = 0
        self._slower = 1 / speed
        self._tokens: dict[int, float] = {}
        self._sampled: dict[int, float] = {0: 0.0}

    def device_us(self, work: Work) -> float:
        """Of the device alone, as described."""
        terms, tokens, sampled = self.profile.terms, work.tokens, work.sampled
        us = self._tokens.get(tokens)
        if us is None:
            us = self._tokens[tokens] = interpolated(terms.tokens, tokens)
        head = self._sampled.get(sampled)
        if head is None:
            head = self._sampled[sampled] = interpolated(terms.sampled, sampled)
        us += head + terms.kv_token * work.kv_tokens
        for taken, before in work.chunks:
            us += terms.chunk + terms.own_pair * taken * (taken + 1) / 2
            us += (terms.before_pair * taken + terms.before_token) * before
        return us

    def stage_us(self, stage: int, work: Work) -> int:
        """Microseconds of an iteration, with what the host needs before the next."""
        profile, most = self.profile, self.profile.range
        if (
            work.tokens > most.tokens
            or work.kv_tokens > most.kv_tokens
            or any(before > most.context for _, before in work.chunks)
        ):
            self.beyond += 1
        us = self.device_us(work) * self._slower
        rows = work.decodes + len(work.chunks)
        return max(1, round(us + profile.between_us + profile.between_row_us * rows))

    def transfer_us(self, tokens: int) -> int:
        """There is no other stage."""
        return 0

    def num_blocks(self, block_size: int, utilisation: float = 0.85) -> int:
        """Of the pool that was measured."""
        return max(1, self.profile.blocks * self.profile.block_size // block_size)


def extrapolated(costs: Iterable[Cost]) -> int:
    """Iterations that were larger than any that was measured, by all of these."""
    return sum(cost.beyond for cost in set(costs) if isinstance(cost, ProfiledCost))


def interpolated(table: Sequence[tuple[int, float]], value: int) -> float:
    """The table's time for ``value``, which is at least 1: linear between two knots and beyond the last two."""
    place = min(bisect_left(table, value, key=lambda knot: knot[0]), len(table) - 1)
    if place == 0:
        return table[0][1]
    (low, less), (high, more) = table[place - 1], table[place]
    return max(0.0, less + (more - less) * (value - low) / (high - low))


def fit_terms(measured: Sequence[Timed]) -> Terms:
    """The terms that come nearest to what was ``measured``. The knots of the tables are the sizes of batches that
    were measured without anything beside."""
    plain = sorted({timed.work.tokens for timed in measured if not timed.work.decodes})
    heads = sorted({timed.work.sampled for timed in measured if timed.work.sampled and not timed.work.chunks})
    if not plain or not heads:
        raise ValueError("a profile needs iterations of chunks alone and of decodes alone")
    rows = [
        [*_climb(plain, timed.work.tokens), *_climb(heads, timed.work.sampled), *_parts(timed.work)]
        for timed in measured
    ]
    found = least_squares(rows, [timed.took_us for timed in measured])
    chunk, own, pair, token, kv = found[-5:]
    return Terms(
        tokens=list(zip(plain, accumulate(found[: len(plain)]), strict=True)),
        sampled=list(zip(heads, accumulate(found[len(plain) : -5]), strict=True)),
        chunk=chunk,
        own_pair=own,
        before_pair=pair,
        before_token=token,
        kv_token=kv,
    )


def _parts(work: Work) -> list[float]:
    """What the terms beside the tables are multiplied with."""
    chunks: Sequence[Chunk] = work.chunks
    own = sum(taken * (taken + 1) / 2 for taken, _ in chunks)
    pairs = sum(taken * before for taken, before in chunks)
    before = sum(before for _, before in chunks)
    return [float(len(chunks)), own, float(pairs), float(before), float(work.kv_tokens)]


def _climb(knots: Sequence[int], value: int) -> list[float]:
    """Of the rise to each knot from the one before, the part that is below ``value``: a table whose rises are not
    negative never falls. The first is from nothing, and none of it is for nothing."""
    if value < 1:
        return [0.0] * len(knots)
    rises = [min(1.0, max(0.0, (value - low) / (high - low))) for low, high in pairwise(knots)]
    return [1.0, *rises]


def fit_between(measured: Sequence[Timed]) -> tuple[float, float]:
    """Microseconds of the host between two iterations, and for each row of the batch."""
    rows = [(1.0, float(timed.work.decodes + len(timed.work.chunks))) for timed in measured]
    constant, each = least_squares(rows, [timed.between_us for timed in measured])
    return constant, each


def errors(cost: ProfiledCost, measured: Sequence[Timed]) -> Fit:
    """Of ``cost`` on what was measured."""
    predicted = [cost.device_us(timed.work) for timed in measured]
    found: Residuals = compared(predicted, [timed.took_us for timed in measured])
    worst = max((abs(p / timed.took_us - 1) for p, timed in zip(predicted, measured, strict=True)), default=0.0)
    return Fit(found.iterations, found.p50, found.p90, worst, found.bias)


def shape_for(profile: Profile, model: str) -> ModelShape:
    """The shape of ``model``, if it is the one that was measured. Raises ``CannotSimulate``."""
    path = Path(model).expanduser()
    if path.name.removesuffix(".gguf") == profile.shape.name:
        return profile.shape
    if path.suffix == ".json" or path.is_dir():
        found = load_shape(model)
        if structs.replace(found, name=profile.shape.name, max_len=profile.shape.max_len) == profile.shape:
            return profile.shape
    raise CannotSimulate(f"{profile.title} was measured with {profile.shape.name}: it says nothing of {model}")


class _Kind(Struct):
    kind: Literal["profile", "device"] = "device"


def load_description(name: str) -> Device | Profile:
    """A device by name, or what a JSON file describes. Raises ``CannotSimulate``, which names what is wrong."""
    path = Path(name).expanduser()
    if name in device_names() or path.suffix != ".json":
        return load_device(name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CannotSimulate(f"{name}: {error.strerror}") from None
    try:
        if msgspec.json.decode(data, type=_Kind).kind == "device":
            return load_device(name)
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as error:
        raise CannotSimulate(f"{name}: {error}") from None
    for field in ("tokens", "sampled"):
        knots = [knot for knot, _ in getattr(profile.terms, field)]
        if any(low >= high for low, high in pairwise(knots)):
            raise CannotSimulate(f"{name}: terms.{field} must ascend")
    return profile
