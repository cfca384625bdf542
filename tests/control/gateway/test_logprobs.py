"""Which tokens are told with which text, over random texts, stop strings and groupings of the tokens on their way."""

import asyncio
from collections.abc import Sequence

from evenflow.control.client import Finish, TokenLogprob
from evenflow.control.gateway.generation import Generation, Reporting, Stopping
from evenflow.control.gateway.logprobs import Reported
from evenflow.control.gateway.metrics import Metrics
from gateway_harness import smollm
from hypothesis import given, settings
from hypothesis import strategies as st


class Feed:
    """Stands for a stream whose tokens come in ``groups``."""

    def __init__(self, ids: Sequence[int], groups: Sequence[int]) -> None:
        self._left = list(ids)
        self._groups = list(groups)
        self._rows: list[TokenLogprob] = []
        self.finish: Finish | None = None
        self.received = 0
        self.aborted = False

    async def wait(self) -> bool:
        if not self._left and self.finish is None:
            self.finish = Finish("length", self.received)
        return bool(self._left)

    def take(self) -> list[int]:
        size = self._groups.pop() if self._groups else len(self._left)
        taken, self._left = self._left[:size], self._left[size:]
        self._rows = [TokenLogprob(token, -float(self.received + i), 1) for i, token in enumerate(taken)]
        self.received += len(taken)
        return taken

    def take_logprobs(self) -> list[TokenLogprob]:
        return self._rows

    def abort(self) -> None:
        self.aborted = True


METRICS = Metrics("test", lambda: None, lambda: True)


def run(ids: list[int], groups: list[int], stops: tuple[str, ...]) -> tuple[str, list[Reported], str | None]:
    """The joined text and tokens; checks that no token is told before its text."""

    async def work() -> tuple[str, list[Reported], str | None]:
        stopping = Stopping(strings=stops)
        generation = Generation(Feed(ids, groups), smollm(), stopping, METRICS, [1], 0, Reporting(logprobs=0))  # type: ignore[arg-type]
        text, told = "", []
        while (piece := await generation.piece()) is not None:
            text += piece.text
            assert piece.told is not None
            told += piece.told
            assert all(item.offset < len(text) for item in piece.told)
        return text, told, generation.finish_reason

    return asyncio.run(work())


texts = st.text(alphabet="ab é京🧑\u200d🚀\n", min_size=1, max_size=24)


@settings(max_examples=150, deadline=None)
@given(text=texts, data=st.data())
def test_the_told_tokens_follow_from_the_text_and_not_from_the_grouping(text: str, data: st.DataObject) -> None:
    ids = smollm().encode(text, add_special_tokens=False)
    places = st.integers(0, len(text) - 1)
    cuts = data.draw(st.lists(st.tuples(places, st.integers(1, 4)), max_size=2))
    stops = tuple(dict.fromkeys(text[start : start + size] for start, size in cuts))
    groups = data.draw(st.lists(st.integers(1, 4), max_size=12))
    got, told, reason = run(ids, groups, stops)
    end = min((text.find(stop) for stop in stops), default=len(text))
    assert got == text[:end] and reason == ("stop" if stops else "length")
    assert (got, told, reason) == run(ids, [1] * len(ids), stops)
    spelled = b"".join(item.token for item in told)
    assert text.encode().startswith(spelled) and spelled.startswith(got.encode())
    # The last one told is the one in which the text ends.
    assert not told or not b"".join(item.token for item in told[:-1]).startswith(got.encode())
    for i, item in enumerate(told):
        before = b"".join(earlier.token for earlier in told[:i])
        assert item.offset == len(before.decode(errors="ignore")) and item.logprob == -float(i)
