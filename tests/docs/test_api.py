"""``docs/api.md`` says what the code does: every route, field, range, limit and error code of the HTTP interface."""

import re
from pathlib import Path

import pytest
from evenflow.control.gateway import limits
from evenflow.control.gateway.fields import IGNORED, UNSUPPORTED
from evenflow.control.gateway.routes import Routes
from evenflow.control.gateway.schema import ChatRequest, CommonFields, CompletionRequest, StreamOptions
from starlette.routing import Route

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()


def section(title: str) -> str:
    """From a heading to the next of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}$", PAGE, re.M)
    assert found, title
    rest = PAGE[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.M)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def fields(title: str) -> dict[str, list[str]]:
    """Of the first table of a section, by field."""
    table = section(title).split("\n### ")[0]
    return {row[0].strip("`"): row for row in rows(table) if row[0].startswith("`")}


COMMON, COMPLETIONS, CHAT = "Fields of completions and chat", "Only completions", "Only chat"


@pytest.mark.parametrize(
    ("title", "kind"), [(COMMON, CommonFields), (COMPLETIONS, CompletionRequest), (CHAT, ChatRequest)]
)
def test_every_field_is_documented(title: str, kind: type) -> None:
    own = set(kind.__struct_fields__) - (set() if kind is CommonFields else set(CommonFields.__struct_fields__))
    assert set(fields(title)) == own
    assert set(StreamOptions.__struct_fields__) == {"include_usage", "continuous_usage_stats"}


def test_every_range_is_the_tables() -> None:
    documented = {name: row[2] for title in (COMMON, COMPLETIONS, CHAT) for name, row in fields(title).items()}
    # Chat's logprobs is a boolean: the integer is completions'.
    documented["logprobs"] = fields(COMPLETIONS)["logprobs"][2]
    for name, span in limits.RANGES.items():
        assert documented[name] == f"{span.low:.12g} to {span.high:.12g}" or documented[name] == (
            f"{span.low} to {span.high}"
        ), name
    ranged = {name for name, text in documented.items() if re.fullmatch(r"-?[\d.]+ to -?[\d.]+", text)}
    assert ranged == set(limits.RANGES) | {"messages"}
    assert documented["stop"] == f"at most {limits.MAX_STOPS}, of 1 to {limits.MAX_STOP_CHARS} characters"
    assert documented["stop_token_ids"].startswith(f"at most {limits.MAX_STOP_IDS}")
    assert documented["prompt"] == f"at most {limits.MAX_PROMPTS} prompts"
    assert documented["messages"] == f"1 to {limits.MAX_MESSAGES}"


def test_every_limit_is_documented() -> None:
    documented = {row[0].strip("`"): float(row[1]) for row in rows(section("Limits"))[1:]}
    #: Not bounds of a request: how the gateway itself paces its work.
    inner = {"KEEP_ALIVE_SECONDS", "HEADER_SECONDS", "SETTLE_SECONDS", "INLINE_CHARS"}
    bounds = {
        name: float(value)
        for name, value in vars(limits).items()
        if re.fullmatch(r"MAX_\w+|\w+_SECONDS", name) and name not in inner | {"MAX_BIASES", "MAX_TOP_LOGPROBS"}
    }
    assert documented == bounds


def test_every_route_is_documented() -> None:
    documented = {row[0].strip("`") for row in rows(section("Endpoints"))[1:]}
    table: list[Route] = Routes(None, "test").table()  # type: ignore[arg-type]
    served = {f"{method} {route.path.replace(':path', '')}" for route in table for method in route.methods or ()}
    assert documented == {route for route in served if not route.startswith("HEAD ")}


def test_every_error_code_is_documented() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "control" / "gateway").glob("*.py"))
    codes = set(re.findall(r'code(?:: str)? ?= ?"(\w+)"', source))
    for call in re.findall(r"\b(?:invalid|unavailable)\((?:[^()]|\([^()]*\))*\)", source):
        codes |= set(re.findall(r', "(\w+)",?\s*\)$', call)) & {*re.findall(r'"([a-z_]+_[a-z_]+|draining)"', call)}
    codes -= {name for kind in (CompletionRequest, ChatRequest) for name in kind.__struct_fields__}
    documented = {row[1].strip("`") for row in rows(section("Errors"))[1:]} - {"none"}
    assert codes <= documented, codes - documented
    for code in documented:
        assert f'"{code}"' in source, code


def test_every_refused_and_ignored_field_is_named() -> None:
    refused, accepted = section("Fields that are refused").split("Accepted, and")
    assert set(re.findall(r"`(\w+)`", refused)) == set(UNSUPPORTED)
    assert set(re.findall(r"`(\w+)`", accepted)) == set(IGNORED)
