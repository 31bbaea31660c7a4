"""The recipe of the embedded models, at toy size, and what it made."""

import json
import math
import re

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer

from minillm.core.model_config import ModelConfig
from minillm.models.fetch import ASSETS
from minillm.models.llama import LlamaForCausalLM
from minillm.models.loader import load_model
from minillm.models.tokenizer import Tokenizer
from minillm.training import corpus, embedded

NAMES = ("tiny", "tiny-draft")
FINAL_SHAPES = {"tiny": (4, 256, 8, 4, 768), "tiny-draft": (1, 128, 4, 2, 256)}


@pytest.fixture
def toy(monkeypatch):
    """A shape that trains in seconds, and tokens with something to learn: a counter that wraps round."""
    shape = dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64, layers=1)
    monkeypatch.setitem(embedded.SHAPES, "toy", shape)
    monkeypatch.setattr(embedded, "PHASES", ((0.5, 32), (0.5, 64)))
    monkeypatch.setattr(embedded, "BATCH_TOKENS", 256)
    monkeypatch.setattr(embedded, "CONTEXT", 64)
    tokens = torch.arange(4096) % 17
    return tokens, {"counter": (torch.arange(300) + 5) % 17}


def train(toy, total, dropout=0.0, **more):
    settings = dict(peak=3e-3, dropout=dropout, seed=0, log=lambda _: None, keep=lambda _: None) | more
    return embedded.train("toy", *toy, total, **settings)


def test_training_learns_and_returns_the_best(toy):
    kept = []
    model, curve, seen = train(toy, 51_200, keep=lambda m: kept.append(1))
    assert curve[0]["held_out"] > 2 and curve[-1]["held_out"] < 0.5
    assert seen == curve[-1]["tokens"] == 51_200
    phases = [[p["held_out"] for p in curve if p["length"] == length] for length in (32, 64)]
    assert embedded.evaluate(model, toy[1], 64)["all"] == pytest.approx(min(phases[1]), abs=1e-3)
    # A new best, counted anew in each phase, is kept.
    assert len(kept) == sum(loss < min(phase[:i], default=9) for phase in phases for i, loss in enumerate(phase))
    assert not any(p.requires_grad for p in model.parameters())


def test_training_stops_when_the_held_out_loss_stands_still(toy):
    tokens, _ = toy
    random = torch.randint(17, 2000, (300,), generator=torch.Generator().manual_seed(0))
    _, curve, seen = train((tokens, {"never seen": random}), 51_200)
    assert seen < 51_200
    losses = [point["held_out"] for point in curve]
    assert len(losses) - 1 - losses.index(min(losses)) == 8


def test_dropout_acts_in_training_only(toy):
    model = LlamaForCausalLM(ModelConfig.from_dict(embedded.hf_config("toy")))
    embedded.initialise(model)
    embedded.add_dropout(model, 0.5)
    batch = toy[0][:65].view(1, 65)
    model.train()
    assert embedded.loss_of(model, batch) != embedded.loss_of(model, batch)
    model.eval()
    assert embedded.loss_of(model, batch) == embedded.loss_of(model, batch)


def test_held_out_part_is_cut_off_first_and_whole():
    paragraphs = [f"paragraph {i} " + "x" * (40 + i % 7) for i in range(2000)]
    source = corpus._split("s", paragraphs)
    train_text, held_text = "\n".join(source.train), "\n".join(source.held_out)
    assert (train_text + "\n" + held_text).split("\n") == paragraphs
    assert len(held_text) / (len(train_text) + len(held_text)) == pytest.approx(corpus.HELD_OUT, abs=0.002)
    assert all(len(p) >= corpus.PASSAGE for p in source.train[:-1])


def test_tokenizer_knows_every_byte_and_ends_each_passage():
    tokenizer = embedded.train_tokenizer(["the cat sat on the mat " * 50, "and the dog too " * 50])
    text = "naïve 北京 🦙 \x00\x7f"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    ids = embedded.encode(tokenizer, ["the cat", "the dog"]).tolist()
    assert ids.count(0) == 2 and ids[-1] == 0


@pytest.mark.parametrize("name", NAMES)
def test_embedded_model_is_as_its_card_says(name):
    folder = ASSETS / name
    model = load_model(folder)
    c = model.config
    assert (
        c.num_hidden_layers,
        c.hidden_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.intermediate_size,
    ) == FINAL_SHAPES[name]
    assert (c.head_dim, c.vocab_size, c.max_position_embeddings, c.tie_word_embeddings) == (32, 2048, 1024, True)
    assert c.eos_token_ids == (0,) and model.dtype == torch.bfloat16
    record = json.loads((folder / "training.json").read_text())
    assert record["parameters"] == c.num_parameters
    loss = record["held_out_nats_per_token"]["all"]
    card = (folder / "README.md").read_text()
    assert f"{loss:.3f} nats per token, perplexity {math.exp(loss):.1f}" in card
    assert f"{c.num_parameters:,}" in card and "public domain" in card
    assert re.search(r"> It is a truth universally acknowledged, that,? \w+", card), "a sample"


def test_embedded_models_fit_and_share_a_tokenizer():
    files = [file for name in NAMES for file in (ASSETS / name).iterdir()]
    assert sum(file.stat().st_size for file in files) <= 12e6
    tiny, draft = ((ASSETS / name / "tokenizer.json").read_bytes() for name in NAMES)
    assert tiny == draft
    fast = FastTokenizer.from_file(str(ASSETS / "tiny" / "tokenizer.json"))
    assert fast.get_vocab_size() == 2048 and fast.token_to_id("<|end|>") == 0
    text = bytes(range(256)).decode("latin-1")
    assert Tokenizer(ASSETS / "tiny").decode(fast.encode(text).ids) == text


def test_tiny_predicts_english_better_than_its_draft_and_both_than_chance():
    text = "And it came to pass, that when she had heard the letter read, she went into the house with her sister."
    losses = {}
    for name in NAMES:
        ids = torch.tensor([Tokenizer(ASSETS / name).encode(text)])
        losses[name] = embedded.loss_of(load_model(ASSETS / name, "float32"), ids).item()
    assert losses["tiny"] < losses["tiny-draft"] < 0.75 * math.log(2048)
