"""The shadow runner and the executor, driven in one process by a naive scheduler of their own."""

import numpy as np
import pytest
from evenflow.control.wire import BatchPlan, Register, Sampling, Start, encode
from evenflow.dataplane.simulated.loopback import LoopbackReplica
from evenflow.dataplane.simulated.shadow import ShadowRunner, shadow_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCKS = 400


def words(values) -> bytes:
    return np.asarray(values, "<u4").tobytes()


def slots_of(values) -> bytes:
    return np.asarray(values, "<u2").tobytes()


def bitmap(slots) -> bytes:
    value = sum(1 << slot for slot in slots)
    return value.to_bytes(-(-value.bit_length() // 8), "little")


class Naive:
    """A scheduler without lookahead: chunks of at most ``budget``, blocks handed out in a shuffled order."""

    def __init__(self, stages: int, block_size: int, budget: int, **epoch: int) -> None:
        self.replica = LoopbackReplica(
            [ShadowRunner(stage, stages, block_size=block_size, num_blocks=BLOCKS) for stage in range(stages)]
        )
        self.block_size = block_size
        self.budget = budget
        self.replica.start(
            Start(
                epoch=epoch.get("epoch", 1),
                stages=stages,
                num_blocks=BLOCKS,
                block_size=block_size,
                num_slots=64,
                token_budget=budget,
                max_model_len=2048,
                links="",
            )
        )
        self.free = list(np.random.default_rng(5).permutation(BLOCKS))
        self.step = 0
        self.output: dict[int, list[int]] = {}
        self.known: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}

    def register(self, slot: int, prompt: list[int], generation: int = 1, **fields: object) -> Register:
        self.known[slot] = len(prompt)
        self.computed[slot] = 0
        self.output[slot] = []
        count = -(-len(prompt) // self.block_size)
        self.blocks[slot] = [int(self.free.pop()) for _ in range(count)]
        values = {"max_len": 2048, "prompt_len": len(prompt), **fields}
        return Register(
            slot=slot,
            generation=generation,
            request=slot,
            tokens=words(prompt),
            computed=0,
            blocks=words(self.blocks[slot]),
            **values,
        )

    def tick(self, registers=(), released=()) -> BatchPlan:
        left = self.budget
        decodes, grow, chunks = [], [], []
        for slot, known in self.known.items():
            if self.computed[slot] == known - 1 and left and self.output[slot]:
                decodes.append(slot)
                if known > len(self.blocks[slot]) * self.block_size:
                    self.blocks[slot].append(int(self.free.pop()))
                    grow.append((slot, self.blocks[slot][-1]))
                left -= 1
        for slot, known in self.known.items():
            if slot not in decodes and left:
                count = min(left, known - self.computed[slot])
                chunks.append((slot, count))
                left -= count
        plan = BatchPlan(
            epoch=1,
            step=self.step,
            lane=0,
            decodes=bitmap(decodes),
            grow_slots=slots_of([slot for slot, _ in grow]),
            grow_blocks=words([block for _, block in grow]),
            chunk_slots=slots_of([slot for slot, _ in chunks]),
            chunk_tokens=words([count for _, count in chunks]),
            released=slots_of(released),
        )
        self.replica.submit([*(encode(register) for register in registers), encode(plan)])
        results = self.replica.run_one()
        self.step += 1
        ids = np.frombuffer(results[-1].ids, "<u4")
        for slot, count in [(slot, 1) for slot in decodes] + chunks:
            self.computed[slot] += count
            if self.computed[slot] == self.known[slot]:
                self.known[slot] += 1
                self.output[slot].append(int(ids[slot]))
        return plan


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 50_000, length).tolist()


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("budget", [5, 16, 64, 1000])
def test_ids_equal_the_oracle_for_any_budget_block_size_and_stages(stages, block_size, budget):
    naive = Naive(stages, block_size, budget)
    prompts = {slot: prompt_of(slot, 1 + 37 * slot) for slot in range(4)}
    seeded = Sampling(temperature=0.7, seed=2**64 - 1, index=3)
    registers = [
        naive.register(slot, prompt, sampling=seeded if slot == 2 else Sampling()) for slot, prompt in prompts.items()
    ]
    naive.tick(registers)
    while min(len(output) for output in naive.output.values()) < 20:
        naive.tick()
    for slot, prompt in prompts.items():
        expected = shadow_tokens(prompt, 20, seeded if slot == 2 else Sampling())
        assert naive.output[slot][:20] == expected


def test_seed_index_and_temperature_change_sampled_ids():
    prompt = prompt_of(1, 20)
    hot = [
        shadow_tokens(prompt, 8, Sampling(temperature=1.0, seed=seed, index=index))
        for seed, index in [(0, 0), (1, 0), (0, 1), (2**64 - 1, 0)]
    ]
    assert len({tuple(ids) for ids in [*hot, shadow_tokens(prompt, 8)]}) == 5


def test_oracle_stops_at_a_stop_id_not_before_the_minimum_length():
    prompt = prompt_of(2, 12)
    free = shadow_tokens(prompt, 10)
    assert shadow_tokens(prompt, 10, stop_ids=[free[4]]) == free[:5]
    assert shadow_tokens(prompt, 10, stop_ids=[free[4]], min_len=12 + 5) == free[:5]
    assert shadow_tokens(prompt, 10, stop_ids=[free[4]], min_len=12 + 6) == free


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("layer", ["_layer_a", "_layer_b"])
def test_a_fault_in_any_stage_and_layer_changes_ids_for_good(stage, layer):
    naive = Naive(3, 8, 100)
    prompt = prompt_of(3, 30)
    naive.tick([naive.register(0, prompt)])
    naive.tick()
    runner = naive.replica.executors[stage].runner
    memory = getattr(runner, layer)
    block = naive.blocks[0][1]
    saved = memory[block, 3].copy()
    memory[block, 3] ^= np.uint64(1)
    naive.tick()
    memory[block, 3] = saved
    naive.tick()
    naive.tick()
    # The token computed while the memory was wrong stays wrong, and with it all that follow.
    expected = shadow_tokens(prompt, 5)
    assert naive.output[0][:2] == expected[:2]
    assert naive.output[0][2] != expected[2]
    forced = shadow_tokens(prompt + naive.output[0][:3], 2)
    assert naive.output[0][3] != forced[0]


def test_reading_what_was_never_written_in_this_epoch_changes_ids():
    naive = Naive(1, 8, 100)
    prompt = prompt_of(4, 24)
    naive.tick([naive.register(0, prompt)])
    naive.replica.executors[0].runner.start(BLOCKS)
    naive.tick()
    assert naive.output[0] != shadow_tokens(prompt, 2)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 3))
def test_any_mix_of_prompt_lengths(lengths, budget, stages):
    naive = Naive(stages, 8, budget)
    prompts = [prompt_of(9 + slot, length) for slot, length in enumerate(lengths)]
    naive.tick([naive.register(slot, prompt) for slot, prompt in enumerate(prompts)])
    for _ in range(400):
        if all(len(output) >= 3 for output in naive.output.values()) or budget < len(lengths):
            break
        naive.tick()
    for slot, prompt in enumerate(prompts):
        output = naive.output[slot]
        assert output == shadow_tokens(prompt, len(output))
