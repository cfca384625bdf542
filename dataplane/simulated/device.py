"""Descriptions of devices: what their kernels, links and hosts cost, as coefficients that were measured.

Each is a JSON file, in ``devices/`` or one's own (``devices/README.md`` has the units and the provenance). A
description is data only; ``cost`` makes times of it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import msgspec
from msgspec import Struct

from .refusal import CannotSimulate


class Linear(Struct, frozen=True, forbid_unknown_fields=True):
    """Linear layers. A matrix product is cut into tiles, by ``tiles`` "rows x columns" with the floating-point
    operations a millisecond that one of ``units`` (multiprocessors) does on them. A last wave of tiles that does not
    fill all units counts for ``partial`` of a whole one more than its share. Compute and memory (``bytes_per_ms``)
    overlap as a norm of order ``norm``; each product takes ``start_ms`` on top.
    """

    units: int
    partial: float
    bytes_per_ms: float
    start_ms: float
    norm: float
    tiles: dict[str, float]


class PrefillAttention(Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of the attention of one chunk in one layer, as seven coefficients (see ``cost``)."""

    coefficients: tuple[float, float, float, float, float, float, float]
    units: int


class DecodeAttention(Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of the attention of all decodes in one layer: at least ``start_ms``, for each megabyte of keys and
    values, for each sequence and KV head, for each token of the mean context up to 1,024."""

    start_ms: float
    megabyte_ms: float
    head_ms: float
    context_ms: float


class Elementwise(Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel that passes once over its elements."""

    start_ms: float
    element_ms: float


class Kernels(Struct, frozen=True, forbid_unknown_fields=True):
    """Kernels beside linear layers and attention."""

    norm: Elementwise
    rope: Elementwise
    activation: Elementwise
    add: Elementwise
    embedding: Elementwise


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """A transfer."""

    start_ms: float
    bytes_per_ms: float

    def ms(self, size: float) -> float:
        return self.start_ms + size / self.bytes_per_ms


class Links(Struct, frozen=True, forbid_unknown_fields=True):
    """``node``: devices in one machine. All-reduce by number of ranks, on one machine and (``far``) across two or
    more; a transfer from one stage to the next, alike."""

    node: int
    all_reduce: dict[str, Link]
    all_reduce_far: dict[str, Link]
    send: Link
    send_far: Link


class Host(Struct, frozen=True, forbid_unknown_fields=True):
    """What an iteration costs beside its kernels. A stage cannot be faster than its host launches kernels
    (``layer_ms`` a layer). On top come a constant (of one device, of tensor-parallel ranks, of a pipeline) and
    ``sequence_ms`` for each sequence of the batch, both shared out over the stages."""

    layer_ms: float
    fixed_ms: float
    fixed_tensor_ms: float
    fixed_pipeline_ms: float
    sequence_ms: float


class Device(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of device. ``measured``: which of its parts rest on measurements of that very device."""

    name: str
    title: str
    measured: tuple[str, ...]
    source: str
    memory_bytes: int
    linear: Linear
    prefill: PrefillAttention
    decode: DecodeAttention
    elementwise: Kernels
    links: Links
    hosts: dict[str, Host]

    @property
    def validated(self) -> bool:
        """Whether anything of it was measured."""
        return bool(self.measured)


_SHIPPED = files(__package__ or __name__.rpartition(".")[0]) / "devices"


def device_names() -> list[str]:
    """The devices that come with the package."""
    return sorted(path.name.removesuffix(".json") for path in _SHIPPED.iterdir() if path.name.endswith(".json"))


def load_device(name: str) -> Device:
    """A device by name, or from a JSON file by path. Raises ``CannotSimulate``, which names what is wrong."""
    if name in device_names():
        return parse_device((_SHIPPED / f"{name}.json").read_bytes(), name)
    path = Path(name).expanduser()
    if path.suffix != ".json":
        raise CannotSimulate(
            f"there is no device {name!r}: it is one of {', '.join(device_names())}, or a .json file"
        )
    try:
        return parse_device(path.read_bytes(), name)
    except OSError as error:
        raise CannotSimulate(f"{name}: {error.strerror}") from None


def parse_device(data: bytes, name: str) -> Device:
    """A description. Raises ``CannotSimulate``, which names the field."""
    try:
        device = msgspec.json.decode(data, type=Device)
    except msgspec.MsgspecError as error:
        raise CannotSimulate(f"{name}: {error}") from None
    problem = _problem(device)
    if problem:
        raise CannotSimulate(f"{name}: {problem}")
    return device


def _problem(device: Device) -> str:
    linear = device.linear
    if device.memory_bytes <= 0 or linear.bytes_per_ms <= 0 or linear.units < 1 or device.prefill.units < 1:
        return "memory_bytes, linear.bytes_per_ms and units must be above 0"
    if not 1 <= linear.norm <= 100:
        return f"linear.norm must be from 1 to 100, not {linear.norm:g}"
    if not linear.tiles:
        return "linear.tiles is empty"
    for tile, rate in linear.tiles.items():
        sides = tile.split("x")
        if len(sides) != 2 or not all(side.isdigit() and int(side) for side in sides) or rate <= 0:
            return f"linear.tiles: {tile!r} must be a tile such as 128x64 with a rate above 0"
    if device.links.node < 1:
        return "links.node must be at least 1"
    if not device.hosts:
        return "hosts is empty"
    return ""
