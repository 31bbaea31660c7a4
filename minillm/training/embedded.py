"""Trains the models that the course carries with it: ``python -m minillm.training.embedded tiny``.

On two cores, two processes of one thread are faster than one of two: ``torchrun --nproc_per_node=2 -m …``.

Writes a Hugging Face checkpoint folder with its card: data and licence, parameters, tokens seen, loss curve, held-out
loss and a sample. The tokenizer is trained first, on the training part of the text alone, and shared by both models.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from minillm.compute.attention.dense import DenseAttention
from minillm.core.model_config import ModelConfig
from minillm.models.layers.linear import Linear
from minillm.models.llama import LlamaForCausalLM
from minillm.models.loader import save_model, write_json
from minillm.training.card import write_card
from minillm.training.corpus import HELD_OUT, load_corpus

END = "<|end|>"
VOCAB = 2048
CONTEXT = 1024
SHAPES = {
    "tiny": dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=4, intermediate_size=768, layers=4),
    "tiny-draft": dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256, layers=1),
}
# Two phases: short sequences learn most of the language for less attention, then the whole context is seen.
PHASES = ((0.7, 256), (0.3, CONTEXT))
BATCH_TOKENS = 4096
LOOK = 4096  # held-out tokens of each source in the looks during training


def hf_config(name: str) -> dict:
    """The config.json of an embedded model."""
    shape = dict(SHAPES[name])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "num_hidden_layers": shape.pop("layers"),
        **shape,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": "bfloat16",
    }


def train_tokenizer(passages: list[str]) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are tokens, so any text can be encoded; id 0 ends a passage."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(passages, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, passages: list[str]) -> Tensor:
    """Passages one after another, each followed by the end token: int64 [tokens]."""
    end = tokenizer.token_to_id(END)
    ids = [i for e in tokenizer.encode_batch(passages) for i in (*e.ids, end)]
    return torch.tensor(ids, dtype=torch.int64)


def initialise(model: LlamaForCausalLM) -> None:
    """Normal(0, 0.02); what writes into the residual stream is scaled down by the square root of its depth."""
    deep = 0.02 / math.sqrt(2 * model.config.num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, Linear | nn.Embedding):
            into_residual = name.endswith(("o_proj", "down_proj"))
            nn.init.normal_(module.weight, std=deep if into_residual else 0.02)


def loss_of(model: LlamaForCausalLM, tokens: Tensor, reduction: str = "mean") -> Tensor:
    """Next-token cross-entropy in nats. tokens int64 [batch, length + 1]."""
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    positions = torch.arange(length).repeat(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model(tokens[:, :-1].reshape(-1), positions, DenseAttention(batch, length))
        logits = model.compute_logits(hidden)
    return F.cross_entropy(logits.float(), tokens[:, 1:].reshape(-1), reduction=reduction)


@torch.no_grad()
def evaluate(
    model: LlamaForCausalLM, held_out: dict[str, Tensor], length: int = CONTEXT, tokens: int | None = None
) -> dict[str, float]:
    """Mean held-out loss per source and over all tokens ("all"), in windows of ``length``.

    ``tokens`` bounds what is taken of each source, for the quick looks during training.
    """
    total, count, table = 0.0, 0, {}
    model.eval()
    for name, ids in held_out.items():
        # A window's first token is context only.
        pieces = [piece for piece in ids[:tokens].split(length) if len(piece) > 1]
        loss = sum(loss_of(model, piece[None], "sum").item() for piece in pieces)
        seen = sum(len(piece) - 1 for piece in pieces)
        table[name] = loss / seen
        total, count = total + loss, count + seen
    model.train()
    return {**table, "all": total / count}


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Dropout on all that enters the residual stream, while ``model.training``.

    The corpus has fewer tokens than the model has parameters: without this the held-out loss stands still after two
    epochs while the training loss falls on.
    """

    def drop(module: nn.Module, _, output: Tensor) -> Tensor:
        return F.dropout(output, rate, training=module.training)

    for name, module in model.named_modules():
        if name == "embed_tokens" or name.endswith(("o_proj", "down_proj")):
            module.register_forward_hook(drop)


def optimizers(model: LlamaForCausalLM, peak: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for embedding and norms."""
    matrices = [p for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim == 2]
    others = [p for n, p in model.named_parameters() if not (n.startswith("layers.") and p.ndim == 2)]
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def average_gradients(model: nn.Module, ranks: int) -> None:
    """Data parallelism: every rank steps with the mean of all gradients."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for grad, mean in zip(grads, (flat / ranks).split([g.numel() for g in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def train(
    name: str,
    tokens: Tensor,
    held_out: dict[str, Tensor],
    total: int,
    peak: float,
    dropout: float,
    seed: int,
    log,
    keep,
):
    """Train for about ``total`` tokens. Returns the model at its best held-out loss, the curve, the tokens seen.

    Looks at the held-out loss fifty times, in windows as long as the phase's sequences: longer ones hold positions that
    the model has not met. Stops early once it has not improved for eight looks; the best counts anew in every phase.
    ``keep`` is called with the model at every new best, so that an interrupted run is not lost; ``log`` with a line at
    every look.
    """
    torch.manual_seed(seed)  # the same weights on every rank
    model = LlamaForCausalLM(ModelConfig.from_dict(hf_config(name)))
    initialise(model)
    add_dropout(model, dropout)
    model.requires_grad_(True)
    opts = optimizers(model, peak)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(seed + rank)  # other batches and other dropout
    steps = total // BATCH_TOKENS
    warmup, look = max(1, steps // 50), max(1, steps // 50)
    curve, best, best_state, since = [], math.inf, None, 0
    losses, length, started = [], 0, time.monotonic()
    for step in range(steps):
        before, length = length, PHASES[0][1] if step < PHASES[0][0] * steps else PHASES[1][1]
        if length != before:
            best, since = math.inf, 0
        starts = torch.randint(len(tokens) - length - 1, (BATCH_TOKENS // length // ranks,))
        batch = torch.stack([tokens[s : s + length + 1] for s in starts.tolist()])
        # Linear warm-up, then linear decay to zero over the second half of the run.
        rate = min((step + 1) / warmup, 1.0, 2 * (steps - step) / steps)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = peak * rate
        loss = loss_of(model, batch)
        loss.backward()
        if ranks > 1:
            average_gradients(model, ranks)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % look == 0 or step + 1 == steps:
            held = evaluate(model, held_out, length, LOOK)["all"]  # the same on every rank, as the weights are
            seen = (step + 1) * BATCH_TOKENS
            curve.append(
                {
                    "tokens": seen,
                    "length": length,
                    "train": round(sum(losses) / len(losses), 4),
                    "held_out": round(held, 4),
                }
            )
            log(f"{time.monotonic() - started:7.0f} s  {seen / 1e6:6.2f} M tokens  {curve[-1]}")
            losses = []
            if held < best:
                best, since = held, 0
                best_state = {k: v.detach().clone() for k, v in model.state_dict().items()}
                keep(model)
            else:
                since += 1
                if since == 8:
                    break
    model.load_state_dict(best_state)
    return model.requires_grad_(False), curve, seen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.training.embedded", description=__doc__)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "assets")
    parser.add_argument("--cache", type=Path, default=Path(".cache/corpus"))
    parser.add_argument("--tokens", type=float, default=20.0, help="millions of tokens to train on")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0

    def say(line: str) -> None:
        if first:
            print(line, flush=True)

    sources = load_corpus(args.cache)
    passages = [p for s in sources for p in s.train]
    tokenizer = train_tokenizer(passages)
    tokens = encode(tokenizer, passages)
    held_out = {s.name: encode(tokenizer, s.held_out) for s in sources}
    say(f"{len(tokens):,} training tokens, {sum(map(len, held_out.values())):,} held out")

    folder = args.out / args.name
    folder.mkdir(parents=True, exist_ok=True)
    model, curve, seen = train(
        args.name,
        tokens,
        held_out,
        total=int(args.tokens * 1e6),
        peak=args.lr,
        dropout=args.dropout,
        seed=args.seed,
        log=say,
        keep=lambda model: save_model(model, folder, torch.bfloat16) if first else None,
    )
    if not first:
        return
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", hf_config(args.name))
    write_json(folder / "generation_config.json", {"eos_token_id": 0})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    )
    write_json(
        folder / "training.json",
        {
            "model": args.name,
            "parameters": model.config.num_parameters,
            "training_tokens_in_corpus": len(tokens),
            "tokens_seen": seen,
            "peak_learning_rate": args.lr,
            "dropout": args.dropout,
            "ranks": dist.get_world_size() if dist.is_initialized() else 1,
            "seed": args.seed,
            "torch": torch.__version__,
            "command": command(args),
            "held_out_fraction": HELD_OUT,
            "long_share": PHASES[-1][0],
            "held_out_nats_per_token": {k: round(v, 4) for k, v in evaluate(model, held_out).items()},
            "curve": curve,
        },
    )
    write_card(folder)
    say(f"written to {folder}")


def command(args: argparse.Namespace) -> str:
    """The command line that gives this model again, without folders."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    start = f"torchrun --nproc_per_node={ranks} -m" if ranks > 1 else "python -m"
    settings = f"--tokens {args.tokens:g} --lr {args.lr:g} --dropout {args.dropout:g} --seed {args.seed}"
    return f"{start} minillm.training.embedded {args.name} {settings}"


if __name__ == "__main__":
    main()
