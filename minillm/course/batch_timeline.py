"""The batch timeline (chapters 03, 04 and 12): who ran in which pass, who waited, whose seat was held for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from statistics import fmean

import ipywidgets

from minillm.core.config import EngineConfig
from minillm.core.presets import DEVICES, MODELS
from minillm.core.workloads import WorkloadRequest
from minillm.course.widgets import Panel
from minillm.scheduling.iteration import SkipJoinMLFQ
from minillm.scheduling.scheduler import Scheduler
from minillm.simulator.simulation import Simulation, simulate
from minillm.simulator.timeline import Frame, timeline

MAX_REQUESTS, MAX_LENGTH = 12, 64
MARKS = {"prompt": "P", "output": "#", "idle": "-", "waiting": ".", "": " "}
WORDS = {"prompt": "computes its prompt", "output": "runs", "idle": "ended, seat held", "waiting": "waits"}


def _short_first(config, kv, *rest) -> Scheduler:
    """Skip-join MLFQ whose first quantum is four tokens, so that a picture's worth of passes shows it."""
    scheduler = Scheduler(config, kv, *rest)
    scheduler.policy = SkipJoinMLFQ(quantum=4)
    return scheduler


# name -> (arguments of the config, how the scheduler is made)
POLICIES = {
    "static": ({"batching": "static"}, Scheduler),
    "iteration": ({"batching": "iteration"}, Scheduler),
    "iteration, MLFQ": ({"batching": "iteration", "scheduling_policy": "mlfq"}, _short_first),
}


@dataclass(frozen=True)
class BatchRun:
    """Some requests served, a pass taking one unit of time."""

    lengths: list[int]  # output tokens of each request
    seats: int
    frames: list[Frame]
    latencies: list[int]  # passes from arrival to the last token

    @property
    def passes(self) -> int:
        return len(self.frames)

    @property
    def utilisation(self) -> float:
        """Requests computed over seats, mean over passes."""
        return sum(len(f.prompt) + len(f.output) for f in self.frames) / (self.seats * self.passes)

    @property
    def mean_over_max(self) -> float:
        return fmean(self.lengths) / max(self.lengths)


def batch_run(lengths: list[int], policy: str = "static", seats: int = 4, every: int = 0) -> BatchRun:
    """Serve requests of these output lengths, one arriving ``every`` so many passes (0: all at once).

    The real scheduler, in simulated time in which every pass takes as long as any other. ValueError for what can't be
    drawn.
    """
    if not lengths:
        raise ValueError("there are no lengths; give at least one")
    if len(lengths) > MAX_REQUESTS:
        raise ValueError(f"{len(lengths)} requests; at most {MAX_REQUESTS} can be drawn")
    for length in lengths:
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"an output of {length} tokens; from 1 to {MAX_LENGTH} can be drawn")
    switches, scheduler = POLICIES[policy]
    # Blocks for all at once: what this timeline shows is seats.
    blocks = MAX_REQUESTS * (MAX_LENGTH // 16 + 1)
    config = EngineConfig.at_chapter(
        3, max_num_seqs=seats, num_gpu_blocks_override=blocks, preemption_mode="swap", **switches
    )
    workload = [WorkloadRequest(float(i * every), [1], length) for i, length in enumerate(lengths)]
    # One second for the host makes all passes alike; the model's share of microseconds is below what rounding sees.
    simulation = simulate(workload, MODELS["tiny"], config, DEVICES["A100 80GB"], host_seconds=1.0, scheduler=scheduler)
    return BatchRun(list(lengths), seats, timeline(simulation), [round(r.latency) for r in simulation.requests])


def marks(frames: list[Frame], request_id: str) -> list[str]:
    """What a request did in each pass: "prompt", "output", "idle", "waiting", or "" before and after."""
    kinds = ("prompt", "output", "idle", "waiting")
    return [next((kind for kind in kinds if request_id in getattr(frame, kind)), "") for frame in frames]


def timeline_text(frames: list[Frame], names: list[str]) -> str:
    """A line a request: P computes its prompt, # runs, - has ended and its seat is held, . waits."""
    lines = ("".join(MARKS[kind] for kind in marks(frames, str(i))) for i in range(len(names)))
    return "\n".join(f"{name:>6}  {line}".rstrip() for name, line in zip(names, lines, strict=True))


def timeline_of(simulation: Simulation) -> str:
    """The same of any simulation whose requests have one sample each."""
    return timeline_text(timeline(simulation), [f"{i}: {r.output_len}" for i, r in enumerate(simulation.requests)])


PRESETS = (
    ("static, one batch", [4, 8, 16, 36], "static", 4, 0),
    ("static, equal lengths", [16, 16, 16, 16], "static", 4, 0),
    ("iteration, one batch", [4, 8, 16, 36], "iteration", 4, 0),
    ("static, mixed queue", [2, 20, 2, 20, 2, 20, 2, 20], "static", 2, 0),
    ("static, sorted queue", [2, 2, 2, 2, 20, 20, 20, 20], "static", 2, 0),
    ("iteration, mixed queue", [2, 20, 2, 20, 2, 20, 2, 20], "iteration", 2, 0),
    ("first come, long ones first", [24, 24, 2, 2, 2], "iteration", 2, 1),
    ("MLFQ, long ones first", [24, 24, 2, 2, 2], "iteration, MLFQ", 2, 1),
)


def preset_rows() -> list[dict]:
    """What the widget shows for some settings: the answers to its tasks."""
    rows = []
    for name, lengths, policy, seats, every in PRESETS:
        run = batch_run(lengths, policy, seats, every)
        rows.append(
            {
                "setting": name,
                "passes": run.passes,
                "seats at work": f"{run.utilisation:.0%}",
                "mean/max of all": f"{run.mean_over_max:.0%}",
                "latencies": " ".join(map(str, run.latencies)),
            }
        )
    return rows


_STYLE = """
  .bt text { font: 12px system-ui, sans-serif; fill: var(--jp-content-font-color1, currentColor); }
  .bt rect { stroke: var(--jp-content-font-color2, #7d8590); stroke-width: .7; }
  .bt .output { fill: var(--jp-brand-color1, #2f81f7); } .bt .prompt { fill: var(--jp-warn-color1, #d9730d); }
  .bt .idle { fill: url(#bt-hatch); }
  .bt .waiting { fill: var(--jp-content-font-color2, #7d8590); stroke: none; }
  .bt .hatch { stroke: var(--jp-content-font-color2, #7d8590); stroke-width: 2; }
  .bt .mark { font-size: 10px; fill: #fff; }
"""
_HATCH = (
    "<defs><pattern id='bt-hatch' width='5' height='5' patternUnits='userSpaceOnUse' "
    "patternTransform='rotate(45)'><path class='hatch' d='M0,0 V5'/></pattern></defs>"
)
_LEFT, _WIDTH, _ROW = 56, 640, 20


def timeline_svg(frames: list[Frame], names: list[str], by_time: bool = False) -> str:
    """A row a request, a cell a pass; ``by_time``: cells are as wide as their passes are long."""
    first, last = frames[0].start, frames[-1].start + frames[-1].seconds
    cell = min(20.0, _WIDTH / len(frames))
    if by_time:
        scale = _WIDTH / (last - first)
        places = [(_LEFT + (f.start - first) * scale, f.seconds * scale) for f in frames]
    else:
        places = [(_LEFT + i * cell, cell) for i in range(len(frames))]
    height = _ROW * len(names) + 46
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' class='bt' viewBox='0 0 {_LEFT + _WIDTH + 10} {height}' role='img' "
        f"aria-label='who ran in which of {len(frames)} passes' style='max-width:{_LEFT + _WIDTH + 10}px'>",
        f"<style>{_STYLE}</style>{_HATCH}",
    ]
    for row, name in enumerate(names):
        y = 4 + row * _ROW
        parts.append(f"<text x='{_LEFT - 6}' y='{y + 13}' text-anchor='end'>{escape(name)}</text>")
        for (x, width), kind in zip(places, marks(frames, str(row)), strict=True):
            parts += _cell(kind, x, y, max(width - 1, 0.5), _ROW - 4) if kind else []
    x, y = _LEFT, height - 20
    for kind, words in WORDS.items():
        parts += _cell(kind, x, y, 14, 14)
        parts.append(f"<text x='{x + 20}' y='{y + 12}'>{words}</text>")
        x += 44 + 6.2 * len(words)
    return "\n".join([*parts, "</svg>"])


def _cell(kind: str, x: float, y: float, width: float, height: float) -> list[str]:
    """A box; a dot for who waits, since it has no seat; a P on a prompt, narrower where its box is."""
    middle = x + width / 2
    if kind == "waiting":
        side = min(3.0, width)
        return [
            f"<rect class='waiting' x='{middle - side / 2:.1f}' y='{y + height / 2 - 1.5:.1f}' width='{side:.1f}' "
            "height='3'/>"
        ]
    parts = [f"<rect class='{kind}' x='{x:.1f}' y='{y}' width='{width:.1f}' height='{height}'/>"]
    if kind == "prompt":
        size = min(10.0, max(5.0, width))
        parts.append(
            f"<text class='mark' x='{middle:.1f}' y='{y + height - 4}' text-anchor='middle' "
            f"style='font-size:{size:.0f}px'>P</text>"
        )
    return parts


def whole_numbers(text: str) -> list[int]:
    """ "4, 1, 8" -> [4, 1, 8]; ValueError names what is no whole number."""
    found = []
    for word in text.replace(",", " ").split():
        try:
            found.append(int(word))
        except ValueError:
            raise ValueError(f"{word!r} is no whole number") from None
    return found


def timeline_widget() -> Panel:
    """Static batching uses mean/max of its seats; find what iteration-level batching leaves, and who pays for MLFQ."""

    def draw(policy: str, lengths: str, seats: int, every: int) -> str:
        run = batch_run(whole_numbers(lengths), policy, seats, every)
        names = [f"{chr(65 + i)}: {length}" for i, length in enumerate(run.lengths)]
        return (
            timeline_svg(run.frames, names)
            + f"<p>{run.passes} passes; seats at work <b class='minillm-readout'>{run.utilisation:.0%}</b>; "
            + f"mean/max of all lengths {run.mean_over_max:.0%}; latency in passes, mean "
            + f"{fmean(run.latencies):.1f}: {', '.join(map(str, run.latencies))}</p>"
        )

    return Panel(
        draw,
        {
            "policy": ipywidgets.ToggleButtons(options=list(POLICIES), description="batching"),
            "lengths": ipywidgets.Text(value="4, 8, 16, 36", description="output lengths", continuous_update=False),
            "seats": ipywidgets.IntSlider(value=4, min=1, max=8, description="seats", continuous_update=False),
            "every": ipywidgets.IntSlider(
                value=0, min=0, max=8, description="passes between arrivals", continuous_update=False
            ),
        },
    )


# -- chapter 04: the same timeline by time, a long prompt among running requests ---------------------------------------

WHOLE = "whole"
BUDGETS = (WHOLE, 4096, 2048, 1024, 512, 256, 128, 64)
CHUNK_MODEL, CHUNK_GPU = "Llama-3-8B", "A100 80GB"
MAX_PASSES = 220  # more would be hairlines


@dataclass(frozen=True)
class ChunkRun:
    """Some requests decode; a while later long prompts come. Milliseconds by the roofline."""

    frames: list[Frame]
    names: list[str]
    gaps: list[float]  # between tokens of those that decode, in order of size
    first_tokens: list[float]  # of the long prompts, from arrival
    chunks: list[list[int]]  # tokens of each long prompt, pass by pass

    @property
    def usual_gap(self) -> float:
        return self.gaps[len(self.gaps) // 2]

    @property
    def longest_gap(self) -> float:
        return self.gaps[-1]

    @property
    def rows_again(self) -> int:
        from minillm.scheduling.sarathi import rows_read_again  # not there in a package that ends before chapter 04

        return sum(map(rows_read_again, self.chunks))


def chunk_run(budget: int | str = WHOLE, prompt: int = 4096, running: int = 4, prompts: int = 1) -> ChunkRun:
    """``running`` requests write 40 tokens each; after 50 ms come ``prompts`` prompts, 20 ms apart.

    The real scheduler in simulated time, Llama-3-8B on an A100. ``budget``: tokens of a pass, or "whole" for chapter
    03's engine. ValueError for what can't be drawn.
    """
    if not 1 <= running <= 8 or not 1 <= prompts <= 4:
        raise ValueError(f"{running} running and {prompts} prompts; 1 to 8 and 1 to 4 can be drawn")
    if not 16 <= prompt <= 8000:
        raise ValueError(f"a prompt of {prompt} tokens; from 16 to 8,000 can be drawn")
    if budget != WHOLE and budget <= running:
        raise ValueError(f"a budget of {budget} tokens and {running} that decode: nothing is left for a prompt")
    workload = [WorkloadRequest(0.0, [1], 40) for _ in range(running)]
    workload += [WorkloadRequest(0.05 + 0.02 * i, [1] * prompt, 4) for i in range(prompts)]
    if budget == WHOLE:
        config = EngineConfig.at_chapter(3)
    else:
        config = EngineConfig.at_chapter(4, max_num_batched_tokens=budget)
        if prompts * prompt / budget > MAX_PASSES:
            raise ValueError(f"{prompts} · {prompt:,} tokens in chunks of {budget} are more than {MAX_PASSES} passes")
    simulation = simulate(workload, MODELS[CHUNK_MODEL], config, DEVICES[CHUNK_GPU])
    frames, long = timeline(simulation), simulation.requests[running:]
    return ChunkRun(
        frames,
        [*(chr(65 + i) for i in range(running)), *(f"long {i + 1}" for i in range(prompts))],
        sorted(1e3 * gap for request in simulation.requests[:running] for gap in request.gaps),
        [1e3 * request.time_to_first_token for request in long],
        [[f.prompt[r.request_id] for f in frames if r.request_id in f.prompt] for r in long],
    )


CHUNK_PRESETS = (
    *((budget, 4096, 4, 1) for budget in BUDGETS[:1] + BUDGETS[2:]),
    (WHOLE, 256, 4, 1),
    (512, 256, 4, 1),
)


def chunk_rows() -> list[dict]:
    """What chapter 04's widget shows for some settings: the answers to its tasks."""
    rows = []
    for budget, prompt, running, prompts in CHUNK_PRESETS:
        run = chunk_run(budget, prompt, running, prompts)
        rows.append(
            {
                "prompt": f"{prompt:,}",
                "budget": budget if budget == WHOLE else f"{budget:,}",
                "passes": len(run.frames),
                "usual gap, ms": f"{run.usual_gap:.1f}",
                "longest": f"{run.longest_gap:.1f}",
                "first token, ms": f"{fmean(run.first_tokens):.0f}",
                "rows read again": f"{run.rows_again:,}",
            }
        )
    return rows


def chunk_widget() -> Panel:
    """The budget sets the longest gap; find where a smaller one stops to help and only reads again."""

    def draw(budget: int | str, prompt: int, running: int, prompts: int) -> str:
        run = chunk_run(budget, prompt, running, prompts)
        return (
            timeline_svg(run.frames, run.names, by_time=True)
            + f"<p>{len(run.frames)} passes, as wide as they are long; longest gap "
            + f"<b class='minillm-readout'>{run.longest_gap:.1f} ms</b> (usual {run.usual_gap:.1f}); first token of a "
            + f"long prompt after {fmean(run.first_tokens):.0f} ms; KV rows read again {run.rows_again:,}</p>"
        )

    return Panel(
        draw,
        {
            "budget": ipywidgets.SelectionSlider(options=BUDGETS, description="budget", continuous_update=False),
            "prompt": ipywidgets.IntSlider(
                value=4096, min=256, max=7936, step=256, description="prompt tokens", continuous_update=False
            ),
            "running": ipywidgets.IntSlider(
                value=4, min=1, max=8, description="requests that decode", continuous_update=False
            ),
            "prompts": ipywidgets.IntSlider(value=1, min=1, max=4, description="long prompts", continuous_update=False),
        },
    )
