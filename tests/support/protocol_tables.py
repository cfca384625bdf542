"""What the page on the protocol must say of each message: its fields, their types and ranges, and an example's bytes.

Run as a program, it brings the tables and bytes of ``docs/protocol.md`` up to date and leaves the words as they are.
"""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import msgspec
from evenflow.control import wire
from evenflow.control.wire import encode
from golden import GOLDEN
from msgspec import inspect

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
HEAD = ["| # | field | type | default | meaning |", "| --- | --- | --- | --- | --- |"]


def structs() -> list[type[msgspec.Struct]]:
    """Every struct that is defined in ``control.wire``."""
    found: list[type[msgspec.Struct]] = []
    for module in pkgutil.iter_modules(wire.__path__):
        name = f"{wire.__name__}.{module.name}"
        kinds = [value for value in vars(importlib.import_module(name)).values() if isinstance(value, type)]
        found += [kind for kind in kinds if issubclass(kind, msgspec.Struct) and kind.__module__ == name]
    return found


def tag_of(kind: type[msgspec.Struct]) -> int | None:
    tag = kind.__struct_config__.tag
    assert tag is None or isinstance(tag, int)
    return tag


def type_text(kind: inspect.Type) -> str:
    """A field's type with its range, as the page writes it."""
    if isinstance(kind, inspect.Metadata):
        return type_text(kind.type)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        name = "int" if isinstance(kind, inspect.IntType) else "float"
        low = f"{kind.ge:g}" if kind.ge is not None else f">{kind.gt:g}" if kind.gt is not None else ""
        high = kind.le if kind.le is not None else None if kind.lt is None else kind.lt - 1
        if high is None and low == "0" and name == "int":
            high = (1 << 64) - 1
        return f"{name} {low} to {high:.15g}".replace("1.84467440737096e+19", "2⁶⁴ - 1") if low else name
    if isinstance(kind, inspect.StrType | inspect.BytesType):
        name = "str" if isinstance(kind, inspect.StrType) else "bytes"
        return name if kind.max_length is None else f"{name}, at most {kind.max_length}"
    if isinstance(kind, inspect.BoolType):
        return "bool"
    if isinstance(kind, inspect.NoneType):
        return "nil"
    if isinstance(kind, inspect.UnionType):
        return " or ".join(type_text(part) for part in kind.types)
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        most = "" if kind.max_length is None else f", at most {kind.max_length}"
        return f"array of {type_text(kind.item_type)}{most}"
    if isinstance(kind, inspect.DictType):
        return f"map of {type_text(kind.key_type)} to {type_text(kind.value_type)}"
    if isinstance(kind, inspect.StructType):
        return kind.cls.__name__
    raise TypeError(f"a field of type {kind}: say here how the page writes it")


def default_text(field: inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return "[]"
    if field.default is msgspec.NODEFAULT:
        return "required"
    value = field.default
    if isinstance(value, msgspec.Struct):
        return "all defaults"
    if value is None:
        return "nil"
    return {(): "[]", b"": "empty", "": "empty"}.get(value, str(value)) if not isinstance(value, bool) else str(value)


def rows(kind: type[msgspec.Struct]) -> list[str]:
    """The table of a message without the last column. Element 0 of a message is its tag."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    first = 0 if tag_of(kind) is None else 1
    return [
        f"| {first + n} | `{field.name}` | {type_text(field.type)} | {default_text(field)} |"
        for n, field in enumerate(info.fields)
    ]


def heading(kind: type[msgspec.Struct]) -> str:
    tag = tag_of(kind)
    return f"### {kind.__name__}" if tag is None else f"### {kind.__name__} ({tag})"


def example(kind: type[msgspec.Struct]) -> str | None:
    """The bytes of the first example among the tests, in hexadecimal; None for what is only a part of messages."""
    return next((encode(message).hex() for message, _ in GOLDEN if type(message) is kind), None)


def sections(page: str) -> dict[str, str]:
    """What stands under each heading of a message."""
    parts = re.split(r"^(#{2,3} .*)$", page, flags=re.M)
    return {head: body for head, body in zip(parts[1::2], parts[2::2], strict=True) if head.startswith("### ")}


def table(body: str) -> list[str]:
    return [line for line in body.splitlines() if re.match(r"\| \d", line)]


def codes(body: str) -> list[str]:
    return ["".join(block.split()) for block in re.findall(r"^```hex\n(.*?)^```", body, re.M | re.S)]


def renewed(page: str) -> str:
    """The page with tables and bytes as the code has them; what is new has no words yet."""
    for kind in structs():
        body = sections(page).get(heading(kind))
        if body is None:
            page += f"\n{heading(kind)}\n\n" + "\n".join([*HEAD, "| 0 |"]) + "\n\n```hex\n```\n"
            body = sections(page)[heading(kind)]
        meanings: dict[str, str] = {}
        for line in table(body):
            cells = line.strip("|\n ").split(" | ")
            meanings[cells[1] if len(cells) > 1 else ""] = cells[4].strip() if len(cells) > 4 else ""
        wanted = [f"{row} {meanings.get(row.split(' | ')[1], '')} |" for row in rows(kind)]
        new = re.sub(r"(^\| \d.*\n)+", lambda _, wanted=wanted: "".join(w + "\n" for w in wanted), body, flags=re.M)
        shown = example(kind)
        if shown is not None:
            lines = "".join(shown[i : i + 96] + "\n" for i in range(0, len(shown), 96))
            block = f"```hex\n{lines}```\n"
            new = re.sub(r"^```hex\n.*?^```\n", lambda _, block=block: block, new, flags=re.M | re.S)
        page = page.replace(heading(kind) + body, heading(kind) + new)
    return page


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
    sys.exit(0)
