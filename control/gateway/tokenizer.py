"""Loads a model's tokenizer, chat template and end-of-sequence ids, without torch and without its tensors.

From a Hugging Face directory, or from a GGUF file's metadata; the tokenizer rebuilt from the latter is cached as
JSON under ``$XDG_CACHE_HOME/evenflow``, named after the file's name, size and time. A cache that cannot be read
is rebuilt; one that cannot be written is done without.
"""

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from .byte_level import build_tokenizer
from .detokenizer import Decoding
from .gguf_metadata import GgufError, read_metadata

#: Part of the cache's names: grows whenever what is built from the same file changes.
_CACHE_VERSION = 1
_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_SPECIALS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_GGUF_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class TokenizerError(ValueError):
    """The model has no tokenizer that can be used. The text is for the user."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """All that turns text into token ids and back. Safe to use from several threads."""

    tokenizer: Tokenizer
    decoding: Decoding
    chat_template: str | None
    #: ``bos_token``, ``eos_token`` … as chat templates name them.
    specials: dict[str, str]
    #: The union of what the model's files say ends a sequence.
    eos_ids: tuple[int, ...]
    bos_id: int | None
    #: No token stands for more bytes of text than this.
    max_token_bytes: int

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. A text that begins with the BOS string gets no second BOS from the tokenizer."""
        # The batch form releases the interpreter lock, the single form does not.
        ids = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        bos = self.bos_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids without text give none."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def load_text_model(path: Path, cache: Path | None = None) -> TextModel:
    """Load from a ``.gguf`` file or a Hugging Face directory. Raises ``TokenizerError``."""
    try:
        return _from_directory(path) if path.is_dir() else _from_gguf(path, cache or _cache_directory())
    except (GgufError, OSError, msgspec.MsgspecError) as error:
        raise TokenizerError(f"cannot load the tokenizer of {path}: {error}") from error


class _Cached(msgspec.Struct):
    tokenizer: msgspec.Raw
    chat_template: str | None
    specials: dict[str, str]
    eos_ids: list[int]


def _from_gguf(path: Path, cache: Path) -> TextModel:
    stat = path.stat()
    identity = f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}:{_CACHE_VERSION}"
    entry = cache / f"tokenizer-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    with contextlib.suppress(OSError, ValueError):
        return _assemble_cached(msgspec.json.decode(entry.read_bytes(), type=_Cached))
    metadata = read_metadata(path)
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])

    def token(key: str) -> str | None:
        index = metadata.get(key)
        return tokens[index] if isinstance(index, int) and index < len(tokens) else None

    cached = _Cached(
        tokenizer=msgspec.Raw(build_tokenizer(metadata).to_str().encode()),
        chat_template=metadata.get("tokenizer.chat_template"),
        specials={name: text for name, key in _GGUF_SPECIALS.items() if (text := token(key)) is not None},
        eos_ids=sorted({metadata[key] for key in _GGUF_ENDS if key in metadata}),
    )
    with contextlib.suppress(OSError):
        _write_atomically(entry, msgspec.json.encode(cached))
    return _assemble_cached(cached)


def _assemble_cached(cached: _Cached) -> TextModel:
    try:
        # The library raises plain Exception for JSON it does not understand.
        tokenizer = Tokenizer.from_str(bytes(cached.tokenizer).decode())
    except Exception as error:
        raise ValueError(f"not a tokenizer: {error}") from error
    return _assemble(tokenizer, cached.chat_template, cached.specials, set(cached.eos_ids))


def _from_directory(path: Path) -> TextModel:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{path} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    config = _read_json(path / "tokenizer_config.json")
    specials: dict[str, str] = {}
    for name in _SPECIALS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            specials[name] = text
    ends: set[int] = set()
    for source in (_read_json(path / "config.json"), _read_json(path / "generation_config.json")):
        value = source.get("eos_token_id")
        ends.update(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
    if (eos := specials.get("eos_token")) and (index := tokenizer.token_to_id(eos)) is not None:
        ends.add(index)
    return _assemble(tokenizer, _directory_template(path, config), specials, ends)


def _directory_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {item["name"]: item["template"] for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _assemble(tokenizer: Tokenizer, template: str | None, specials: dict[str, str], ends: set[int]) -> TextModel:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    longest = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
    if tokenizer.normalizer is not None:
        # A normaliser may make text shorter: composition takes up to four bytes into one.
        longest *= 4
    bos = specials.get("bos_token")
    return TextModel(
        tokenizer=tokenizer,
        decoding=Decoding(tokenizer),
        chat_template=template,
        specials=specials,
        eos_ids=tuple(sorted(ends)),
        bos_id=None if bos is None else tokenizer.token_to_id(bos),
        max_token_bytes=longest,
    )


def _read_json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "evenflow"


def _write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
        try:
            file.write(content)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
