"""The audit of worker tables: which slots a step audits, and the checksum over them.

Control and every worker compute the same checksum from their own tables; a difference means that a worker's
state is not what control believes. Each audited step covers a 64th of the slots, so all are covered in 1,024
steps.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence

#: One step in this many is audited.
AUDIT_EVERY = 16
#: An audited step covers one slot in this many.
AUDIT_STRIDE = 64

_HEAD = struct.Struct("<IIII")


def audited(step: int, num_slots: int) -> range:
    """The slots that ``step`` audits, ascending; empty at steps without an audit (see ``is_audited``)."""
    if not is_audited(step):
        return range(0)
    return range((step // AUDIT_EVERY) % AUDIT_STRIDE, num_slots, AUDIT_STRIDE)


def is_audited(step: int) -> bool:
    """Whether results of ``step`` carry a digest (also when none of its slots is registered: then it is 0)."""
    return step % AUDIT_EVERY == AUDIT_EVERY - 1


def audit_digest(entries: Iterable[tuple[int, int, int, bytes | Sequence[int]]]) -> int:
    """CRC-32 over (slot, generation, computed tokens after the step, blocks) of registered slots, by
    ascending slot.

    Blocks are a sequence of block ids, or their u32 little-endian buffer.
    """
    crc = 0
    for slot, generation, computed, blocks in entries:
        table = blocks if isinstance(blocks, bytes) else struct.pack(f"<{len(blocks)}I", *blocks)
        crc = zlib.crc32(_HEAD.pack(slot, generation, computed, len(table) // 4), crc)
        crc = zlib.crc32(table, crc)
    return crc
