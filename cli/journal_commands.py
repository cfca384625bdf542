"""The grammar of journals: the flags of ``serve`` that write one, and what is done with one."""

from pathlib import Path
from typing import Annotated

import typer

from .flags import Admission, Policy, env

JournalFile = Annotated[
    Path | None,
    typer.Option("--journal", envvar=env("journal"), metavar="FILE", help="Record events and plans: docs/journal.md"),
]
JournalIds = Annotated[
    bool,
    typer.Option("--journal-ids", envvar=env("journal_ids"), help="Record token ids, too, not only hashes."),
]
JournalSize = Annotated[
    str,
    typer.Option(
        "--journal-size",
        envvar=env("journal_size"),
        metavar="BYTES",
        help="Most that FILE and FILE.1, the one before, may take together.",
    ),
]


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A journal of serve --journal.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Feed a journal's events to the scheduler of this program: exit code 1 if a plan is not the recorded one."""
    from .replay import run_replay

    raise typer.Exit(run_replay(file, as_json))


def whatif(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A journal of serve --journal.")],
    policy: Annotated[Policy | None, typer.Option("--policy", help="Another policy.")] = None,
    admission: Annotated[Admission | None, typer.Option("--admission", help="Another order.")] = None,
    token_budget: Annotated[
        int | None, typer.Option("--token-budget", "--max-num-batched-tokens", help="Another budget.")
    ] = None,
    tbt_slo: Annotated[
        str | None, typer.Option("--tbt-slo", metavar="DURATION", help="As for serve; none: bounded by tokens.")
    ] = None,
    ttft_slo: Annotated[str | None, typer.Option("--ttft-slo", metavar="DURATION", help="As for serve.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option("--max-num-seqs", help="Another bound.")] = None,
    blocks: Annotated[int | None, typer.Option("--blocks", help="Blocks of each replica's pool.")] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", "-dp", "--dp", help="Another number.")] = None,
    prefix_caching: Annotated[
        bool | None, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse prefixes or not.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a journal's requests would have seen under other settings: TTFT, TBT, throughput, preemptions."""
    from .whatif import Wishes, run_whatif

    wishes = Wishes(
        None if policy is None else policy.value,
        None if admission is None else admission.value,
        token_budget,
        tbt_slo,
        ttft_slo,
        max_num_seqs,
        blocks,
        replicas,
        prefix_caching,
    )
    raise typer.Exit(run_whatif(file, wishes, as_json))
