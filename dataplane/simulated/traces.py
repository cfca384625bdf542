"""Traces of request lengths and arrivals, in the schemas in which they are published.

CSV, or JSON lines, plain or gzipped. Columns are known by their names (``_ARRIVAL``, ``_PROMPT``, ``_OUTPUT``,
``hash_ids``), in any order and case. An arrival is in seconds, or a date and time as Azure has them; ``timestamp`` in
JSON is in milliseconds, as Mooncake has it, unless there is a ``chat_id``: then it is one of the Bailian traces, in
seconds. A prompt has a hash for each block of 512 tokens (Mooncake) or 16 (Bailian).

Requests without output (failures in BurstGPT) are left out.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from .load import Entry
from .refusal import CannotSimulate

_ARRIVAL = ("arrival", "arrival_s", "timestamp")
_PROMPT = ("prompt", "prompt_len", "num_prefill_tokens", "contexttokens", "request tokens", "input_length")
_OUTPUT = ("output", "output_len", "num_decode_tokens", "generatedtokens", "response tokens", "output_length")
#: Longest prompt or output.
_MOST = 1 << 21


def read_trace(path: Path) -> list[Entry]:
    """All requests of a file, in its order; times from the first one's. Raises ``CannotSimulate``, which names
    the line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CannotSimulate(f"{path}: {error.strerror}") from None
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode()
    except (OSError, EOFError, ValueError):
        raise CannotSimulate(f"{path} is neither text nor gzipped text") from None
    rows = _json_rows(text, path.name) if text.lstrip().startswith("{") else _csv_rows(text, path.name)
    entries = [entry for entry in rows if entry is not None]
    if not entries:
        raise CannotSimulate(f"{path} has no request")
    if entries[0].at is None:
        return entries
    begin = min(entry.at or 0.0 for entry in entries)
    return [entry._replace(at=(entry.at or 0.0) - begin) for entry in entries]


def _csv_rows(text: str, name: str) -> Iterator[Entry | None]:
    reader = csv.DictReader(io.StringIO(text))
    fields = {field.strip().lower(): field for field in reader.fieldnames or ()}
    for row in reader:
        yield _entry({key: row[field] for key, field in fields.items()}, f"{name}, line {reader.line_num}", False)


def _json_rows(text: str, name: str) -> Iterator[Entry | None]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise CannotSimulate(f"{name}, line {number} is not a JSON object")
        yield _entry({str(key).lower(): value for key, value in row.items()}, f"{name}, line {number}", True)


def _entry(row: Mapping[str, object], where: str, is_json: bool) -> Entry | None:
    prompt, output = _tokens(row, _PROMPT, where), _tokens(row, _OUTPUT, where)
    if not output:
        return None
    at = None
    found = next((key for key in _ARRIVAL if key in row), None)
    if found is not None:
        at = _seconds(row[found], f"{where}: {found}")
        if is_json and found == "timestamp" and "chat_id" not in row:
            at /= 1e3
    hashes = row.get("hash_ids") or ()
    try:
        if isinstance(hashes, str):
            hashes = hashes.split()
        if not isinstance(hashes, list | tuple):
            raise ValueError
        numbers = tuple(int(number) for number in hashes)
    except (TypeError, ValueError):
        raise CannotSimulate(f"{where}: hash_ids must be numbers") from None
    return Entry(max(1, prompt), output, at, numbers, 16 if "chat_id" in row else 512 if numbers else 0)


def _tokens(row: Mapping[str, object], names: tuple[str, ...], where: str) -> int:
    found = next((key for key in names if key in row), None)
    if found is None:
        raise CannotSimulate(f"{where}: no column is one of {', '.join(names)}")
    try:
        value = int(float(str(row[found])))
    except (ValueError, OverflowError):
        value = -1
    if not 0 <= value <= _MOST:
        raise CannotSimulate(f"{where}: {found} must be tokens from 0 to {_MOST}, not {row[found]!r}")
    return value


def _seconds(value: object, where: str) -> float:
    text = str(value).strip()
    try:
        return float(text)
    except ValueError:
        pass
    try:
        # Seven digits of a second, as Azure writes them, are one more than Python reads.
        head, dot, fraction = text.partition(".")
        zone = fraction.lstrip("0123456789")
        fraction = fraction[: len(fraction) - len(zone)]
        return datetime.fromisoformat(head + zone).timestamp() + (float(f"0.{fraction}") if dot and fraction else 0.0)
    except ValueError:
        raise CannotSimulate(f"{where} must be seconds, or a date and time, not {text!r}") from None
