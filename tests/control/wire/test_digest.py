"""The audit digest is defined by its bytes, not by either side's code."""

import struct
import zlib

from evenflow.control.wire.digest import audit_digest, audited, is_audited


def test_digest_is_the_crc_of_the_documented_bytes():
    expected = zlib.crc32(struct.pack("<IIIIII", 1, 7, 40, 2, 9, 3) + struct.pack("<IIIII", 65, 2, 1, 1, 8))
    assert audit_digest([(1, 7, 40, [9, 3]), (65, 2, 1, struct.pack("<I", 8))]) == expected
    assert audit_digest([]) == 0


def test_each_slot_is_audited_once_in_1024_steps():
    seen = [slot for step in range(1024) for slot in audited(step, 300)]
    assert sorted(seen) == list(range(300))
    assert [step for step in range(64) if is_audited(step)] == [15, 31, 47, 63]
    assert list(audited(15 + 16 * 65, 300)) == [1, 65, 129, 193, 257]
    assert not audited(16, 300)
