"""Turns token ids into text as they come.

The deltas of a request, joined, are exactly the text of all its ids at once: a character whose bytes are spread
over several tokens comes with the last of them, and a rest that never became one comes at the end, as the
replacement character that the whole text has there, too.

Byte-level vocabularies, which most models have, are decoded here, byte by byte. The tokenizers library's own
``DecodeStream`` gives the same text, but decodes everything again that it has not let out yet: 4,000 tokens of
broken characters took it 19 s. It serves the other vocabularies.
"""

import codecs
import re
from typing import Protocol

from tokenizers import Tokenizer, decoders
from tokenizers.decoders import DecodeStream


class Detokenizer(Protocol):
    """One request's decoder. ``push`` each id in order, then ``finish``."""

    def push(self, token: int) -> str:
        """The text that became certain with this token; often one word, sometimes nothing."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


def _byte_letters() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable ones as themselves, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_LETTERS = _byte_letters()
#: How vocabularies that fall back to bytes spell them.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level vocabulary, filled in as they are asked for; ids without text: none."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._hidden = hidden

    def __missing__(self, token: int) -> bytes:
        text = None if token in self._hidden else self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        try:
            data = bytes([_LETTERS[letter] for letter in text])
        except KeyError:
            data = text.encode()  # an added token, spelled as it is
        self[token] = data
        return data


class Decoding:
    """Makes detokenizers for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._specials = frozenset(index for index, token in added.items() if token.special)
        self._bytes: dict[bool, TokenBytes] | None = None
        if isinstance(tokenizer.decoder, decoders.ByteLevel):
            self._bytes = {
                True: TokenBytes(tokenizer, self._specials),
                False: TokenBytes(tokenizer, frozenset()),
            }

    def start(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes[skip_special_tokens])
        return StreamDetokenizer(self._tokenizer, self._specials if skip_special_tokens else frozenset())

    def is_silent(self, token: int, *, skip_special_tokens: bool = True) -> bool:
        """The token has no text, whatever follows it."""
        if self._bytes is not None:
            return not self._bytes[skip_special_tokens][token]
        return (skip_special_tokens and token in self._specials) or self._tokenizer.id_to_token(token) is None

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for on its own, special or not, which may be a part of a character."""
        if self._bytes is not None:
            return self._bytes[False][token]
        text = self._tokenizer.id_to_token(token) or ""
        if _BYTE_TOKEN.match(text):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()


class ByteDetokenizer:
    """For byte-level vocabularies: the cost of a token is a look-up, whatever came before."""

    __slots__ = ("_bytes", "_decode")

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._bytes[token])

    def finish(self) -> str:
        return self._decode(b"", True)


class StreamDetokenizer:
    """For all other vocabularies. Hidden ids never reach the library, which would keep and decode them each time."""

    __slots__ = ("_hidden", "_ids", "_length", "_pending", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._length = 0
        self._pending = False

    def push(self, token: int) -> str:
        if token in self._hidden or self._tokenizer.id_to_token(token) is None:
            return ""
        self._ids.append(token)
        text = self._stream.step(self._tokenizer, token)
        if text is None:
            self._pending = True
            return ""
        self._pending = False
        self._length += len(text)
        return text

    def finish(self) -> str:
        if not self._pending:
            return ""
        self._pending = False
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)[self._length :]
