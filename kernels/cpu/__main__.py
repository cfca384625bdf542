"""Compiles the C++ kernels (``build``), unless that is done, and says in a line what there is now."""

import sys
import time

from .build import BuildError, build


def main() -> int:
    began = time.monotonic()
    try:
        print(f"kernels: compiled ({build().parent.name}, {time.monotonic() - began:.1f} s)")
    except BuildError as error:
        print(f"kernels: operations of torch, since they could not be compiled:\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
