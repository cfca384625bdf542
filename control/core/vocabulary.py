"""The token ids of a submission, checked where it is taken: a worker only sees ids that the model has."""

from __future__ import annotations


def too_large(tokens: bytes, vocab_size: int) -> int | None:
    """The largest id in ``tokens`` (u32, at least one) if ``vocab_size`` is not above it, else None.

    Nearly always decided without an object a token: ids are small, so their upper bytes alone tell.
    """
    most = vocab_size - 1
    for place in (3, 2, 1, 0):
        limit = most >> 8 * place & 255
        if limit == 255:
            continue
        plane = tokens[place::4]
        if plane.translate(None, _UP_TO[limit]):
            break
        if limit and limit not in plane:
            return None
    largest = max(memoryview(tokens).cast("I"))
    return largest if largest > most else None


_UP_TO = [bytes(range(limit + 1)) for limit in range(256)]
