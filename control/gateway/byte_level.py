"""Rebuilds a byte-level BPE tokenizer from what a GGUF file says of it.

A GGUF file names the pre-tokenizer instead of describing it. The table below gives the description for the
names that are supported; an unknown name is refused, since a wrong split changes tokens in silence.
"""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from .gguf_metadata import GgufError

#: Values of ``tokenizer.ggml.token_type``.
_CONTROL = 3
_USER_DEFINED = 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    # Digits are cut out first, so white space before one is not split as GPT-2's expression would.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(expression: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(expression), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "default": _gpt2,
    "smollm": _single_digits,
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the file's metadata describes. Raises ``GgufError`` for what is not supported."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise GgufError(f"tokenizer.ggml.model {kind!r} is not supported, only 'gpt2' (byte-level BPE)")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    build_pre = PRE_TOKENIZERS.get(pre)
    if build_pre is None:
        raise GgufError(f"tokenizer.ggml.pre {pre!r} is not supported, only {', '.join(PRE_TOKENIZERS)}")
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    except KeyError as error:
        raise GgufError(f"the key {error} is missing") from None
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = build_pre()
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    pairs = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token, kind in pairs if kind == _USER_DEFINED]
    )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], pair=[tokens[bos], "$A", "$B"], special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer
