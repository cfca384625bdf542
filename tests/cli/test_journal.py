"""``serve --journal`` and what is done with the file: the real launcher, control and writer, in their processes."""

import json
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from evenflow.control.journal.files import JournalFile, frame, head
from evenflow.control.journal.records import Came, Opening
from evenflow.control.journal.replay import Journal
from live_server import EVENFLOW, LiveServer, live, wait_for
from msgspec import structs

RECORDED = Path(__file__).parents[1] / "control" / "journal" / "recorded" / "stall-free-fcfs-10.journal"


def replayed(path: Path) -> dict[str, object]:
    done = subprocess.run([*EVENFLOW, "replay", str(path), "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def ask(server: LiveServer, words: int, tokens: int) -> None:
    prompt = " ".join(["secret"] * words)
    fields = {"model": "scripted", "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0}
    assert server.post("/v1/completions", **fields).status_code == 200


@pytest.mark.parametrize("ids", [False, True])
def test_a_server_records_what_it_does_and_replay_does_it_again(tmp_path: Path, ids: bool) -> None:
    path = tmp_path / "day.journal"
    flags = ["--journal", str(path), "--step-ms", "2", "--token-budget", "64", *(["--journal-ids"] if ids else [])]
    with live("scripted", *flags) as server:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: ask(server, 20 + 7 * i, 10 + 3 * i), range(24)))
        assert server.stop() == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    told = replayed(path)
    assert told["same"] is True and told["ids"] is ids and told["note"] == ""
    assert told["submissions"] == 24 and told["plans"] >= 10 + 3 * 23
    submits = [step.event.submit for step in Journal(path).steps() if isinstance(step.event, Came)]
    shared = submits[0].tokens[:80]
    # One word again and again: as ids it is one number, as hashes every place has its own.
    assert all(submit.tokens.startswith(shared) for submit in submits)
    words = [shared[i : i + 4] for i in range(0, len(shared), 4)]
    assert (len(set(words[1:-1])) <= 2) is ids
    assert path.stat().st_size < 60_000


def test_what_a_killed_control_process_had_recorded_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "day.journal"
    with live("scripted", "--journal", str(path), "--step-ms", "2") as server:
        ask(server, 30, 40)
        time.sleep(0.5)  # a tick of control: what it has is handed over
        server.kill("control")
        wait_for(lambda: server.said("the server is ready again"), why="another life")
        ask(server, 30, 20)
        assert server.stop() == 0
    first, second = replayed(path.with_name("day.journal.1")), replayed(path)
    assert "not closed" in str(first["note"]) and second["note"] == ""
    assert first["submissions"] == 1 and second["submissions"] == 1


def test_a_server_goes_on_without_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "day.journal"
    with live("scripted", "--journal", str(path), "--step-ms", "2") as server:
        server.kill("journal")
        ask(server, 10, 60)
        wait_for(lambda: server.said("the journal ends, the server goes on"))
        ask(server, 10, 60)


def replay(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*EVENFLOW, "replay", str(path), *flags], capture_output=True, text=True, timeout=120)


def test_the_first_difference_is_printed_and_the_exit_code_is_1(tmp_path: Path) -> None:
    path = tmp_path / "other.journal"
    opening, *rest = list(JournalFile(RECORDED))
    assert isinstance(opening, Opening)
    budget = opening.limits.token_budget // 2
    changed = structs.replace(opening, limits=structs.replace(opening.limits, token_budget=budget))
    path.write_bytes(head() + frame([changed, *rest]))
    done = replay(path)
    assert done.returncode == 1 and done.stdout.startswith("event ") and "they part" in done.stdout
    assert ": recorded [" in done.stdout and ", made [" in done.stdout and " blocks available" in done.stdout
    told = json.loads(replay(path, "--json").stdout)
    assert told["same"] is False and told["difference"] == done.stdout.splitlines()[: len(told["difference"])]


def test_what_is_no_journal_is_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "not"
    path.write_text("something else")
    done = replay(path)
    assert done.returncode == 2 and "not a journal of evenflow" in done.stderr and not done.stdout
    assert "not a journal" in json.loads(replay(path, "--json").stdout)["error"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--journal-ids"], ["--journal-ids", "--journal"]),
        (["--journal", "{}/no/such"], ["--journal", "does not exist"]),
        (["--journal", "{}"], ["not a file"]),
        (["--journal", "{}/j", "--journal-size", "1M"], ["--journal-size", "8M"]),
        (["--journal", "{}/j", "--journal-size", "much"], ["--journal-size", "much"]),
    ],
)
def test_flags_that_cannot_be_are_refused(flags: list[str], words: list[str], tmp_path: Path) -> None:
    given = [flag.format(tmp_path) for flag in flags]
    done = subprocess.run([*EVENFLOW, "serve", "scripted", *given], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    for word in words:
        assert word in done.stderr
