"""The command line's grammar: flags, their other names, their environment variables; no work is done here.

Each command imports what it needs when it runs, so that ``--version`` and ``--help`` answer at once. ``_``
and ``-`` are the same in flags; every flag of ``serve`` can come from ``EVENFLOW_<FLAG>``. Exit codes: 0
done, 1 failed, 2 asked for what cannot be.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from .bench_commands import bench
from .cluster_commands import keys, launch, worker
from .errors import MeasureFailed, MemoryShort, UsageError
from .flags import SETTINGS, Admission, Dtype, LogLevel, Policy, ServedDtype, env
from .journal_commands import JournalFile, JournalIds, JournalSize, replay, whatif
from .profile_commands import profile
from .simulate_commands import Simulated, capacity, simulate, tune

app = typer.Typer(
    name="evenflow",
    help="LLM serving that does not stall: new prompts never freeze running streams.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
)


def _show_version(value: bool) -> None:
    if value:
        print(f"evenflow {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command(context_settings=SETTINGS)
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="smollm2-135m, a GGUF file, or a Hugging Face model directory.",
            envvar=env("model"),
        ),
    ],
    stages: Annotated[
        int,
        typer.Option(
            "--stages",
            "--pipeline-parallel-size",
            "-pp",
            "--pp",
            envvar=env("stages"),
            help="Pipeline stages: processes among which the layers are divided.",
        ),
    ] = 1,
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas",
            "--data-parallel-size",
            "-dp",
            "--dp",
            envvar=env("replicas"),
            help="Complete copies of the model.",
        ),
    ] = 1,
    token_budget: Annotated[
        int | None,
        typer.Option(
            "--token-budget",
            "--max-num-batched-tokens",
            envvar=env("token_budget"),
            show_default="256; 2048 with --tbt-slo",
            help="Most tokens in one iteration: bounds the gap between the tokens of a stream.",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int,
        typer.Option(
            "--max-num-seqs",
            "--max-running-requests",
            envvar=env("max_num_seqs"),
            help="Most sequences that run in a replica at once.",
        ),
    ] = 256,
    block_size: Annotated[
        int,
        typer.Option("--block-size", "--page-size", envvar=env("block_size"), help="Tokens in a KV block."),
    ] = 16,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            "--context-length",
            envvar=env("max_model_len"),
            show_default="the model's",
            help="Most tokens of a prompt and its answer together.",
        ),
    ] = None,
    dtype: Annotated[
        ServedDtype,
        typer.Option(
            "--dtype",
            envvar=env("dtype"),
            help="Type of weights; int8 and int4 compute in whole numbers, with a KV cache in bfloat16; auto measures"
            " which is the quickest here.",
        ),
    ] = ServedDtype.BFLOAT16,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-memory",
            "--kv-cache-memory-bytes",
            envvar=env("kv_cache_memory"),
            metavar="BYTES",
            show_default="a fifth of the free memory, at most 4G a worker",
            help="KV cache of each worker: a number with K, M or G.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", envvar=env("host"), help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", envvar=env("port"), help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            "--alias",
            envvar=env("served_model_name"),
            show_default="the model's",
            help="The model's id in the API.",
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            envvar=env("enable_prefix_caching"),
            help="Reuse the KV blocks of equal beginnings of prompts.",
        ),
    ] = True,
    policy: Annotated[
        Policy,
        typer.Option("--policy", envvar=env("policy"), help="What goes into an iteration: docs/scheduling.md."),
    ] = Policy.STALL_FREE,
    tbt_slo: Annotated[
        str | None,
        typer.Option(
            "--tbt-slo",
            envvar=env("tbt_slo"),
            metavar="DURATION",
            help="Bound iterations by time: tokens of a stream come at most so far apart. 100ms, or by class.",
        ),
    ] = None,
    ttft_slo: Annotated[
        str | None,
        typer.Option(
            "--ttft-slo",
            envvar=env("ttft_slo"),
            metavar="DURATION",
            help="With --tbt-slo: when first tokens are wanted. Until it is urgent, prefill takes half the room.",
        ),
    ] = None,
    admission: Annotated[
        Admission,
        typer.Option(
            "--admission",
            "--scheduling-policy",
            envvar=env("admission"),
            help="In which order requests are taken: docs/scheduling.md.",
        ),
    ] = Admission.FCFS,
    patience: Annotated[
        float,
        typer.Option(
            "--patience",
            envvar=env("patience"),
            metavar="SECONDS",
            help="By priority: the wait worth a step of it. By deadline: the deadline of requests that name none.",
        ),
    ] = 60.0,
    tenant_weight: Annotated[
        list[str] | None,
        typer.Option(
            "--tenant-weight",
            envvar=env("tenant_weight"),
            metavar="TENANT=WEIGHT",
            help="With --admission fair: the share of a tenant, 1 if not given. Repeatable.",
        ),
    ] = None,
    queue_timeout: Annotated[
        float | None,
        typer.Option(
            "--queue-timeout",
            envvar=env("queue_timeout"),
            metavar="SECONDS",
            show_default="none",
            help="A request that has not been begun by then ends.",
        ),
    ] = None,
    prefill_share: Annotated[
        float | None,
        typer.Option(
            "--prefill-share",
            envvar=env("prefill_share"),
            show_default="1/4",
            help="Share of the prefill tokens kept for the next requests; 0 is the paper's Algorithm 3.",
        ),
    ] = None,
    generation_config: Annotated[
        bool,
        typer.Option(
            "--generation-config/--no-generation-config",
            envvar=env("generation_config"),
            help="Draw as the model's generation_config.json says where a request says nothing.",
        ),
    ] = True,
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout",
            "--shutdown-timeout",
            envvar=env("drain_timeout"),
            metavar="SECONDS",
            help="How long running requests may go on after SIGTERM.",
        ),
    ] = 30.0,
    hang_timeout: Annotated[
        float | None,
        typer.Option(
            "--hang-timeout",
            envvar=env("hang_timeout"),
            metavar="SECONDS",
            show_default="15, or ten times the predicted iteration",
            help="A worker silent for longer in an iteration is replaced.",
        ),
    ] = None,
    attention_backend: Annotated[
        str | None,
        typer.Option(
            "--attention-backend",
            envvar=env("attention_backend"),
            show_default="the fastest here",
            help="Attention implementation.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            "-t",
            envvar=env("threads"),
            show_default="its share of the cores",
            help="Threads that compute in each worker.",
        ),
    ] = None,
    log_level: Annotated[
        LogLevel, typer.Option("--log-level", envvar=env("log_level"), help="Least severe lines to log.")
    ] = LogLevel.INFO,
    journal: JournalFile = None,
    journal_ids: JournalIds = False,
    journal_size: JournalSize = "256M",
    simulate: Simulated = None,
    step_ms: Annotated[
        float,
        typer.Option("--step-ms", envvar=env("step_ms"), hidden=True, help="Scripted workers' iteration."),
    ] = 5.0,
    worker_arg: Annotated[
        list[str] | None,
        typer.Option("--worker-arg", hidden=True, help="An argument for scripted workers: --worker-arg=--tile=16"),
    ] = None,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API until a signal."""
    from .launcher import serve as run_server
    from .options import (
        SLO_TOKENS,
        ServeOptions,
        check_journal,
        check_model,
        parse_bytes,
        parse_weights,
        settle,
    )
    from .precision import settle_dtype

    options, notes = settle(
        ServeOptions(
            model=model,
            served_model_name=served_model_name,
            stages=stages,
            replicas=replicas,
            token_budget=token_budget if token_budget is not None else SLO_TOKENS if tbt_slo else 256,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            max_model_len=max_model_len,
            dtype=dtype.value,
            kv_cache_memory=None if kv_cache_memory is None else parse_bytes(kv_cache_memory),
            host=host,
            port=port,
            prefix_caching=enable_prefix_caching,
            policy=policy.value,
            admission=admission.value,
            patience=patience,
            tenant_weights=parse_weights(tenant_weight or ()),
            queue_timeout=queue_timeout,
            prefill_share=prefill_share,
            tbt_slo=tbt_slo,
            ttft_slo=ttft_slo,
            generation_config=generation_config,
            drain_timeout=drain_timeout,
            hang_timeout=hang_timeout,
            threads=threads,
            attention_backend=attention_backend,
            log_level=log_level.value,
            journal=None if journal is None else str(journal.absolute()),
            journal_ids=journal_ids,
            journal_size=parse_bytes(journal_size, "--journal-size"),
            simulate=simulate,
            step_ms=step_ms,
            worker_args=tuple(worker_arg or ()),
        )
    )
    check_model(options)
    check_journal(options)
    options, measured = settle_dtype(options)
    raise typer.Exit(run_server(options, [*notes, *measured]))


_Url = Annotated[
    str | None,
    typer.Option("--url", envvar="OPENAI_BASE_URL", show_default="http://127.0.0.1:8000/v1", help="A server."),
]
_Connect = Annotated[
    str | None,
    typer.Option("--connect", metavar="ENDPOINT", help="Talk to the control process itself: tcp:// or ipc://."),
]
_Keys = Annotated[
    Path | None,
    typer.Option("--keys", envvar=env("keys"), metavar="FOLDER", help="server.pub and client.key, for --connect."),
]
_MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Most tokens of the answer.")]
_Temperature = Annotated[float | None, typer.Option("--temperature", help="0 takes the likeliest token.")]
_TopP = Annotated[float | None, typer.Option("--top-p", help="Draw from the likeliest with this total.")]
_TopK = Annotated[int | None, typer.Option("--top-k", help="Draw from so many of the likeliest.")]
_MinP = Annotated[float | None, typer.Option("--min-p", help="Only what is this fraction as likely as the best.")]
_Repetition = Annotated[
    float | None, typer.Option("--repetition-penalty", help="Above 1: less of what has been said before.")
]
_Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text. Repeatable.")]
_Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same answer.")]


@app.command(context_settings=SETTINGS)
def generate(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="As for serve: a private server is started. Or the URL of one."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", show_default="stdin", help="The text to go on from.")
    ] = None,
    max_tokens: _MaxTokens = 64,
    temperature: _Temperature = 0.0,
    top_p: _TopP = None,
    top_k: _TopK = None,
    min_p: _MinP = None,
    repetition_penalty: _Repetition = None,
    stop: _Stop = None,
    seed: _Seed = None,
    url: Annotated[str | None, typer.Option("--url", help="Use this running server.")] = None,
    stages: Annotated[int, typer.Option("--stages", "-pp", help="As for serve.")] = 1,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="As for serve.")] = Dtype.BFLOAT16,
    connect: _Connect = None,
    keys: _Keys = None,
) -> None:
    """Complete a prompt and print the answer."""
    from .openai_http import Draw

    text = sys.stdin.read() if prompt is None else prompt
    stops = tuple(stop or ()) or None
    draw = Draw(max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, stops, seed)
    if connect is not None:
        from .direct import generate_directly

        raise typer.Exit(generate_directly(connect, keys, model, text, draw))
    from .generate import run_generate

    raise typer.Exit(run_generate(model, url, text, draw, stages, dtype.value))


@app.command(context_settings=SETTINGS)
def chat(
    url: _Url = None,
    model: Annotated[str | None, typer.Option("--model", show_default="the server's first")] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    min_p: _MinP = None,
    repetition_penalty: _Repetition = None,
    stop: _Stop = None,
    seed: _Seed = None,
    connect: _Connect = None,
    keys: _Keys = None,
) -> None:
    """Talk with a running server."""
    from .openai_http import Draw

    stops = tuple(stop or ()) or None
    draw = Draw(max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, stops, seed)
    if connect is not None:
        from .direct import chat_directly

        raise typer.Exit(chat_directly(connect, keys, model, system, draw))
    from .chat import run_chat

    raise typer.Exit(run_chat(url, model, system, draw))


@app.command(context_settings=SETTINGS)
def status(
    url: _Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    connect: _Connect = None,
    keys: _Keys = None,
) -> None:
    """Show whether a running server is ready, and its counters."""
    if connect is not None:
        from .direct import status_directly

        raise typer.Exit(status_directly(connect, keys, as_json))
    from .status import run_status

    raise typer.Exit(run_status(url, as_json))


for _command in (launch, worker, keys, bench, simulate, capacity, tune, profile, replay, whatif):
    app.command(context_settings=SETTINGS)(_command)


_Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[SERVER]",
        help="A server on this machine: its URL, its run directory, or its ZeroMQ endpoint.",
        show_default="the one that runs",
    ),
]


@app.command(context_settings=SETTINGS)
def monitor(
    server: _Target = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.25, max=60.0, metavar="SECONDS", help="Time between refreshes.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a refresh.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", hidden=True, help="With --once: also save as SVG.")] = None,
) -> None:
    """Watch what a running server does: batches, queue, cache, stages, latencies, requests. Ctrl-C ends. Also: top"""
    from .monitor.command import run_monitor

    raise typer.Exit(run_monitor(server, interval, once, as_json, svg))


app.command("top", context_settings=SETTINGS, hidden=True)(monitor)


def run() -> None:
    """The ``evenflow`` command."""
    try:
        app()
    except UsageError as error:
        print(f"evenflow: {error}", file=sys.stderr)
        sys.exit(2)
    except (MeasureFailed, MemoryShort) as error:
        print(f"evenflow: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
