"""Dynamic rotary frequencies under the real core: keys of a long prompt depend on its length, so that only prompts of
one length may share them. Every request gets the tokens that it gets alone, with prefix cache and preemption.
"""

from dataclasses import replace
from random import Random

import pytest
from evenflow.control.core.events import Limits
from evenflow.dataplane.model_runner import ModelRunner
from evenflow.dataplane.models.rope import RopeScaling
from evenflow.dataplane.weights.random import RANDOM_CONFIG, RandomSource
from inprocess import InProcess

TRAINED = 64
NEW = 12
_random = Random(3)
TEXT = [_random.randrange(RANDOM_CONFIG.vocab_size) for _ in range(400)]


@pytest.fixture(scope="module")
def runners() -> list[ModelRunner]:
    source = RandomSource(replace(RANDOM_CONFIG, layers=2, rope=RopeScaling("dynamic", 4.0, TRAINED)))
    return [ModelRunner(source, stage, 2, dtype="float32", kv_memory=1 << 20, poison=True) for stage in range(2)]


def serve(
    runners: list[ModelRunner], prompts: list[list[int]], *, limit: int = TRAINED, blocks: int | None = None
) -> tuple[list[list[int]], list[int]]:
    """Tokens of each prompt, and how many it found in the prefix cache. One after the other, or with few ``blocks``
    all at once."""
    for runner in runners:
        runner.poison()
    limits = Limits(token_budget=48, max_model_len=400, prefix_limit=limit)
    server = InProcess(limits, lambda stage, _: runners[stage], stages=2, num_blocks=blocks)
    for key, prompt in enumerate(prompts):
        server.submit(key, prompt, NEW)
        if blocks is None:
            server.run()
    server.run()
    preempted = sum(replica.preemptions for replica in server.engine.replicas.values())
    assert bool(preempted) == (blocks is not None)
    cached = server.clients[0].cached
    return [server.tokens(key) for key in range(len(prompts))], [cached[key] for key in range(len(prompts))]


def test_only_prompts_of_one_length_share_keys_past_the_trained_length(runners: list[ModelRunner]) -> None:
    assert runners[0].info.prefix_limit == TRAINED
    prompts = [TEXT[:length] for length in (40, 60, 64, 65, 200, 200, 201, 330, 200, 60)]
    by_length = {len(prompt): serve(runners, [prompt])[0][0] for prompt in prompts}
    alone = [by_length[len(prompt)] for prompt in prompts]
    tokens, cached = serve(runners, prompts)
    assert tokens == alone
    assert cached == [0, 32, 48, 0, 0, 192, 0, 0, 192, 48]
    # Without the limit the prompts would share what they must not.
    assert serve(runners, prompts, limit=0)[0] != alone


def test_a_preempted_sequence_is_recomputed_with_its_own_frequencies(runners: list[ModelRunner]) -> None:
    prompts = [TEXT[begin : begin + 60 + begin // 20] for begin in (0, 20, 40, 60, 80)] + [TEXT[:78]]
    alone = [serve(runners, [prompt])[0][0] for prompt in prompts]
    assert serve(runners, prompts, blocks=14)[0] == alone
