"""Ids taken out of events, so that the core still decides the same.

What the core does with ids is to compare prefixes. So each token is replaced by a keyed hash of everything from the
sequence's start up to it: two sequences have the same hashes exactly as far as they have the same ids. The key is
made for the process and never written, so nothing of the text can be tried out; what remains is who shares how long
a prefix with whom. A hash has ``width`` bytes, enough that a whole block of them is at least 64 bits (32 where blocks
have less than two tokens): that blocks which differ look alike is as likely as 2^-64 a pair.

The salt that keeps tenants' blocks apart is hashed too, and so are names of tenants without a weight of their own.
Stop ids and biases are left out: which tokens met a stop is in the results.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from hashlib import blake2b

from msgspec import structs

from ..core.engine import Engine
from ..core.events import Delivered, Effect, Limits, Returned, Submitted
from ..core.packing import bits
from ..wire import Logprobs, Register, Result, Submit

_TYPES = {1: "B", 2: "H", 4: "I"}


def width_for(block_size: int) -> int:
    """Bytes of a token."""
    return 1 if block_size >= 8 else 2 if block_size >= 4 else 4


def widen(tokens: bytes, width: int) -> bytes:
    """u32 ids from narrow ones."""
    if width == 4:
        return tokens
    values = array(_TYPES[width])
    values.frombytes(tokens[: len(tokens) - len(tokens) % width])
    return array("I", values).tobytes()


def narrow(tokens: bytes, width: int) -> bytes:
    """The reverse of ``widen``."""
    return tokens if width == 4 else array(_TYPES[width], array("I", tokens)).tobytes()


def plain_limits(limits: Limits) -> Limits:
    """The limits under which hashes are served: any u32 is a token."""
    return replace(limits, vocab_size=1 << 32)


def shape_of(register: Register) -> Register:
    """A REGISTER with its ids zeroed, and without stop ids and biases."""
    sampling = register.sampling
    if sampling.bias_ids:
        sampling = structs.replace(sampling, bias_ids=b"", bias_values=b"")
    return structs.replace(register, tokens=bytes(len(register.tokens)), stop_ids=(), sampling=sampling)


class Redactor:
    """Follows the events that ``engine``, which runs on what this gives, is about to be told."""

    def __init__(self, engine: Engine, key: bytes, limits: Limits) -> None:
        self._engine = engine
        self._base = blake2b(key=key, digest_size=8)
        self._width = width_for(limits.block_size)
        self._tenants = {name for name, _ in limits.tenant_weights}
        #: The hash of all tokens so far, by client and key of an unfinished request.
        self._chains: dict[tuple[int, int], bytes] = {}

    def submitted(self, event: Submitted) -> Submitted:
        """A submission that the core did not find fault with."""
        submit = event.submit
        sampling = submit.sampling
        if sampling.bias_ids:
            sampling = structs.replace(sampling, bias_ids=b"", bias_values=b"")
        salt = self._hash(b"salt" + submit.salt) if submit.salt else b""
        tenant = submit.tenant
        if tenant and tenant not in self._tenants:
            tenant = self._hash(b"tenant" + tenant.encode()).hex()
        chain = self._hash(b"tokens" + salt)
        hashes = array("I")
        tokens, base, width = submit.tokens, self._base, self._width
        for at in range(0, len(tokens), 4):
            link = base.copy()
            link.update(chain + tokens[at : at + 4])
            chain = link.digest()
            hashes.append(int.from_bytes(chain[:width], "little"))
        self._chains[event.owner, submit.key] = chain
        return Submitted(
            event.owner,
            structs.replace(
                submit, tokens=hashes.tobytes(), sampling=sampling, stop_ids=(), salt=salt, tenant=tenant
            ),
        )

    def returned(self, event: Returned) -> Returned:
        """A result: hashes for the rows that count, zeros for the others."""
        result = event.result
        ids = bytearray(len(result.ids))
        replica = self._engine.replicas.get(event.replica)
        if replica is not None and replica.inflight and result.epoch == replica.epoch:
            record = replica.inflight[0]
            if record.step == result.step:
                chains, base, width = self._chains, self._base, self._width
                for slot in bits(bytes(record.live)):
                    seq, at = replica.owners[slot], 4 * slot
                    chain = None if seq is None else chains.get((seq.owner, seq.key))
                    if seq is None or chain is None or at + 4 > len(ids):
                        continue
                    link = base.copy()
                    link.update(chain + result.ids[at : at + 4])
                    chains[seq.owner, seq.key] = chain = link.digest()
                    ids[at : at + width] = chain[:width]
        logprobs = [_blank(entry) for entry in result.logprobs]
        return Returned(event.replica, structs.replace(result, ids=bytes(ids), logprobs=logprobs), event.starved_us)

    def note(self, effects: list[Effect]) -> None:
        """What came of an event: chains of requests that ended are dropped."""
        for effect in effects:
            if type(effect) is Delivered:
                for ended in effect.ends:
                    if ended.reason != "paused":
                        self._chains.pop((ended.seq.owner, ended.seq.key), None)

    def _hash(self, data: bytes) -> bytes:
        found = self._base.copy()
        found.update(data)
        return found.digest()


def _blank(entry: Logprobs) -> Logprobs:
    return Logprobs(
        entry.slot,
        entry.start,
        bytes(len(entry.values)),
        bytes(len(entry.ranks)),
        bytes(len(entry.top_ids)),
        bytes(len(entry.top_values)),
    )


def narrowed(event: Submit | Result, width: int) -> Submit | Result:
    """A message of hashes as it stands in the file."""
    if isinstance(event, Submit):
        return structs.replace(event, tokens=narrow(event.tokens, width))
    return structs.replace(event, ids=narrow(event.ids, width)) if event.ids else event


def widened(event: Submit | Result, width: int) -> Submit | Result:
    """The reverse of ``narrowed``."""
    if isinstance(event, Submit):
        return structs.replace(event, tokens=widen(event.tokens, width))
    return structs.replace(event, ids=widen(event.ids, width)) if event.ids else event
