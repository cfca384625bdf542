"""``python -P -m evenflow.control``: the control process. Started by the launcher."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys

import uvloop
from setproctitle import setproctitle

from .core.bounds import ADMISSIONS, POLICIES
from .core.events import Limits
from .core.slo import parse_slo
from .heap import return_large
from .logs import configure
from .options import JOURNAL_BYTES, ControlOptions, Door
from .server import serve
from .wire.keys import ROLES, KeyFault
from .wire.lifeline import ParentGone, die_with_parent
from .wire.sockets import EndpointError


def _weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    return name, float(weight)


def _options(argv: list[str]) -> tuple[ControlOptions, argparse.Namespace]:
    defaults = Limits()
    parser = argparse.ArgumentParser(prog="evenflow.control", description="Schedules; never touches a tensor.")
    parser.add_argument("--workers", required=True, help="endpoint to bind for workers and the launcher")
    parser.add_argument("--clients", required=True, help="endpoint to bind for clients")
    parser.add_argument("--events", default="", help="endpoint to bind for subscribers to iteration records")
    parser.add_argument("--links", required=True, help="directory where neighbouring stages meet")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--token-budget", type=int, default=defaults.token_budget)
    parser.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--policy", default=defaults.policy, choices=POLICIES)
    parser.add_argument("--tbt-slo", default=None, help="target for the time between tokens, such as 100ms")
    parser.add_argument("--ttft-slo", default=None, help="target for the time to the first token")
    parser.add_argument("--admission", default=defaults.admission, choices=ADMISSIONS)
    parser.add_argument("--patience", type=float, default=defaults.patience)
    parser.add_argument("--tenant-weight", type=_weight, action="append", default=[], metavar="TENANT=WEIGHT")
    parser.add_argument("--queue-timeout", type=float, default=defaults.queue_timeout)
    parser.add_argument("--prefill-share", type=float, default=defaults.share)
    parser.add_argument("--hang-timeout", type=float, default=15.0)
    parser.add_argument("--drain-timeout", type=float, default=30.0)
    parser.add_argument("--served-model-name", default=None)
    parser.add_argument("--block-size", type=int, default=defaults.block_size, help="what workers are told to use")
    parser.add_argument(
        "--external", type=int, action="append", default=[], help="replica of workers started by hand"
    )
    for role in ROLES:
        parser.add_argument(f"--listen-{role}s", metavar="ENDPOINT", help=f"tcp:// endpoint for other {role}s, too")
        parser.add_argument(f"--listen-{role}s-fd", type=int, help="descriptor of a socket that listens there")
    parser.add_argument("--keys", metavar="FOLDER", help="server.key and the allow-lists, for tcp:// endpoints")
    parser.add_argument("--insecure", action="store_true", help="bind tcp:// endpoints without keys")
    parser.add_argument("--journal", default="", metavar="FILE", help="record events and plans there")
    parser.add_argument("--journal-ids", action="store_true", help="with token ids, else with hashes of prefixes")
    parser.add_argument("--journal-size", type=int, default=JOURNAL_BYTES, help="most bytes of the last two files")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    args = parser.parse_args(argv)
    for name, least in (("replicas", 1), ("stages", 1), ("token_budget", 1), ("max_num_seqs", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    slo = None
    if args.tbt_slo is not None:
        if args.policy != "stall-free":
            parser.error(f"--tbt-slo needs --policy stall-free, not {args.policy}")
        try:
            slo = parse_slo(args.tbt_slo, args.ttft_slo)
        except ValueError as error:
            parser.error(str(error))
    elif args.ttft_slo is not None:
        parser.error("--ttft-slo needs --tbt-slo")
    if not 0.0 <= args.prefill_share <= 1.0:
        parser.error(f"--prefill-share must be from 0 to 1, not {args.prefill_share}")
    if not args.patience > 0 or not args.queue_timeout >= 0:
        parser.error("--patience must be more than 0 seconds, and --queue-timeout at least 0")
    limits = Limits(
        token_budget=args.token_budget,
        max_num_seqs=args.max_num_seqs,
        block_size=args.block_size,
        prefix_caching=not args.no_prefix_cache,
        share=args.prefill_share,
        slo=slo,
        policy=args.policy,
        admission=args.admission,
        patience=args.patience,
        tenant_weights=tuple(args.tenant_weight),
        queue_timeout=args.queue_timeout,
    )
    options = ControlOptions(
        workers=args.workers,
        clients=args.clients,
        links=args.links,
        limits=limits,
        replicas=args.replicas,
        stages=args.stages,
        max_model_len=args.max_model_len,
        hang_timeout=args.hang_timeout,
        drain_timeout=args.drain_timeout,
        model_name=args.served_model_name,
        external=tuple(args.external),
        doors=tuple(
            Door(role, endpoint, getattr(args, f"listen_{role}s_fd"))
            for role in ROLES
            if (endpoint := getattr(args, f"listen_{role}s")) is not None
        ),
        keys=args.keys,
        insecure=args.insecure,
        events=args.events,
        journal=args.journal,
        journal_ids=args.journal_ids,
        journal_size=args.journal_size,
        log_level=args.log_level,
    )
    return options, args


def settle_gc() -> None:
    """Keep the garbage collector out of the hot path.

    The core's objects go by reference count. A full collection over everything that runs takes milliseconds, in which
    no plan is made; what little a cycle may hold is found when so many objects have been made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


def main(argv: list[str] | None = None) -> int:
    """Run the control process; returns its exit code."""
    options, args = _options(sys.argv[1:] if argv is None else argv)
    configure(args.log_level)
    setproctitle("evenflow control")
    settle_gc()
    return_large()
    try:
        die_with_parent()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options))
    except (EndpointError, KeyFault, ParentGone) as error:
        print(f"evenflow control: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
