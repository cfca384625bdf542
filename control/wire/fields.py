"""Field types shared by the messages: each carries its bounds, so that decoding is validation."""

from typing import Annotated

from msgspec import Meta

#: Largest accepted message. A prompt of a million tokens needs 4 MB.
MAX_MESSAGE_BYTES = 16 << 20
#: Slots are named by u16; the largest value means none.
MAX_SLOTS = (1 << 16) - 1
MAX_TOKENS = 1 << 21
#: Entries of a list in a message: two a slot, and room for requests that own none.
MAX_ENTRIES = 1 << 18

U16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
#: MessagePack integers reach 2**64 - 1, msgspec's bounds only 2**63 - 1: the upper half is left to the format.
U64 = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
#: u32 little-endian token ids.
TokenBuffer = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
#: f32 little-endian, one value a token.
FloatBuffer = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
#: u32 little-endian block ids.
BlockBuffer = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
#: u16 little-endian slots.
SlotBuffer = Annotated[bytes, Meta(max_length=2 * MAX_SLOTS)]
#: u64 little-endian keys of requests.
KeyBuffer = Annotated[bytes, Meta(max_length=8 * MAX_SLOTS)]
#: One bit a slot, slot 0 in the lowest bit of the first byte.
Bitmap = Annotated[bytes, Meta(max_length=(MAX_SLOTS + 7) // 8)]
StopIds = Annotated[tuple[U32, ...], Meta(max_length=64)]
