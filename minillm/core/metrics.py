"""Counters of an engine: the same on every machine, so that chapters can be judged by them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from minillm.core.batch import ScheduledBatch


@dataclass
class EngineMetrics:
    """Totals since the engine was built or ``reset``.

    A slot is room for one token's K and V in every layer. Reserved slots are those of all blocks a request holds;
    used ones are rows that hold a token. Both are taken at the pass where most were reserved.
    """

    forward_passes: int = 0
    tokens_computed: int = 0  # rows through the model, prompt and output
    tokens_cached: int = 0  # rows that were there already, in the prefix cache
    tokens_generated: int = 0  # sampled or forced
    tokens_forced: int = 0  # by a grammar, and not sampled: each would have taken its request a pass of its own
    kv_slots_reserved: int = 0
    kv_slots_used: int = 0
    preemptions: int = 0  # times a request gave up its KV to another
    blocks_copied: int = 0  # on write to a block that others share
    blocks_swapped: int = 0  # moved to host memory or back
    modelled_hbm_bytes: int = 0  # core.cost: weights, KV and attention scratch moved to and from device memory

    def record_pass(self, tokens: int, reserved: int, used: int, hbm_bytes: int) -> None:
        self.forward_passes += 1
        self.tokens_computed += tokens
        self.modelled_hbm_bytes += hbm_bytes
        # >= so that of passes with equal reservations the fullest, usually the last, is the one reported.
        if (reserved, used) >= (self.kv_slots_reserved, self.kv_slots_used):
            self.kv_slots_reserved, self.kv_slots_used = reserved, used

    def record_moves(self, batch: ScheduledBatch) -> None:
        """Count who gave way before a pass, the blocks that move before it and the rows it need not compute."""
        self.tokens_cached += batch.num_cached_tokens
        self.preemptions += len(batch.preempted_ids)
        self.blocks_copied += len(batch.block_copies)
        self.blocks_swapped += len(batch.swaps_out) + len(batch.swaps_in)

    def reset(self) -> None:
        self.__init__()

    def to_dict(self) -> dict[str, int]:
        return asdict(self)
