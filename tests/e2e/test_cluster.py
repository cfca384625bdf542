"""A cluster on one machine: ``evenflow launch`` with a replica whose workers are started by hand, over CURVE.

SEC-2, OBS-3 and FT-1 with real processes; the workers are scripted, everything else is what users run.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from evenflow.cli.keys import make_keys
from evenflow.control.client import Client
from live_server import EVENFLOW, PATIENCE, LiveServer, wait_for

CLUSTER = """
model = "scripted"
stages = 2
port = 0

[network]
workers = "tcp://127.0.0.1:0"
clients = "tcp://127.0.0.1:0"
keys = "keys"

[[replica]]
launcher = "external"
"""
PROMPT = [21, 22, 23, 24, 25]
TOKENS = 150


class Cluster:
    """The server, and the workers that a person would start."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys"
        self.folder = folder
        make_keys(self.keys)
        (folder / "cluster.toml").write_text(CLUSTER)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.server = LiveServer("", cluster=folder / "cluster.toml")
        self.dial = {role: self._door(role) for role in ("workers", "clients")}

    def _door(self, role: str) -> str:
        pattern = rf"^{role} on other machines dial (tcp://\S+)"
        return wait_for(lambda: re.search(pattern, self.server.log, re.MULTILINE), why=f"the address of {role}")[1]

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()

    def start(self, stage: int, name: str, *arguments: str, keys: Path | None = None) -> subprocess.Popen[bytes]:
        command = ["worker", "--connect", self.dial["workers"], "--stage", str(stage), "--model", "scripted"]
        with (self.folder / name).open("wb") as log:
            process = subprocess.Popen(
                [*EVENFLOW, *command, "--keys", str(keys or self.keys), "--step-ms", "5", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.workers.append(process)
        return process

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*EVENFLOW, *arguments], capture_output=True, text=True, timeout=PATIENCE)

    def client(self) -> Client:
        return Client(self.dial["clients"], keys=self.keys)

    def complete(self) -> list[int]:
        with self.client() as client:
            return [token for chunk in client.submit(PROMPT, max_tokens=TOKENS) for token in chunk.ids]

    def close(self) -> None:
        for process in self.workers:
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE)
        self.server.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    except BaseException:
        print(made.server.log[-20_000:])
        raise
    finally:
        made.close()


@pytest.mark.xdist_group("live")
def test_workers_started_by_hand_die_and_come_back(cluster: Cluster) -> None:
    server = cluster.server
    # Strangers first: without a key of ours nobody is let in, and nothing else happens.
    stranger = cluster.folder / "stranger"
    make_keys(stranger)
    shutil.copy(cluster.keys / "server.pub", stranger / "server.pub")
    refused = cluster.run("status", "--connect", cluster.dial["clients"], "--keys", str(stranger))
    assert refused.returncode == 1 and "not in the server's allow-list" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    wait_for(lambda: server.said("connection refused"), why="the refusal in the log")
    without = cluster.run("status", "--connect", cluster.dial["clients"])
    assert without.returncode == 1 and "keys folder" in without.stderr
    unwanted = cluster.start(0, "unwanted", keys=stranger)
    misplaced = cluster.start(2, "misplaced")
    assert unwanted.wait(PATIENCE) == 1 and "not in the server's allow-list" in cluster.log("unwanted")
    assert misplaced.wait(PATIENCE) == 1 and "stage 2 of 2, rank 0 does not exist" in cluster.log("misplaced")
    assert len(cluster.log("misplaced").splitlines()) == 1

    first, second = cluster.start(0, "first"), cluster.start(1, "second")
    server.ready()
    tokens = cluster.complete()
    assert len(tokens) == TOKENS
    status = cluster.run("status", "--connect", cluster.dial["clients"], "--keys", str(cluster.keys))
    assert status.returncode == 0 and "replica 0                 up" in status.stdout, status.stderr
    place = ("--connect", cluster.dial["clients"], "--keys", str(cluster.keys))
    said = cluster.run("generate", *place, "--prompt", "a b c", "--max-tokens", "5")
    assert said.returncode == 0 and said.stdout.strip(), said.stderr

    # A place is taken while its worker lives, and the second to want it is told.
    double = cluster.start(1, "double")
    assert double.wait(PATIENCE) == 1
    assert f"replica 0, stage 1 is taken by process {second.pid}" in cluster.log("double")

    # One dies in the middle of a stream. Nobody restarts it but us; the stream waits and goes on.
    with cluster.client() as client:
        stream = client.submit(PROMPT, max_tokens=TOKENS)
        got: list[int] = []
        again = None
        for chunk in stream:
            got += chunk.ids
            if again is None and len(got) >= 20:
                second.kill()
                wait_for(lambda: server.said("epoch over"), why="the end of the epoch")
                again = cluster.start(1, "again")
        assert got == tokens and stream.finish is not None and stream.finish.reason == "length"
    assert again is not None
    second = again
    assert first.poll() is None, "the other one kept its weights"

    # Control dies: the workers dial again.
    at = server.kill("control")
    wait_for(lambda: server.said("replica up", at), why="a new epoch")
    assert cluster.complete() == tokens

    # OBS-3: no key in any log or command line; OBS-4: no colours in a pipe.
    secrets = [path.read_text().strip() for path in cluster.folder.rglob("*.key")]
    words = [word for member in [*server.members(), *map(_process, (first, second))] for word in member.cmdline()]
    logs = server.log + "".join(cluster.log(name) for name in ("unwanted", "misplaced", "first", "again", "double"))
    assert len(secrets) == 6 and not any(secret in text for secret in secrets for text in [logs, *words])
    assert "\x1b" not in logs

    for process, number in ((first, signal.SIGTERM), (second, signal.SIGINT)):
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
    wait_for(lambda: not list(Path("/dev/shm").glob(f"{_links(server)}.r*")), why="the end of their meeting place")
    assert server.stop() == 0


def _links(server: LiveServer) -> str:
    return server._links[0].name


def _process(process: subprocess.Popen[bytes]) -> psutil.Process:
    return psutil.Process(process.pid)


def test_ctrl_c_ends_a_worker_that_reaches_nobody_obs4(tmp_path: Path) -> None:
    """OBS-4 and OPS-3: it says what it cannot reach, and ends when it is told."""
    make_keys(tmp_path / "keys")
    command = ["worker", "--connect", "tcp://127.0.0.1:1", "--model", "scripted", "--keys", str(tmp_path / "keys")]
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        process = subprocess.Popen([*EVENFLOW, *command], stderr=subprocess.PIPE, start_new_session=True)
        assert process.stderr is not None
        with process.stderr as pipe:
            line = pipe.readline()
            assert b"127.0.0.1, port 1 does not answer" in line and b"\x1b" not in line
            os.kill(process.pid, number)
            assert process.wait(10.0) == code
