"""Frames of a timeline: for each pass who ran, who waited, whose seat was held for nothing. Plain data to be drawn."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from minillm.simulator.simulation import Simulation


@dataclass(frozen=True)
class Frame:
    """One pass. Request ids in order of arrival."""

    step: int
    start: float  # seconds
    seconds: float
    prompt: dict[str, int]  # request -> tokens of a prompt, computed for the first time or again after preemption
    output: list[str]  # computed their newest token only
    waiting: list[str]  # had arrived and were not in this pass
    preempted: list[str]  # gave up their KV before it; they wait
    idle: list[str]  # static batching: ended, and their seats are kept until the last of their batch has ended too

    def to_dict(self) -> dict:
        return asdict(self)


def timeline(simulation: Simulation) -> list[Frame]:
    """One frame a pass. Cost grows as passes times requests: meant for a picture's worth of them."""
    static = simulation.config.batching == "static"
    order = {request.request_id: number for number, request in enumerate(simulation.requests)}
    frames, batch, last = [], set(), set()
    for each in simulation.passes:
        there = [r for r in simulation.requests if r.arrival <= each.start]
        ended = {r.request_id for r in there if r.finish <= each.start}
        if not last - ended:
            batch = set()  # nobody of the last batch runs any more
        last = each.scheduled.keys()
        batch = batch | last
        frames.append(
            Frame(
                step=each.step,
                start=each.start,
                seconds=each.seconds,
                prompt={i: each.scheduled[i] for i in sorted(each.prompts, key=order.get)},
                output=sorted(each.scheduled.keys() - set(each.prompts), key=order.get),
                waiting=[r.request_id for r in there if r.request_id not in ended | each.scheduled.keys()],
                preempted=sorted(each.preempted, key=order.get),
                idle=sorted(batch & ended, key=order.get) if static else [],
            )
        )
    return frames
