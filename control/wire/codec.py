"""Encoding and decoding. A frame that does not decode raises ``WireError``; nothing else may be raised."""

from typing import TypeVar

import msgspec
from msgspec import msgpack

from .client import FromClient, ToClient
from .fields import MAX_MESSAGE_BYTES
from .records import IterationRecord
from .worker import FromWorker, ToWorker

#: Raised only when a change cannot be expressed by appending fields.
PROTOCOL_VERSION = 1


class WireError(ValueError):
    """A frame is not a message of this protocol. The text says which field and why."""


_T = TypeVar("_T")

encode = msgpack.Encoder().encode

_to_worker = msgpack.Decoder(ToWorker)
_from_worker = msgpack.Decoder(FromWorker)
_to_client = msgpack.Decoder(ToClient)
_from_client = msgpack.Decoder(FromClient)
_record = msgpack.Decoder(IterationRecord)


def _checked(decoder: msgpack.Decoder[_T], frame: bytes | memoryview) -> _T:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(frame)} bytes: at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise WireError(str(error)) from None


def decode_to_worker(frame: bytes | memoryview) -> ToWorker:
    """Decode what a worker (or the launcher) receives. Raises ``WireError``."""
    return _checked(_to_worker, frame)


def decode_from_worker(frame: bytes | memoryview) -> FromWorker:
    """Decode what the control process receives from a worker or the launcher. Raises ``WireError``."""
    return _checked(_from_worker, frame)


def decode_to_client(frame: bytes | memoryview) -> ToClient:
    """Decode what a client receives. Raises ``WireError``."""
    return _checked(_to_client, frame)


def decode_from_client(frame: bytes | memoryview) -> FromClient:
    """Decode what the control process receives from a client. Raises ``WireError``."""
    return _checked(_from_client, frame)


def decode_record(frame: bytes | memoryview) -> IterationRecord:
    """Decode what a subscriber of the ``events`` socket receives. Raises ``WireError``."""
    return _checked(_record, frame)
