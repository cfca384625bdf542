"""The bytes of every message, so that a change of the protocol is seen: fields may only be appended.

Decoded by plain ``msgpack`` too, as a client in another language would.
"""

from typing import get_args

import msgpack
import msgspec
import pytest
from evenflow.control.wire import BatchPlan, WireError, encode
from golden import DECODERS, GOLDEN, u16, u32


def members(union):
    """The messages of a direction, of which one may be all."""
    return get_args(union) or (union,)


def decoder_of(kind: type):
    return next(decode for union, decode in DECODERS if kind in members(union))


def plain(value: object) -> object:
    """What a decoder without our types sees: arrays of the fields, the tag first."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        head = [] if config.tag is None else [config.tag]
        return [*head, *(plain(getattr(value, field)) for field in value.__struct_fields__)]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def ids(case):
    return type(case).__name__ if isinstance(case, msgspec.Struct) else ""


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=ids)
def test_bytes_of_every_message(message, golden):
    assert encode(message).hex() == golden
    assert decoder_of(type(message))(bytes.fromhex(golden)) == message
    assert msgpack.unpackb(bytes.fromhex(golden)) == plain(message)


def test_every_message_has_golden_bytes_and_tags_are_unique():
    kinds = {kind for union, _ in DECODERS for kind in members(union)}
    assert kinds == {type(message) for message, _ in GOLDEN}
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=ids)
def test_appended_fields_are_ignored(message, golden):
    newer = msgpack.packb([*msgpack.unpackb(bytes.fromhex(golden)), {"new": [1, b"x"]}, None])
    assert decoder_of(type(message))(newer) == message


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=ids)
def test_missing_trailing_fields_take_their_defaults_and_required_ones_are_missed(message, golden):
    kind = type(message)
    required = len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    fields = msgpack.unpackb(bytes.fromhex(golden))
    older = decoder_of(kind)(msgpack.packb(fields[: 1 + required]))
    for field, default in zip(kind.__struct_fields__[required:], kind.__struct_defaults__, strict=True):
        assert getattr(older, field) == (default.factory() if hasattr(default, "factory") else default)
    if required:
        with pytest.raises(WireError):
            decoder_of(kind)(msgpack.packb(fields[:required]))


def test_a_plan_of_256_decodes_and_a_chunk_has_at_most_350_bytes():
    plan = BatchPlan(
        epoch=2**32 - 1,
        step=2**32 - 1,
        lane=0,
        decodes=b"\xff" * 32,
        grow_slots=u16(*range(0, 256, 16)),
        grow_blocks=u32(*range(10**6, 10**6 + 16)),
        chunk_slots=u16(256),
        chunk_tokens=u32(512),
    )
    assert len(encode(plan)) <= 350
