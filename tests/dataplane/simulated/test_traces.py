"""Traces in the schemas in which they are published, and loads that are drawn."""

import gzip
from array import array
from itertools import islice
from pathlib import Path

import pytest
from evenflow.dataplane.simulated.load import Entry, arrivals, hashed_tokens, poisson, shuffled, traced
from evenflow.dataplane.simulated.refusal import CannotSimulate
from evenflow.dataplane.simulated.traces import read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:01.509930+00:00,2399,6\n"
)
BURST = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,,1,ChatGPT,472,18,490,Conversation log\n"
    "45,,,ChatGPT,1087,0,1087,Conversation log\n"
    "118,,2,GPT-4,417,276,693,API log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [3, 4, 5]}\n'
    '{"timestamp": 1500, "input_length": 600, "output_length": 1, "hash_ids": [3, 9]}\n'
)
BAILIAN = (
    '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 20, "output_length": 9, "type": "text",'
    ' "turn": 1, "hash_ids": [1, 2]}\n'
)


def read(tmp_path: Path, text: str, name: str = "trace.csv") -> list[Entry]:
    path = tmp_path / name
    path.write_text(text)
    return read_trace(path)


def test_published_schemas(tmp_path: Path) -> None:
    first, second = read(tmp_path, AZURE)
    assert first == Entry(374, 44, 0.0) and (second.prompt, second.output) == (396, 109)
    assert second.at == pytest.approx(4.314579, abs=1e-6)
    assert [entry.at for entry in read(tmp_path, AZURE_2024)] == pytest.approx([0.0, 1.5])
    assert read(tmp_path, BURST) == [Entry(472, 18, 0.0), Entry(417, 276, 113.0)], "failures are left out"
    assert read(tmp_path, MOONCAKE) == [Entry(1100, 20, 0.0, (3, 4, 5), 512), Entry(600, 1, 1.5, (3, 9), 512)]
    assert read(tmp_path, BAILIAN) == [Entry(20, 9, 0.0, (1, 2), 16)]


def test_lengths_alone_and_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv.gz"
    path.write_bytes(gzip.compress(b"prompt_len,output_len\n10,20\n30,40\n"))
    assert read_trace(path) == [Entry(10, 20), Entry(30, 40)]
    path.write_bytes(gzip.compress(b"prompt_len,output_len,arrival_s,hash_ids\n600,20,1.5,7 8\n"))
    assert read_trace(path) == [Entry(600, 20, 0.0, (7, 8), 512)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "trace.csv, line 2: no column is one of prompt, "),
        ("prompt,output\n1,x\n", "trace.csv, line 2: output must be tokens from 0 to 2097152, not 'x'"),
        ("prompt,output,arrival\n1,2,soon\n", "line 2: arrival must be seconds, or a date and time, not 'soon'"),
        ("prompt,output\n", "has no request"),
        ('{"input_length": 5, "output_length": 5, "hash_ids": ["x"]}\n', "line 1: hash_ids must be numbers"),
        ('{"input_length": 5,\n', "line 1 is not a JSON object"),
    ],
)
def test_a_bad_line_is_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CannotSimulate, match=message):
        read(tmp_path, text)


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with pytest.raises(CannotSimulate, match="No such file"):
        read_trace(path)
    path.write_bytes(b"\x1f\x8b\xff\xff")
    with pytest.raises(CannotSimulate, match="neither text nor gzipped text"):
        read_trace(path)


def test_another_rate_sends_the_same_requests() -> None:
    slow, fast = (list(islice(poisson(rate, 3), 50)) for rate in (1.0, 4.0))
    assert [4 * at for at in fast] == pytest.approx(slow)
    assert slow != list(islice(poisson(1.0, 4), 50))
    assert sum(1 for at in islice(poisson(10.0, 1), 5000) if at < 100) == pytest.approx(1000, rel=0.1)


def test_a_shuffle_takes_each_once() -> None:
    entries = [Entry(number, number) for number in range(100)]
    assert sorted(shuffled(entries, 5)) == entries != shuffled(entries, 5) == shuffled(entries, 5)
    assert shuffled(entries, 5, 10) == shuffled(entries, 5)[:10]


def test_sequences_are_cut_to_the_length() -> None:
    cut = list(arrivals([Entry(90, 20), Entry(500, 20), Entry(5, 5)], [0.0, 1.0, 2.0], 100))
    assert [(arrival.prompt, arrival.output) for arrival in cut] == [(90, 10), (99, 1), (5, 5)]
    assert [arrival.at for arrival in traced([Entry(1, 1, 6.0), Entry(1, 1, 2.0)], 100, 2.0)] == [
        1_000_000,
        3_000_000,
    ]


def test_tokens_of_hashes() -> None:
    tokens = array("I", hashed_tokens((3, 4, 5), 4, 10)).tolist()
    assert tokens == [3, 3, 3, 3, 4, 4, 4, 4, 5, 5]
    assert array("I", hashed_tokens((3,), 2, 4)).tolist() == [3, 3, 3, 3]
