"""The fault simulator's command line: ``python tests/faults --help``."""

import argparse
import json
import sys
import time
from contextlib import suppress

from faultsim.plants import PLANTS, hunt, plant
from faultsim.scenario import Cut, draw
from faultsim.shrink import Case, shrink
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="one seed alone, in words")
    parser.add_argument("--first", type=int, default=0, help="the first of many seeds")
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--events", type=int, default=500, help="after so many events faults and requests stop")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="N", help="requests (r3) and faults (f2) left out"
    )
    parser.add_argument("--shrink", action="store_true", help="make the first failing seed smaller")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="with a mistake put into the product on purpose")
    parser.add_argument("--hunt", action="store_true", help="plant each mistake in turn, and look for it")
    parser.add_argument("--json", action="store_true", help="one line of JSON a failing seed, and one in the end")
    args = parser.parse_args()
    if args.plant:
        plant(args.plant)
    if args.seed is not None:
        return one(Case(args.seed, args.events, Cut.parse(args.without)), args.shrink)
    return hunts(args) if args.hunt else many(args)


def hunts(args: argparse.Namespace) -> int:
    missed = 0
    for name in PLANTS:
        found = hunt(name, args.seeds, args.events)
        missed += found is None
        if args.json:
            print(json.dumps({"plant": name, "found": found}), flush=True)
        elif found is None:
            print(f"{name}: not found by {args.seeds} seeds", flush=True)
        else:
            print(f"{name}: seed {found['seed']}, event {found['events']}: {found['problem']}", flush=True)
    return 1 if missed else 0


def one(case: Case, smaller: bool) -> int:
    print(draw(case.seed, case.events).without(case.cut).describe())
    report = case.run()
    if report.problem is not None and smaller:
        case, report = shrink(case, print)
        print(draw(case.seed, case.events).without(case.cut).describe())
    if report.problem is None:
        print(
            f"seed {case.seed}: {report.events} events, {report.requests} requests, {report.tokens} tokens: all well"
        )
        return 0
    print(report.trace)
    print(f"seed {case.seed} fails after {report.events} events: {report.problem}\n  {case.command()}")
    return 1


def many(args: argparse.Namespace) -> int:
    began = time.process_time()
    failed: list[int] = []
    events = requests = tokens = epochs = done = 0
    cut = Cut.parse(args.without)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Whoever interrupts a long run is told of what has been done.
    with Progress(*columns, console=Console(stderr=True)) as progress, suppress(KeyboardInterrupt):
        task = progress.add_task("seeds", total=args.seeds)
        for seed in range(args.first, args.first + args.seeds):
            case = Case(seed, args.events, cut)
            report = case.run()
            events, requests, tokens = events + report.events, requests + report.requests, tokens + report.tokens
            epochs += report.epochs
            if report.problem is not None:
                failed.append(seed)
                if args.shrink and len(failed) == 1:
                    case, report = shrink(case, progress.console.print)
                tell = {"seed": seed, "events": report.events, "problem": report.problem, "command": case.command()}
                progress.stop()
                print(
                    json.dumps(tell) if args.json else f"seed {seed}: {report.problem}\n  {case.command()}",
                    flush=True,
                )
                progress.start()
            done += 1
            progress.update(task, advance=1, description=f"{len(failed)} failed")
    seconds = time.process_time() - began
    total = {
        "seeds": done,
        "failed": failed,
        "events": events,
        "requests": requests,
        "tokens": tokens,
        "epochs_lost": epochs,
        "events_per_second": round(events / max(seconds, 1e-9)),
        "seconds": round(seconds, 1),
    }
    if args.json:
        print(json.dumps(total))
    else:
        print(
            f"{done} seeds, {len(failed)} failed: {events} events ({total['events_per_second']} a second),"
            f" {requests} requests, {tokens} tokens, {epochs} epochs lost, {seconds:.1f} s"
        )
    return 1 if failed or done < args.seeds else 0


if __name__ == "__main__":
    sys.exit(main())
