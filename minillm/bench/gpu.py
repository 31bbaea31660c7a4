"""The one GPU script: ``python -m minillm.bench.gpu --out DIR`` writes DIR/gpu.json in under eight minutes.

Kernels: error against float64 and time against the library's routine and the roofline. Tokens: every chapter's engine
against transformers in float32, greedy. Throughput: nano-vllm's workload (256 requests, 100 to 1,024 tokens in and
out) on a model of Qwen3-0.6B's shape with random weights, against transformers in static batches.

``--dry-run`` does all of it at toy sizes on a CPU, kernels in Triton's interpreter: does the script run?
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from minillm.bench.against import TransformersPeer
from minillm.bench.machine import describe
from minillm.bench.workload import run_workload
from minillm.core.config import LAST_BUILT, EngineConfig
from minillm.core.presets import DEVICES, MODELS, Device
from minillm.core.sampling_params import SamplingParams
from minillm.core.workloads import WorkloadRequest
from minillm.engine.engine import Engine
from minillm.kernels import HAS_TRITON
from minillm.kernels.flash_attention import flash_attention, flash_attention_torch
from minillm.kernels.paged_attention import paged_attention, paged_attention_torch
from minillm.llm import LLM
from minillm.models.fetch import resolve
from minillm.models.layers.linear import Linear
from minillm.models.llama import LlamaForCausalLM

PROMPTS = ("It is a truth universally acknowledged, that", "And God said", "The", "Emma was not at all sure that he")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minillm.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets gpu.json")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on a CPU")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        print("minillm.bench.gpu: torch sees no CUDA device; --dry-run tries the script on a CPU", file=sys.stderr)
        return 1
    device = torch.device("cpu" if args.dry_run else "cuda")
    report = {"machine": describe(), "dry_run": args.dry_run}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("kernels", kernels), ("tokens", tokens), ("throughput", throughput)):
        started = time.perf_counter()
        try:
            report[name] = part(device, args.dry_run)
        except Exception as error:  # the other parts are still worth having
            report[name] = {"error": f"{type(error).__name__}: {error}"}
        report[f"{name}_seconds"] = round(time.perf_counter() - started, 1)
        # After each part, so that a run that is cut short leaves what it has.
        (args.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {report[f'{name}_seconds']} s", file=sys.stderr)
    failed = [name for name in ("kernels", "tokens", "throughput") if "error" in report[name]]
    return 1 if failed else 0


# -- kernels ----------------------------------------------------------------------------------------------------------


def kernels(device: torch.device, dry_run: bool) -> list[dict] | dict:
    """32 query and 8 KV heads. Flash attention: one causal sequence; paged: decodes of one length, blocks shuffled."""
    if not HAS_TRITON:
        return {"error": "Triton is not installed"}
    heads, kv_heads = (4, 2) if dry_run else (32, 8)
    cases = [(torch.float16, 64, 96)] if dry_run else [
        (dtype, d, n) for dtype in (torch.bfloat16, torch.float16) for d in (64, 128) for n in (1024, 4096, 16384)
    ]  # fmt: skip
    decodes = [(torch.float16, 64, 3, 40)] if dry_run else [
        (torch.bfloat16, d, requests, n)
        for d in (64, 128)
        for requests, n in ((8, 1024), (64, 1024), (256, 1024), (64, 8192))
    ]  # fmt: skip
    return [flash_case(device, *case, heads, kv_heads) for case in cases] + [
        paged_case(device, *case, heads, kv_heads) for case in decodes
    ]


def flash_case(device: torch.device, dtype: torch.dtype, d: int, n: int, heads: int, kv_heads: int) -> dict:
    """One configuration: error of kernel and library against float64, both times, share of the device's peak."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, h, d, generator=generator, dtype=torch.float32).to(device, dtype)
        for h in (heads, kv_heads, kv_heads)
    )
    starts = torch.tensor([0, n], dtype=torch.int32, device=device)
    first, length = starts[:1], starts[1:]

    def ours():
        return flash_attention(q, k, v, starts, first, length, n, d**-0.5)[0]

    def library():
        qt, kt, vt = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(qt, kt, vt, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    some = slice(max(0, n - 128), n)  # float64 on the last rows: all of it would take longer than the rest
    rows = n - some.start
    want = flash_attention_torch(
        q[some].double(), k.double(), v.double(),
        torch.tensor([0, rows], dtype=torch.int32), first, length, rows, d**-0.5,
    )[0]  # fmt: skip
    flops = 4 * heads * d * n * (n + 1) / 2
    times = {name: milliseconds(run, device) for name, run in (("ours", ours), ("library", library))}
    peak = device_sheet(device)
    return {
        "kernel": "flash_attention",
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": d,
        "length": n,
        "error": (ours()[some].double() - want).abs().max().item(),
        "library_error": (library()[some].double() - want).abs().max().item(),
        "ours_ms": times["ours"],
        "library_ms": times["library"],
        "ratio": times["library"] / times["ours"],
        "share_of_peak": flops / (times["ours"] / 1e3) / peak.flops if peak else None,
    }


def paged_case(
    device: torch.device, dtype: torch.dtype, d: int, requests: int, n: int, heads: int, kv_heads: int, size: int = 16
) -> dict:
    """A decode step of attention; the library reads the same keys where they lie contiguous."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*shape, d, generator=generator, dtype=torch.float32).to(device, dtype)
        for shape in ((requests, heads), (requests, n, kv_heads), (requests, n, kv_heads))
    )
    blocks = -(-n // size)
    table = (torch.randperm(requests * blocks, generator=generator) + 1).view(requests, blocks).to(device, torch.int32)
    keys = torch.arange(n, device=device)
    rows = table[:, keys // size].long() * size + keys % size
    caches = [x.new_zeros((requests * blocks + 1) * size, kv_heads, d).index_put_((rows,), x) for x in (k, v)]
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
    lens = torch.full((requests,), n, dtype=torch.int32, device=device)

    def ours():
        return paged_attention(q, *caches, starts, lens, table, size, 1, d**-0.5)[0]

    def library():
        grouped = q.view(requests, kv_heads, -1, d)
        return F.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2)).view_as(q)

    some = min(4, requests)  # as many of them in float64
    doubles = q[:some].double(), *(cache.double() for cache in caches)
    want = paged_attention_torch(*doubles, starts[: some + 1], lens[:some], table[:some], size, 1, d**-0.5)[0]
    times = {name: milliseconds(run, device) for name, run in (("ours", ours), ("library", library))}
    peak = device_sheet(device)
    return {
        "kernel": "paged_attention",
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": d,
        "requests": requests,
        "length": n,
        "error": (ours()[:some].double() - want).abs().max().item(),
        "library_error": (library()[:some].double() - want).abs().max().item(),
        "ours_ms": times["ours"],
        "library_ms": times["library"],
        "ratio": times["library"] / times["ours"],
        "share_of_bandwidth": (k.nbytes + v.nbytes) / (times["ours"] / 1e3) / peak.bandwidth if peak else None,
    }


def milliseconds(run, device: torch.device) -> float:
    """Median time of a call, after warm-up."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(run, return_mode="median")
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


def device_sheet(device: torch.device) -> Device | None:
    """The data sheet of this GPU, if core.presets has it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((sheet for key, sheet in DEVICES.items() if key.split()[0] in name or key in name), None)


# -- tokens -----------------------------------------------------------------------------------------------------------


def tokens(device: torch.device, dry_run: bool) -> list[dict]:
    """Every chapter's engine on ``tiny`` in float32: steps that agree with transformers, and the largest error."""
    from transformers import AutoModelForCausalLM

    steps, epsilon = (8, 1e-4) if dry_run else (128, 1e-4)
    reference = AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float32, local_files_only=True)
    reference = reference.to(device).eval()
    rows = []
    for chapter in range(LAST_BUILT + 1):
        config = EngineConfig.at_chapter(chapter, dtype="float32", device=device.type)
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, logprobs=1)
        agree, undecided, worst = 0, 0, 0.0
        with LLM("tiny", config=config) as llm:
            for output in llm.generate(list(PROMPTS), params):
                sample, prompt = output.outputs[0], output.prompt_token_ids
                ids = torch.tensor([prompt + sample.token_ids[:-1]], device=device)
                with torch.inference_mode():
                    logprobs = reference(ids).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
                best, order = logprobs.topk(2)
                for step, token in enumerate(sample.token_ids):
                    worst = max(worst, abs(sample.logprobs[step][token].logprob - logprobs[step, token].item()))
                    agree += token == order[step, 0].item()
                    undecided += (best[step, 0] - best[step, 1]).item() < 2 * epsilon
        total = steps * len(PROMPTS)
        rows.append(
            {
                "chapter": chapter,
                "steps": total,
                "agree": agree,
                "undecided": undecided,
                "largest_error": worst,
                "same_tokens": total - agree <= undecided and worst <= epsilon,
            }
        )
    return rows


# -- throughput -------------------------------------------------------------------------------------------------------


def nano_vllm_workload(vocab: int, requests: int, low: int, high: int) -> list[WorkloadRequest]:
    """Prompt and output lengths uniform in [low, high], seeded ids, all there at once."""
    rng = random.Random(0)
    return [
        WorkloadRequest(0, [rng.randrange(1, vocab) for _ in range(rng.randint(low, high))], rng.randint(low, high))
        for _ in range(requests)
    ]


def throughput(device: torch.device, dry_run: bool) -> dict:
    """Output tokens a second of the last chapter's engine and of transformers, useful tokens only."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = MODELS["tiny"] if dry_run else MODELS["Qwen3-0.6B"]
    dtype = torch.float32 if dry_run else torch.bfloat16
    requests, low, high, batch = (4, 5, 12, 2) if dry_run else (256, 100, 1024, 64)
    workload = nano_vllm_workload(shape.vocab_size, requests, low, high)
    useful = sum(request.output_len for request in workload)

    torch.manual_seed(0)
    model = LlamaForCausalLM(shape, dtype, device)
    for module in model.modules():
        if isinstance(module, Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    model.process_after_loading()
    config = EngineConfig.latest(max_model_len=min(2 * high, shape.max_position_embeddings), max_num_seqs=requests)
    engine = Engine(model, config)
    run_workload(engine, workload[:1])
    row = run_workload(engine, workload)
    engine.close()
    del model, engine

    ours = {"tokens_per_second": useful / row["seconds"], **row}
    peer_config = Qwen3Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings, tie_word_embeddings=True,
    )  # fmt: skip
    peer = TransformersPeer(Qwen3ForCausalLM(peer_config).to(device, dtype).eval(), str(device))
    peer.run(workload[:1], 1)
    # A quarter of the requests: the whole would take most of the eight minutes.
    part = workload[: max(batch, requests // 4)]
    seconds = peer.run(part, batch)
    theirs = sum(request.output_len for request in part) / seconds
    return {
        "shape": asdict(shape),
        "requests": requests,
        "output_tokens": useful,
        "ours": ours,
        "transformers_tokens_per_second": theirs,
        "transformers_batch": batch,
        "ratio": ours["tokens_per_second"] / theirs,
    }


if __name__ == "__main__":
    sys.exit(main())
