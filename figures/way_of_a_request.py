"""Draws figures/way_of_a_request.svg: the rooms that one request passes, and the loop inside.

Plain SVG, since it is boxes and arrows; colours follow the reader's light or dark theme.
"""

from pathlib import Path

STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; }
  .small { font-size: 12px; fill: #59636e; }
  .mono { font: 13px ui-monospace, monospace; }
  .box { fill: #f6f8fa; stroke: #59636e; }
  .axis { fill: #ddf4ff; stroke: #0969da; }
  .line { stroke: #59636e; fill: none; stroke-width: 1.5; }
  .loop { stroke: #0969da; fill: none; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .small { fill: #9198a1; }
    .box { fill: #212830; stroke: #9198a1; } .axis { fill: #10233d; stroke: #4493f8; }
    .line { stroke: #9198a1; } .loop { stroke: #4493f8; }
  }
"""

# x, y, width, room, what happens there, whether the room is one of the four axes
BOXES = [
    (20, 30, 150, "llm.py", ("prompts in,", "texts out"), False),
    (240, 30, 150, "engine/", ("refuse, queue,", "step, abort"), False),
    (460, 30, 170, "scheduling/", ("who runs next", "axis 3"), True),
    (710, 30, 170, "memory/", ("whose rows, where", "axis 2"), True),
    (20, 180, 150, "engine/", ("ids to text,", "stop strings"), False),
    (460, 180, 170, "engine/", ("runner: one", "forward pass"), False),
    (710, 180, 170, "models/", ("layers, weights,", "checkpoints"), False),
    (460, 330, 170, "parallel/", ("more than one device", "axis 4"), True),
    (710, 330, 170, "compute/ · kernels/", ("attention, sampling", "axis 1"), True),
]
HEIGHT = 90


def box(x: int, y: int, width: int, room: str, lines: tuple[str, str], axis: bool) -> str:
    kind = "axis" if axis else "box"
    middle = x + width / 2
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="8"/>']
    parts.append(f'<text class="mono" x="{middle}" y="{y + 28}" text-anchor="middle" font-weight="600">{room}</text>')
    for i, line in enumerate(lines):
        parts.append(f'<text class="small" x="{middle}" y="{y + 52 + 18 * i}" text-anchor="middle">{line}</text>')
    return "\n".join(parts)


def arrow(points: str, kind: str = "line") -> str:
    return f'<path class="{kind}" d="{points}" marker-end="url(#tip-{kind})"/>'


def label(x: int, y: int, text: str, anchor: str = "middle") -> str:
    return f'<text class="small" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def tip(kind: str, light: str, dark: str) -> str:
    return (
        f'<marker id="tip-{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="tip-{kind}" d="M0,0 L8,4 L0,8 z"/></marker>'
        f"<style>.tip-{kind} {{ fill: {light}; }} "
        f"@media (prefers-color-scheme: dark) {{ .tip-{kind} {{ fill: {dark}; }} }}</style>"
    )


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 440" role="img" aria-labelledby="title">',
        '<title id="title">A request goes from llm.py to the engine, which loops over scheduler, runner and output '
        "processor; the four axes are the rooms scheduling, memory, compute and parallel</title>",
        f"<style>{STYLE}</style>",
        "<defs>" + tip("line", "#59636e", "#9198a1") + tip("loop", "#0969da", "#4493f8") + "</defs>",
        *(box(*b) for b in BOXES),
        arrow("M170,65 H238"),
        label(204, 57, "prompt"),
        arrow("M390,75 H458", "loop"),
        label(424, 67, "step"),
        arrow("M630,75 H708"),
        label(669, 67, "blocks"),
        arrow("M545,120 V178", "loop"),
        label(553, 154, "batch", "start"),
        arrow("M630,225 H708"),
        arrow("M795,270 V328"),
        label(803, 304, "attend", "start"),
        arrow("M545,270 V328"),
        label(553, 304, "ranks", "start"),
        arrow("M460,225 H172", "loop"),
        label(316, 217, "token ids"),
        arrow("M60,178 V122"),
        label(68, 154, "text", "start"),
        arrow("M130,178 C130,150 315,160 315,122", "loop"),
        label(20, 350, "Blue arrows: the loop, once for every forward pass.", "start"),
        label(20, 376, "Blue boxes: the four axes of the papers. Whoever knows what", "start"),
        label(20, 394, "a paper moves (arithmetic, memory, order, devices) knows", "start"),
        label(20, 412, "which room to open.", "start"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
