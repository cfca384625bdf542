"""The core's whole state as data, so that a file of a journal can begin in the middle of a run.

An image lists objects; what is not a number, text or bytes refers to its place in the list. It is read like
everything else that comes from outside: only the core's own classes are made, only their own attributes are set, and
nothing is called. An image is for the program that wrote it: a core with other attributes refuses it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from types import ModuleType
from typing import Any, cast

import msgspec
from msgspec import msgpack

from ..core import (
    balance,
    blocks,
    budget,
    drain,
    engine,
    expiry,
    fair,
    inflight,
    lane,
    margin,
    policy,
    replica,
    role,
    sequence,
    stall_free,
    timing,
    waiting,
    whole_prompts,
)
from ..core.engine import Engine
from ..core.events import Limits
from ..core.lane import Lane
from ..core.slo import Slo, SloClass
from ..wire import Logprobs, Register, Sampling, Submit

_MODULES: tuple[ModuleType, ...] = (
    balance,
    blocks,
    budget,
    drain,
    engine,
    expiry,
    fair,
    inflight,
    lane,
    margin,
    policy,
    replica,
    role,
    sequence,
    stall_free,
    timing,
    waiting,
    whole_prompts,
)
#: The classes that an image may hold, by name.
_CLASSES: dict[str, type[Any]] = {
    found.__name__: found
    for module in _MODULES
    for found in vars(module).values()
    if isinstance(found, type) and found.__module__ == module.__name__
}
#: An object of each class whose constructor wants something, since a compiled class cannot be made without it. All
#: attributes are set afterwards.
_BLANKS: dict[type[Any], Callable[[], Any]] = {
    balance.Balance: lambda: balance.Balance(1, None),
    blocks.BlockPool: lambda: blocks.BlockPool(0, 1),
    blocks.Node: lambda: blocks.Node(None, b"", [], 0, b""),
    budget.Budget: lambda: budget.Budget(Slo((SloClass("", 1.0),)), 1, 1, 0),
    budget.Timed: lambda: budget.Timed(timing.Features(0, 0, 0, 0), 0.0, 0.0, 0.0, False),
    budget._Tick: lambda: budget._Tick(0.0, 0, False),  # pyright: ignore[reportPrivateUsage]
    fair.Account: lambda: fair.Account("", 1.0, 0.0),
    fair.FairQueue: lambda: fair.FairQueue(fair.Ledger(())),
    fair.Ledger: lambda: fair.Ledger(()),
    fair.Share: lambda: fair.Share(fair.Account("", 1.0, 0.0)),
    inflight.InFlight: lambda: inflight.InFlight(0, Lane(0, 1, 1), False),
    lane.Lane: lambda: Lane(0, 1, 1),
    replica.Replica: lambda: replica.Replica(0, 0, 1, 1, 1, Limits()),
    sequence.Sequence: lambda: sequence.Sequence(0, 0, Submit(0, "", b"", 0), 0),
    stall_free.ChunkedOnly: lambda: stall_free.ChunkedOnly(1),
    timing.Estimator: lambda: timing.Estimator([1.0], 1.0),
    timing.Features: lambda: timing.Features(0, 0, 0, 0),
    whole_prompts.Hybrid: lambda: whole_prompts.Hybrid(False),
    whole_prompts.RequestLevel: lambda: whole_prompts.RequestLevel(1),
}
_STRUCTS: dict[str, type[Any]] = {found.__name__: found for found in (Sampling, Register, Logprobs)}
_SCALARS = (type(None), bool, int, float, str, bytes)
#: A class, and for each attribute its name and its value.
_Entry = list[Any]

_decoder = msgpack.Decoder(list[list[Any]])


class ImageError(Exception):
    """The image is not one of this program's core. The text says why."""


def attributes(kind: type[Any]) -> list[str]:
    """The attributes of a class's objects, as far as the class declares them."""
    found = getattr(kind, "__mypyc_attrs__", None)
    if found is None:
        found = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    return [name for name in found if not name.startswith("__")]


def dump(state: Engine) -> bytes:
    """The image of ``state``."""
    entries: list[_Entry] = []
    places: dict[int, int] = {}
    kept: list[object] = []  # nothing that is named by its id may go before the end

    def place(value: object) -> object:
        if isinstance(value, _SCALARS) and not isinstance(value, Enum):
            return value
        at = places.get(id(value))
        if at is None:
            at = places[id(value)] = len(places)
            kept.append(value)
        return [at]

    place(state)
    done = 0
    while done < len(kept):
        entries.append(_entry(kept[done], state.limits, place))
        done += 1
    return msgpack.encode(entries)


def _entry(value: Any, limits: Limits, place: Any) -> _Entry:
    if value is limits:
        return ["limits"]
    if value is limits.slo:
        return ["slo"]
    if isinstance(value, Enum):
        return ["enum", type(value).__name__, value.value]
    if isinstance(value, OrderedDict | dict):
        kind = "ordered" if isinstance(value, OrderedDict) else "dict"
        return [kind, *(place(part) for pair in cast(dict[Any, Any], value).items() for part in pair)]
    if isinstance(value, list | tuple | deque):
        kind = "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else "deque"
        head = [kind] if kind != "deque" else [kind, cast(deque[Any], value).maxlen]
        return head + [place(part) for part in cast(list[Any], value)]
    if isinstance(value, bytearray):
        return ["bytearray", bytes(value)]
    if isinstance(value, array):
        numbers = cast("array[int]", value)
        return ["array", numbers.typecode, numbers.tobytes()]
    if type(value).__name__ in _STRUCTS:
        return ["struct", type(value).__name__, *(place(getattr(value, f)) for f in value.__struct_fields__)]
    kind = type(value)
    if _CLASSES.get(kind.__name__) is not kind:
        raise ImageError(f"there is no image of {kind.__name__}")
    entry: _Entry = ["object", kind.__name__]
    for name in sorted(_kept(value)):
        entry += [name, place(getattr(value, name))]
    return entry


def _kept(value: Any) -> set[str]:
    """The attributes of an object that an image holds: not what follows from others."""
    names = {*attributes(type(value)), *getattr(value, "__dict__", ())}
    return {
        name
        for name in names
        if hasattr(value, name) and name != "_handlers" and not isinstance(getattr(value, name), memoryview)
    }


def load(data: bytes, limits: Limits) -> Engine:
    """The core of an image. Raises ``ImageError``."""
    try:
        entries = _decoder.decode(data)
        return _Loader(entries, limits).engine()
    except (msgspec.DecodeError, AttributeError, TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise ImageError(f"the image does not fit this program's core: {error}") from None


class _Loader:
    """Makes all objects empty, then fills them. Tuples cannot be filled: they are made when asked for."""

    def __init__(self, entries: list[_Entry], limits: Limits) -> None:
        self._entries = entries
        self._limits = limits
        self._wanted: dict[str, set[str]] = {}  #: attributes, by the name of a class
        self._made: list[Any] = [self._empty(entry) for entry in entries]

    def engine(self) -> Engine:
        for made, entry in zip(self._made, self._entries, strict=True):
            self._fill(made, entry)
        found = self._made[0]
        if type(found) is not Engine or found.limits is not self._limits:
            raise ImageError("the image is not one of a core")
        for made in self._made:
            if type(made) is Lane:
                ring = made._ring_ids  # pyright: ignore[reportPrivateUsage]
                made._ring = memoryview(ring).cast("B")  # pyright: ignore[reportPrivateUsage]
        return found

    def _empty(self, entry: _Entry) -> Any:
        kind = entry[0]
        if kind == "object":
            cls = _CLASSES[entry[1]]
            return Engine(self._limits) if cls is Engine else _BLANKS.get(cls, cls)()
        if kind == "deque":
            return deque[Any](maxlen=entry[1])
        if kind == "bytearray":
            return bytearray(entry[1])
        if kind == "array":
            made = array(entry[1])
            made.frombytes(entry[2])
            return made
        if kind == "enum":
            return _CLASSES[entry[1]](entry[2])
        if kind == "limits":
            return self._limits
        if kind == "slo":
            return self._limits.slo
        if kind in ("tuple", "struct"):
            return None
        return {"list": list, "dict": dict, "ordered": OrderedDict}[kind]()

    def _value(self, part: Any) -> Any:
        if not isinstance(part, list):
            return part
        (at,) = cast(list[int], part)
        if at < 0:
            raise ImageError("an entry of the image refers to what it does not hold")
        made = self._made[at]
        if made is None:
            entry = self._entries[at]
            if entry[0] == "tuple":
                made = tuple(self._value(item) for item in entry[1:])
            else:
                made = _STRUCTS[entry[1]](*(self._value(item) for item in entry[2:]))
            self._made[at] = made
        return made

    def _fill(self, made: Any, entry: _Entry) -> None:
        kind = entry[0]
        if kind in ("list", "deque"):
            made.extend(self._value(part) for part in entry[1 if kind == "list" else 2 :])
        elif kind in ("dict", "ordered"):
            for i in range(1, len(entry), 2):
                made[self._value(entry[i])] = self._value(entry[i + 1])
        elif kind == "object":
            # An interpreted object would take any name, and any would keep what it was made with for want of another.
            wanted = self._wanted.get(entry[1])
            if wanted is None:
                wanted = self._wanted[entry[1]] = _kept(made)
            given: set[Any] = set(entry[2::2])
            if given != wanted:
                raise ImageError(f"{entry[1]} has other attributes: {sorted(map(str, given ^ wanted))}")
            for i in range(2, len(entry), 2):
                name = entry[i]
                setattr(made, name, self._value(entry[i + 1]))
