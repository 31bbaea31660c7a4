"""Public traces of real traffic, read from files that the reader downloads: none is part of the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

MOONCAKE_BLOCK = 512  # tokens that one of Mooncake's hash ids stands for


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace without its text. ``hash_ids``: one for each block of its prompt, the last one perhaps
    not full; an id stands for a block and all before it, so equal ids mean equal prefixes."""

    arrival: float  # seconds
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_mooncake(path: str | Path) -> list[TraceRequest]:
    """Mooncake's traces (FAST '25): JSON lines of timestamp in ms, input_length, output_length, hash_ids.

    ValueError names the first line that is not of this form, and what is wrong with it.
    """
    trace = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    trace.append(_mooncake_request(line))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    if not trace:
        raise ValueError(f"{path} holds no requests")
    return trace


def _mooncake_request(line: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    timestamp, prompt, output = (_count(fields, name) for name in ("timestamp", "input_length", "output_length"))
    hash_ids = fields.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(each) is int for each in hash_ids):
        raise ValueError(f"hash_ids is {hash_ids!r}; it must be a list of whole numbers")
    blocks = -(-prompt // MOONCAKE_BLOCK)
    if len(hash_ids) != blocks:
        raise ValueError(f"{len(hash_ids)} hash_ids; {prompt} tokens are {blocks} blocks of {MOONCAKE_BLOCK}")
    return TraceRequest(timestamp / 1000, prompt, output, hash_ids)


def _count(fields: dict, name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 0")
    return value
