"""What an idea is worth for a model, a GPU and a workload: calculators over core's cost model."""

from __future__ import annotations

import math

import ipywidgets

from minillm.core.cost import attention_traffic, kv_bytes_per_token, step_cost
from minillm.core.presets import DEVICES, MODELS
from minillm.course.widgets import Panel, table

# -- roofline (chapters 00, 02, 09, 11, 13, 15) -----------------------------------------------------------------------


def roofline(model: str, gpu: str, batch: int, context: int) -> dict[str, float]:
    """One decode pass of ``batch`` requests, each ``context`` tokens long, in bfloat16 with tiled attention.

    Seconds and shares by the roofline; ``batch_at_ridge`` is the batch whose weights alone reach the ridge point,
    ``batch_in_memory`` the one whose weights and KV fit. ValueError if the model itself does not fit the GPU.
    """
    shape, device = MODELS[model], DEVICES[gpu]
    if batch < 1 or context < 1:
        raise ValueError(f"batch is {batch} and context {context}; both must be at least 1")
    if context > shape.max_position_embeddings:
        raise ValueError(f"context is {context:,}; {model}'s positions end at {shape.max_position_embeddings:,}")
    cost = step_cost(shape, [(1, context)] * batch, "flash", "bfloat16")
    kv = batch * context * kv_bytes_per_token(shape, "bfloat16")
    weights = shape.num_parameters * 2  # all of them; a pass reads only the embedding rows it looks up
    left = device.memory - weights
    if left <= 0:
        raise ValueError(f"{model} takes {weights / 1e9:.0f} GB and {gpu} has {device.memory / 1e9:.0f} GB")
    # A weight of two bytes does one multiply and one add a request: the intensity of the weights is the batch.
    return {
        "milliseconds": 1e3 * cost.seconds(device),
        "tokens_per_second": batch / cost.seconds(device),
        "arithmetic_share": cost.arithmetic_share(device),
        "intensity": cost.intensity,
        "ridge": device.ridge,
        "weight_gb": weights / 1e9,
        "kv_gb": kv / 1e9,
        "memory_gb": device.memory / 1e9,
        "batch_at_ridge": math.ceil(device.ridge),
        "batch_in_memory": int(left // (context * kv_bytes_per_token(shape, "bfloat16"))),
    }


def roofline_rows(**params) -> list[dict]:
    """The same as lines to print."""
    r = roofline(**params)
    return [
        {"": "one pass takes", "value": f"{r['milliseconds']:.2f} ms"},
        {"": "tokens a second, all requests", "value": f"{r['tokens_per_second']:,.0f}"},
        {"": "operations for each byte", "value": f"{r['intensity']:.1f} of {r['ridge']:.0f} at the ridge"},
        {"": "arithmetic in use", "value": f"{100 * r['arithmetic_share']:.1f} %"},
        {"": "weights + KV", "value": f"{r['weight_gb']:.1f} + {r['kv_gb']:.1f} of {r['memory_gb']:.0f} GB"},
        {"": "batch at the ridge, by weights alone", "value": r["batch_at_ridge"]},
        {"": "batch that memory allows", "value": r["batch_in_memory"]},
    ]


def roofline_widget() -> Panel:
    """How starved is decode, and what does the batch that would feed it take?"""

    def draw(model: str, gpu: str, batch: int, context: int) -> str:
        rows = roofline_rows(model=model, gpu=gpu, batch=batch, context=context)
        r = roofline(model, gpu, batch, context)
        verdict = "" if batch <= r["batch_in_memory"] else "<p><b>This batch does not fit the memory.</b></p>"
        return table(rows) + roofline_plot(r) + verdict

    return Panel(
        draw,
        {
            "model": ipywidgets.Dropdown(options=list(MODELS), value="Llama-3-8B", description="model"),
            "gpu": ipywidgets.Dropdown(options=list(DEVICES), value="A100 80GB", description="GPU"),
            "batch": ipywidgets.IntSlider(value=1, min=1, max=512, description="batch"),
            "context": ipywidgets.IntSlider(value=1024, min=128, max=8192, step=128, description="context"),
        },
    )


def roofline_plot(r: dict[str, float]) -> str:
    """The roof, log-log, with a dot where the pass stands; inline SVG."""
    width, height, low, high = 420, 160, -1.0, 4.0

    def x(intensity: float) -> float:
        return 40 + (math.log10(intensity) - low) / (high - low) * (width - 60)

    def y(share: float) -> float:
        return 20 + (-math.log10(share)) / 4 * (height - 50)

    ridge, dot = r["ridge"], r["intensity"]
    start = max(1e-4, 10**low / ridge)
    return (
        f"<svg viewBox='0 0 {width} {height}' width='{width}' role='img' aria-label='roofline: share of the peak "
        f"{r['arithmetic_share']:.3f} at {dot:.1f} operations a byte'>"
        f"<polyline points='{x(max(10**low, 1e-4 * ridge)):.0f},{y(start):.0f} {x(ridge):.0f},{y(1):.0f} "
        f"{x(10**high):.0f},{y(1):.0f}' fill='none' stroke='currentColor' stroke-width='2'/>"
        f"<circle cx='{x(dot):.0f}' cy='{y(max(r['arithmetic_share'], 1e-4)):.0f}' r='6' fill='#0969da'/>"
        f"<text x='{x(ridge):.0f}' y='{y(1) - 6:.0f}' font-size='11' fill='currentColor' text-anchor='middle'>"
        f"ridge {ridge:.0f}</text>"
        f"<text x='{width / 2}' y='{height - 6}' font-size='11' fill='currentColor' text-anchor='middle'>"
        "operations for each byte (log)</text>"
        f"<text x='12' y='{height / 2}' font-size='11' fill='currentColor' "
        f"transform='rotate(-90 12 {height / 2})' text-anchor='middle'>share of peak (log)</text></svg>"
    )


# -- tile size (chapter 01) -------------------------------------------------------------------------------------------


def tile_traffic(n: int, d: int, tile: int, order: str, sram_kb: int = 164) -> dict[str, float]:
    """Elements of HBM traffic of one head, in units of N·d, and what a tile takes of the chip's memory.

    order "Q outside" is the kernel's, (2 + 2⌈N/tile⌉); "K/V outside" is FlashAttention's Algorithm 1,
    (3⌈N/tile⌉ + 2). Naive attention moves 4 + 4N/d. A program holds tiles of Q, K, V and O and the scores, in two
    bytes an element and four for scores and O.
    """
    if tile > n:
        raise ValueError(f"tile is {tile} and N {n}; a tile is at most the whole sequence")
    tiled, naive = (attention_traffic(loops, n, d, tile) / (n * d) for loops in (order, "naive"))
    on_chip = tile * d * (3 * 2 + 4) + 4 * tile * tile
    return {
        "tiled": tiled,
        "naive": naive,
        "wins": tiled < naive,
        "on_chip_kb": on_chip / 1024,
        "fits": on_chip <= sram_kb * 1024,
    }


def smallest_winning_tile(n: int, d: int, order: str) -> int:
    """The smallest tile that moves less than naive attention: about d/2 with Q outside, 3d/4 with K/V outside."""
    return next(tile for tile in range(1, n + 1) if tile_traffic(n, d, tile, order)["wins"])


def winning_tile_rows(lengths=(1024, 4096, 32768)) -> list[dict]:
    """The smallest winning tile for both orders and head dims, at several lengths."""
    return [
        {"d": d, "order": order, **{f"N = {n:,}": smallest_winning_tile(n, d, order) for n in lengths}}
        for d in (64, 128)
        for order in ("K/V outside", "Q outside")
    ]


def tile_rows(n: int, d: int, order: str, tiles=(16, 32, 48, 64, 128, 256)) -> list[dict]:
    """A line for each tile size."""
    rows = []
    for tile in (t for t in tiles if t <= n):
        r = tile_traffic(n, d, tile, order)
        rows.append(
            {
                "tile": tile,
                "tiled, N·d": f"{r['tiled']:.0f}",
                "naive, N·d": f"{r['naive']:.0f}",
                "tiling": "wins" if r["wins"] else "loses",
                "on chip": f"{r['on_chip_kb']:.0f} KiB" + ("" if r["fits"] else ", too much"),
            }
        )
    return rows


def tile_widget() -> Panel:
    """From which tile size on does tiling pay, and where does the chip end?"""
    tiles = (16, 32, 48, 64, 96, 128, 192, 256)

    def draw(n: int, d: int, order: str, tile: int) -> str:
        tile_traffic(n, d, tile, order)  # refuses what makes no sense
        shown = [t for t in tiles if t <= n]
        rows = tile_rows(n, d, order, shown)
        best = smallest_winning_tile(n, d, order)
        note = f"<p>Smallest tile that moves less than naive attention: <b class='minillm-readout'>{best}</b></p>"
        return table(rows, mark=shown.index(tile)) + note

    return Panel(
        draw,
        {
            "n": ipywidgets.Dropdown(options=[256, 512, 1024, 4096, 32768], value=1024, description="N"),
            "d": ipywidgets.Dropdown(options=[64, 128], value=64, description="d"),
            "order": ipywidgets.ToggleButtons(options=["Q outside", "K/V outside"], description="loops"),
            "tile": ipywidgets.SelectionSlider(options=tiles, value=64, description="tile"),
        },
    )


# -- KV memory (chapter 02) -------------------------------------------------------------------------------------------


def kv_requests(model: str, gpu: str, longest: int, length: int, block_size: int = 16) -> dict[str, float]:
    """Requests of ``length`` tokens whose KV fits a GPU at a time, if each reserves ``longest`` slots, and paged.

    KV gets nine tenths of the memory less the weights, both in bfloat16. ValueError if the model itself does not fit,
    or a request is longer than allowed.
    """
    shape, device = MODELS[model], DEVICES[gpu]
    if not 1 <= length <= longest:
        raise ValueError(
            f"length is {length:,} and the longest {longest:,}; a request has from 1 to {longest:,} tokens"
        )
    if longest > shape.max_position_embeddings:
        raise ValueError(f"the longest is {longest:,}; {model}'s positions end at {shape.max_position_embeddings:,}")
    slot, weights = kv_bytes_per_token(shape, "bfloat16"), shape.num_parameters * 2
    memory = 0.9 * device.memory - weights
    if memory < longest * slot:
        raise ValueError(f"{model} takes {weights / 1e9:.0f} GB; {gpu} has no room left for {longest:,} slots")
    blocks = math.ceil(length / block_size)
    return {
        "slot_bytes": slot,
        "kv_gb": memory / 1e9,
        "slots": int(memory // slot),
        "max_length": int(memory // (longest * slot)),
        "paged": int(memory // (block_size * slot)) // blocks,
        "used": length / longest,
        "used_paged": length / (blocks * block_size),
    }


def kv_requests_rows(**params) -> list[dict]:
    """The same as lines to print."""
    r = kv_requests(**params)
    how = f"{params['model']} on {params['gpu']}"
    return [
        {"": "KV of a token, 2 bytes a number", how: f"{r['slot_bytes']:,} bytes"},
        {"": "KV memory: 0.9 of the GPU's less the weights", how: f"{r['kv_gb']:.1f} GB, {r['slots']:,} slots"},
        {
            "": "requests, each reserves the longest",
            how: f"{r['max_length']:,}, {r['used']:.0%} of their slots used",
        },
        {"": "requests, paged", how: f"{r['paged']:,}, {r['used_paged']:.0%} of their slots used"},
    ]


KV_PRESETS = (
    ("Llama-2-7B", "A100 80GB", 4096, 500),
    ("Llama-2-7B", "A100 80GB", 4096, 4096),
    ("Llama-3-8B", "A100 80GB", 8192, 500),
    ("Llama-3-8B", "RTX 4090", 8192, 500),
)


def kv_preset_rows() -> list[dict]:
    """Four settings of the KV calculator, a line each."""
    rows = []
    for model, gpu, longest, length in KV_PRESETS:
        r = kv_requests(model, gpu, longest, length)
        rows.append(
            {
                "model": model,
                "GPU": gpu,
                "longest": f"{longest:,}",
                "length": f"{length:,}",
                "max-length": f"{r['max_length']:,}",
                "paged": f"{r['paged']:,}",
            }
        )
    return rows


def kv_requests_widget() -> Panel:
    """How many requests fit a GPU, if each reserves the longest, and in blocks?"""

    def draw(model: str, gpu: str, longest: int, length: int, block_size: int) -> str:
        params = dict(model=model, gpu=gpu, longest=longest, length=length, block_size=block_size)
        gain = kv_requests(**params)["paged"] / kv_requests(**params)["max_length"]
        note = f"<p>Paged holds <b class='minillm-readout'>{gain:.1f}</b> times as many.</p>"
        return table(kv_requests_rows(**params)) + note

    return Panel(
        draw,
        {
            "model": ipywidgets.Dropdown(options=list(MODELS), value="Llama-2-7B", description="model"),
            "gpu": ipywidgets.Dropdown(options=list(DEVICES), value="A100 80GB", description="GPU"),
            "longest": ipywidgets.Dropdown(options=[1024, 2048, 4096, 8192], value=4096, description="longest"),
            "length": ipywidgets.IntSlider(value=500, min=1, max=8192, description="length"),
            "block_size": ipywidgets.Dropdown(options=[1, 16, 64, 256], value=16, description="block size"),
        },
    )
