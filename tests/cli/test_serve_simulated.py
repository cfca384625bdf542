"""``serve --simulate``: the real server on modelled devices. Times are looked at loosely: the machine may be busy."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_server import live

EVENFLOW = [sys.executable, "-P", "-c", "from evenflow.cli.main import run; run()"]


def test_a_replica_of_sixteen_devices_serves() -> None:
    with live("llama-2-70b", "--simulate", "4xh100", "--stages", "4", "--threads", "1") as server:
        assert len([process for process in server.members() if "worker" in " ".join(process.cmdline())]) == 4

        def ask(number: int) -> str:
            fields = {"model": "llama-2-70b", "max_tokens": 8, "min_tokens": 8, "temperature": 0}
            answer = server.post("/v1/completions", prompt=" word" * (20 + number), **fields).json()
            assert answer["usage"]["completion_tokens"] == 8
            return answer["choices"][0]["text"]

        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(ask, range(6)))
        # Ids follow from positions, whatever else is in the batch and whoever computes which layer.
        assert [ask(number) for number in range(6)] == together
        steps = server.metrics()
        took = steps["evenflow_time_to_first_token_seconds_sum"] / steps["evenflow_time_to_first_token_seconds_count"]
        assert took > 0.01
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["yi-34b", "--simulate", "b200"], "--simulate b200: there is no device 'b200'"),
        (["no-such", "--simulate", "h100"], "there is no model 'no-such'"),
        (["scripted", "--simulate", "h100"], "--simulate needs a model with sizes"),
        (["falcon-180b", "--simulate", "h100"], "falcon-180b needs 359 GB for its weights"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments: list[str], message: str) -> None:
    done = subprocess.run([*EVENFLOW, "serve", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
