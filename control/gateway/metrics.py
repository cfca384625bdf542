"""Prometheus metrics of one gateway: what it sees of its requests, and the control process's figures.

Names, units and buckets follow vLLM's, with the prefix ``evenflow_``; each series carries ``model_name``.
``docs/metrics.md`` says what each one means, and a test holds it to that.
"""

import re
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ..wire import StatusReply

_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_GAP = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_WHOLE = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
#: A figure's name, its labels, and one of them: ``name{label="value",label="value"}``.
_FIGURE = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)(?:\{(.*)\})?\Z")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"\\]*)"(?:,|\Z)')
#: Series that the gateway counts itself; the control process's figures of the same name are left out.
_OWN = frozenset(
    {
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "request_refused_total",
        "http_responses_total",
    }
)


class Metrics:
    """The registry and the series of one gateway. All methods are called from its event loop."""

    def __init__(self, model_name: str, status: Callable[[], StatusReply | None], connected: Callable[[], bool]):
        self._registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            series = Histogram(f"evenflow_{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
            return series.labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"evenflow_{name}", text, ["model_name"], registry=self._registry).labels(model_name)

        self._first = histogram("time_to_first_token_seconds", "Request received to first token.", _FIRST_TOKEN)
        self._gap = histogram("inter_token_latency_seconds", "Time between tokens of a request.", _GAP)
        self._whole = histogram("e2e_request_latency_seconds", "Request received to last token.", _WHOLE)
        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "evenflow_request_success",
            "Finished requests by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._responses = Counter(
            "evenflow_http_responses",
            "HTTP responses by status.",
            ["model_name", "status"],
            registry=self._registry,
        )
        self._refused = Counter(
            "evenflow_request_refused",
            "Requests answered with an error, by its code.",
            ["model_name", "code"],
            registry=self._registry,
        )
        self._registry.register(_ControlFigures(model_name, status, connected))

    def first_token(self, seconds: float, tokens: int) -> None:
        self._first.observe(seconds)
        for _ in range(tokens - 1):
            self._gap.observe(0.0)
        self._generated.inc(tokens)

    def gap(self, seconds: float, tokens: int) -> None:
        """Tokens that came together: the first ends a gap, the others had none."""
        self._gap.observe(seconds)
        for _ in range(tokens - 1):
            self._gap.observe(0.0)
        self._generated.inc(tokens)

    def finished(self, reason: str, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        self._success.labels(self._model_name, reason).inc()
        self._prompt.inc(prompt_tokens)
        if completion_tokens:
            self._whole.observe(seconds)

    def refused(self, code: str) -> None:
        self._refused.labels(self._model_name, code).inc()

    def responded(self, status: int) -> None:
        self._responses.labels(self._model_name, str(status)).inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)


class _ControlFigures:
    """The newest status of the control process, read when the metrics are."""

    def __init__(self, model_name: str, status: Callable[[], StatusReply | None], connected: Callable[[], bool]):
        self._model_name = model_name
        self._status = status
        self._connected = connected

    def collect(self) -> Iterator[Metric]:
        figures = {"control_connected": float(self._connected())}
        status = self._status()
        if status is not None:
            figures |= {"ready": float(status.ready), "draining": float(status.draining), **status.values}
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for figure, value in figures.items():
            parsed = _FIGURE.match(figure)
            if parsed is None or parsed[1] in _OWN:
                continue
            name, labels = parsed[1], {"model_name": self._model_name, **dict(_LABEL.findall(parsed[2] or ""))}
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = kind(f"evenflow_{name}", "Of the control process.", labels=list(labels))
                families[name] = family
            family.add_metric(list(labels.values()), value)
        yield from families.values()
