"""``evenflow status``: is a running server ready, what does it serve, and what do its counters say.

Reads ``/ready``, ``/v1/models`` and ``/metrics`` of the server. Exit code 0 if it is ready, 1 if it is not
or cannot be reached.
"""

import json
import sys
from typing import Any

import httpx

from .openai_http import ServerError, connect, get_json

#: Shown to people; ``--json`` has all. Name in /metrics, words.
SHOWN = (
    ("evenflow_num_requests_running", "running requests"),
    ("evenflow_num_requests_waiting", "waiting requests"),
    ("evenflow_kv_cache_usage_perc", "KV cache in use (0 to 1)"),
    ("evenflow_prompt_tokens_total", "prompt tokens"),
    ("evenflow_generation_tokens_total", "generated tokens"),
    ("evenflow_num_preemptions_total", "preemptions"),
)


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of ``evenflow_*`` in Prometheus text, summed over labels; histograms' buckets are left out."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("evenflow_"):
            continue
        name, _, rest = line.partition("{")
        if rest:
            number = rest.rpartition("}")[2]
        else:
            name, _, number = line.partition(" ")
        if name.endswith(("_bucket", "_created")):
            continue
        try:
            values[name] = values.get(name, 0.0) + float(number.split()[0])
        except (ValueError, IndexError):
            continue
    return values


def _read(url: str | None) -> dict[str, Any]:
    with connect(url) as client:
        root = str(client.base_url).removesuffix("/").removesuffix("/v1")
        models = [str(entry["id"]) for entry in get_json(client, "models").get("data") or ()]
        try:
            ready = client.get(f"{root}/ready").status_code == 200
            metrics = client.get(f"{root}/metrics")
        except httpx.HTTPError as error:
            raise ServerError(f"The connection was lost: {error}.") from None
        values = parse_metrics(metrics.text) if metrics.status_code == 200 else {}
        return {"url": root, "ready": ready, "models": models, "metrics": values}


def run_status(url: str | None, as_json: bool) -> int:
    """Returns the exit code."""
    try:
        state = _read(url)
    except ServerError as error:
        if as_json:
            print(json.dumps({"ready": False, "error": str(error)}))
        else:
            print(f"evenflow: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(state))
    else:
        print(f"{state['url']}: {'ready' if state['ready'] else 'not ready'}")
        print(f"{'models':<26}{', '.join(state['models'])}")
        for name, words in SHOWN:
            if name in state["metrics"]:
                print(f"{words:<26}{state['metrics'][name]:g}")
    return 0 if state["ready"] else 1
