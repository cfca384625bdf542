"""Stop strings: the text ends just before the earliest match, whatever the pieces."""

import pytest
from evenflow.control.gateway.stops import StopFinder
from hypothesis import given
from hypothesis import strategies as st


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    finder = StopFinder(stops)
    out: list[str] = []
    for piece in pieces:
        out.append(finder.feed(piece))
        if finder.stopped:
            return out, True
    out.append(finder.finish())
    return out, finder.stopped


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
)
def test_equals_search_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    out, stopped = run(pieces, stops)
    consumed = "".join(pieces)
    assert ("".join(out), stopped) == naive(consumed, stops)


@given(
    st.lists(st.text(alphabet="ab", max_size=3), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_nothing_is_let_out_that_would_have_to_be_taken_back(pieces: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops)
    sent = ""
    for piece in pieces:
        sent += finder.feed(piece)
        assert not any(sent.endswith(stop) for stop in stops)
        if finder.stopped:
            break
    text, _ = naive("".join(pieces), stops)
    assert text.startswith(sent)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["The quick br", "own f", "ox"], ["own fox"], "The quick br"),
        (["xa", "bc"], ["ab", "bc"], "x"),
        (["abc", "d"], ["abcd", "bc"], ""),
        (["abc", "x"], ["abcd", "bc"], "a"),
        (["abc"], ["abcd", "bc"], "a"),
        (["one token holds \n\nUser: all of it"], ["\n\nUser:"], "one token holds "),
        (["aaa", "aab"], ["aaab"], "aa"),
        (["almost own fo"], ["own fox"], "almost own fo"),
    ],
)
def test_str_4_examples(pieces: list[str], stops: list[str], expected: str) -> None:
    out, _ = run(pieces, stops)
    assert "".join(out) == expected


def test_without_stops_text_passes_unheld() -> None:
    finder = StopFinder([])
    assert [finder.feed("a"), finder.feed("b"), finder.finish()] == ["a", "b", ""]
