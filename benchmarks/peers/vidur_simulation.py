"""Vidur (vidur==0.0.26) on the load of benchmarks/simulation_speed.py; run by it, in an environment of Vidur's own.

Its execution times are trained from tables that it downloads. Here they are what is cheapest: constants, looked up
nowhere, so only its events, scheduler and entities are measured; metrics and traces are off. Reads a JSON object
from stdin (``requests``: prompt and output lengths, all there at the start; ``running``, ``budget``, ``blocks``, and
``first`` and ``last``, the numbers of completed requests between which is measured), prints one.
"""

import json
import os
import sys
import tempfile
import time


def main() -> int:
    asked = json.load(sys.stdin)
    os.environ["WANDB_MODE"] = "disabled"
    # It writes its log to what it finds here.
    sys.stdout, told = sys.stderr, sys.stdout
    os.chdir(tempfile.mkdtemp(prefix="vidur-"))
    from vidur.config import (
        CacheConfig,
        ClusterConfig,
        MetricsConfig,
        ReplicaConfig,
        SarathiSchedulerConfig,
        SimulationConfig,
    )
    from vidur.entities import Request
    from vidur.events.batch_end_event import BatchEndEvent
    from vidur.execution_time_predictor.base_execution_time_predictor import BaseExecutionTimePredictor
    from vidur.execution_time_predictor.random_forrest_execution_time_predictor import (
        RandomForrestExecutionTimePredictor,
    )
    from vidur.request_generator.synthetic_request_generator import SyntheticRequestGenerator
    from vidur.simulator import Simulator

    constants = {}
    for name in dir(RandomForrestExecutionTimePredictor):
        if name.startswith("_get_") and name.endswith("_time"):
            constants[name] = lambda self, *_: 0.01

    def begin(self, predictor_config, replica_config, cache_config):
        BaseExecutionTimePredictor.__init__(self, predictor_config, replica_config, cache_config)

    for name, value in {**constants, "__init__": begin}.items():
        setattr(RandomForrestExecutionTimePredictor, name, value)
    SyntheticRequestGenerator.generate_requests = lambda self: [
        Request(1e-9 * number, prompt, output) for number, (prompt, output) in enumerate(asked["requests"])
    ]
    config = SimulationConfig(
        cluster_config=ClusterConfig(
            replica_config=ReplicaConfig(num_pipeline_stages=1, tensor_parallel_size=1),
            cache_config=CacheConfig(num_blocks=asked["blocks"]),
            replica_scheduler_config=SarathiSchedulerConfig(
                batch_size_cap=asked["running"], chunk_size=asked["budget"]
            ),
        ),
        metrics_config=MetricsConfig(write_metrics=False, enable_chrome_trace=False, store_plots=False),
    )
    config.execution_time_predictor_config.use_native_execution_time_predictor = False
    simulator = Simulator(config)
    ends, finished = 0, 0
    marks = []
    handle = BatchEndEvent.handle_event

    def counted(self, *arguments):
        nonlocal ends, finished
        ends += 1
        events = handle(self, *arguments)
        finished += sum(request.completed for request in self._batch.requests)
        if (not marks and finished >= asked["first"]) or (len(marks) == 1 and finished >= asked["last"]):
            marks.append((ends, time.process_time()))
        return events

    BatchEndEvent.handle_event = counted
    simulator.run()
    (before, began), (after, ended) = marks
    json.dump({"iterations": after - before, "cpu_seconds": ended - began, "finished": finished}, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
