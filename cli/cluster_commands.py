"""The grammar of the commands for more than one machine: ``launch``, ``worker``, ``keys``."""

from pathlib import Path
from typing import Annotated

import typer

from .flags import Dtype, env


def launch(
    file: Annotated[Path, typer.Argument(metavar="CLUSTER.TOML", help="Model, replicas, addresses, keys.")],
) -> None:
    """Serve as a TOML file describes it: replicas started here, or by hand on other machines."""
    from .cluster import read_cluster
    from .launcher import serve as run_server
    from .options import check_keys, check_model, settle
    from .precision import settle_dtype

    options, notes = settle(read_cluster(file))
    check_keys(options)
    check_model(options)
    options, measured = settle_dtype(options)
    raise typer.Exit(run_server(options, [*notes, *measured]))


def worker(
    connect: Annotated[
        str, typer.Option("--connect", metavar="ENDPOINT", envvar=env("connect"), help="As launch says: tcp://…")
    ],
    model: Annotated[str, typer.Option("--model", "-m", envvar=env("model"), help="As for serve; on this machine.")],
    replica: Annotated[int, typer.Option("--replica", min=0, max=65535, help="Which replica it is part of.")] = 0,
    stage: Annotated[int, typer.Option("--stage", min=0, max=65535, help="Which stage of it.")] = 0,
    stages: Annotated[
        int, typer.Option("--stages", min=0, max=65535, show_default="the server's", help="Stages of a replica.")
    ] = 0,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", metavar="FOLDER", envvar=env("keys"), help="server.pub and worker.key."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Dial tcp:// without keys.")] = False,
    dtype: Annotated[Dtype, typer.Option("--dtype", envvar=env("dtype"), help="As for serve.")] = Dtype.BFLOAT16,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option("--kv-cache-memory", envvar=env("kv_cache_memory"), metavar="BYTES", help="As for serve."),
    ] = None,
    attention_backend: Annotated[
        str | None, typer.Option("--attention-backend", envvar=env("attention_backend"), help="As for serve.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", "-t", envvar=env("threads"), show_default="its share of the cores", help="As for serve."
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", show_default="never", help="Give up if nobody answers."),
    ] = None,
    simulate: Annotated[str | None, typer.Option("--simulate", metavar="DEVICE", help="As for serve.")] = None,
    step_ms: Annotated[float, typer.Option("--step-ms", hidden=True, help="Scripted workers' iteration.")] = 5.0,
    worker_arg: Annotated[
        list[str] | None, typer.Option("--worker-arg", hidden=True, help="An argument for scripted workers.")
    ] = None,
) -> None:
    """Run one worker, here and now, for a server that `evenflow launch` has started."""
    from .options import ServeOptions, parse_bytes
    from .worker import Place, run_worker

    options = ServeOptions(
        model=model,
        dtype=dtype.value,
        kv_cache_memory=None if kv_cache_memory is None else parse_bytes(kv_cache_memory),
        attention_backend=attention_backend,
        simulate=simulate,
        step_ms=step_ms,
        worker_args=tuple(worker_arg or ()),
        threads=threads,
    )
    place = Place(connect, replica, stage, stages)
    raise typer.Exit(run_worker(options, place, keys, insecure, timeout))


def keys(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the keys are.")] = Path("keys"),
    add_worker: Annotated[str | None, typer.Option("--add-worker", metavar="NAME", help="Let one more in.")] = None,
    add_client: Annotated[str | None, typer.Option("--add-client", metavar="NAME", help="Let one more in.")] = None,
) -> None:
    """Make the keys with which workers and clients on other machines are known."""
    from .keys import add_peer, make_keys

    lines: list[str] = []
    if add_worker is None and add_client is None:
        lines += make_keys(out)
    if add_worker is not None:
        lines += add_peer(out, "worker", add_worker)
    if add_client is not None:
        lines += add_peer(out, "client", add_client)
    print("\n".join(lines))
