"""Two small tokenizers of the kinds that checkpoints have, and text that is hard on them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from minillm.models.tokenizer import Tokenizer

END = "<|end|>"


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte (Radford et al. 2019): itself if printable, or U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(256)]


LETTERS = _byte_letters()


def letters(data: bytes) -> str:
    """How the vocabulary of ``byte_level`` writes these bytes."""
    return "".join(LETTERS[byte] for byte in data)


# Words, a token with leading space, a whole character of three bytes, and pieces that straddle characters.
MERGED = ["th", "the", " the", "an", "and", "\n\n", "\xe4\xb8", "\xe4\xb8\xad", "\xf0\x9f", "\xad\xe4", "STOP"]
MERGES = [("t", "h"), ("th", "e"), (" ", "the"), ("a", "n"), ("an", "d"), ("\n", "\n"), ("\xe4", "\xb8")]
MERGES += [("\xe4\xb8", "\xad"), ("\xf0", "\x9f"), ("\xad", "\xe4"), ("S", "T"), ("O", "P"), ("ST", "OP")]


def byte_level(folder: Path) -> Tokenizer:
    """GPT-2's kind, which Llama 3, Qwen and SmolLM2 use: a token is a string of bytes, whole characters or not."""
    vocab = {letter: byte for byte, letter in enumerate(LETTERS)}
    for piece in [*MERGED, "ST", "OP"]:
        vocab[letters(piece.encode("latin-1"))] = len(vocab)
    merges = [tuple(letters(half.encode("latin-1")) for half in pair) for pair in MERGES]
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(END, special=True)])
    return save(fast, folder, {"eos_token": END})


def sentencepiece_like(folder: Path) -> Tokenizer:
    """Llama 2's kind: ▁ for a space, none at the start of a text, and byte tokens for what has no token of its own."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", *"abcdehnot.", "▁t", "▁th", "▁the", "▁a", "an", "▁an", "▁and", "中"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a"), ("▁a", "n"), ("▁an", "d"), ("a", "n")]
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(steps)
    fast.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return save(fast, folder, {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}})


def save(fast: FastTokenizer, folder: Path, config: dict) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer(folder)


def byte_ids(data: str | bytes) -> list[int]:
    """One token of ``byte_level`` for each byte."""
    return list(data.encode() if isinstance(data, str) else data)


def fallback_ids(data: str | bytes) -> list[int]:
    """One byte token of ``sentencepiece_like`` for each byte."""
    return [3 + byte for byte in byte_ids(data)]


CHARACTERS = [*"abe .\n", "the", " the and", "STOP", "é", "e\u0301", "ß", "Ω", "中", "文", "한", "𝄞", "😀", "😁"]
CHARACTERS += ["👩\u200d👩\u200d👧", "🇸🇪"]


def random_text(rng: random.Random, pieces: int = 12) -> str:
    """Of one to four bytes a character, joined and combined ones among them."""
    return "".join(rng.choice(CHARACTERS) for _ in range(pieces))


def random_garbage(rng: random.Random, size: int = 24) -> bytes:
    """Bytes of which some make characters, most do not."""
    pieces = [random_text(rng, 1).encode(), rng.randbytes(2), "中".encode()[: rng.randrange(1, 3)], b"\x80", b"\xff"]
    pieces += ["😀".encode()[: rng.randrange(1, 4)], "\ufffd".encode(), b"a"]
    return b"".join(rng.choice(pieces) for _ in range(size))
