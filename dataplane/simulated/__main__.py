"""``python -P -m evenflow.dataplane.simulated``: a worker without a model, for tests of everything around
one.
"""

import argparse
import json
import sys
from pathlib import Path

from ..batch import Runner
from ..worker import add_worker_arguments, run_worker
from .blank import BlankRunner
from .modelled import timing_of
from .refusal import CannotSimulate
from .scenario import served_cost
from .scripted import ScriptedRunner
from .shadow import DEFAULT_VOCAB, ShadowRunner


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evenflow.dataplane.simulated", description=__doc__)
    add_worker_arguments(parser)
    parser.add_argument("--model", default="scripted", help="the name that the worker gives")
    parser.add_argument("--step-ms", type=float, default=0.0, help="planned time of an iteration")
    parser.add_argument("--token-us", type=float, default=0.0, help="planned time of each of its tokens")
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--eos-id", type=int, default=0)
    parser.add_argument("--tile", type=int, default=0)
    parser.add_argument(
        "--blank",
        action=argparse.BooleanOptionalAction,
        help="keep no shadow of the cache: ids follow from positions",
    )
    parser.add_argument("--device", default=None, help="take the time that --model takes on it: h100, 4xh100, a file")
    parser.add_argument("--script", type=Path, default=None, help="JSON list of ids that every request outputs")
    parser.add_argument("--crash-on", type=int, default=None, metavar="ID", help="exit when a batch has this id")
    parser.add_argument("--hang-on", type=int, default=None, metavar="ID", help="hang when a batch has this id")
    arguments = parser.parse_args(argv)
    timing = None
    if arguments.device is not None:
        try:
            shape, cost = served_cost(arguments.model, arguments.device, arguments.stages)
        except CannotSimulate as error:
            print(f"evenflow: {error}", file=sys.stderr)
            return 1
        timing = timing_of(cost, arguments.stage)
        arguments.model, arguments.max_model_len = shape.name, shape.max_len
        arguments.num_blocks = cost.num_blocks(arguments.block_size)

    def load() -> Runner:
        inner: Runner = ShadowRunner(
            arguments.stage,
            arguments.stages,
            block_size=arguments.block_size,
            num_blocks=arguments.num_blocks,
            vocab_size=arguments.vocab_size,
            max_model_len=arguments.max_model_len,
            eos_ids=(arguments.eos_id,),
            script=None if arguments.script is None else read_script(arguments.script),
            name=arguments.model,
            tile=arguments.tile,
        )
        if arguments.blank:
            inner = BlankRunner(arguments.stage, arguments.stages, inner.info)
        return ScriptedRunner(
            inner,
            arguments.step_ms / 1e3,
            arguments.token_us / 1e6,
            timing=timing,
            crash_on=arguments.crash_on,
            hang_on=arguments.hang_on,
        )

    return run_worker(arguments, load)


def read_script(path: Path) -> list[int]:
    """Raises ``ValueError`` unless the file is a JSON list of token ids."""
    script = json.loads(path.read_text())
    if not isinstance(script, list) or not all(type(item) is int and 0 <= item < 1 << 32 for item in script):
        raise ValueError(f"{path}: not a JSON list of token ids")
    return script


if __name__ == "__main__":
    sys.exit(main())
