"""``docs/protocol.md`` says of every message what the code does: fields, types, ranges, bytes, limits, codes.

After a change of the protocol, ``python tests/support/protocol_tables.py`` renews tables and bytes; words are yours.
"""

import importlib
import re
from pathlib import Path

import msgspec
import pytest
from evenflow.control import wire
from golden import GOLDEN
from protocol_tables import PAGE, codes, example, heading, renewed, rows, sections, structs, table, tag_of

#: What to do about a difference.
RENEW = "python tests/support/protocol_tables.py renews tables and bytes of docs/protocol.md; then find the words"
CONTROL = Path(__file__).parents[2] / "control"
TEXT = PAGE.read_text()
KINDS = structs()


def part(title: str) -> str:
    """What stands under a heading of the second level."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", text, re.M)


def test_all_structs_of_the_wire_are_known() -> None:
    exported = {
        value for value in vars(wire).values() if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    assert exported <= set(KINDS) and len(KINDS) == len({kind.__name__ for kind in KINDS}) > 30


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_is_described_as_it_is(kind: type[msgspec.Struct]) -> None:
    body = sections(TEXT).get(heading(kind))
    assert body is not None, f"{heading(kind)} is missing: {RENEW}"
    said = table(body)
    wanted = rows(kind)
    assert len(said) == len(wanted), f"{kind.__name__} has {len(wanted)} fields, the page {len(said)}: {RENEW}"
    for line, start in zip(said, wanted, strict=True):
        assert line.startswith(start), f"{kind.__name__}: the page says\n{line}\nthe code\n{start}\n{RENEW}"
        assert len(line.removeprefix(start).strip(" |")) > 0, f"{kind.__name__}: no word on\n{start}"
    assert len(body.split("\n| ")[0].strip()) > 10, f"{kind.__name__}: no word on what it is for"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_is_shown_in_the_bytes_that_the_code_makes(kind: type[msgspec.Struct]) -> None:
    shown = codes(sections(TEXT)[heading(kind)])
    if tag_of(kind) is None:
        assert shown == [] and not any(type(message) is kind for message, _ in GOLDEN)
    else:
        assert example(kind) is not None, f"tests/support/golden.py has no {kind.__name__}"
        assert shown == [example(kind)], RENEW
        assert shown[0] in [golden for _, golden in GOLDEN]


def test_nothing_is_described_that_does_not_exist() -> None:
    assert set(sections(TEXT)) == {heading(kind) for kind in KINDS}


def test_the_page_is_as_the_program_that_renews_it_leaves_it() -> None:
    assert renewed(TEXT) == TEXT
    torn = TEXT.replace("| 2 | `key` |", "| 2 | `kex` |").replace("9125\n", "9126\n")
    torn = re.sub(r"^\| 1 \| `nonce`.*\n", "", torn, count=1, flags=re.M)
    assert "9125\n" in renewed(torn) and "`kex`" not in renewed(torn)


def test_the_limits_are_those_of_the_code() -> None:
    found = re.findall(r"^\| `([\w.]+)\.([A-Z_]+)` \| ([\d.]+) \| (.+) \|$", part("Limits"), re.M)
    assert len(found) == len(first_cells(part("Limits"))) >= 20
    for module, name, value, meaning in found:
        assert vars(importlib.import_module(f"evenflow.control.{module}"))[name] == float(value), name
        assert meaning
    named = {name for _, name, _, _ in found}
    for module in ("wire.client", "wire.fields", "sessions", "merging"):
        for name in vars(importlib.import_module(f"evenflow.control.{module}")):
            if name.startswith("MAX_"):
                assert name in named, f"the limit {module}.{name} is not on the page"


def test_the_error_codes_are_those_of_the_code() -> None:
    text = "".join(path.read_text() for folder in (CONTROL, CONTROL / "core") for path in folder.glob("*.py"))
    used = set(re.findall(r'Refused\([\w.]+, "(\w+)"', text)) | set(re.findall(r'return "(\w+)", (?:"|f")', text))
    assert set(first_cells(part("Error codes"))) == used


def test_ends_have_the_reasons_that_the_page_says() -> None:
    text = "".join(path.read_text() for path in (CONTROL / "core").glob("*.py"))
    used = set(re.findall(r'Ended\([^()]*, "(\w+)"', text)) | set(re.findall(r'_end\(seq, "(\w+)"', text))
    (row,) = [line for line in table(sections(TEXT)["### End"]) if "`reason`" in line]
    assert used == {"stop", "length", "abort", "error", "paused"}
    assert all(f"`{reason}`" in row for reason in used)


def test_the_metrics_that_the_page_names_exist() -> None:
    from evenflow.control.delivery import Delivery
    from evenflow.control.sessions import Sessions

    figures = Delivery(Sessions(), lambda identity, frame: "sent", lambda: None).figures()
    named = set(re.findall(r"`(clients_\w+|client_\w+_\w+)`", TEXT)) - {"client_state"}
    assert named and named <= set(figures)
