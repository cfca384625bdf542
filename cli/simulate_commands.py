"""The grammar of ``simulate``, ``capacity`` and ``tune``: the scheduler that serves, on devices that are modelled."""

from pathlib import Path
from typing import Annotated

import typer

from .bench_commands import Arrivals
from .flags import Admission, Policy, env

#: Of ``serve``.
Simulated = Annotated[
    str | None,
    typer.Option(
        "--simulate",
        metavar="DEVICE",
        envvar=env("simulate"),
        help="Compute nothing, but take as long as on DEVICE, or so many of it a stage, 4xh100: docs/simulate.md.",
    ),
]
_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="mistral-7b, yi-34b, llama-2-70b, falcon-180b …, or a Hugging Face config.json or its directory.",
    ),
]
_Device = Annotated[
    str,
    typer.Option("--device", help="a100-pcie, a100-sxm, h100, a40, h200, mi300x, or a .json file: docs/simulate.md."),
]
_Ranks = Annotated[int, typer.Option("--tp", "--tensor-parallel-size", "-tp", help="Tensor-parallel ranks.")]
_Stages = Annotated[int, typer.Option("--stages", "--pipeline-parallel-size", "-pp", "--pp", help="Pipeline stages.")]
_Replicas = Annotated[int, typer.Option("--replicas", "--data-parallel-size", "-dp", "--dp", help="Copies.")]
_Policy = Annotated[Policy, typer.Option("--policy", help="What goes into an iteration: docs/scheduling.md.")]
_Admission = Annotated[Admission, typer.Option("--admission", help="In which order requests are taken.")]
_Budget = Annotated[
    int, typer.Option("--token-budget", "--max-num-batched-tokens", help="Most tokens in one iteration.")
]
_Seqs = Annotated[int, typer.Option("--max-num-seqs", help="Most sequences that run in a replica at once.")]
_Length = Annotated[
    int | None, typer.Option("--max-model-len", show_default="the model's", help="Most tokens of a sequence.")
]
_Block = Annotated[int, typer.Option("--block-size", help="Tokens in a KV block.")]
_Tile = Annotated[int, typer.Option("--tile", help="The batch total that the device computes without waste; 0: any.")]
_Share = Annotated[
    float | None, typer.Option("--prefill-share", show_default="1/4", help="As for serve; 0 is the paper's.")
]
_Prefix = Annotated[
    bool,
    typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse equal beginnings of prompts."),
]
_Host = Annotated[str, typer.Option("--host", help="What launches kernels: eager, or graphs, which cost nothing.")]
_Speed = Annotated[float, typer.Option("--speed", help="Of the device, 1 as it was measured.")]
_Memory = Annotated[float, typer.Option("--gpu-memory-utilization", help="Share for weights and KV cache.")]
_Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Lengths, arrivals too if it has them: docs/simulate.md."),
]
_Requests = Annotated[int | None, typer.Option("--requests", "-n", metavar="N", help="End after N.")]
_Prompt = Annotated[
    str,
    typer.Option(
        "--prompt-tokens", "--input-len", metavar="SPEC", help="N, A:B (uniform) or lognormal:MEAN:SIGMA[:MAX]."
    ),
]
_Output = Annotated[str, typer.Option("--output-tokens", "--output-len", metavar="SPEC", help="Alike.")]
_Seed = Annotated[int, typer.Option("--seed", help="Same seed, same load.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_TbtSlo = Annotated[
    str | None, typer.Option("--tbt-slo", metavar="DURATION", help="Bound iterations by time, as serve does.")
]
_Slo = Annotated[
    str, typer.Option("--tbt-p99", "--slo", metavar="TIME", help="P99 of all times between tokens, at most: 100ms.")
]
_Seeds = Annotated[int, typer.Option("--seeds", metavar="N", help="Loads that are tried, for a confidence interval.")]
_Png = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw it.")]


def simulate(
    model: _Model,
    device: _Device = "a100-pcie",
    ranks: _Ranks = 1,
    stages: _Stages = 1,
    replicas: _Replicas = 1,
    policy: _Policy = Policy.STALL_FREE,
    admission: _Admission = Admission.FCFS,
    token_budget: _Budget = 512,
    max_num_seqs: _Seqs = 128,
    max_model_len: _Length = None,
    block_size: _Block = 16,
    tile: _Tile = 0,
    prefill_share: _Share = None,
    prefix_caching: _Prefix = True,
    tbt_slo: _TbtSlo = None,
    host: _Host = "eager",
    speed: _Speed = 1.0,
    utilisation: _Memory = 0.85,
    rate: Annotated[
        float | None, typer.Option("--rate", "--request-rate", "-r", metavar="R", help="Requests a second.")
    ] = None,
    arrivals: Annotated[Arrivals, typer.Option("--arrivals", help="How --rate is spread.")] = Arrivals.POISSON,
    trace: _Trace = None,
    pace: Annotated[float, typer.Option("--pace", help="The trace's own arrivals, so many times as fast.")] = 1.0,
    requests: _Requests = None,
    duration: Annotated[
        str | None, typer.Option("--duration", metavar="TIME", help="No request arrives after this: 30s.")
    ] = None,
    prompt: _Prompt = "512",
    output: _Output = "128",
    seed: _Seed = 0,
    as_json: _Json = False,
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="FILE.json", help="Write a timeline of all stages.")
    ] = None,
    plot: _Png = None,
) -> None:
    """What a load would do on a device under a policy: TTFT, TBT, delays, throughput, bubbles."""
    from .bench.plan import parse_seconds
    from .simulation.setup import LoadFlags, SystemFlags
    from .simulation.simulate import run_simulate

    system = SystemFlags(
        model=model,
        device=device,
        ranks=ranks,
        stages=stages,
        replicas=replicas,
        policy=policy.value,
        admission=admission.value,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        tile=tile,
        prefill_share=prefill_share,
        prefix_caching=prefix_caching,
        tbt_slo=tbt_slo,
        host=host,
        speed=speed,
        utilisation=utilisation,
    )
    load = LoadFlags(
        rate=rate,
        arrivals=arrivals.value,
        trace=trace,
        pace=pace,
        requests=requests,
        duration=None if duration is None else parse_seconds(duration, "--duration"),
        prompt=prompt,
        output=output,
        seed=seed,
    )
    raise typer.Exit(run_simulate(system, load, as_json, perfetto, plot))


def capacity(
    model: _Model,
    slo: _Slo,
    device: _Device = "a100-pcie",
    ranks: _Ranks = 1,
    stages: _Stages = 1,
    replicas: _Replicas = 1,
    policy: _Policy = Policy.STALL_FREE,
    admission: _Admission = Admission.FCFS,
    token_budget: _Budget = 512,
    max_num_seqs: _Seqs = 128,
    max_model_len: _Length = None,
    block_size: _Block = 16,
    tile: _Tile = 0,
    prefill_share: _Share = None,
    prefix_caching: _Prefix = True,
    tbt_slo: _TbtSlo = None,
    host: _Host = "eager",
    speed: _Speed = 1.0,
    utilisation: _Memory = 0.85,
    trace: _Trace = None,
    requests: Annotated[
        int | None, typer.Option("--requests", "-n", metavar="N", show_default="2048", help="In each run.")
    ] = None,
    prompt: _Prompt = "512",
    output: _Output = "128",
    seeds: _Seeds = 3,
    as_json: _Json = False,
    plot: _Png = None,
) -> None:
    """The largest load that a system serves within an SLO."""
    from .bench.plan import parse_seconds
    from .simulation.capacity import run_capacity
    from .simulation.setup import LoadFlags, SystemFlags

    system = SystemFlags(
        model=model,
        device=device,
        ranks=ranks,
        stages=stages,
        replicas=replicas,
        policy=policy.value,
        admission=admission.value,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        tile=tile,
        prefill_share=prefill_share,
        prefix_caching=prefix_caching,
        tbt_slo=tbt_slo,
        host=host,
        speed=speed,
        utilisation=utilisation,
    )
    load = LoadFlags(trace=trace, requests=requests, prompt=prompt, output=output)
    target = parse_seconds(slo, "--tbt-p99")
    raise typer.Exit(run_capacity(system, load, target, seeds, as_json, plot))


def tune(
    model: _Model,
    slo: _Slo,
    device: _Device = "a100-pcie",
    ranks: _Ranks = 1,
    stages: _Stages = 1,
    replicas: _Replicas = 1,
    policy: _Policy = Policy.STALL_FREE,
    admission: _Admission = Admission.FCFS,
    max_num_seqs: _Seqs = 128,
    max_model_len: _Length = None,
    block_size: _Block = 16,
    tile: _Tile = 0,
    prefill_share: _Share = None,
    prefix_caching: _Prefix = True,
    host: _Host = "eager",
    speed: _Speed = 1.0,
    utilisation: _Memory = 0.85,
    trace: _Trace = None,
    requests: Annotated[
        int | None, typer.Option("--requests", "-n", metavar="N", show_default="1024", help="In each run.")
    ] = None,
    prompt: _Prompt = "512",
    output: _Output = "128",
    seeds: _Seeds = 1,
    budgets: Annotated[
        str, typer.Option("--budgets", metavar="FROM:TO:STEP", help="Token budgets to try, or a list: 256,512.")
    ] = "128:2048:128",
    as_json: _Json = False,
    plot: _Png = None,
) -> None:
    """The token budget that serves the largest load within an SLO, and the whole curve."""
    from .bench.plan import parse_seconds
    from .simulation.capacity import parse_budgets, run_tune
    from .simulation.setup import LoadFlags, SystemFlags

    system = SystemFlags(
        model=model,
        device=device,
        ranks=ranks,
        stages=stages,
        replicas=replicas,
        policy=policy.value,
        admission=admission.value,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        tile=tile,
        prefill_share=prefill_share,
        prefix_caching=prefix_caching,
        host=host,
        speed=speed,
        utilisation=utilisation,
    )
    load = LoadFlags(trace=trace, requests=requests, prompt=prompt, output=output)
    target = parse_seconds(slo, "--tbt-p99")
    raise typer.Exit(run_tune(system, load, target, seeds, parse_budgets(budgets), as_json, plot))
