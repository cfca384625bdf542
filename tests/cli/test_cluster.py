"""What ``cluster.toml`` says becomes options and command lines; what it cannot say is refused by name."""

import os
from pathlib import Path

import pytest
from evenflow.cli.children import build_plan
from evenflow.cli.cluster import read_cluster
from evenflow.cli.errors import UsageError
from evenflow.cli.keys import make_keys
from evenflow.cli.launcher import waiting_lines
from evenflow.cli.listener import PortTaken, open_door
from evenflow.cli.options import Network, ServeOptions, check_keys, settle
from evenflow.cli.run_dir import RunDir
from evenflow.cli.worker import Place, Refused, ask_terms, external_argv
from evenflow.control.wire import Terms
from evenflow.control.wire.keys import dial_keys

WHOLE = """
model = "scripted"
stages = 2
token-budget = 128
max_num_seqs = 32
kv_cache_memory = "64M"
port = 0
drain_timeout = 3
enable_prefix_caching = false
worker_args = ["--tile=16"]

[network]
workers = "tcp://127.0.0.1:5556"
clients = "tcp://[::1]:5557"
keys = "keys"

[[replica]]
launcher = "local"

[[replica]]
launcher = "external"
"""


def cluster(tmp_path: Path, text: str) -> ServeOptions:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster(path)


def test_a_whole_file(tmp_path: Path) -> None:
    options = cluster(tmp_path, WHOLE)
    assert (options.model, options.stages, options.token_budget, options.max_num_seqs) == ("scripted", 2, 128, 32)
    assert (options.kv_cache_memory, options.port, options.prefix_caching) == (64 << 20, 0, False)
    assert (options.replicas, options.external, options.workers) == (2, (1,), 2)
    assert options.drain_timeout == 3.0 and options.worker_args == ("--tile=16",)
    assert options.network == Network("tcp://127.0.0.1:5556", "tcp://[::1]:5557", str(tmp_path / "keys"))


def test_without_replicas_or_network_it_is_serve(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    assert cluster(tmp_path, 'model = "m"\nreplicas = 3') == ServeOptions("m", replicas=3)
    assert cluster(tmp_path, 'model = "tiny.gguf"').model == str(tmp_path / "tiny.gguf"), "relative to the file"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('model = "m"\ntoken_budgt = 3', "token_budgt is not known; the nearest name is token_budget"),
        ('model = "m"\nexternal = [0]', "external is not known; the nearest name is"),
        ('model = "m"\n[network]\nworker = "x"', r"\[network\] worker is not known; the nearest name is workers"),
        (
            'model = "m"\n[[replica]]\nluncher = "x"',
            r"\[\[replica\]\] 0 luncher is not known; the nearest name is launcher",
        ),
        ('model = "m"\n[[replica]]\nlauncher = "ray"', "launcher 'ray' is not one of local, external"),
        ('model = "m"\ntoken_budget = "many"', "token_budget: expected int, got str"),
        ('model = "m"\n[network]\nkeys = 3', r"\[network\] keys: expected str"),
        ('model = "m"\nreplicas = 1\n[[replica]]', "both replicas and"),
        ('model = "m"\nreplica = 2', r"written as \[\[replica\]\]"),
        ('model = "m"\ntoken-budget = 1\ntoken_budget = 1', "token_budget is given twice"),
        ('model = "m"\nkv_cache_memory = "much"', "not a number of bytes"),
        ("stages = 2", "names no model"),
        ('model = "m"\npolicies = "hybrid"', "policies is not known; the nearest name is policy"),
        ("model = ", "is not TOML"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as error:
        cluster(tmp_path, text)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml cannot be read: No such file"):
        read_cluster(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("network", "external", "problem"),
    [
        (Network(), (0,), "need an address to dial"),
        (Network(workers="tcp://0.0.0.0:1"), (), r"without keys would let in .* insecure = true"),
        (Network(clients="tcp://127.0.0.1:1"), (), "without keys"),
        (Network(clients="127.0.0.1:1", insecure=True), (), "is not an address such as"),
        (Network(workers="ipc:///tmp/x", insecure=True), (), "is not an address such as"),
    ],
)
def test_sec_2_networks_that_are_refused(network: Network, external: tuple[int, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        settle(ServeOptions("m", network=network, external=external))


def test_keys_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    options = ServeOptions("m", network=Network("tcp://127.0.0.1:0", keys=str(tmp_path / "keys")))
    with pytest.raises(UsageError, match=r"server\.key: No such file"):
        check_keys(options)
    make_keys(tmp_path / "keys")
    check_keys(options)


def test_the_launcher_starts_no_worker_of_an_external_replica(tmp_path: Path) -> None:
    """And control gets the listening sockets, the folder of the keys, and no key."""
    options = cluster(tmp_path, WHOLE.replace("5556", "0").replace("[::1]:5557", "127.0.0.1:0"))
    make_keys(tmp_path / "keys")
    doors = [open_door(role, endpoint) for role, endpoint in options.network.endpoints.items()]
    try:
        plan = build_plan(options, RunDir(Path("/run/x"), Path("/dev/shm/x"), -1), 3, 4, dict(os.environ), doors)
        assert [spec.worker for spec in plan.workers] == [(0, 0), (0, 1)]
        argv = plan.control.argv
        assert argv[argv.index("--external") + 1] == "1"
        assert argv[argv.index("--keys") + 1] == str(tmp_path / "keys") and "--insecure" not in argv
        assert plan.control.pass_fds == tuple(door.socket.fileno() for door in doors)
        for door in doors:
            assert argv[argv.index(f"--listen-{door.role}s") + 1] == door.endpoint and not door.endpoint.endswith(
                ":0"
            )
            assert argv[argv.index(f"--listen-{door.role}s-fd") + 1] == str(door.socket.fileno())
        secrets = [path.read_text().strip() for path in (tmp_path / "keys").rglob("*.key")]
        assert len(secrets) == 3
        for spec in (plan.control, plan.gateway, *plan.workers):
            assert not any(secret in word for secret in secrets for word in spec.argv)
        first, second = waiting_lines(options, doors)
        assert f"--connect {doors[0].endpoint} --replica 1 --stage 0 --keys" in first and "--stage 1" in second
    finally:
        for door in doors:
            door.socket.close()


def test_a_taken_port_is_known_at_once() -> None:
    door = open_door("worker", "tcp://127.0.0.1:0")
    try:
        with pytest.raises(PortTaken, match=r"is taken by another process; choose another with \[network\]"):
            open_door("client", door.endpoint)
    finally:
        door.socket.close()


def test_a_worker_takes_from_the_server_what_it_was_not_told() -> None:
    terms = Terms(2, 3, 32, 9000, 20, "m")
    argv = external_argv(ServeOptions("m", threads=1), Place("tcp://h:1", 1, 2), terms, Path("/keys"))
    for words in ("--stages 3", "--block-size 32", "--max-tokens 9000", "--max-slots 40", "--replica 1", "--stage 2"):
        name, value = words.split()
        assert argv[argv.index(name) + 1] == value
    assert argv[argv.index("--threads") + 1] == "1" and argv[argv.index("--keys") + 1] == "/keys"
    assert "--external" in argv and "--parent" not in argv


def test_ops_3_an_address_that_does_not_answer_is_named(tmp_path: Path) -> None:
    """OPS-3: with its port, after a few seconds; and it is tried on until the time is up."""
    make_keys(tmp_path / "keys")
    said: list[str] = []
    with pytest.raises(Refused, match=r"127\.0\.0\.1, port 1 does not answer"):
        ask_terms(Place("tcp://127.0.0.1:1", 0, 0), dial_keys(tmp_path / "keys", "worker"), 4.0, said.append)
    assert len(said) == 1 and said[0].startswith("127.0.0.1, port 1 does not answer")
