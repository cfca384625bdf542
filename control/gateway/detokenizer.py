"""Turns token ids into text as they come.

The deltas of a request, joined, are exactly the text of all its ids at once: a character whose bytes are spread
over several tokens comes with the last of them, and a rest that never became one comes at the end, as the
replacement character that the whole text has there, too.
"""

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """One request's decoder. ``push`` each id in order, then ``finish``."""

    __slots__ = ("_ids", "_length", "_pending", "_skip", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._length = 0
        self._pending = False

    def push(self, token: int) -> str:
        """The text that became certain with this token; often one word, sometimes nothing."""
        self._ids.append(token)
        text = self._stream.step(self._tokenizer, token)
        if text is None:
            self._pending = True
            return ""
        self._pending = False
        self._length += len(text)
        return text

    def finish(self) -> str:
        """What was held back."""
        if not self._pending:
            return ""
        self._pending = False
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)[self._length :]
