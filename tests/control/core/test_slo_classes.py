"""How targets are written, and what is refused."""

from math import inf

import pytest
from evenflow.control.core.slo import parse_slo


def test_a_bare_duration_is_the_interactive_class_and_relaxed_has_five_times_as_much() -> None:
    slo = parse_slo("100ms", "2s")
    assert [(c.name, c.tbt, c.ttft, c.chunk) for c in slo.classes] == [
        ("interactive", 0.1, 2.0, 0),
        ("relaxed", 0.5, 10.0, 0),
    ]
    assert parse_slo("100").classes == parse_slo("0.1s").classes
    assert [c.ttft for c in parse_slo("100ms").classes] == [inf, inf]


def test_classes_may_be_named_with_a_largest_chunk() -> None:
    slo = parse_slo("chat=80ms,batch=1.5s:256", "chat=1s")
    chat, batch = slo.classes
    assert (chat.name, chat.tbt, chat.ttft, chat.chunk) == ("chat", 0.08, 1.0, 0)
    assert (batch.name, batch.tbt, batch.ttft, batch.chunk) == ("batch", 1.5, inf, 256)
    assert [c.ttft for c in parse_slo("chat=80ms,batch=1s", "3s").classes] == [3.0, 3.0]
    assert slo.find("") is slo.find("chat") is chat and slo.find("relaxed") is None


@pytest.mark.parametrize(
    ("tbt", "ttft", "words"),
    [
        ("fast", None, "--tbt-slo 'fast': 'fast' is not a duration such as 100ms"),
        ("0.5ms", None, "from 1ms to 600s"),
        ("601s", None, "from 1ms to 600s"),
        ("a=1s,a=2s", None, "names a twice"),
        ("A=1s", None, "'A' is not a name"),
        ("a=1s,", None, "'' is not a name"),
        ("a=1s:0", None, "'0' is not a number of tokens"),
        ("a=1s", "b=1s", "--ttft-slo 'b=1s': b is none of the classes a"),
        ("a=1s", "a=1s:5", "--ttft-slo"),
    ],
)
def test_what_cannot_be_meant_is_refused(tbt: str, ttft: str | None, words: str) -> None:
    with pytest.raises(ValueError, match="slo") as error:
        parse_slo(tbt, ttft)
    assert words in str(error.value)
