"""The rebuilt tokenizer against transformers, its cache, and the loading from a Hugging Face directory."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from evenflow.control.gateway.byte_level import build_tokenizer
from evenflow.control.gateway.detokenizer import ByteDetokenizer, Detokenizer, StreamDetokenizer
from evenflow.control.gateway.gguf_metadata import GgufError, read_metadata
from evenflow.control.gateway.scripted import scripted_text_model
from evenflow.control.gateway.tokenizer import TextModel, TokenizerError, load_text_model
from evenflow.control.wire.location import ModelNotFound, locate_model
from gateway_harness import smollm
from tokenizers import pre_tokenizers

PLAIN = [
    "Hello, world!",
    "naïve café — “quotes” …",
    "東京は夜の七時、雨が降る。",
    "สวัสดีครับ ภาษาไทยไม่มีช่องว่าง",
    "🧑‍🚀👩‍👩‍👧‍👦🇩🇪 ❤️ ok",
    "مرحبا بالعالم שלום עולם हिन्दी",
    "def f(x):\n\treturn {k: v**2 for k, v in x.items()}  # comment\n",
    "for (int i=0;i<10;i++){ a[i]+=i; }\r\n\r\n",
    "a\x00b\x01c\x1b[31m\x7f\u200b\ufeff",
    "   leading\n\n\n   and   trailing   ",
    "\t\t\ttabs\t and  spaces   ",
    "I'll don't we've you're I'd it's 'S 'LL",
    "x12y345z 6789",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|",
    "a" * 500,
    "",
]
#: White space before a digit, and numbers that are no digits of ASCII.
DIGITS = ["a  5", "x   12  345", "line\n\n 7", "٣٤ ½ Ⅳ ²", "1 2  3   4\n5", "v1.2.3 2024-11-29", "  42"]


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoTokenizer

    path = locate_model("smollm2-135m")
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.mark.parametrize("text", PLAIN)
def test_mod_6_equal_to_transformers(oracle: Any, text: str) -> None:
    ids = smollm().encode(text, add_special_tokens=True)
    assert ids == oracle.encode(text)
    assert smollm().decode(ids, skip_special_tokens=False) == oracle.decode(ids, clean_up_tokenization_spaces=False)


def test_mod_6_digits_are_split_as_the_model_was_trained(oracle: Any) -> None:
    """transformers' conversion from GGUF knows no "smollm" split and takes GPT-2's: the oracle is given the split of
    the model's own tokenizer.json, in which each digit is cut out first."""
    backend = oracle.backend_tokenizer
    before = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    try:
        for text in PLAIN + DIGITS:
            assert smollm().encode(text, add_special_tokens=True) == oracle.encode(text)
    finally:
        backend.pre_tokenizer = before


def test_the_specials_and_ends_of_smollm() -> None:
    model = smollm()
    assert model.eos_ids == (2,)
    assert model.specials["bos_token"] == "<|im_start|>" and model.specials["eos_token"] == "<|im_end|>"
    assert model.chat_template is not None
    assert model.max_token_bytes >= max(len(token) for token in model.tokenizer.get_vocab())


def detokenizers(skip: bool) -> list[Detokenizer]:
    """Both kinds, over the same vocabulary."""
    model = smollm()
    specials = frozenset(range(17)) if skip else frozenset[int]()
    return [model.decoding.start(skip_special_tokens=skip), StreamDetokenizer(model.tokenizer, specials)]


def test_str_1_deltas_are_the_whole_text() -> None:
    model = smollm()
    rng = random.Random(7)
    pool = model.encode("naïve 東京 🧑‍🚀 ok. สวัสดี", add_special_tokens=False)
    for _ in range(1000):
        ids = [
            rng.choice([rng.choice(pool), rng.randrange(3, 280), rng.randrange(49_300)])
            for _ in range(rng.randint(1, 30))
        ]
        for skip in (True, False):
            for decoder in detokenizers(skip):
                text = "".join([decoder.push(token) for token in ids]) + decoder.finish()
                assert text == model.decode(ids, skip_special_tokens=skip)


def test_the_byte_decoder_is_the_one_in_use_and_knows_all_tokens() -> None:
    model = smollm()
    assert isinstance(model.decoding.start(), ByteDetokenizer)
    for token in range(49_152):
        decoder = model.decoding.start(skip_special_tokens=False)
        assert decoder.push(token) + decoder.finish() == model.decode([token], skip_special_tokens=False)


def test_str_1_half_a_character_is_held_back() -> None:
    model = smollm()
    ids = model.encode("🧑‍🚀 ok", add_special_tokens=False)
    for decoder in detokenizers(True):
        pieces = [decoder.push(token) for token in ids]
        assert "\ufffd" not in "".join(pieces) and "" in pieces
    for cut in detokenizers(True):
        assert cut.push(ids[0]) == "" and cut.finish() == model.decode(ids[:1])


def test_tok_5_ids_without_text_give_an_empty_delta() -> None:
    for decoder in detokenizers(True):
        assert [decoder.push(token) for token in (49_152, 49_999, 4_000_000_000)] == ["", "", ""]
        assert decoder.finish() == ""


def test_the_cache_is_used_and_rebuilt_when_broken(tmp_path: Path) -> None:
    path = locate_model("smollm2-135m")
    first = load_text_model(path, tmp_path)
    (entry,) = tmp_path.iterdir()
    text = PLAIN[1]
    assert load_text_model(path, tmp_path).encode(text, add_special_tokens=False) == first.encode(
        text, add_special_tokens=False
    )
    for broken in (b"", b"{}", b'{"tokenizer":{},"chat_template":null,"specials":{},"eos_ids":[]}', b"\xff" * 99):
        entry.write_bytes(broken)
        again = load_text_model(path, tmp_path)
        assert again.encode(text, add_special_tokens=False) == first.encode(text, add_special_tokens=False)
        assert entry.stat().st_size > 10_000
    assert [item.name for item in tmp_path.iterdir()] == [entry.name]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert load_text_model(locate_model("smollm2-135m"), blocked).eos_ids == (2,)


def hf_directory(folder: Path, model: TextModel, **tokenizer_config: Any) -> Path:
    model.tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", **tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    return folder


def test_tok_3_ends_are_the_union_of_all_sources(tmp_path: Path) -> None:
    model = load_text_model(hf_directory(tmp_path, smollm()))
    assert model.eos_ids == (0, 2, 3, 4)


def test_templates_of_a_directory(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = hf_directory(tmp_path, smollm(), chat_template=named)
    assert load_text_model(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert load_text_model(folder).chat_template == "J"


def test_tok_1_a_text_that_begins_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    metadata = read_metadata(locate_model("smollm2-135m"))
    metadata["tokenizer.ggml.add_bos_token"] = True
    build_tokenizer(metadata).save(str(tmp_path / "plain.json"))
    folder = hf_directory(tmp_path, smollm())
    shutil.copy(tmp_path / "plain.json", folder / "tokenizer.json")
    model = load_text_model(folder)
    assert model.encode("hi", add_special_tokens=True)[:1] == [1]
    assert model.encode("<|im_start|>hi", add_special_tokens=True).count(1) == 1
    assert model.encode("hi", add_special_tokens=False).count(1) == 0


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    metadata = read_metadata(locate_model("smollm2-135m"))
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.pre 'other'"):
        build_tokenizer(metadata | {"tokenizer.ggml.pre": "other"})
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.model 'llama'"):
        build_tokenizer(metadata | {"tokenizer.ggml.model": "llama"})
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_text_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"nonsense" * 9, b"GGUF\x03\0\0\0" + b"\xff" * 40])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=r"m\.gguf"):
        load_text_model(path, tmp_path)


def test_models_are_located() -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        locate_model("no-such-model")
    assert locate_model("smollm2-135m").suffix == ".gguf"


def test_the_scripted_model_shows_every_id() -> None:
    model = scripted_text_model()
    ids = model.encode("héllo 東", add_special_tokens=False)
    assert model.decode(ids) == "héllo 東"
    assert model.decode([1234, 49_999]) == " 1234 49999"
