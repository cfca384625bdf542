"""What ``evenflow serve`` was asked for, checked before anything is started.

``ServeOptions`` is the launcher's whole configuration. ``settle`` turns what the user gave into what will
run: it refuses what cannot work (``UsageError``, exit code 2) and lowers what is only too large, saying so.
Units: bytes, seconds, tokens; ``cores`` are those this process may use.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from ..control.core.bounds import ADMISSIONS, POLICIES, WHOLE_PROMPTS
from ..control.core.slo import parse_slo
from ..control.options import JOURNAL_BYTES
from ..control.wire.keys import KeyFault, Role, server_keys
from ..control.wire.location import ModelNotFound, locate_model
from ..dataplane.simulated.refusal import CannotSimulate
from ..dataplane.simulated.scenario import served_cost
from .errors import MemoryShort, UsageError

#: Most tokens of an iteration that time bounds, unless told.
SLO_TOKENS = 2048

#: The model name that starts scripted workers instead of real ones (for tests of the control plane).
SCRIPTED = "scripted"

GIB = 1 << 30
#: Share of the free memory that the KV caches of all local workers get by default.
KV_SHARE = 0.2
#: No worker takes more KV memory than this unless told.
KV_CAP = 4 * GIB
KV_LEAST = 1 << 20
#: A journal's file begins with the core's state, for which there must be room.
JOURNAL_LEAST = 8 << 20

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B)?", re.IGNORECASE)
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.*-]+):(\d{1,5})")
_SCALE = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


DTYPES = ("bfloat16", "float32", "int8", "int4")
#: Stands for the quickest of these, which the launcher finds out (``precision``).
AUTO = "auto"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Network:
    """Where other machines dial, as ``tcp://host:port`` (port 0 takes a free one), and who may."""

    workers: str | None = None
    clients: str | None = None
    #: A folder as ``evenflow keys`` makes it.
    keys: str | None = None
    #: TCP without keys.
    insecure: bool = False

    @property
    def endpoints(self) -> dict[Role, str]:
        pairs: tuple[tuple[Role, str | None], ...] = (("worker", self.workers), ("client", self.clients))
        return {role: endpoint for role, endpoint in pairs if endpoint is not None}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Configuration of one launcher. ``None`` means: left to the part that knows better."""

    model: str
    served_model_name: str | None = None
    stages: int = 1
    replicas: int = 1
    token_budget: int = 256
    max_num_seqs: int = 256
    block_size: int = 16
    max_model_len: int | None = None
    #: What goes into an iteration, one of ``bounds.POLICIES``.
    policy: str = "stall-free"
    #: In which order requests are taken, one of ``bounds.ADMISSIONS``, and its parameters.
    admission: str = "fcfs"
    patience: float = 60.0
    tenant_weights: dict[str, float] = field(default_factory=dict[str, float])
    #: Seconds in which a request must be begun.
    queue_timeout: float | None = None
    dtype: str = "bfloat16"
    #: KV cache bytes of each worker.
    kv_cache_memory: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    prefix_caching: bool = True
    prefill_share: float | None = None
    #: Targets for the time between tokens and to the first one, as ``core.slo.parse_slo`` reads them.
    tbt_slo: str | None = None
    ttft_slo: str | None = None
    generation_config: bool = True
    drain_timeout: float = 30.0
    hang_timeout: float | None = None
    attention_backend: str | None = None
    #: Threads that compute in each worker.
    threads: int | None = None
    log_level: str = "info"
    #: Where control records its events and plans, and whether with token ids; bytes of the last two files.
    journal: str | None = None
    journal_ids: bool = False
    journal_size: int = JOURNAL_BYTES
    #: Devices whose time simulated workers take, such as ``4xh100`` for each stage; None: the model is computed.
    simulate: str | None = None
    #: Planned duration of an iteration of a scripted worker, in milliseconds.
    step_ms: float = 5.0
    #: More arguments for scripted workers.
    worker_args: tuple[str, ...] = ()
    #: Replicas whose workers are started by hand.
    external: tuple[int, ...] = ()
    network: Network = Network()

    @property
    def scripted(self) -> bool:
        """Whether nothing is computed."""
        return self.model == SCRIPTED or self.simulate is not None

    @property
    def workers(self) -> int:
        """Workers that the launcher starts."""
        return self.stages * (self.replicas - len(self.external))


def parse_bytes(text: str, flag: str = "--kv-cache-memory") -> int:
    """``512M`` → 536870912. Suffixes K, M, G, T are powers of 1024; a bare number is bytes."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{flag} {text!r} is not a number of bytes such as 800000000, 512M or 2G.")
    return int(float(match[1]) * _SCALE[match[2].upper()])


def parse_weights(texts: Iterable[str]) -> dict[str, float]:
    """``alice=2`` → {"alice": 2.0}; the last of a name counts."""
    weights: dict[str, float] = {}
    for text in texts:
        name, _, weight = text.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            raise UsageError(f"--tenant-weight {text!r} is not a tenant and a number such as alice=2.") from None
    return weights


def free_memory() -> int:
    """Bytes that can still be used: of the machine, or of the control group where that is less."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # no control group: the machine's figure stands
    return free


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def threads_per_worker(cores: int, workers: int) -> int:
    """One thread a core at most: oversubscribed parallel regions stall for milliseconds."""
    return max(1, cores // max(1, workers))


def default_kv_memory(free: int, workers: int) -> int:
    return max(KV_LEAST, min(KV_CAP, int(free * KV_SHARE) // max(1, workers)))


def _refuse(options: ServeOptions) -> str | None:
    """Why ``options`` cannot run, or None."""
    o = options
    if o.stages < 1 or o.replicas < 1:
        return "--stages and --replicas must be at least 1."
    if o.token_budget < 1:
        return f"--token-budget {o.token_budget} leaves no iteration anything to run; it must be at least 1."
    if o.max_num_seqs < 1:
        return f"--max-num-seqs {o.max_num_seqs} lets no request run; it must be at least 1."
    if o.max_num_seqs >= 1 << 16:
        return f"--max-num-seqs {o.max_num_seqs} is too large; at most 65535 sequences run in a replica."
    if o.block_size < 1 or o.block_size & (o.block_size - 1):
        return f"--block-size {o.block_size} is not a power of two, such as 8, 16 or 32."
    if o.block_size > 4096:
        return f"--block-size {o.block_size} is too large; at most 4096 tokens make a block."
    if o.max_model_len is not None and o.max_model_len < 2:
        return f"--max-model-len {o.max_model_len} leaves no room for an answer; it must be at least 2."
    if o.kv_cache_memory is not None and o.kv_cache_memory < KV_LEAST:
        return f"--kv-cache-memory {o.kv_cache_memory} is too small; it must be at least 1M."
    if o.threads is not None and o.threads < 1:
        return f"--threads {o.threads} lets no worker compute; it must be at least 1."
    if not 0 <= o.port < 1 << 16:
        return f"--port {o.port} is not a port; it must be between 0 and 65535."
    if o.drain_timeout < 0:
        return f"--drain-timeout {o.drain_timeout:g} is negative."
    if o.hang_timeout is not None and o.hang_timeout <= 0:
        return f"--hang-timeout {o.hang_timeout:g} must be more than 0 seconds."
    if o.journal_ids and o.journal is None:
        return "--journal-ids needs --journal."
    if o.journal_size < JOURNAL_LEAST:
        return f"--journal-size {o.journal_size} is too small; it must be at least {JOURNAL_LEAST >> 20}M."
    if o.prefill_share is not None and not 0 <= o.prefill_share < 1:
        return f"--prefill-share {o.prefill_share:g} must be at least 0 and less than 1."
    if (problem := _refuse_slo(o)) is not None:
        return problem
    if (problem := _refuse_admission(o)) is not None:
        return problem
    if o.policy not in POLICIES:
        return f"--policy {o.policy} is not one of {', '.join(POLICIES)}."
    if o.worker_args and not o.scripted:
        return f"--worker-arg is for --simulate and the model {SCRIPTED} only."
    if o.simulate is not None and o.model == SCRIPTED:
        return f"--simulate needs a model with sizes, which {SCRIPTED} has not."
    if o.scripted and o.step_ms < 0:
        return f"--step-ms {o.step_ms:g} is negative."
    if o.dtype not in (AUTO, *DTYPES):
        return f"--dtype {o.dtype} is not one of {', '.join((AUTO, *DTYPES))}."
    if o.log_level not in LOG_LEVELS:
        return f"--log-level {o.log_level} is not one of {', '.join(LOG_LEVELS)}."
    return _refuse_network(o)


def _refuse_slo(options: ServeOptions) -> str | None:
    if options.tbt_slo is None:
        return None if options.ttft_slo is None else "--ttft-slo needs --tbt-slo, which bounds the chunks."
    if options.policy != "stall-free":
        return f"--tbt-slo needs --policy stall-free: {options.policy} does not bound an iteration by its chunks."
    try:
        parse_slo(options.tbt_slo, options.ttft_slo)
    except ValueError as error:
        return f"{error}."
    return None


def _refuse_admission(o: ServeOptions) -> str | None:
    if o.admission not in ADMISSIONS:
        return f"--admission {o.admission} is not one of {', '.join(ADMISSIONS)}."
    if not 0.001 <= o.patience <= 1e6:
        return f"--patience {o.patience:g} must be from 0.001 to 1000000 seconds."
    if o.queue_timeout is not None and not 0.001 <= o.queue_timeout <= 1e6:
        return f"--queue-timeout {o.queue_timeout:g} must be from 0.001 to 1000000 seconds."
    for tenant, weight in o.tenant_weights.items():
        if o.admission != "fair":
            return f"--tenant-weight {tenant} is for --admission fair only."
        if not tenant or not 0.01 <= weight <= 100:
            return f"--tenant-weight {tenant}={weight:g} must name a tenant and a weight from 0.01 to 100."
    return None


def _refuse_network(options: ServeOptions) -> str | None:
    network = options.network
    if options.external and network.workers is None:
        return (
            "Workers that are started by hand need an address to dial: [network] workers, such as tcp://0.0.0.0:5556."
        )
    for role, endpoint in network.endpoints.items():
        if _TCP.fullmatch(endpoint) is None:
            return f"[network] {role}s {endpoint!r} is not an address such as tcp://10.0.0.1:5556."
        if network.keys is None and not network.insecure:
            return (
                f"[network] {role}s {endpoint} without keys would let in whoever reaches it; make some with"
                " evenflow keys and name their folder in [network] keys, or insist with insecure = true."
            )
    return None


def check_keys(options: ServeOptions) -> None:
    """Raises ``UsageError`` if the keys are named but cannot be used."""
    if options.network.keys is not None:
        try:
            server_keys(options.network.keys)
        except KeyFault as error:
            raise UsageError(f"{error}.") from None


def check_journal(options: ServeOptions) -> None:
    """Raises ``UsageError`` if no journal can be written there."""
    if options.journal is None:
        return
    path = Path(options.journal)
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UsageError(f"--journal {path} is not a file.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        problem = "cannot be written to" if path.parent.is_dir() else "does not exist"
        raise UsageError(f"--journal {path}: the folder {path.parent} {problem}.")


def check_model(options: ServeOptions) -> None:
    """Raises ``UsageError`` if there is no such model on this machine."""
    if options.simulate is not None:
        try:
            served_cost(options.model, options.simulate, max(1, options.stages))
        except CannotSimulate as error:
            raise UsageError(f"--simulate {options.simulate}: {error}.") from None
    if options.scripted:
        return
    try:
        locate_model(options.model)
    except ModelNotFound as error:
        sentence = str(error).rstrip(".")
        raise UsageError(f"{sentence[:1].upper()}{sentence[1:]}.") from None


def settle(options: ServeOptions, free: int | None = None) -> tuple[ServeOptions, list[str]]:
    """The options that will run, and a line for each that was changed. Raises ``UsageError``, ``MemoryShort``.

    ``free``: bytes of free memory, asked of the system if None.
    """
    refusal = _refuse(options)
    if refusal is not None:
        raise UsageError(refusal)
    notes: list[str] = []
    # A sequence decodes in one lane, a lane has the whole budget, and a replica has a lane for each stage.
    # What a policy needs that computes prompts whole is known when the model's length is.
    runnable = options.token_budget * options.stages
    if options.policy not in WHOLE_PROMPTS and options.max_num_seqs > runnable:
        notes.append(
            f"--max-num-seqs {options.max_num_seqs} is lowered to {runnable}: with --token-budget"
            f" {options.token_budget} and --stages {options.stages} no more sequences can decode at once."
        )
        options = replace(options, max_num_seqs=runnable)
    if options.threads is not None and options.threads > (cores := usable_cores()):
        # Parallel regions that wait for a thread without a core stall for milliseconds.
        notes.append(f"--threads {options.threads} is lowered to {cores}, the cores that this process may use.")
        options = replace(options, threads=cores)
    free = free_memory() if free is None else free
    if options.kv_cache_memory is None:
        options = replace(options, kv_cache_memory=default_kv_memory(free, options.workers))
    elif options.kv_cache_memory * options.workers > free:
        raise MemoryShort(
            f"--kv-cache-memory {options.kv_cache_memory} for each of {options.workers} workers is more than the"
            f" {free} bytes of memory that are free; lower it, or --stages and --replicas."
        )
    return options, notes
