"""The command line of each child process: functions of the options, the run directory and this process's id.

Children are started as ``python -P -m …`` so that nothing in the working directory can shadow a module. The
names here are the contract with ``control``, ``control.gateway``, ``dataplane`` and ``dataplane.simulated``.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..control.core.bounds import USUAL_TOKENS, worker_tokens
from .libraries import library_env
from .listener import OpenDoor
from .options import SCRIPTED, ServeOptions, threads_per_worker
from .run_dir import RunDir

#: Where scripted workers' ids get their text from, and how many ids have one.
_SCRIPTED_TEXT = "smollm2-135m"
_SCRIPTED_VOCAB = 49_152
#: The gateway ends after control, which tells it how each request ended at the limit.
_GATEWAY_MARGIN = 2.0
_MOST_SLOTS = 1 << 16


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start one process. ``name`` prefixes its log lines; ``worker``: its (replica, stage), if any."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    worker: tuple[int, int] | None = None
    pass_fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of one server."""

    control: ChildSpec
    gateway: ChildSpec
    workers: tuple[ChildSpec, ...]


def _python(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", f"evenflow.{module}"]


def served_name(options: ServeOptions) -> str:
    """The model's id in the API: a path's last part, or the name as it was given."""
    given = options.model.rstrip("/").rpartition("/")[2] or options.model
    return options.served_model_name or given.removesuffix(".gguf")


def control_argv(options: ServeOptions, run: RunDir, doors: Sequence[OpenDoor] = ()) -> list[str]:
    argv = [
        *_python("control"),
        *("--workers", run.workers_endpoint),
        *("--clients", run.clients_endpoint),
        *("--events", run.events_endpoint),
        *("--links", str(run.links)),
        *("--replicas", str(options.replicas)),
        *("--stages", str(options.stages)),
        *("--token-budget", str(options.token_budget)),
        *("--max-num-seqs", str(options.max_num_seqs)),
        *("--policy", options.policy),
        *("--drain-timeout", f"{options.drain_timeout:g}"),
        *("--served-model-name", served_name(options)),
        *("--log-level", options.log_level),
        *("--block-size", str(options.block_size)),
    ]
    for replica in options.external:
        argv += ["--external", str(replica)]
    for door in doors:
        argv += [f"--listen-{door.role}s", door.endpoint, f"--listen-{door.role}s-fd", str(door.socket.fileno())]
    if options.network.keys is not None:
        argv += ["--keys", options.network.keys]
    if options.network.insecure:
        argv += ["--insecure"]
    if options.max_model_len is not None:
        argv += ["--max-model-len", str(options.max_model_len)]
    if not options.prefix_caching:
        argv += ["--no-prefix-cache"]
    if options.admission != "fcfs":
        argv += ["--admission", options.admission, "--patience", f"{options.patience:g}"]
    for tenant, weight in options.tenant_weights.items():
        argv += ["--tenant-weight", f"{tenant}={weight:g}"]
    if options.queue_timeout is not None:
        argv += ["--queue-timeout", f"{options.queue_timeout:g}"]
    if options.prefill_share is not None:
        argv += ["--prefill-share", f"{options.prefill_share:g}"]
    if options.tbt_slo is not None:
        argv += ["--tbt-slo", options.tbt_slo]
    if options.ttft_slo is not None:
        argv += ["--ttft-slo", options.ttft_slo]
    if options.journal is not None:
        argv += ["--journal", options.journal, "--journal-size", str(options.journal_size)]
        argv += ["--journal-ids"] if options.journal_ids else []
    if options.hang_timeout is not None:
        argv += ["--hang-timeout", f"{options.hang_timeout:g}"]
    return argv


def gateway_argv(options: ServeOptions, control: str, fd: int, keys: Path | None = None) -> list[str]:
    """``control``: the endpoint for clients, with ``keys`` if it is a ``tcp://`` one."""
    return [
        *_python("control.gateway"),
        *("--control", control),
        *([] if keys is None else ["--keys", str(keys)]),
        *("--model", _SCRIPTED_TEXT if options.scripted else options.model),
        *("--served-model-name", served_name(options)),
        *("--host", options.host),
        *("--fd", str(fd)),
        *("--drain-timeout", f"{options.drain_timeout + _GATEWAY_MARGIN:g}"),
        *("--parent", str(os.getpid())),
        *([] if options.generation_config else ["--no-generation-config"]),
    ]


def worker_argv(
    options: ServeOptions, connect: str, replica: int, stage: int, threads: int, rest: Sequence[str] = ()
) -> list[str]:
    """``connect``: the endpoint of control for workers; ``rest``: what only this kind of worker is told."""
    o = options
    tokens = max(USUAL_TOKENS, worker_tokens(o.policy, o.token_budget, o.max_model_len, o.max_num_seqs))
    place = [
        *("--connect", connect),
        *("--replica", str(replica)),
        *("--stage", str(stage)),
        *("--stages", str(options.stages)),
        *("--block-size", str(options.block_size)),
        *("--max-tokens", str(tokens)),
        # A slot stays taken for as long as a plan in flight names it, longer than its sequence runs.
        *("--max-slots", str(min(_MOST_SLOTS, 2 * options.max_num_seqs))),
        *rest,
    ]
    if options.simulate is not None:
        device = ["--device", options.simulate, "--blank", "--vocab-size", str(_SCRIPTED_VOCAB)]
        return [*_python("dataplane.simulated"), *place, "--model", options.model, *device, *options.worker_args]
    if options.scripted:
        timing = ["--step-ms", f"{options.step_ms:g}", "--vocab-size", str(_SCRIPTED_VOCAB)]
        return [*_python("dataplane.simulated"), *place, "--model", SCRIPTED, *timing, *options.worker_args]
    argv = [
        *_python("dataplane"),
        *place,
        *("--model", options.model),
        *("--dtype", options.dtype),
        *("--kv-memory", str(options.kv_cache_memory)),
        *("--threads", str(threads)),
    ]
    if options.attention_backend is not None:
        argv += ["--attention-backend", options.attention_backend]
    return argv


def build_plan(
    options: ServeOptions,
    run: RunDir,
    fd: int,
    cores: int,
    environ: Mapping[str, str],
    doors: Sequence[OpenDoor] = (),
) -> Plan:
    """Every child of a server. ``fd``: the listening HTTP socket; ``cores``: shared out among the workers; ``doors``:
    where other machines dial control."""
    threads = options.threads or threads_per_worker(cores, options.workers)
    env = {**environ, "PYTHONUNBUFFERED": "1"}
    worker_env = {**env, **library_env(threads, env)}
    parent = ("--parent", str(os.getpid()))
    workers = tuple(
        ChildSpec(
            name=f"worker {replica}.{stage}",
            argv=tuple(worker_argv(options, run.workers_endpoint, replica, stage, threads, parent)),
            env=worker_env,
            worker=(replica, stage),
        )
        for replica in range(options.replicas)
        if replica not in options.external
        for stage in range(options.stages)
    )
    return Plan(
        control=ChildSpec(
            "control",
            tuple(control_argv(options, run, doors)),
            env,
            pass_fds=tuple(door.socket.fileno() for door in doors),
        ),
        gateway=ChildSpec("gateway", tuple(gateway_argv(options, run.clients_endpoint, fd)), env, pass_fds=(fd,)),
        workers=workers,
    )
