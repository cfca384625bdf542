"""``evenflow serve`` with stand-ins for its children: ``fake_serve.py LOG PORT MODES [SECONDS]``.

MODES: ``control=slow-drain,worker0.1=fail`` and so on; SECONDS: the drain limit.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from evenflow.cli.children import ChildSpec, Plan
from evenflow.cli.launcher import serve
from evenflow.cli.listener import OpenDoor
from evenflow.cli.options import ServeOptions
from evenflow.cli.run_dir import RunDir


def main() -> int:
    log, port, modes_text, *rest = sys.argv[1:]
    modes = dict(pair.split("=") for pair in modes_text.split(",") if pair)
    script = str(Path(__file__).with_name("fake_child.py"))

    def spec(role: str, name: str, *arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-P", script, role, name, log, modes.get(name, "-"), *arguments)

    def make_plan(options: ServeOptions, run: RunDir, fd: int, doors: Sequence[OpenDoor]) -> Plan:
        Path(log).with_name("dirs").write_text(f"{run.path}\n{run.links}\n")
        endpoints = (run.workers_endpoint, run.clients_endpoint)
        return Plan(
            control=ChildSpec("control", spec("control", "control", *endpoints), {}),
            gateway=ChildSpec("gateway", spec("gateway", "gateway", str(fd)), {}, pass_fds=(fd,)),
            workers=tuple(
                ChildSpec(f"worker {r}.{s}", spec("worker", f"worker{r}.{s}"), {}, worker=(r, s))
                for r in range(options.replicas)
                for s in range(options.stages)
            ),
        )

    limit = float(rest[0]) if rest else 30.0
    options = ServeOptions(model="fake", stages=2, port=int(port), drain_timeout=limit)
    return serve(options, ["a note"], make_plan=make_plan)


if __name__ == "__main__":
    sys.exit(main())
