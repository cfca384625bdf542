"""evenflow beside what else serves the same model on a CPU, on the same weights, interleaved in one run.

Offline: tokens a second of a prompt of 512 and of 2,048 tokens, and of 1, 8 and 32 sequences that decode after 512
tokens, each engine in the same process model (no sockets, its own scheduler). Rows compare engines whose weights
have the same number of bits; what they compute in is theirs to choose. ``ratio_best_peer`` is evenflow's rate over
that of the fastest peer, the median of paired repetitions, with the middle 95 % of resampled medians as ``_low`` and
``_high``.

Over HTTP (``online``): ``served`` is the largest load with even tokens, ``stall`` the gaps of running streams while
long prompts arrive, with each peer at its default and with iterations of 256 tokens down to 32.

``make peers`` builds the environments; one that is missing is named and left out. ``--quick`` takes one repetition of
the short works, and leaves out the peer whose start alone takes more than a minute, and all that are servers.

Run: python benchmarks/peers/all.py [--quick] [--json] [--dtype D,...] [--work W,...] [--repetitions N] [--png FILE]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import offline
import online
import report
from engines import OURS, OUT, engines
from report import Report

DTYPES = ("bf16", "int8", "int4")
#: Works over HTTP, in bf16.
ONLINE = ("served", "stall")
#: Left out with ``--quick``.
SLOW_TO_START = "vllm"


def _listed(text: str) -> list[str]:
    return text.split(",")


def draw(results: Report, target: Path) -> None:
    """Bars of tokens a second, one panel for each work and precision."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for row in results.rows:
        if row.measure == "tokens_per_s":
            bars.setdefault((row.case["dtype"], row.case["work"]), []).append((row.case["engine"], row.value))
    dtypes = list(dict.fromkeys(dtype for dtype, _ in bars))
    works = list(dict.fromkeys(work for _, work in bars))
    size = (2.6 * len(works), 2.2 * len(dtypes) + 0.6)
    figure, axes = pyplot.subplots(len(dtypes), len(works), figsize=size, squeeze=False)
    for line, dtype in enumerate(dtypes):
        for column, work in enumerate(works):
            names, values = zip(*bars[dtype, work], strict=True)
            place = axes[line][column]
            colours = ["#0072B2" if name == OURS else "#BBBBBB" for name in names]
            drawn = place.barh(names[::-1], values[::-1], color=colours[::-1])
            place.bar_label(drawn, fmt="%.0f", fontsize=7, padding=2)
            place.set_title(f"{work}, {dtype}", fontsize=8)
            place.tick_params(labelsize=7)
            place.margins(x=0.2)
    figure.suptitle("tokens a second", fontsize=9)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=140)


def main() -> int:
    parser = report.arguments(__doc__)
    parser.add_argument("--dtype", type=_listed, default=None, help="precisions (bf16,int8,int4)")
    parser.add_argument("--work", type=_listed, default=None, help="works (all)")
    parser.add_argument("--repetitions", type=int, default=None, help="of each work (4, of stall 5; 1 with --quick)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--png", type=Path, default=OUT / "offline.png")
    options = parser.parse_args()
    dtypes = options.dtype or (["bf16"] if options.quick else DTYPES)
    wanted = options.work or (
        ["prefill_512", "decode_1"] if options.quick else [*(work.name for work in offline.WORKS), *ONLINE]
    )
    for given, known in ((dtypes, DTYPES), (wanted, [*(work.name for work in offline.WORKS), *ONLINE])):
        for name in given:
            if name not in known:
                parser.error(f"{name} is none of {', '.join(known)}")
    works = [work for work in offline.WORKS if work.name in wanted]
    results = Report("peers")
    for dtype in dtypes if works else ():
        found = engines(dtype, options.threads)
        for engine in found:
            if not engine.installed:
                print(f"{engine.name} is left out: {engine.python} is missing (make peers)", file=sys.stderr)
        found = [e for e in found if e.installed and not (options.quick and e.name == SLOW_TO_START)]
        repetitions = options.repetitions or (1 if options.quick else 4)
        offline.compare(found, works, repetitions, options.threads, results)
    if works:
        draw(results, options.png)
    if "bf16" in dtypes:
        runs = options.repetitions or (1 if options.quick else 5)
        online.compare(wanted, options.threads, options.quick, runs, results)
    results.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
