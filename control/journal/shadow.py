"""A second core that is told what is recorded: the recorded plans must be its own, byte for byte."""

from __future__ import annotations

from ..core.engine import Engine
from ..core.events import Effect, Rejected, SendPlan
from ..wire import Register, WireError, decode_to_worker, encode
from .records import Outcome, Planned, Turned
from .redaction import shape_of


def outcomes(effects: list[Effect], ids: bool) -> list[Outcome]:
    """What a journal says of the effects of one event."""
    found: list[Outcome] = []
    for effect in effects:
        if type(effect) is SendPlan:
            registers = effect.registers if ids else [shape_of(r) for r in effect.registers]
            frames = [encode(register) for register in registers]
            frames.append(encode(effect.plan))
            found.append(Planned(effect.replica, frames, effect.digest))
        elif isinstance(effect, Rejected):
            found.append(Turned(effect.code))
    return found


def shaped(outcome: Outcome) -> Outcome:
    """An outcome as it stands in a journal without ids."""
    if not isinstance(outcome, Planned) or len(outcome.frames) < 2:
        return outcome
    frames: list[bytes] = []
    for frame in outcome.frames[:-1]:
        register = decode_to_worker(frame)
        assert isinstance(register, Register)
        frames.append(encode(shape_of(register)))
    return Planned(outcome.replica, [*frames, outcome.frames[-1]], outcome.digest)


def difference(recorded: list[Outcome], made: list[Outcome]) -> list[str]:
    """In which way ``made`` is not what was recorded, a line each, for people; empty if it is."""
    if recorded == made:
        return []
    lines: list[str] = []
    for i in range(max(len(recorded), len(made))):
        old = recorded[i] if i < len(recorded) else None
        new = made[i] if i < len(made) else None
        if old == new:
            continue
        if isinstance(old, Planned) and isinstance(new, Planned) and len(old.frames) == len(new.frames):
            if old.replica != new.replica:
                lines.append(f"replica: recorded {old.replica}, made {new.replica}")
            for frame, other in zip(old.frames, new.frames, strict=True):
                if frame != other:
                    lines += _fields(_message(frame), _message(other))
            if old.digest != new.digest:
                lines.append(f"digest of the tables: recorded {old.digest}, made {new.digest}")
        else:
            lines.append(f"recorded {_summary(old)}")
            lines.append(f"made     {_summary(new)}")
        break
    return lines


def check(engine: Engine) -> str:
    """One line on where the core stands."""
    parts = [
        f"replica {replica.index}: step {replica.step}, {len(replica.running)} running,"
        f" {len(replica.waiting)} waiting, {replica.pool.available} of {replica.pool.num_blocks} blocks available"
        for replica in engine.replicas.values()
    ]
    return "; ".join(parts) or "no replica is up"


def _message(frame: bytes) -> object:
    try:
        return decode_to_worker(frame)
    except WireError as error:
        return f"a frame that cannot be read: {error}"


def _fields(old: object, new: object) -> list[str]:
    if type(old) is not type(new) or isinstance(old, str):
        return [f"recorded {old}", f"made     {new}"]
    name = type(old).__name__
    lines: list[str] = []
    for field in getattr(old, "__struct_fields__", ()):
        was, now = getattr(old, field), getattr(new, field)
        if was != now:
            lines.append(f"{name}.{field}: recorded {readable(field, was)}, made {readable(field, now)}")
    return lines


#: Buffers of the wire and the width of their entries; bitmaps have bits.
_WIDTHS = {
    "tokens": 4,
    "blocks": 4,
    "grow_slots": 2,
    "grow_blocks": 4,
    "chunk_slots": 2,
    "chunk_tokens": 4,
    "released": 2,
}
_MOST = 24


def readable(field: str, value: object) -> str:
    """A field's value: buffers as numbers, long ones cut off."""
    if not isinstance(value, bytes):
        return str(value)
    if field == "decodes":
        number = int.from_bytes(value, "little")
        numbers = [i for i in range(number.bit_length()) if number >> i & 1]
    elif field in _WIDTHS:
        width = _WIDTHS[field]
        numbers = [int.from_bytes(value[i : i + width], "little") for i in range(0, len(value), width)]
    else:
        return value.hex()
    rest = f", … {len(numbers)} in all" if len(numbers) > _MOST else ""
    return f"[{', '.join(map(str, numbers[:_MOST]))}{rest}]"


def _summary(outcome: Outcome | None) -> str:
    if outcome is None:
        return "nothing"
    if isinstance(outcome, Turned):
        return f"a refusal ({outcome.code})"
    plan = _message(outcome.frames[-1])
    registers = len(outcome.frames) - 1
    fields = [f"replica {outcome.replica}", f"{registers} registrations"]
    for field in getattr(plan, "__struct_fields__", ()):
        value = getattr(plan, field)
        if value != b"":
            fields.append(f"{field} {readable(field, value)}")
    return f"a plan: {', '.join(fields)}"
