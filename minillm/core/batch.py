"""What the scheduler tells the runner each step, and what the runner answers: plain data that survives JSON.

No tensor and no Request in here, so a scheduler is tested without a model, and other ranks, other processes and the
simulator get exactly what a runner beside it gets.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from minillm.core.sampling_params import SamplingParams


@dataclass
class NewRequest:
    """A request the runner has not seen, with all it needs to keep a row of its own."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]  # not empty if forced, or if it was preempted before this runner met it
    sampling_params: SamplingParams
    seed: int
    sample_index: int
    adapter_id: str | None
    num_computed_tokens: int
    block_ids: list[list[int]]  # per KV group


@dataclass
class KnownRequest:
    """What changed since the runner last saw this request."""

    request_id: str
    new_token_ids: list[int]  # sampled, accepted or forced since then
    new_block_ids: list[list[int]]  # per KV group: to append, or the whole table if rewritten
    num_computed_tokens: int
    rewritten: bool = False  # the block table does not extend the old one: resumed after preemption, or copy-on-write


@dataclass
class ScheduledBatch:
    """One forward pass. Requests run in the order of ``num_scheduled_tokens``.

    A request computes its tokens num_computed_tokens … + num_scheduled_tokens, drafts last. Drafts form a tree:
    ``draft_parents[id][i]`` is the index of draft i's parent, −1 for the last real token; a chain is 0, 1, 2, … − 1.
    Copies and swaps come before the pass, in this order: swaps out, swaps in, block copies.
    """

    step: int
    new_requests: list[NewRequest] = field(default_factory=list)
    known_requests: list[KnownRequest] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    draft_parents: dict[str, list[int]] = field(default_factory=dict)
    block_copies: list[tuple[int, int, int]] = field(default_factory=list)  # KV group, from, to
    swaps_out: list[tuple[int, int, int]] = field(default_factory=list)  # KV group, device block, host block
    swaps_in: list[tuple[int, int, int]] = field(default_factory=list)  # KV group, host block, device block
    finished_ids: list[str] = field(default_factory=list)  # rows the runner may forget
    # For whoever counts: who gave up its KV since the last pass, and rows that were found in the prefix cache.
    preempted_ids: list[str] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ScheduledBatch:
        data = json.loads(text)
        for new in data["new_requests"]:
            new["sampling_params"] = SamplingParams(**new["sampling_params"])
        data["new_requests"] = [NewRequest(**new) for new in data["new_requests"]]
        data["known_requests"] = [KnownRequest(**known) for known in data["known_requests"]]
        for name in ("block_copies", "swaps_out", "swaps_in"):
            data[name] = [tuple(move) for move in data[name]]
        return cls(**data)


@dataclass
class TokenLogprob:
    """One candidate at one position. ``rank`` 1 is the most likely token."""

    token_id: int
    logprob: float
    rank: int


@dataclass
class ModelOutput:
    """What one forward pass gave. Requests whose known tokens are not all computed yet have no entry in ``sampled``."""

    step: int
    # Accepted drafts, one more, and what a grammar forces after it; usually one token.
    sampled: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[list[TokenLogprob]]] = field(default_factory=dict)  # per token, the sampled one first
    # Per prompt token computed in this pass, the actual one first; its first token has no entry.
    prompt_logprobs: dict[str, list[list[TokenLogprob]]] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)  # proposed for the next step
    draft_parents: dict[str, list[int]] = field(default_factory=dict)
    num_forced: dict[str, int] = field(default_factory=dict)  # of the sampled ones, those at the end that were forced
    failed: dict[str, str] = field(default_factory=dict)  # requests that cannot go on, and why; nothing was sampled

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelOutput:
        data = json.loads(text)
        for name in ("logprobs", "prompt_logprobs"):
            data[name] = {
                request_id: [[TokenLogprob(**entry) for entry in position] for position in positions]
                for request_id, positions in data[name].items()
            }
        return cls(**data)
