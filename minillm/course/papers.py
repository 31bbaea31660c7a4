"""The fifteen papers: table, and the map of problems that lead from one to the next."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

import ipywidgets

from minillm.course.widgets import Panel

AXES = ("compute", "memory", "scheduling", "parallelism")
GUIDE = "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮"


@dataclass(frozen=True)
class Paper:
    """One chapter's paper: what was wrong, what the paper does, where the engine has it."""

    chapter: int
    name: str
    venue: str
    axis: tuple[str, ...]
    guide: int  # its number in the reading guide; 0 for chapter 00
    analogy: str
    problem: str
    method: str
    code: str

    @property
    def lap(self) -> str:
        """First lap 01 to 10, second 11 to 15; the first seven are must-read, 08 to 10 by interest."""
        if self.chapter == 0:
            return "start"
        if self.chapter > 10:
            return "second"
        return "first, must" if self.chapter <= 7 else "first, optional"


def _p(chapter, name, venue, axis, guide, analogy, problem, method, code) -> Paper:
    return Paper(chapter, name, venue, tuple(axis.split(", ")) if axis else (), guide, analogy, problem, method, code)


PAPERS = {
    paper.chapter: paper
    for paper in (
        _p(0, "Start here", "", "", 0, "", "A story costs passes, slots and places; most carry nothing.",
           "Generate, count, guess.", "engine/"),
        _p(1, "FlashAttention", "NeurIPS'22", "compute", 5, "cache blocking, rematerialisation",
           "Attention writes an N×N matrix to memory and reads it back.",
           "Tiles and an online softmax: the matrix never leaves the chip.", "kernels/flash_attention.py"),
        _p(2, "PagedAttention", "SOSP'23", "memory", 1, "page table, copy-on-write fork, swap",
           "KV is reserved for the longest output anybody might want.",
           "Fixed blocks, a block table for each sequence, reference counts.", "memory/"),
        _p(3, "Orca", "OSDI'22", "scheduling", 2, "time-sharing with a quantum of one iteration",
           "A batch waits for its longest member.", "Decide anew after every forward pass who is in.",
           "scheduling/"),
        _p(4, "Sarathi-Serve", "OSDI'24", "scheduling", 3, "bounded interrupt latency by yield points",
           "One long prompt stalls every running answer.", "A token budget; prompts go in by chunks.",
           "scheduling/"),
        _p(5, "RadixAttention", "NeurIPS'24", "memory", 4, "page cache with pinned inodes, path lookup",
           "Equal beginnings are computed again and again.", "Keep finished KV in a tree over tokens.",
           "memory/"),
        _p(6, "H2O", "NeurIPS'23", "memory", 6, "working set; frequency with recency",
           "KV grows with the length of the text.", "Keep recent tokens and heavy hitters, evict the rest.",
           "memory/"),
        _p(7, "S-LoRA", "MLSys'24", "memory", 7, "shared text segment with private data",
           "A thousand fine-tunes will not fit as a thousand models.",
           "One base model; adapters paged beside the KV.", "memory/, models/"),
        _p(8, "ZeRO", "SC'20", "parallelism", 8, "remote memory with prefetch",
           "Every device holds all optimizer state, gradients and weights.", "Shard them and gather when needed.",
           "parallel/"),
        _p(9, "Megatron-LM", "arXiv'19, SC'21", "parallelism", 9, "SIMD and an instruction pipeline",
           "Gathering weights for each layer is too slow for decoding.",
           "Split each matrix, column then row; split layers into stages.", "parallel/"),
        _p(10, "PyTorch 2", "ASPLOS'24", "compute", 10, "JIT with guards and deoptimisation",
           "The step has become host overhead.", "Capture graphs with guards, fuse, replay.", "compute/"),
        _p(11, "Speculative decoding", "ICML'23", "compute", 11, "branch prediction, commit at retirement",
           "Decoding still gives one token a pass.", "A cheap draft, one pass that verifies it exactly.",
           "compute/, models/"),
        _p(12, "DistServe, Splitwise, Mooncake", "OSDI'24, ISCA'24, FAST'25", "scheduling, parallelism", 12,
           "DMA engine, producer and consumer", "First token and next token want different machines.",
           "Prefill here, decode there, move the KV.", "parallel/, serving/"),
        _p(13, "SmoothQuant, AWQ, KIVI", "ICML'23, MLSys'24, ICML'24", "memory, compute", 13, "compressed memory",
           "Every weight and every KV number takes two bytes.",
           "Scale the outliers away, then round to eight, four, two bits.", "compute/quantization/"),
        _p(14, "FlashAttention-2, -3", "ICLR'24, NeurIPS'24", "compute", 14, "double buffering",
           "The kernel leaves half the multiprocessors idle.",
           "Other loops, split along the sequence, asynchronous copies.", "kernels/"),
        _p(15, "MoE, Mamba", "several", "compute, parallelism", 15, "hot pages; a checkpoint instead of a log",
           "Every token pays for every weight, and the cache never stops growing.",
           "Route to few experts; or carry a state of constant size.", "models/, parallel/"),
    )
}  # fmt: skip

# Minutes for a chapter and for its lab, of those that are there.
MINUTES = {0: (60, 10), 1: (75, 90), 2: (80, 100), 3: (75, 100), 4: (75, 100), 5: (80, 100)}

# from, to, the problem that the first leaves for the second
EDGES = (
    (0, 1, "scratch is N²"),
    (1, 2, "scratch gone, KV reservation fills memory"),
    (1, 14, "multiprocessors half idle"),
    (1, 6, "scores no longer visible"),
    (2, 3, "room for many, but all wait for the longest"),
    (3, 4, "one long prompt stalls all decodes"),
    (2, 5, "blocks shared only when told"),
    (4, 12, "mixing has a ceiling, two objectives conflict"),
    (5, 12, "cache bigger than a machine"),
    (2, 6, "KV still grows with length"),
    (2, 7, "adapters fight KV for the same pages"),
    (2, 13, "bytes per token unchanged"),
    (7, 8, "the base itself does not fit"),
    (8, 9, "gathering weights each layer is too slow for decode"),
    (9, 12, "prefill and decode want different degrees"),
    (3, 10, "the step is now host overhead"),
    (10, 14, "a compiler can't invent the algebra"),
    (3, 11, "decode still one token a pass"),
    (11, 13, "cheaper draft"),
    (13, 14, "FP8 needs care in attention"),
    (6, 15, "or drop the cache altogether"),
    (9, 15, "experts want their own split"),
    (4, 15, "chunks reload experts"),
)

# column, row: axes in lanes from top (compute) to bottom (parallelism), time from left to right
_PLACES = {
    0: (0, 1.2), 1: (1, 0), 10: (3.9, 0.5), 11: (4.95, 0.95), 14: (6, 0),
    3: (3, 1), 4: (4.3, 1.6), 12: (6, 1.6),
    2: (2, 2), 5: (3.15, 1.8), 13: (4.9, 2.5), 6: (3.2, 3.2), 7: (2.2, 4),
    8: (3.3, 4.3), 9: (4.6, 4), 15: (6, 3.3),
}  # fmt: skip
_SHORT = {11: "Speculation", 12: "P–D split", 13: "Quantization", 14: "Flash-2, -3"}
# JupyterLab's variable, so that the map is of its theme; then what holds elsewhere for a light and for a dark scheme.
_COLOURS = {
    "ink": ("--jp-content-font-color1", "#1f2328", "#e6edf3"),
    "faint": ("--jp-content-font-color2", "#59636e", "#9198a1"),
    "line": ("--jp-inverse-layout-color4", "#8c959f", "#656c76"),
    "surface": ("--jp-layout-color0", "#ffffff", "#111111"),
    "box": ("--jp-layout-color2", "#f6f8fa", "#212830"),
    "accent": ("--jp-brand-color1", "#0969da", "#4493f8"),
}


def _coloured(dark: bool) -> str:
    ink, faint, line, surface, box, accent = (f"var({theme}, {two[dark]})" for theme, *two in _COLOURS.values())
    return f"""
  .pm text {{ fill: {ink}; }} .pm .small {{ fill: {faint}; }}
  .pm rect {{ fill: {box}; stroke: {faint}; }} .pm .surface {{ fill: {surface}; stroke: none; }}
  .pm .edge {{ stroke: {line}; }} .pm .tip {{ fill: {line}; }} .pm .picked rect, .pm .lit {{ stroke: {accent}; }}
"""


_STYLE = f"""
  .pm text {{ font: 12px system-ui, sans-serif; }} .pm .name {{ font-weight: 600; }} .pm .small {{ font-size: 10px; }}
  .pm .edge {{ fill: none; stroke-width: 1.3; }}
  .pm .picked rect {{ stroke-width: 3; }} .pm .lit {{ stroke-width: 2.2; }} .pm .dim {{ opacity: 0.22; }}
{_coloured(dark=False)}
  @media (prefers-color-scheme: dark) {{ {_coloured(dark=True)} }}
"""
WIDTH, HEIGHT = 136, 46


def map_svg(axis: str = "all", picked: int | None = None) -> str:
    """The map: a box a chapter, an arrow a problem. Papers off ``axis`` are dimmed, ``picked`` and its arrows lit."""

    def corner(chapter: int) -> tuple[float, float]:
        column, row = _PLACES[chapter]
        return 12 + column * 162, 12 + row * 82

    def off_axis(chapter: int) -> bool:
        return axis != "all" and axis not in PAPERS[chapter].axis

    hover = "".join(
        f".pm:has(#pm{n}:hover) .edge:not(.e{n}) {{ opacity: 0.12; }} "
        f".pm:has(#pm{n}:hover) .e{n} {{ stroke-width: 2.4; }} "
        for n in PAPERS
    )
    parts = [
        "<svg xmlns='http://www.w3.org/2000/svg' class='pm' viewBox='0 0 1134 424' role='img' "
        "aria-label='map of the fifteen papers: each arrow is a problem one paper leaves for another'>",
        f"<style>{_STYLE}{hover}</style>",
        "<defs><marker id='pm-tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='6' markerHeight='6' orient='auto'>"
        "<path class='tip' d='M0,0 L8,4 L0,8 z'/></marker></defs>",
        "<rect class='surface' width='1134' height='424' rx='12'/>",
    ]
    for a, b, problem in EDGES:
        (ax, ay), (bx, by) = corner(a), corner(b)
        if bx > ax + WIDTH:
            start, end = (ax + WIDTH, ay + HEIGHT / 2), (bx - 2, by + HEIGHT / 2)
        elif by > ay:
            start, end = (ax + WIDTH / 2, ay + HEIGHT), (bx + WIDTH / 2, by - 2)
        else:
            start, end = (ax + WIDTH / 2, ay), (bx + WIDTH / 2, by + HEIGHT + 2)
        kind = "edge" + (" lit" if picked in (a, b) else "") + (" dim" if off_axis(a) and off_axis(b) else "")
        bend = (start[0] + end[0]) / 2
        (x0, y0), (x1, y1) = start, end
        path = f"M{x0:.0f},{y0:.0f} C{bend:.0f},{y0:.0f} {bend:.0f},{y1:.0f} {x1:.0f},{y1:.0f}"
        if bx <= ax + WIDTH:
            path = f"M{x0:.0f},{y0:.0f} L{x1:.0f},{y1:.0f}"
        parts.append(
            f"<path class='{kind} e{a} e{b}' d='{path}' marker-end='url(#pm-tip)'><title>{a:02d} → {b:02d}: "
            f"{escape(problem)}</title></path>"
        )
    for n, paper in PAPERS.items():
        x, y = corner(n)
        kind = ("picked" if n == picked else "") + (" dim" if off_axis(n) else "")
        name, axes = _SHORT.get(n, paper.name), ", ".join(paper.axis) or "where it begins"
        parts.append(
            f"<g id='pm{n}' class='{kind.strip()}'><title>{escape(paper.problem)}</title>"
            f"<rect x='{x:.0f}' y='{y:.0f}' width='{WIDTH}' height='{HEIGHT}' rx='7'/>"
            f"<text class='name' x='{x + 8:.0f}' y='{y + 19:.0f}'>{n:02d} {escape(name)}</text>"
            f"<text class='small' x='{x + 8:.0f}' y='{y + 36:.0f}'>{axes}</text></g>"
        )
    return "\n".join([*parts, "</svg>"])


def describe(chapter: int) -> list[str]:
    """Problem, method and code of a paper, then the problems it answers and leaves."""
    paper = PAPERS[chapter]
    lines = [f"problem: {paper.problem}", f"method: {paper.method}", f"code: minillm/{paper.code}"]
    lines += [f"answers {a:02d}: {problem}" for a, b, problem in EDGES if b == chapter]
    lines += [f"leaves for {b:02d}: {problem}" for a, b, problem in EDGES if a == chapter]
    return lines


def chapter_table(root: Path) -> str:
    """The README's table in Markdown; chapters and labs that are there are linked."""
    lines = [
        "| chapter | guide | paper | axis | lap | an operating system's word for it | minutes | lab |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for n, paper in PAPERS.items():
        chapter = next((root / "chapters").glob(f"{n:02d}_*.ipynb"), None)
        lab = next((root / "labs").glob(f"lab{n:02d}_*.ipynb"), None)
        venue = f" ({paper.venue})" if paper.venue else ""
        cells = (
            f"[{n:02d}](chapters/{chapter.name})" if chapter else f"{n:02d}",
            GUIDE[paper.guide - 1] if paper.guide else "",
            f"{paper.name}{venue}",
            ", ".join(paper.axis),
            paper.lap,
            paper.analogy,
            (f"{MINUTES[n][0]}" + (f" + {MINUTES[n][1]}" if lab else "")) if chapter else "",
            f"[lab {n:02d}](labs/{lab.name})" if lab else "",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def map_widget() -> Panel:
    """Every answer is someone's next problem: filter by axis, pick a paper, hover over the map."""

    def draw(axis: str, paper: int) -> str:
        title = f"{paper:02d} {PAPERS[paper].name} {PAPERS[paper].venue}"
        items = "".join(f"<li>{escape(line)}</li>" for line in describe(paper))
        return f"{map_svg(axis, paper)}<p><b>{escape(title)}</b></p><ul>{items}</ul>"

    return Panel(
        draw,
        {
            "axis": ipywidgets.ToggleButtons(options=["all", *AXES], description="axis"),
            "paper": ipywidgets.Dropdown(
                options=[(f"{n:02d} {p.name}", n) for n, p in PAPERS.items()], value=1, description="paper"
            ),
        },
    )
