"""One sequence on its way through the engine. Plain data: no tensor, no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from minillm.core.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    BLOCKED = "blocked"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A prompt and what has been generated for it.

    There is no prefill phase and no decode phase: ``num_computed_tokens`` (rows of KV written or scheduled to be)
    chases ``num_tokens``. A request whose count has caught up waits for its next token to come back.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int  # of its draws; the request's own or one the engine drew for it
    sample_index: int = 0  # which of the n samples of its prompt
    group: str | None = None  # the prompt, if it has several samples: they may share its KV
    adapter_id: str | None = None
    cache_salt: str | None = None  # prefixes are shared only among requests of equal salt
    priority: int = 0  # smaller runs earlier
    arrival: int = 0  # running number given by the engine
    status: RequestStatus = RequestStatus.WAITING
    blocked_on: str | None = None  # what a BLOCKED request waits for
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache when it first ran
    num_preemptions: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # the stop token or stop string; None for the model's own end token

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, drafts not counted."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def cache_key(self) -> tuple[str | None, str | None]:
        """What must be equal, beside the tokens, for KV to be shared."""
        return self.adapter_id, self.cache_salt

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
