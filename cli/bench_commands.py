"""The grammar of ``bench``: load on a server, and what it felt like."""

import enum
from pathlib import Path
from typing import Annotated

import typer


class Arrivals(enum.StrEnum):
    POISSON = "poisson"
    CONSTANT = "constant"


def bench(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]",
            envvar="OPENAI_BASE_URL",
            show_default="http://127.0.0.1:8000/v1",
            help="Any server of OpenAI's interface. The key comes from OPENAI_API_KEY.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", "--request-rate", "-r", metavar="R", help="Requests a second, whatever the server does."
        ),
    ] = None,
    arrivals: Annotated[Arrivals, typer.Option("--arrivals", help="How --rate is spread.")] = Arrivals.POISSON,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "--max-concurrency", "-c", metavar="N", help="Or: N requests open at any time."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.csv", help="Or: a file with the columns arrival,prompt,output."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            "--num-prompts",
            "-n",
            metavar="N",
            show_default="100, or by --duration",
            help="End after N.",
        ),
    ] = None,
    duration: Annotated[
        str | None, typer.Option("--duration", metavar="TIME", help="Start no request after this: 30s.")
    ] = None,
    prompt: Annotated[
        str,
        typer.Option(
            "--prompt-tokens", "--input-len", metavar="SPEC", help="N, A:B (uniform) or lognormal:MEAN:SIGMA[:MAX]."
        ),
    ] = "512",
    output: Annotated[str, typer.Option("--output-tokens", "--output-len", metavar="SPEC", help="Alike.")] = "128",
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions (prompts of words).")] = False,
    model: Annotated[str | None, typer.Option("--model", "-m", show_default="the server's first")] = None,
    ttft_slo: Annotated[
        str | None, typer.Option("--ttft-slo", metavar="TIME", help="Goodput: the first token within this.")
    ] = None,
    tbt_slo: Annotated[
        str | None, typer.Option("--tbt-slo", metavar="TIME", help="Goodput: 99 of 100 gaps within this: 200ms.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same requests at the same times.")] = 0,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="A request that takes longer fails.")
    ] = "600s",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Put load on a running server and report TTFT, TBT, throughput, failures and this client's own lag."""
    from .bench.command import BenchOptions, run_bench

    options = BenchOptions(
        url=url,
        chat=chat,
        model=model,
        rate=rate,
        arrivals=arrivals.value,
        concurrency=concurrency,
        requests=requests,
        duration=duration,
        prompt=prompt,
        output=output,
        trace=trace,
        seed=seed,
        ttft_slo=ttft_slo,
        tbt_slo=tbt_slo,
        timeout=timeout,
        as_json=as_json,
    )
    raise typer.Exit(run_bench(options))
