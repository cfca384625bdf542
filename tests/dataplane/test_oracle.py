"""Greedy tokens of SmolLM2 equal those of transformers on the same weights, in float32; criterion 1, case MOD-6.

The oracle reads each prompt with our answer in one pass, and must itself choose every token of the answer: that is
generating, token by token, for as long as the two agree. Where it chooses another token although its two best
logits differ by less than ``TIE``, the split is a tie: printed, and the answer goes on with our token.

Log-probabilities of prompts and answers are within ``TIE`` of the oracle's.
"""

import mmap
import random
import zlib
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from evenflow.control.core.events import Limits
from evenflow.control.wire import Sampling
from evenflow.control.wire.location import locate_model
from evenflow.dataplane.model_runner import ModelRunner, load_runner
from evenflow.dataplane.models.config import HEAD, LlamaConfig, tensor_shapes
from evenflow.dataplane.weights import open_model
from evenflow.dataplane.weights.gguf_file import read_header
from gguf import GGMLQuantizationType, GGUFWriter
from inprocess import InProcess
from runner_driver import Sequence, generate, sequence
from transformers import LlamaConfig as OracleConfig
from transformers import LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

MODEL = "smollm2-135m"
NEW_TOKENS = 64
TIE = 1e-4
#: Lengths of the prompts in tokens.
LENGTHS = [*range(1, 8), 15, 16, 17, 31, 32, 33, 40, 48, 63, 64, 65, 90, 127, 128, 129, 200, 255, 256, 257, 400, 700]
LENGTHS += [1500, 3000]


def oracle_config(config: LlamaConfig) -> OracleConfig:
    return OracleConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_len,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied,
    )


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    """transformers' model with our tensors; ``test_weights_equal_…`` holds those against its own reader."""
    source = open_model(MODEL)
    with torch.device("meta"):
        model = LlamaForCausalLM(oracle_config(source.config))
    state = {name: source.load(name) for name in tensor_shapes(source.config)}
    state[HEAD] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    # The rotary frequencies are no part of the state: made again, off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(oracle_config(source.config))
    return model.eval()


def varied_prompts() -> list[list[int]]:
    """Noise, repetition, slow drift over the vocabulary, and mixtures; seeded by the length."""
    prompts: list[list[int]] = []
    for number, length in enumerate(LENGTHS):
        source = random.Random(zlib.crc32(b"%d" % length))
        noise = [source.randrange(17, 49152) for _ in range(length)]
        common = [source.randrange(17, 2000) for _ in range(length)]
        period = [common[index % 5] for index in range(length)]
        half = length // 2
        prompts.append([noise, common, period, [1, *common[:half], *noise[half:]][:length]][number % 4])
    return prompts


def count_ties(oracle: LlamaForCausalLM, answered: Sequence, length: int) -> int:
    """Fails at a token that the oracle did not choose."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([answered.tokens[:-1]]), logits_to_keep=NEW_TOKENS).logits[0]
    ties = 0
    for index, token in enumerate(answered.out):
        best = torch.topk(logits[index], 2)
        if int(best.indices[0]) == token:
            continue
        gap = float(best.values[0] - best.values[1])
        assert gap < TIE and token == int(best.indices[1]), (
            f"prompt of {length}: token {index} is {token}, the oracle's {best.indices.tolist()} are {gap} apart"
        )
        print(f"prompt of {length}: tie at token {index}, the oracle's two best differ by {gap:.1e}")
        ties += 1
    return ties


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return load_runner(MODEL, dtype="float32", kv_memory=1 << 29, poison=True)


def test_greedy_tokens_equal_transformers(oracle: LlamaForCausalLM, runner: ModelRunner) -> None:
    prompts = varied_prompts()
    assert len(prompts) == 30 and max(map(len, prompts)) == 3000
    answered: list[Sequence] = []
    first = 0
    for prompt in prompts:
        answered.append(sequence(prompt, first, 16, NEW_TOKENS))
        first += len(answered[-1].blocks)
    generate([runner], answered, NEW_TOKENS, budget=512)
    ties = sum(count_ties(oracle, one, len(prompt)) for one, prompt in zip(answered, prompts, strict=True))
    print(f"{len(prompts)} prompts, {ties} ties")
    assert len({token for one in answered for token in one.out}) > 100


def test_logprobs_equal_transformers(oracle: LlamaForCausalLM, runner: ModelRunner) -> None:
    """Of every token of the prompt after the first, read in chunks of 16, and of a greedy output."""
    limits = Limits(token_budget=16, max_num_seqs=4, max_model_len=256, block_size=16)
    server = InProcess(limits, lambda _stage, _stages: runner)
    prompts = [prompt for prompt in varied_prompts() if len(prompt) in (5, 33, 48)]
    for key, prompt in enumerate(prompts):
        server.submit(key, prompt, 12, sampling=Sampling(logprobs=5, prompt_logprobs=5))
    server.run()
    for key, prompt in enumerate(prompts):
        tokens = [*prompt, *server.tokens(key)]
        with torch.inference_mode():
            wanted = torch.log_softmax(oracle(torch.tensor([tokens])).logits[0], -1)
        found = server.logprobs_of(key)
        assert sorted(found) == list(range(1, len(prompt) + 12))
        for place, (value, rank, top) in found.items():
            row = wanted[place - 1]
            assert value == pytest.approx(float(row[tokens[place]]), abs=TIE)
            assert [of_token for _, of_token in top] == pytest.approx(torch.topk(row, 5).values.tolist(), abs=TIE)
            assert [float(row[token]) for token, _ in top] == pytest.approx([v for _, v in top], abs=TIE)
            # Between the ranks that a token has if all that are within TIE of it come later, or earlier.
            assert int((row > value + 2 * TIE).sum()) < rank <= int((row > value - 2 * TIE).sum())
            assert place < len(prompt) or rank == 1


def without_tokenizer(source: Path, path: Path) -> Path:
    """The same model in a file without the long lists, of which the public reader makes objects for half a minute."""
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = read_header(source, data)
        writer = GGUFWriter(path, header.metadata["general.architecture"])
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        for key, value in header.metadata.items():
            if key.startswith("llama."):
                add[type(value)](key, value)
        for name, tensor in header.tensors.items():
            raw = np.frombuffer(data[tensor.offset : tensor.offset + tensor.num_bytes], np.uint8)
            rows = raw.reshape(*tensor.shape[:-1], -1)
            if tensor.type == GGMLQuantizationType.F32:
                writer.add_tensor(name, rows.view(np.float32))
            else:
                writer.add_tensor(name, rows, raw_dtype=tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_equal_those_that_transformers_reads(
    oracle: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own GGUF reader: dequantisation, names and rotary order of every tensor."""
    path = without_tokenizer(locate_model(MODEL), tmp_path / "model.gguf")
    # The reader makes the same table of names again for each module of the model.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=oracle)
    ours = {name: tensor for name, tensor in oracle.state_dict().items() if name != HEAD}
    assert set(theirs["tensors"]) == set(ours)
    for name, tensor in theirs["tensors"].items():
        assert torch.equal(tensor, ours[name]), name
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta"):
        expected = theirs["config"][key]
        actual = oracle.config.rope_parameters[key] if key == "rope_theta" else getattr(oracle.config, key)
        assert actual == pytest.approx(expected), key
