"""Draws figures/way_of_a_request.svg: the rooms that one request passes, and the loop inside."""

from pathlib import Path

from minillm.course.drawing import arrow, rect, svg, text

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


def box(x: int, y: int, width: int, room: str, lines: tuple[str, str], axis: bool) -> list[str]:
    middle = x + width / 2
    return [
        rect(x, y, width, HEIGHT, "lit" if axis else "box", 8),
        text(middle, y + 28, room, "mono strong"),
        *(text(middle, y + 52 + 18 * i, line) for i, line in enumerate(lines)),
    ]


def draw() -> str:
    title = (
        "A request goes from llm.py to the engine, which loops over scheduler, runner and output "
        "processor; the four axes are the rooms scheduling, memory, compute and parallel"
    )
    parts = [
        *(part for b in BOXES for part in box(*b)),
        arrow("M170,65 H238"),
        text(204, 57, "prompt"),
        arrow("M390,75 H458", "flow"),
        text(424, 67, "step"),
        arrow("M630,75 H708"),
        text(669, 67, "blocks"),
        arrow("M545,120 V178", "flow"),
        text(553, 154, "batch", anchor="start"),
        arrow("M630,225 H708"),
        arrow("M795,270 V328"),
        text(803, 304, "attend", anchor="start"),
        arrow("M545,270 V328"),
        text(553, 304, "ranks", anchor="start"),
        arrow("M460,225 H172", "flow"),
        text(316, 217, "token ids"),
        arrow("M60,178 V122"),
        text(68, 154, "text", anchor="start"),
        arrow("M130,178 C130,150 315,160 315,122", "flow"),
        text(20, 350, "Blue arrows: the loop, once for every forward pass.", anchor="start"),
        text(20, 376, "Blue boxes: the four axes of the papers. Whoever knows what", anchor="start"),
        text(20, 394, "a paper moves (arithmetic, memory, order, devices) knows", anchor="start"),
        text(20, 412, "which room to open.", anchor="start"),
    ]
    return svg(900, 440, title, parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
