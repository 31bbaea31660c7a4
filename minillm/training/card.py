"""The card of an embedded model: its README.md, written from its training record and a sample of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path

from minillm.core.config import EngineConfig
from minillm.core.sampling_params import SamplingParams
from minillm.engine.engine import Engine
from minillm.models.loader import load_model
from minillm.models.tokenizer import Tokenizer

PROMPT = "It is a truth universally acknowledged, that"

CARD = """\
# {model}

A Llama-shaped language model of {parameters:,} parameters that comes with `minillm`: small enough to lie in a git
repository, trained enough for its statistics to be a language model's. It completes text in the manner of its sources;
it was not trained to chat, and nothing it says is a fact.

| | |
|---|---|
| shape | {layers} layers, hidden {hidden}, {heads} query and {kv_heads} KV heads of {head_dim}, MLP {mlp}, tied |
| context | {context:,} tokens; the last {long_share:.0%} of training used sequences of that length |
| tokenizer | byte-level BPE of {vocab:,} tokens, all 256 bytes among them; id 0 ends a passage; both models share it |
| weights | bfloat16 safetensors |
| tokens seen | {tokens_seen:,}, of a corpus of {training_tokens_in_corpus:,} |
| recipe | `{command}`, torch {torch}, seed {seed}, dropout {dropout} |
| held-out loss | **{loss:.3f} nats per token, perplexity {perplexity:.1f}** |
| licence | Apache-2.0, as the code; the text is in the public domain |

## Data

{held_out_rows}

Six novels by Jane Austen (1811–1818) from Debian's package r-cran-janeaustenr, and the King James Bible (1611) from
Debian's bible-kjv-text; both texts are in the public domain. The last {held_out_fraction:.0%} of each source was held
out before the tokenizer was trained. Passages of about 1,500 characters, each followed by the end token.

## Loss

| million tokens seen | sequence length | training loss | held-out loss |
|---|---|---|---|
{curve_rows}

Training loss is with dropout; held-out loss is here of the first 4,096 tokens of each source, in windows as long as the
training sequences. The whole curve is in `training.json`.

## A sample

Temperature 0.7, top-p 0.9, seed 0, after "{prompt}":

> {sample}
"""


def write_card(folder: Path) -> None:
    """Write README.md into a folder that holds a trained model and its training.json."""
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    model = load_model(folder, "float32")
    shape = model.config
    losses = record["held_out_nats_per_token"]
    rows = ["| source | held-out loss, nats per token |", "|---|---|"]
    rows += [f"| {name} | {loss:.3f} |" for name, loss in losses.items() if name != "all"]
    curve = record["curve"]
    shown = curve[:: max(1, len(curve) // 12)]
    if shown[-1] != curve[-1]:
        shown.append(curve[-1])
    text = CARD.format(
        **record,
        layers=shape.num_hidden_layers,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        mlp=shape.intermediate_size,
        context=shape.max_position_embeddings,
        vocab=shape.vocab_size,
        loss=losses["all"],
        perplexity=math.exp(losses["all"]),
        held_out_rows="\n".join(rows),
        curve_rows="\n".join(
            f"| {p['tokens'] / 1e6:.1f} | {p['length']:,} | {p['train']:.3f} | {p['held_out']:.3f} |" for p in shown
        ),
        prompt=PROMPT,
        sample=sample(model, folder).replace("\n", "\n> "),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def sample(model, folder: Path) -> str:
    """What the model writes after PROMPT."""
    engine = Engine(model, EngineConfig.at_chapter(0, max_num_seqs=1), Tokenizer(folder))
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=0, max_tokens=100)
    engine.add_request("sample", PROMPT, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return PROMPT + outputs[0].outputs[0].text
