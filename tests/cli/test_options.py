"""What the command line asks for becomes options, and options become the children's command lines."""

import os
from collections.abc import Sequence
from pathlib import Path

import evenflow.cli.launcher
import evenflow.cli.options
import pytest
from evenflow.cli.children import build_plan
from evenflow.cli.flags import Admission, Policy
from evenflow.cli.listener import PortTaken, listen, url_of
from evenflow.cli.main import app
from evenflow.cli.options import (
    GIB,
    SCRIPTED,
    MemoryShort,
    ServeOptions,
    UsageError,
    default_kv_memory,
    parse_bytes,
    parse_weights,
    settle,
    threads_per_worker,
    usable_cores,
)
from evenflow.cli.run_dir import RunDir
from evenflow.control.__main__ import _options as control_options
from evenflow.control.core.bounds import ADMISSIONS, POLICIES, WHOLE_PROMPTS
from typer.testing import CliRunner

RUN = RunDir(Path("/run/x"), Path("/dev/shm/x"), -1)


def flag(argv: Sequence[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def options_of(monkeypatch: pytest.MonkeyPatch, *arguments: str, env: dict[str, str] | None = None) -> ServeOptions:
    """What ``evenflow serve`` would start."""
    got: list[ServeOptions] = []

    def remember(options: ServeOptions, notes: list[str]) -> int:
        got.append(options)
        return 0

    monkeypatch.setattr(evenflow.cli.launcher, "serve", remember)
    monkeypatch.setattr(evenflow.cli.options, "check_model", lambda options: None)
    result = CliRunner().invoke(app, ["serve", *arguments], env=env or {})
    assert result.exit_code == 0, result.output
    return got[0]


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(monkeypatch, "smollm2-135m")
    assert (options.host, options.port, options.dtype) == ("127.0.0.1", 8000, "bfloat16")
    assert (options.stages, options.replicas, options.token_budget, options.block_size) == (1, 1, 256, 16)
    assert options.prefix_caching and options.drain_timeout == 30.0


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--stages", "2"], "stages", 2),
        (["--pipeline-parallel-size", "3"], "stages", 3),
        (["--pipeline_parallel_size", "3"], "stages", 3),
        (["-pp", "2"], "stages", 2),
        (["--data-parallel-size", "2"], "replicas", 2),
        (["-dp", "2"], "replicas", 2),
        (["--max-num-batched-tokens", "512"], "token_budget", 512),
        (["--token_budget", "512"], "token_budget", 512),
        (["--no-enable-prefix-caching"], "prefix_caching", False),
        (["--no_enable_prefix_caching"], "prefix_caching", False),
        (["--kv-cache-memory", "1.5G"], "kv_cache_memory", 3 << 29),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--hang-timeout", "2"], "hang_timeout", 2.0),
        (["--threads", "1"], "threads", 1),
        (["-t", "1"], "threads", 1),
        (["--served-model-name", "m"], "served_model_name", "m"),
        (["--no-generation-config"], "generation_config", False),
        (["--policy", "prefill-first"], "policy", "prefill-first"),
    ],
)
def test_flags_and_their_other_names(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], field: str, value: object
) -> None:
    assert getattr(options_of(monkeypatch, "m", *arguments), field) == value


def test_environment_is_overridden_by_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"EVENFLOW_TOKEN_BUDGET": "64", "EVENFLOW_PORT": "9000", "EVENFLOW_ENABLE_PREFIX_CACHING": "false"}
    options = options_of(monkeypatch, "m", "--port", "9001", env=env)
    assert (options.token_budget, options.port, options.prefix_caching) == (64, 9001, False)


@pytest.mark.parametrize(
    ("change", "knobs"),
    [
        ({"token_budget": 0}, ["--token-budget"]),
        ({"token_budget": -1}, ["--token-budget"]),
        ({"max_num_seqs": 0}, ["--max-num-seqs"]),
        ({"max_num_seqs": 1 << 16}, ["--max-num-seqs"]),
        ({"block_size": 0}, ["--block-size"]),
        ({"block_size": 24}, ["--block-size"]),
        ({"block_size": 8192}, ["--block-size"]),
        ({"stages": 0}, ["--stages"]),
        ({"replicas": 0}, ["--replicas"]),
        ({"max_model_len": 0}, ["--max-model-len"]),
        ({"kv_cache_memory": 0}, ["--kv-cache-memory"]),
        ({"port": 65536}, ["--port"]),
        ({"hang_timeout": 0.0}, ["--hang-timeout"]),
        ({"threads": 0}, ["--threads"]),
        ({"drain_timeout": -1.0}, ["--drain-timeout"]),
        ({"prefill_share": 1.0}, ["--prefill-share"]),
        ({"policy": "orca"}, ["--policy", "hybrid"]),
        ({"admission": "lifo"}, ["--admission", "fcfs, priority, deadline, fair"]),
        ({"patience": 0.0}, ["--patience"]),
        ({"queue_timeout": -1.0}, ["--queue-timeout"]),
        ({"tenant_weights": {"a": 2.0}}, ["--tenant-weight", "--admission fair"]),
        ({"admission": "fair", "tenant_weights": {"a": 0.0}}, ["--tenant-weight a=0", "0.01 to 100"]),
        ({"admission": "fair", "tenant_weights": {"": 1.0}}, ["--tenant-weight"]),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence_sch5(change: dict[str, object], knobs: list[str]) -> None:
    """SCH-5: refused before anything starts, naming the knob."""
    with pytest.raises(UsageError) as refusal:
        settle(ServeOptions(model="m", **change))  # type: ignore[arg-type]
    text = str(refusal.value)
    assert all(knob in text for knob in knobs)
    assert "\n" not in text and text.endswith(".")


@pytest.mark.parametrize(("budget", "stages", "asked", "runs"), [(16, 1, 256, 16), (16, 2, 256, 32), (256, 1, 9, 9)])
def test_more_sequences_than_the_budget_are_lowered_sch5(budget: int, stages: int, asked: int, runs: int) -> None:
    """SCH-5: budget < sequences is normalised with a line that names both knobs."""
    options, notes = settle(ServeOptions("m", token_budget=budget, stages=stages, max_num_seqs=asked))
    assert options.max_num_seqs == runs
    assert len(notes) == (runs != asked)
    assert all("--max-num-seqs" in note and "--token-budget" in note for note in notes)


def test_kv_memory_by_default() -> None:
    assert default_kv_memory(10 * GIB, 1) == 2 * GIB
    assert default_kv_memory(10 * GIB, 4) == GIB // 2
    assert default_kv_memory(1000 * GIB, 1) == 4 * GIB
    assert default_kv_memory(0, 1) > 0
    options, _ = settle(ServeOptions("m", stages=2), free=20 * GIB)
    assert options.kv_cache_memory == 2 * GIB
    options, _ = settle(ServeOptions("m", kv_cache_memory=64 << 20), free=20 * GIB)
    assert options.kv_cache_memory == 64 << 20


def test_more_kv_memory_than_there_is() -> None:
    with pytest.raises(MemoryShort, match=r"--kv-cache-memory.*lower it"):
        settle(ServeOptions("m", stages=2, kv_cache_memory=6 * GIB), free=10 * GIB)
    settle(ServeOptions("m", kv_cache_memory=6 * GIB), free=10 * GIB)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1 << 20), ("512M", 512 << 20), ("2g", 2 << 30), ("1.5GiB", 3 << 29), ("64 KB", 64 << 10)],
)
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1X", "1 2", "nan"])
def test_bytes_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


def test_threads() -> None:
    assert [threads_per_worker(8, workers) for workers in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    worker = build_plan(ServeOptions("m", stages=2, threads=1), RUN, 7, 8, {}).workers[0]
    assert flag(worker.argv, "--threads") == "1" == worker.env["OMP_NUM_THREADS"]


def test_more_threads_than_cores_are_lowered_and_said() -> None:
    cores = usable_cores()
    options, notes = settle(ServeOptions(SCRIPTED, threads=cores + 1), 8 << 30)
    assert options.threads == cores
    assert any(f"--threads {cores + 1} is lowered to {cores}" in note for note in notes)
    kept, notes = settle(ServeOptions(SCRIPTED, threads=cores), 8 << 30)
    assert kept.threads == cores and not any("--threads" in note for note in notes)


def test_control_is_told_of_the_journal() -> None:
    argv = build_plan(ServeOptions("m", journal="/x/j", journal_size=9 << 20), RUN, 7, 8, {}).control.argv
    assert flag(argv, "--journal") == "/x/j" and flag(argv, "--journal-size") == str(9 << 20)
    assert "--journal-ids" not in argv
    assert "--journal-ids" in build_plan(ServeOptions("m", journal="j", journal_ids=True), RUN, 7, 8, {}).control.argv


def test_control_command() -> None:
    options = ServeOptions(
        "m", stages=2, replicas=3, token_budget=64, max_model_len=100, prefix_caching=False, prefill_share=0.0,
        hang_timeout=2.0, served_model_name="name",
    )  # fmt: skip
    argv = build_plan(options, RUN, 7, 8, {}).control.argv
    assert argv[1:4] == ("-P", "-m", "evenflow.control")
    assert argv[4:] == (
        "--workers", "ipc:///run/x/workers", "--clients", "ipc:///run/x/clients",
        "--events", "ipc:///run/x/events", "--links", "/dev/shm/x",
        "--replicas", "3", "--stages", "2", "--token-budget", "64", "--max-num-seqs", "256", "--policy", "stall-free",
        "--drain-timeout", "30", "--served-model-name", "name", "--log-level", "info",
        "--block-size", "16", "--max-model-len", "100",
        "--no-prefix-cache", "--prefill-share", "0", "--hang-timeout", "2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "length", "budget", "tokens"),
    [
        ("stall-free", None, 256, 8192), ("stall-free", 20_000, 256, 8192), ("chunked-only", None, 10_000, 10_000),
        ("prefill-first", None, 256, 8192), ("prefill-first", 20_000, 256, 20_000), ("hybrid", None, 256, 8192 + 40),
        ("hybrid-only", 20_000, 256, 20_040), ("request-level", 100, 30_000, 30_000),
    ],
)  # fmt: skip
def test_a_worker_takes_the_iterations_of_its_policy(
    policy: str, length: int | None, budget: int, tokens: int
) -> None:
    options = ServeOptions("m", policy=policy, max_model_len=length, token_budget=budget, max_num_seqs=40)
    plan = build_plan(options, RUN, 7, 8, {})
    assert flag(plan.workers[0].argv, "--max-tokens") == str(tokens)
    assert flag(plan.control.argv, "--policy") == policy


def test_a_small_budget_does_not_bound_the_sequences_of_what_computes_prompts_whole() -> None:
    """SCH-5: their iterations hold the longest sequence, however small the budget."""
    for policy in POLICIES:
        settled, _ = settle(ServeOptions("m", policy=policy, token_budget=8, max_num_seqs=100))
        assert settled.max_num_seqs == (100 if policy in WHOLE_PROMPTS else 8)


def test_every_policy_can_be_asked_for() -> None:
    assert tuple(policy.value for policy in Policy) == POLICIES


def test_the_admission_order_reaches_the_control_process() -> None:
    weights = parse_weights(["alice=2", "b=ob=0.5"])
    options = ServeOptions("m", admission="fair", patience=30.0, tenant_weights=weights, queue_timeout=20.0)
    argv = build_plan(settle(options, 8 << 30)[0], RUN, 7, 8, {}).control.argv
    limits = control_options(list(argv[4:]))[0].limits
    assert (limits.admission, limits.patience, limits.queue_timeout) == ("fair", 30.0, 20.0)
    assert limits.tenant_weights == (("alice", 2.0), ("b=ob", 0.5))
    with pytest.raises(UsageError, match="alice=2"):
        parse_weights(["alice"])


def test_the_orders_of_the_command_line_are_those_of_the_core() -> None:
    assert tuple(order.value for order in Admission) == ADMISSIONS


def test_gateway_command_inherits_the_port() -> None:
    gateway = build_plan(ServeOptions("m"), RUN, 7, 8, {}).gateway
    assert gateway.argv[1:4] == ("-P", "-m", "evenflow.control.gateway")
    assert flag(gateway.argv, "--control") == "ipc:///run/x/clients"
    assert flag(gateway.argv, "--fd") == "7" and gateway.pass_fds == (7,)


@pytest.mark.parametrize(
    ("model", "name"),
    [("smollm2-135m", "smollm2-135m"), ("/a/Tiny-1.1B/", "Tiny-1.1B"), ("b/q.Q4_1.gguf", "q.Q4_1")],
)
def test_served_name_is_the_same_everywhere(model: str, name: str) -> None:
    plan = build_plan(ServeOptions(model), RUN, 7, 8, {})
    assert flag(plan.control.argv, "--served-model-name") == flag(plan.gateway.argv, "--served-model-name") == name


def test_children_know_their_parent() -> None:
    plan = build_plan(ServeOptions("m"), RUN, 7, 8, {})
    assert flag(plan.gateway.argv, "--parent") == flag(plan.workers[0].argv, "--parent") == str(os.getpid())


def test_worker_commands() -> None:
    options = ServeOptions("m", stages=2, replicas=2, kv_cache_memory=1 << 20, attention_backend="reference")
    plan = build_plan(options, RUN, 7, 8, {"KEPT": "1"})
    assert [worker.worker for worker in plan.workers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    last = plan.workers[-1]
    assert last.argv[1:4] == ("-P", "-m", "evenflow.dataplane")
    assert [flag(last.argv, f"--{name}") for name in ("replica", "stage", "stages")] == ["1", "1", "2"]
    assert flag(last.argv, "--threads") == "2" == last.env["OMP_NUM_THREADS"]
    assert flag(last.argv, "--kv-memory") == str(1 << 20)
    assert flag(last.argv, "--attention-backend") == "reference"
    assert last.env["KEPT"] == "1"
    assert "OMP_NUM_THREADS" not in plan.control.env


def test_scripted_worker_command() -> None:
    plan = build_plan(ServeOptions("scripted", step_ms=2.5), RUN, 7, 8, {})
    argv = plan.workers[0].argv
    assert argv[1:4] == ("-P", "-m", "evenflow.dataplane.simulated")
    assert flag(argv, "--step-ms") == "2.5"


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "")])
def test_port_zero_takes_a_free_one(host: str, shown: str) -> None:
    with listen(host, 0) as first, listen(host, 0) as second:
        assert url_of(first) != url_of(second)
        assert url_of(first).startswith(f"http://{shown}")
        assert not url_of(first).endswith(":0")


def test_host_that_is_not_ours() -> None:
    with pytest.raises(PortTaken, match="Cannot listen on"):
        listen("192.0.2.1", 0)


def test_run_directory_has_room_for_socket_names(tmp_path: Path) -> None:
    """A path that is too long for a socket is passed over, not found out later."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    run = RunDir.create({"XDG_RUNTIME_DIR": str(deep)})
    try:
        assert deep not in run.path.parents
        assert len(run.workers_endpoint.removeprefix("ipc://")) <= 107
    finally:
        run.remove()
    assert not run.path.exists() and not run.links.exists()


def test_run_directory_sweep_leaves_the_living_alone(tmp_path: Path) -> None:
    short = {"XDG_RUNTIME_DIR": "/tmp"}
    first, second = RunDir.create(short), RunDir.create(short)
    assert first.path.exists() and first.links.exists()
    for run in (first, second):
        run.remove()
