"""Round trips, bounds and garbage: whatever comes in, decoding gives a valid message or ``WireError``."""

import contextlib
import pickle
import struct

import msgpack
import pytest
from evenflow.control.wire import (
    MAX_BIASES,
    BatchPlan,
    Heartbeat,
    Logprobs,
    Register,
    Result,
    Sampling,
    Submit,
    Subscribe,
    Tick,
    TokenLogprobs,
    WireError,
    decode_from_client,
    decode_from_worker,
    decode_record,
    decode_to_client,
    decode_to_worker,
    encode,
)
from evenflow.control.wire.fields import MAX_ENTRIES, MAX_MESSAGE_BYTES, MAX_TOKENS
from hypothesis import given
from hypothesis import strategies as st

DECODERS = [decode_to_worker, decode_from_worker, decode_to_client, decode_from_client, decode_record]

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
count = st.integers(0, MAX_TOKENS)
buffers = st.lists(u32, max_size=20).map(lambda values: struct.pack(f"<{len(values)}I", *values))
slots = st.lists(u16, max_size=20).map(lambda values: struct.pack(f"<{len(values)}H", *values))
stops = st.lists(u32, max_size=64).map(tuple)
floats = st.lists(st.floats(width=32, allow_nan=False), max_size=20).map(
    lambda values: struct.pack(f"<{len(values)}f", *values)
)
penalty = st.floats(-2, 2)
alternatives = st.integers(-1, 20)
sampling = st.builds(
    Sampling,
    temperature=st.floats(0, 100),
    top_k=u32,
    top_p=st.floats(0, 1, exclude_min=True),
    seed=u64,
    index=u32,
    min_p=st.floats(0, 1),
    repetition=st.floats(0.01, 10),
    presence=penalty,
    frequency=penalty,
    bias_ids=buffers,
    bias_values=floats,
    logprobs=alternatives,
    prompt_logprobs=alternatives,
)
rows = {"start": count, "values": floats, "ranks": buffers, "top_ids": buffers, "top_values": floats}
registers = st.builds(
    Register,
    slot=u16,
    generation=u32,
    request=u64,
    tokens=buffers,
    prompt_len=count,
    computed=count,
    blocks=buffers,
    max_len=count,
    min_len=count,
    stop_ids=stops,
    sampling=sampling,
)
plans = st.builds(
    BatchPlan,
    epoch=u32,
    step=u32,
    lane=u16,
    decodes=st.binary(max_size=64),
    grow_slots=slots,
    grow_blocks=buffers,
    chunk_slots=slots,
    chunk_tokens=buffers,
    released=slots,
)
results = st.builds(
    Result,
    epoch=u32,
    step=u32,
    lane=u16,
    received_us=u64,
    started_us=u64,
    ended_us=u64,
    idle_us=u64,
    starved_us=u64,
    ids=buffers,
    stopped=slots,
    digest=st.none() | u32,
    logprobs=st.lists(st.builds(Logprobs, slot=u16, **rows), max_size=3),
)
submits = st.builds(
    Submit,
    key=u64,
    request=st.text(max_size=40),
    tokens=buffers,
    prompt_len=count,
    max_tokens=count,
    sampling=sampling,
    stop_ids=stops,
    min_tokens=count,
    salt=st.binary(max_size=64),
    leader=st.none() | u64,
    tenant=st.text(max_size=40),
    priority=st.integers(-1000, 1000),
    deadline_ms=st.integers(0, 86_400_000),
    slo=st.text(max_size=40),
    tbt_ms=st.integers(0, 60_000),
)
ticks = st.builds(
    Tick,
    sequence=u64,
    step=u64,
    live=st.binary(max_size=64),
    dense=st.booleans(),
    ids=buffers,
    logprobs=st.lists(st.builds(TokenLogprobs, key=u64, **rows), max_size=3),
)


@given(registers | plans)
def test_round_trip_to_workers(message):
    assert decode_to_worker(encode(message)) == message


@given(results)
def test_round_trip_from_workers(message):
    assert decode_from_worker(encode(message)) == message


@given(submits)
def test_round_trip_from_clients(message):
    assert decode_from_client(encode(message)) == message
    assert decode_from_client(memoryview(encode(message))) == message


@given(ticks)
def test_round_trip_to_clients(message):
    assert decode_to_client(encode(message)) == message


REGISTER = [2, 0, 1, 1, b"\0" * 4, 1, 0, b"", 2]
#: The later fields of a ``Sampling``: their defaults, and values that each refuses.
SAMPLING = [0.0, 1.0, 0.0, 0.0, b"", b"", -1, -1]
SAMPLING_BOUNDS = {
    "min_p": (-0.1, 1.5, float("nan"), float("inf")),
    "repetition": (0.0, -1.0, 10.5, float("nan"), float("inf")),
    "presence": (-2.5, 2.5, float("nan"), float("-inf")),
    "frequency": (-2.5, 2.5, float("nan"), "1"),
    "bias_ids": (b"\0" * (4 * MAX_BIASES + 1), [1]),
    "bias_values": (b"\0" * (4 * MAX_BIASES + 1), 1.0),
    "logprobs": (-2, 21, 1.5, True),
    "prompt_logprobs": (-2, 21, None),
}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param([2, 1 << 16, *REGISTER[2:]], id="slot past u16"),
        pytest.param([2, -1, *REGISTER[2:]], id="negative slot"),
        pytest.param([*REGISTER[:2], 1 << 32, *REGISTER[3:]], id="generation past u32"),
        pytest.param([*REGISTER[:5], MAX_TOKENS + 1, *REGISTER[6:]], id="prompt length"),
        pytest.param([*REGISTER[:4], [1, 2], *REGISTER[5:]], id="tokens as a list"),
        pytest.param([*REGISTER[:4], "text", *REGISTER[5:]], id="tokens as text"),
        pytest.param([*REGISTER, 0, [0] * 65], id="too many stop ids"),
        pytest.param([*REGISTER, 0, [1 << 32]], id="stop id past u32"),
        pytest.param([*REGISTER, 0, [], [-0.5]], id="negative temperature"),
        pytest.param([*REGISTER, 0, [], [float("nan")]], id="temperature not a number"),
        pytest.param([*REGISTER, 0, [], [1.0, 0, 0.0]], id="top_p of nothing"),
        pytest.param([*REGISTER, 0, [], [1.0, 0, 1.5]], id="top_p past one"),
        *(
            pytest.param(
                [*REGISTER, 0, [], [1.0, 0, 1.0, 0, 0, *SAMPLING[:place], value]], id=f"{name} {str(value)[:8]}"
            )
            for place, (name, values) in enumerate(SAMPLING_BOUNDS.items())
            for value in values
        ),
        pytest.param([3, 0, 0, 0, b"\0" * 8193], id="bitmap past the slots"),
        pytest.param([3, 0, True, 0, b""], id="step as a boolean"),
        pytest.param([3, 0, 1.5, 0, b""], id="step as a fraction"),
        pytest.param([99], id="unknown tag"),
        pytest.param([], id="no tag"),
        pytest.param(["3", 0, 0, 0, b""], id="tag as text"),
        pytest.param({"type": 3}, id="a map"),
        pytest.param(3, id="a number"),
    ],
)
def test_out_of_bounds_is_refused(fields):
    with pytest.raises(WireError):
        decode_to_worker(msgpack.packb(fields))


def test_bounds_of_client_messages():
    with pytest.raises(WireError, match="60000"):
        decode_from_client(encode(Subscribe(60_001)))
    with pytest.raises(WireError):
        decode_from_client(msgpack.packb([33, 5, "x" * 257, b"", 0]))
    with pytest.raises(WireError):
        decode_from_client(msgpack.packb([33, 5, "x", b"", 0, 0, [], [], 0, b"s" * 65]))
    with pytest.raises(WireError):
        decode_from_client(msgpack.packb([33, 5, "x", b"", 0, 0, [], [], 0, b"", -1]))


MANY = b"\xdd" + (MAX_ENTRIES + 1).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("decode", "frame"),
    [
        pytest.param(decode_from_worker, b"\x9d\x12" + bytes(8) + b"\xc4\0\xc4\0\xc0" + MANY, id="Result.logprobs"),
        pytest.param(decode_to_client, b"\x99\x31\0\0\xc4\0\xc2" + b"\xc4\0" * 3 + MANY, id="Tick.ends"),
        pytest.param(decode_to_client, b"\x93\x35\0" + MANY, id="Merged.runs"),
        pytest.param(decode_to_client, b"\x95\x35\0\x90\x90" + MANY, id="Merged.owned"),
        pytest.param(decode_to_client, b"\x98\x33\0\0\xa0\xc2\xc2\x80" + MANY, id="StatusReply.replicas"),
    ],
)
def test_lists_are_bounded_before_a_single_entry_is_made(decode, frame):
    """Their entries are many times larger in memory than in the message."""
    with pytest.raises(WireError, match="length <= "):
        decode(frame)


def test_seeds_and_keys_up_to_64_bits():
    top = 2**64 - 1
    message = Submit(top, "r", b"", 0, sampling=Sampling(1.0, seed=top))
    assert decode_from_client(encode(message)) == message
    assert msgpack.unpackb(encode(message))[6][3] == top


def test_a_message_of_another_direction_is_refused():
    with pytest.raises(WireError):
        decode_from_client(encode(Heartbeat()))
    with pytest.raises(WireError):
        decode_to_client(encode(Subscribe()))


def deep(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


GARBAGE = [
    pytest.param(b"", id="empty"),
    pytest.param(pickle.dumps({"a": [1, 2, 3]}), id="pickle"),
    pytest.param(b"\x92\x03" + deep(10_000), id="deep arrays in a field"),
    pytest.param(b"\x92\x63" + b"\x81\xa1a" * 10_000 + b"\xc0", id="deep maps under an unknown tag"),
    pytest.param(encode(Heartbeat())[:1] + b"\x04\x01\x02" + deep(100_000), id="trailing bytes"),
    pytest.param(b"\x9f\x04\x00\x00" + (b"\x81\xa1a" * 10_000 + b"\xc0") * 12, id="deep maps in ignored fields"),
    pytest.param(b"\xdd\xff\xff\xff\xff\x04", id="array that claims 2**32 items"),
    pytest.param(b"\x92\x06\xdb\x7f\xff\xff\xff", id="text that claims 2 GB"),
    pytest.param(b"\x92\x06\xc6\x7f\xff\xff\xff", id="buffer that claims 2 GB"),
    pytest.param(b"\x92\x06\xa4\xff\xfe\xfd\xfc", id="text that is not UTF-8"),
    pytest.param(b"\0" * (MAX_MESSAGE_BYTES + 1), id="too large"),
]


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("frame", GARBAGE)
def test_garbage_is_refused(decode, frame):
    with pytest.raises(WireError):
        decode(frame)


@pytest.mark.parametrize("decode", DECODERS)
@given(frame=st.binary(max_size=200) | st.builds(lambda tail: b"\x9a" + tail, st.binary(max_size=60)))
def test_random_bytes_never_raise_anything_else(decode, frame):
    with contextlib.suppress(WireError):
        decode(frame)


@given(message=registers | plans, data=st.data())
def test_damaged_messages_never_raise_anything_else(message, data):
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        decode_to_worker(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
