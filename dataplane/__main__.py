"""``python -P -m evenflow.dataplane``: a worker with a real model."""

import argparse
import sys

from .worker import add_worker_arguments, run_worker


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evenflow.dataplane", description=__doc__)
    add_worker_arguments(parser)
    parser.add_argument("--model", required=True, help="a path, or the name of a packaged model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "int8", "int4"), default="bfloat16")
    parser.add_argument("--kv-memory", type=int, default=1 << 30, help="bytes for the KV cache of this stage")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    parser.add_argument("--attention-backend", default="cpu", help="which implementation of attention")
    arguments = parser.parse_args(argv)

    def load():
        # Imported here so that a wrong command line is answered before torch is loaded.
        from .model_runner import load_runner

        return load_runner(
            arguments.model,
            arguments.stage,
            arguments.stages,
            dtype=arguments.dtype,
            block_size=arguments.block_size,
            kv_memory=arguments.kv_memory,
            threads=arguments.threads,
            attention=arguments.attention_backend,
        )

    return run_worker(arguments, load)


if __name__ == "__main__":
    sys.exit(main())
