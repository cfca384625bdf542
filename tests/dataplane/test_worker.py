"""Scripted worker processes, driven over real sockets by a control process of a few lines."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from evenflow.control.wire import (
    BatchPlan,
    Heartbeat,
    Hello,
    Quit,
    Redial,
    Register,
    Result,
    Resync,
    Sampling,
    Start,
    Started,
    decode_from_worker,
    encode,
)
from evenflow.control.wire.sockets import bind_router, close_context, ipc_endpoint, new_context
from evenflow.dataplane.executor import Limits
from evenflow.dataplane.simulated.shadow import ShadowRunner, shadow_tokens
from evenflow.dataplane.worker import Worker

PATIENCE_MS = 30_000
PROMPT = [21, 22, 23, 24, 25]


class Control:
    """Just enough of the control process: knows its workers by stage and waits for one kind of message."""

    def __init__(self, directory, stages: int = 1, links: str | None = None) -> None:
        self.directory = directory
        self.stages = stages
        self.links = str(directory) if links is None else links
        self.endpoint = ipc_endpoint(directory / "workers")
        self.processes: list[subprocess.Popen] = []
        self.peers: dict[int, bytes] = {}
        self.early: list[Result] = []
        self.listen()

    def listen(self) -> None:
        self.context = new_context()
        self.router = bind_router(self.context, self.endpoint)

    def stop_listening(self) -> None:
        close_context(self.context)

    def spawn(self, *arguments: str, stage: int = 0) -> subprocess.Popen:
        command = [sys.executable, "-P", "-m", "evenflow.dataplane.simulated", "--connect", self.endpoint]
        place = ["--stage", str(stage), "--stages", str(self.stages), "--num-blocks", "64"]
        log = (self.directory / f"log-{stage}").open("ab")
        process = subprocess.Popen([*command, *place, *arguments], stderr=log, stdout=log)
        log.close()
        self.processes.append(process)
        return process

    def log(self, stage: int = 0) -> str:
        return (self.directory / f"log-{stage}").read_text()

    def receive(self, *kinds: type, timeout_ms: int = PATIENCE_MS):
        """The next message of one of these kinds, with its sender; others are passed over."""
        deadline = time.monotonic() + timeout_ms / 1000
        while (left := deadline - time.monotonic()) > 0:
            if self.router.poll(left * 1000):
                peer, frame = self.router.recv_multipart()
                message = decode_from_worker(frame)
                if isinstance(message, kinds):
                    return peer, message
        raise TimeoutError(f"no {kinds} came")

    def send(self, message, stage: int = 0) -> None:
        self.send_frames([encode(message)], stage)

    def send_frames(self, frames: list[bytes], stage: int = 0) -> None:
        self.router.send_multipart([self.peers[stage], *frames])

    def join(self) -> list[Hello]:
        hellos = []
        for _ in range(self.stages):
            peer, hello = self.receive(Hello)
            self.peers[hello.stage] = peer
            hellos.append(hello)
        return hellos

    def start(self, epoch: int = 1) -> None:
        self.early.clear()
        message = Start(epoch, self.stages, 64, 16, 8, 64, 512, self.links)
        for stage in self.peers:
            self.send(message, stage)
        for _ in self.peers:
            started = self.receive(Started, Resync)[1]
            assert isinstance(started, Started) and started.epoch == epoch, started

    def plan(self, *frames: bytes) -> None:
        for stage in self.peers:
            self.send_frames(list(frames), stage)

    def results(self) -> list[Result]:
        """The oldest step's results, one of each stage; the one with ids last."""
        while True:
            step = self.early[0].step if self.early else 0
            same = [result for result in self.early if result.step == step]
            if len(same) == self.stages:
                self.early = [result for result in self.early if result.step != step]
                return sorted(same, key=lambda result: len(result.ids))
            self.early.append(self.receive(Result)[1])
            self.early.sort(key=lambda result: result.step)


@pytest.fixture
def control_of(tmp_path):
    made: list[Control] = []

    def make(stages: int = 1, **options: str) -> Control:
        control = Control(tmp_path, stages, **options)
        made.append(control)
        return control

    yield make
    for control in made:
        for process in control.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        control.stop_listening()


def register(slot: int = 0, prompt=PROMPT, **fields: object) -> bytes:
    blocks = np.arange(4 * slot, 4 * slot + 4, dtype="<u4").tobytes()
    tokens = np.array(prompt, "<u4").tobytes()
    fields = {"generation": 1, "request": 1, "computed": 0, "max_len": 64, "prompt_len": len(prompt), **fields}
    return encode(Register(slot=slot, tokens=tokens, blocks=blocks, **fields))


def chunk(step: int, slot: int = 0, tokens: int = len(PROMPT), epoch: int = 1) -> bytes:
    slots, counts = np.array([slot], "<u2").tobytes(), np.array([tokens], "<u4").tobytes()
    return encode(BatchPlan(epoch, step, 0, b"", chunk_slots=slots, chunk_tokens=counts))


def decode(step: int, epoch: int = 1) -> bytes:
    return encode(BatchPlan(epoch, step, 0, b"\x01"))


def first_id(result: Result) -> int:
    return int(np.frombuffer(result.ids, "<u4")[0])


def gone(pid: int, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            stat = Path(f"/proc/{pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_replica_of_worker_processes_follows_plans_with_lookahead(control_of, tmp_path, stages):
    control = control_of(stages)
    for stage in range(stages):
        control.spawn(stage=stage)
    hellos = control.join()
    assert sorted(hello.pid for hello in hellos) == sorted(process.pid for process in control.processes)
    control.start()
    seeded = Sampling(temperature=0.9, seed=2**64 - 1)
    control.plan(register(sampling=seeded), chunk(0))
    output = []
    for step in range(1, 20):
        # The next plan is under way before the result it depends on: its inputs are sent between the stages.
        control.plan(decode(step))
        results = control.results()
        assert {result.step for result in results} == {step - 1}
        output.append(first_id(results[-1]))
        for result in results:
            assert result.received_us <= result.started_us <= result.ended_us
            assert 0 <= result.starved_us <= result.idle_us
    assert output == shadow_tokens(PROMPT, 19, seeded)
    assert not list(tmp_path.glob("*.ring")), "the shared memory has no name left that a death could leave behind"
    for stage in range(stages):
        control.send(Quit("over"), stage)
    assert [process.wait(10) for process in control.processes] == [0] * stages
    assert "over" in control.log()


def test_a_new_epoch_drops_slots_and_keeps_processes(control_of):
    control = control_of(2)
    for stage in range(2):
        control.spawn(stage=stage)
    control.join()
    for epoch in (1, 2, 3):
        control.start(epoch)
        control.plan(register(), chunk(0, epoch=epoch))
        control.plan(decode(1, epoch=epoch))
        assert {result.epoch for result in control.results()} == {epoch}
        assert first_id(control.results()[-1]) == shadow_tokens(PROMPT, 2)[1]
        # Left unfinished: plans and slots of this epoch must not reach the next.
        control.plan(decode(2, epoch=epoch))
        control.plan(decode(3, epoch=epoch))


def test_time_between_iterations_is_accounted(control_of):
    control = control_of()
    control.spawn("--step-ms", "20", "--token-us", "1000")
    control.join()
    control.start()
    control.plan(register(), chunk(0))
    control.plan(decode(1))
    control.plan(decode(2))
    first, second, third = (control.results()[0] for _ in range(3))
    assert first.starved_us > 0
    assert first.ended_us - first.started_us >= 24_000
    for result in (second, third):
        # Waiting while the one before ran: not a moment was spent without a plan.
        assert result.starved_us == 0
        assert result.ended_us - result.started_us >= 15_000
    assert third.started_us == second.ended_us + third.idle_us
    time.sleep(0.05)
    control.plan(decode(3))
    late = control.results()[0]
    assert late.idle_us >= late.starved_us >= 40_000


def test_a_gap_is_answered_once_and_plans_are_ignored_until_the_next_epoch(control_of):
    control = control_of()
    control.spawn()
    control.join()
    control.start()
    control.plan(register(), chunk(0))
    control.results()
    control.plan(decode(2))
    control.plan(decode(3))
    control.plan(decode(1))
    assert control.receive(Resync, Result)[1] == Resync(1, 1, "step 2 came, 1 was expected")
    with pytest.raises(TimeoutError):
        control.receive(Resync, Result, timeout_ms=300)
    control.start(2)
    control.plan(register(), chunk(0, epoch=2))
    assert first_id(control.results()[0]) == shadow_tokens(PROMPT, 1)[0]


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        ([encode(BatchPlan(1, 1, 0, b"\x02"))], "slot 1 is not registered"),
        ([decode(2)], "step 2 came, 1 was expected"),
        ([b"garbage"], "not a message"),
    ],
)
def test_what_is_refused_behind_a_running_iteration_is_reported_after_its_result(control_of, behind, reason):
    control = control_of()
    control.spawn("--step-ms", "400")
    control.join()
    control.start()
    control.plan(register(), chunk(0))
    control.plan(*behind)
    assert first_id(control.receive(Result, Resync)[1]) == shadow_tokens(PROMPT, 1)[0]
    assert reason in control.receive(Result, Resync)[1].reason
    control.start(2)
    control.plan(register(), chunk(0, epoch=2))
    assert first_id(control.results()[0]) == shadow_tokens(PROMPT, 1)[0]


def test_a_start_comes_while_an_iteration_runs(control_of):
    """What ran belongs to an epoch that nobody asks about any more: it has no result, and leaves no trace."""
    control = control_of()
    control.spawn("--step-ms", "400")
    control.join()
    control.start()
    control.plan(register(), chunk(0))
    control.plan(decode(1))
    control.send(Start(2, 1, 64, 16, 8, 64, 512, control.links))
    control.plan(register(prompt=[9, 8, 7]), chunk(0, tokens=3, epoch=2))
    kinds = Started, Result, Resync
    started = control.receive(*kinds)[1]
    assert isinstance(started, Started) and started.epoch == 2, started
    result = control.receive(*kinds)[1]
    assert (result.epoch, result.step, first_id(result)) == (2, 0, shadow_tokens([9, 8, 7], 1)[0])


def test_a_worker_listens_while_an_iteration_runs(control_of):
    control = control_of()
    control.spawn("--step-ms", "1500")
    control.join()
    control.start()
    control.plan(register(), chunk(0))
    assert control.receive(Heartbeat, Result)[1] == Heartbeat(epoch=1)
    assert control.receive(Heartbeat, Result)[1].step == 0


@pytest.mark.parametrize("stages", [1, 2])
def test_a_broken_reference_is_answered_by_every_stage(control_of, stages):
    control = control_of(stages)
    for stage in range(stages):
        control.spawn(stage=stage)
    control.join()
    control.start()
    control.plan(decode(0))
    for _ in range(stages):
        assert "slot 0 is not registered" in control.receive(Resync, Result)[1].reason
    control.start(2)


def test_sec_1_no_frame_ends_a_worker(control_of):
    """SEC-1 at a worker's socket: garbage is answered with a resync, and the next epoch works."""
    control = control_of()
    process = control.spawn()
    control.join()
    garbage = [
        [b""],
        [pickle.dumps(["x"] * 100)],
        [os.urandom(500)],
        [b"\x91" * 10_000],
        [b"\x93\x63\x01\x02"],
        [encode(Heartbeat()), encode(Heartbeat())],
        [register(), encode(Heartbeat())],
        [register()],
        [encode(Hello(1, 0, 0, 0, 1, 1, "x", (), 16, 1, 1, 1, 1, 1))],
        [encode(Started(1))],
    ]
    for epoch, frames in enumerate(garbage, 1):
        control.start(epoch)
        control.send_frames(frames)
        assert control.receive(Resync)[1].epoch == epoch
    # Ids that the model does not have.
    control.start(41)
    control.send_frames([register(prompt=[1 << 31]), chunk(0, tokens=1, epoch=41)])
    assert "token 2147483648 of" in control.receive(Resync)[1].reason
    # Outside an epoch too: then there is nothing to resynchronise.
    control.send(Redial())
    control.receive(Hello)
    for _ in range(50):
        control.send_frames([os.urandom(50)])
    control.start(77)
    control.plan(register(), chunk(0, epoch=77))
    assert first_id(control.results()[0]) == shadow_tokens(PROMPT, 1)[0]
    assert process.poll() is None


def test_sec_1_links_at_a_path_that_no_file_can_have_are_refused(control_of, tmp_path):
    control = control_of(2, links=str(tmp_path))
    for stage in range(2):
        control.spawn(stage=stage)
    control.join()
    for stage in range(2):
        control.send(Start(1, 2, 64, 16, 8, 64, 512, "/links\0"), stage)
        assert "null byte" in control.receive(Started, Resync)[1].reason
    control.start(2)


def test_a_start_that_asks_too_much_is_refused(control_of, tmp_path):
    control = control_of(2, links=str(tmp_path / "missing"))
    for stage in range(2):
        control.spawn(stage=stage)
    control.join()
    with pytest.raises(AssertionError):
        control.start()
    control.send(Start(2, 2, 65, 16, 8, 64, 512, str(tmp_path)))
    while "num_blocks 65" not in control.receive(Resync)[1].reason:
        pass


def test_a_worker_without_work_gives_signs_of_life(control_of):
    control = control_of()
    control.spawn()
    control.join()
    assert control.receive(Heartbeat)[1] == Heartbeat(epoch=0)
    control.start(5)
    stamps = []
    for _ in range(3):
        assert control.receive(Heartbeat)[1] == Heartbeat(epoch=5)
        stamps.append(time.monotonic())
    assert stamps[2] - stamps[0] > 1


def test_a_new_life_of_control_gets_a_hello_from_the_same_process(control_of):
    control = control_of()
    process = control.spawn()
    control.join()
    control.start()
    control.plan(register(), chunk(0))
    control.results()
    control.stop_listening()
    control.listen()
    control.peers[0], _ = control.receive(Heartbeat)
    control.send(Redial(instance=2))
    assert control.join()[0].pid == process.pid
    control.plan(decode(1))
    assert "before an epoch" in control.receive(Resync)[1].reason
    control.start(2)
    control.plan(register(), chunk(0, epoch=2))
    assert first_id(control.results()[0]) == shadow_tokens(PROMPT, 1)[0]


def test_sigterm_ends_a_worker_after_its_iteration_and_sigint_does_not(control_of):
    control = control_of()
    process = control.spawn("--step-ms", "300")
    control.join()
    control.start()
    process.send_signal(signal.SIGINT)
    control.plan(register(), chunk(0))
    control.plan(decode(1))
    control.results()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert "fails" not in control.log()


def test_zmq_1_a_worker_ends_although_control_is_gone(control_of):
    """ZMQ-1: what a worker could not send does not keep it."""
    control = control_of()
    process = control.spawn()
    control.join()
    control.stop_listening()
    time.sleep(1.2)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert time.monotonic() - begin < 2
    control.listen()


def test_a_worker_dies_with_its_parent(control_of):
    control = control_of()
    code = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-P", "-m", "evenflow.dataplane.simulated",
            "--connect", {control.endpoint!r}])
        print(child.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        _, hello = control.receive(Hello)
        assert hello.pid == pid
        parent.kill()
    assert gone(pid)


def test_a_worker_whose_parent_is_gone_already_does_not_start(control_of):
    control = control_of()
    process = control.spawn("--parent", "1")
    assert process.wait(20) == 1
    assert "process 1, which started this one, has ended" in control.log()


def test_a_poisoned_token_crashes_or_hangs_the_worker_that_computes_it(control_of):
    control = control_of(2)
    control.spawn("--hang-on", "31", stage=0)
    control.spawn("--crash-on", "32", stage=1)
    control.join()
    control.start()
    control.plan(register(), chunk(0))
    control.results()
    control.plan(register(1, prompt=[30, 32, 30]), chunk(1, slot=1, tokens=3))
    assert control.receive(Result)[1].ids == b""
    assert control.processes[1].wait(10) == 70
    control.send_frames([register(2, prompt=[31]), chunk(2, slot=2, tokens=1)], 0)
    with pytest.raises(TimeoutError):
        control.receive(Result, Heartbeat, timeout_ms=1500)
    control.processes[0].send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        control.processes[0].wait(0.5)


def test_a_script_decides_the_output(control_of, tmp_path):
    path = tmp_path / "script.json"
    path.write_text(json.dumps([900, 901]))
    control = control_of()
    control.spawn("--script", str(path), "--eos-id", "2", "--vocab-size", "1000", "--model", "parrot")
    (hello,) = control.join()
    assert (hello.model, hello.eos_ids, hello.vocab_size) == ("parrot", (2,), 1000)
    control.start()
    control.plan(register(stop_ids=(2,)), chunk(0))
    results = [control.results()[0]]
    for step in (1, 2):
        control.plan(decode(step))
        results.append(control.results()[0])
    assert [first_id(result) for result in results] == [900, 901, 2]
    assert [result.stopped for result in results] == [b"", b"", b"\0\0"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--script", "/nowhere.json"], "No such file"),
        (["--stage", "3"], "stage 3 of 1"),
        (["--connect", "nonsense"], "cannot dial nonsense"),
    ],
)
def test_what_cannot_start_says_so_last(control_of, arguments, reason):
    control = control_of()
    assert control.spawn(*arguments).wait(20) == 1
    last = control.log().strip().split("\n")[-1]
    assert "cannot start" in last
    assert reason in last


def test_an_exception_in_an_iteration_ends_the_worker_with_code_1(control_of, caplog):
    class Broken(ShadowRunner):
        def run(self, batch, hidden):
            raise ArithmeticError("the device is on fire")

    control = control_of()
    worker = Worker(Broken(num_blocks=64), control.endpoint, 0, 0, 1, Limits())
    codes = []
    thread = threading.Thread(target=lambda: codes.append(worker.run()))
    thread.start()
    control.join()
    control.start()
    control.plan(register(), chunk(0))
    thread.join(10)
    assert codes == [1]
    assert "the device is on fire" in caplog.text
    assert "Traceback" in caplog.text


def test_a_scripted_worker_needs_no_torch():
    code = "import sys, evenflow.dataplane.simulated.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0
