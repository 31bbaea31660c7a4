"""The public-domain text that the embedded models learn from, fetched from Debian's package registry.

Seven sources: six novels by Jane Austen (package r-cran-janeaustenr) and the King James Bible (packages bible-kjv,
bible-kjv-text). The last five percent of each source is held out before anything else, the tokenizer included, sees it.
Needs ``apt-get`` and ``dpkg`` (Debian, Ubuntu) and the ``training`` extra (rdata).
"""

from __future__ import annotations

import bz2
import lzma
import re
import struct
import subprocess
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("r-cran-janeaustenr", "bible-kjv", "bible-kjv-text")
HELD_OUT = 0.05
PASSAGE = 1500  # characters a passage has at least; an end token follows each


@dataclass
class Source:
    """One text, cut into passages; ``train`` and ``held_out`` do not overlap."""

    name: str
    train: list[str]
    held_out: list[str]


def load_corpus(cache: Path) -> list[Source]:
    """All seven sources. Packages are downloaded into ``cache`` once."""
    roots = {name: _unpack(name, cache) for name in PACKAGES}
    texts = _austen(roots["r-cran-janeaustenr"]) | {"bible": _bible(roots["bible-kjv"], roots["bible-kjv-text"])}
    return [_split(name, paragraphs) for name, paragraphs in texts.items()]


def _split(name: str, paragraphs: list[str]) -> Source:
    total = sum(map(len, paragraphs))
    seen, cut = 0, 0
    while seen < (1 - HELD_OUT) * total:
        seen, cut = seen + len(paragraphs[cut]), cut + 1
    return Source(name, _passages(paragraphs[:cut]), _passages(paragraphs[cut:]))


def _passages(paragraphs: list[str]) -> list[str]:
    passages, current = [], []
    for paragraph in paragraphs:
        current.append(paragraph)
        if sum(map(len, current)) >= PASSAGE:
            passages.append("\n".join(current))
            current = []
    return [*passages, "\n".join(current)] if current else passages


def _unpack(package: str, cache: Path) -> Path:
    root = cache / package
    if not root.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            subprocess.run(["apt-get", "download", "-qq", package], cwd=work, check=True)
            (deb,) = Path(work).glob("*.deb")
            subprocess.run(["dpkg", "-x", deb, Path(work) / "root"], check=True)
            (Path(work) / "root").rename(root)
    return root


def _bible(program: Path, text: Path) -> list[str]:
    """One paragraph a verse; chapter and verse numbers are dropped."""
    command = [program / "usr/bin/bible", "-p", text / "usr/lib", "-d", "bible.data", "-f", "gen1:1-rev22:21"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    verses = re.findall(r"^\S+ (.*)$", output, flags=re.MULTILINE)
    return [verse.strip() for verse in verses if verse.strip()]


def _austen(root: Path) -> dict[str, list[str]]:
    """Novel -> paragraphs, out of an R lazy-load database: an index (.rdx) of compressed R objects (.rdb)."""
    import rdata

    def parse(raw: bytes):
        return rdata.conversion.convert(rdata.parser.parse_data(raw))

    data = root / "usr/lib/R/site-library/janeaustenr/data"
    index = parse(zlib.decompress((data / "Rdata.rdx").read_bytes(), 47))["variables"]
    objects = (data / "Rdata.rdb").read_bytes()
    novels = {}
    for name, place in index.items():
        offset, size = map(int, place)
        lines = parse(_decompress(objects[offset : offset + size]))
        blocks = re.split(r"\n\s*\n", "\n".join(map(str, lines)))
        paragraphs = [" ".join(block.split()).replace("_", "") for block in blocks]
        novels[name] = [p for p in paragraphs if p]
    return novels


def _decompress(chunk: bytes) -> bytes:
    """R's chunk: uncompressed size (4 bytes, big-endian), then a method letter for all but zlib."""
    (size,) = struct.unpack(">I", chunk[:4])
    method, body = chunk[4:5], chunk[5:]
    if method == b"Z":
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
        raw = lzma.decompress(body, format=lzma.FORMAT_RAW, filters=filters)
    elif method == b"2":
        raw = bz2.decompress(body)
    elif method == b"0":
        raw = body
    else:
        raw = zlib.decompress(chunk[4:])
    if len(raw) != size:
        raise ValueError(f"an R object unpacked to {len(raw)} bytes, its header says {size}")
    return raw
