"""When requests are sent and how long they are: the same under a seed, and of the asked distributions."""

import itertools
import statistics

import pytest
from evenflow.cli.bench.plan import Prompts, arrival_times, parse_length, parse_seconds, plan, read_trace
from evenflow.cli.errors import UsageError

LENGTH = parse_length("10", "--x")


def test_arrivals_depend_on_the_seed_and_nothing_else() -> None:
    first = list(itertools.islice(arrival_times("poisson", 50, 1), 5000))
    assert first == list(itertools.islice(arrival_times("poisson", 50, 1), 5000))
    assert first != list(itertools.islice(arrival_times("poisson", 50, 2), 5000))
    gaps = [b - a for a, b in itertools.pairwise(first)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.1)
    # Exponential: as much spread as mean.
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.1)
    # Another rate is the same pattern, stretched.
    assert list(itertools.islice(arrival_times("poisson", 25, 1), 9)) == pytest.approx([2 * at for at in first[:9]])
    assert list(itertools.islice(arrival_times("constant", 4, 1), 4)) == [0, 0.25, 0.5, 0.75]


def test_a_plan_ends_by_number_or_by_time() -> None:
    by_number = list(plan(LENGTH, LENGTH, rate=10, arrivals="constant", requests=7))
    assert [request.index for request in by_number] == list(range(7))
    by_time = list(plan(LENGTH, LENGTH, rate=10, arrivals="constant", duration=0.45))
    assert [request.at for request in by_time] == [0, 0.1, 0.2, pytest.approx(0.3), 0.4]
    assert len(list(plan(LENGTH, LENGTH, rate=10, requests=3, duration=1e6))) == 3
    assert [request.at for request in plan(LENGTH, LENGTH, rate=None, requests=2)] == [None, None]


def test_lengths_do_not_depend_on_the_rate() -> None:
    spec = parse_length("lognormal:200:1", "--x")
    slow, fast = (
        [(request.prompt, request.output) for request in plan(spec, spec, rate=rate, seed=3, requests=50)]
        for rate in (1, 100)
    )
    assert slow == fast


def test_length_specs() -> None:
    def draws(text: str) -> list[int]:
        return [request.prompt for request in plan(parse_length(text, "--x"), LENGTH, rate=None, requests=20_000)]

    assert set(draws("128")) == {128}
    assert set(draws("3:5")) == set(draws("uniform:3:5")) == {3, 4, 5}
    lognormal = draws("lognormal:300:0.8")
    assert statistics.mean(lognormal) == pytest.approx(300, rel=0.05)
    assert min(lognormal) >= 1 and statistics.median(lognormal) < 250
    assert max(draws("lognormal:300:2:1000")) == 1000


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "5:3", "1:2:3", "lognormal:5", "lognormal:nan:1", "normal:1:2"]
)
def test_bad_length_specs_name_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--prompt-tokens"):
        parse_length(text, "--prompt-tokens")


def test_times() -> None:
    assert parse_seconds("200ms", "--x") == pytest.approx(0.2)
    assert parse_seconds("1.5s", "--x") == parse_seconds("1.5", "--x") == 1.5
    for text in ("", "ms", "-1s", "0", "nan", "inf", "5m"):
        with pytest.raises(UsageError, match="--x"):
            parse_seconds(text, "--x")


def test_traces() -> None:
    rows = read_trace("output, arrival ,prompt,id\n5,1.5,10,a\n6,0,20,b\n", "t.csv")
    assert [(row.index, row.at, row.prompt, row.output) for row in rows] == [(0, 0, 20, 6), (1, 1.5, 10, 5)]
    assert len(read_trace("arrival,prompt,output\n0,1,1\n1,1,1\n", "t.csv", requests=1)) == 1
    assert len(read_trace("arrival,prompt,output\n0,1,1\n1,1,1\n", "t.csv", duration=0.5)) == 1
    for text, named in (
        ("", "no arrival"),
        ("arrival,prompt\n", "no output"),
        ("arrival,prompt,output\n", "no request"),
        ("arrival,prompt,output\n0,1,1\n0,0,1\n", "line 3"),
        ("arrival,prompt,output\nx,1,1\n", "line 2"),
        ("arrival,prompt,output\n1,1\n", "line 2"),
        ("arrival,prompt,output\nnan,1,1\n", "line 2"),
    ):
        with pytest.raises(UsageError, match=named):
            read_trace(text, "t.csv")


@pytest.mark.parametrize("length", [1, 15, 16, 17, 1000, 40_000])
def test_prompts_are_their_own(length: int) -> None:
    prompts = Prompts(range(1000, 2000), 7)
    made = [prompts.make(index, length) for index in range(3)]
    assert all(len(prompt) == length and set(prompt) <= set(range(1000, 2000)) for prompt in made)
    assert made == [Prompts(range(1000, 2000), 7).make(index, length) for index in range(3)]
    assert len({tuple(prompt[:16]) for prompt in made}) == 3
