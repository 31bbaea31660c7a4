"""The model runner: turns a ScheduledBatch into tensors, runs the model, samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minillm.compute.attention.base import AttentionBackend, AttentionMetadata, StepAttention
from minillm.compute.sampling.processors import SamplingRow
from minillm.compute.sampling.sampler import Sampler, top_logprobs
from minillm.core.batch import KnownRequest, ModelOutput, NewRequest, ScheduledBatch
from minillm.core.config import EngineConfig
from minillm.kernels import use_triton
from minillm.kernels.cpp import use_cpp
from minillm.memory.kv_cache import KVCache
from minillm.memory.kv_manager import KVGeometry, plan_host_blocks

if TYPE_CHECKING:  # loaded with the first request that has a grammar
    from minillm.engine.structured import Grammars, GrammarState


def attention_backend(config: EngineConfig, device: torch.device) -> AttentionBackend:
    """The configured backend. Imported only here, so that an engine loads no file of a later chapter."""
    if config.attention_backend == "flash" and config.kv_layout == "paged":
        from minillm.compute.attention.paged import PagedAttention

        return PagedAttention(config, device)
    if config.attention_backend == "flash":
        from minillm.compute.attention.flash_backend import FlashAttention

        return FlashAttention(use_triton(config.kernel_backend, device))
    from minillm.compute.attention.naive import NaiveAttention

    return NaiveAttention()


def kv_write(config: EngineConfig, device: torch.device) -> Callable | None:
    """The kernel that stores new rows: in C++, or for paged KV in Triton, where they serve; None: torch's way."""
    if use_cpp(config.kernel_backend, config.dtype, device):
        return torch.ops.minillm.kv_write
    if config.kv_layout != "paged" or not use_triton(config.kernel_backend, device):
        return None
    from minillm.kernels.kv_write import kv_write

    return kv_write


@dataclass
class Row:
    """What the runner keeps of a request between steps."""

    token_ids: list[int]  # prompt and output
    block_ids: list[list[int]]  # per KV group
    num_computed_tokens: int
    sampling: SamplingRow
    prompt_logprobs_sent: int = 0  # they are told once, though a preempted prompt is computed again
    grammar: GrammarState | None = None


class Buffer:
    """A tensor that lives as long as the runner and is filled on the host each step.

    On a GPU it has a pinned twin there; addresses never change, which CUDA graphs will need.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device):
        self.host = torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.array = self.host.numpy()
        self.device = self.host if device.type == "cpu" else torch.zeros(*shape, dtype=dtype, device=device)

    def send(self, n: int) -> Tensor:
        """The first ``n`` entries, on the device."""
        if self.device is not self.host:
            self.device[:n].copy_(self.host[:n], non_blocking=True)
        return self.device[:n]


class ModelRunner:
    """Owns the weights, the KV cache and one row per running request."""

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        geometry: KVGeometry,
        eos_token_ids: tuple[int, ...] = (),
        grammars: Callable[[], Grammars] | None = None,
        attention: Callable[[EngineConfig, torch.device], AttentionBackend] = attention_backend,
    ):
        self.model, self.config, self.geometry = model, config, geometry
        self.device = next(model.parameters()).device
        self.eos_token_ids, self.grammars = eos_token_ids, grammars
        self.capacity = min(config.max_model_len, geometry.num_usable_blocks * geometry.block_size)
        self.kv_cache = KVCache(geometry, self.device, kv_write(config, self.device))
        self.host_cache = KVCache(replace(geometry, num_usable_blocks=plan_host_blocks(config, geometry)))
        self.attention = attention(config, self.device)
        self.sampler = Sampler()
        self.rows: dict[str, Row] = {}
        tokens, requests = config.max_num_batched_tokens, min(config.max_num_seqs, config.max_num_batched_tokens)
        blocks = geometry.blocks_for(config.max_model_len)
        place = {"device": self.device}
        self.input_ids = Buffer(tokens, dtype=torch.int64, **place)
        self.positions = Buffer(tokens, dtype=torch.int64, **place)
        self.slot_mapping = Buffer(tokens, dtype=torch.int64, **place)
        self.query_start_loc = Buffer(requests + 1, dtype=torch.int32, **place)
        self.block_table = Buffer(requests, blocks, dtype=torch.int32, **place)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        """Run one pass. Raises whatever the model raises; rows of the batch's requests are then undefined."""
        self._take_in(batch)
        self._move(batch)
        input_ids, positions, metadata = self._prepare(batch)
        hidden = self.model(input_ids, positions, StepAttention(self.attention, self.kv_cache, metadata))
        output = ModelOutput(step=batch.step)
        self._prompt_logprobs(batch, hidden, output)
        self._sample(batch, hidden, output)
        for request_id, scheduled in batch.num_scheduled_tokens.items():
            self.rows[request_id].num_computed_tokens += scheduled
        return output

    def _move(self, batch: ScheduledBatch) -> None:
        """Swaps and copies that come before the pass; blocks that leave must be read before others move in."""
        for group, device, host in batch.swaps_out:
            self.host_cache.write_blocks(group, [host], self.kv_cache.read_blocks(group, [device]))
        for group, host, device in batch.swaps_in:
            self.kv_cache.write_blocks(group, [device], self.host_cache.read_blocks(group, [host]))
        self.kv_cache.copy_blocks(batch.block_copies)

    def _take_in(self, batch: ScheduledBatch) -> None:
        for request_id in batch.finished_ids:
            self.rows.pop(request_id, None)
        for new in batch.new_requests:
            self.rows[new.request_id] = self._new_row(new)
        for known in batch.known_requests:
            self._update_row(self.rows[known.request_id], known)

    def _new_row(self, new: NewRequest) -> Row:
        prompt, output = list(new.prompt_token_ids), list(new.output_token_ids)
        sampling = SamplingRow(new.sampling_params, prompt, output, new.seed, new.sample_index, self.eos_token_ids)
        row = Row(prompt + output, [list(b) for b in new.block_ids], new.num_computed_tokens, sampling)
        row.prompt_logprobs_sent = max(0, new.sampling_params.prompt_logprobs_start - 1)
        if new.sampling_params.structured_outputs is not None:
            row.grammar = self.grammars().start(new.sampling_params)
        return row

    @staticmethod
    def _update_row(row: Row, known: KnownRequest) -> None:
        row.token_ids.extend(known.new_token_ids)
        row.sampling.output_token_ids.extend(known.new_token_ids)
        row.num_computed_tokens = known.num_computed_tokens
        if known.rewritten:
            row.block_ids = [list(blocks) for blocks in known.new_block_ids]
        else:
            for table, blocks in zip(row.block_ids, known.new_block_ids, strict=True):
                table.extend(blocks)

    def _prepare(self, batch: ScheduledBatch) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Fill the input buffers: request after request, each one's new tokens in order."""
        size, first_row = self.geometry.block_size, self.geometry.first_row
        end, query_lens, seq_lens, first_rows, widest = 0, [], [], [], 1
        for i, (request_id, new) in enumerate(batch.num_scheduled_tokens.items()):
            row = self.rows[request_id]
            start, begin, end = row.num_computed_tokens, end, end + new
            blocks = row.block_ids[0]  # one KV group so far
            self.input_ids.array[begin:end] = row.token_ids[start : start + new]
            self.positions.array[begin:end] = range(start, start + new)
            self.slot_mapping.array[begin:end] = [
                first_row(blocks[r // size]) + r % size for r in range(start, start + new)
            ]
            self.query_start_loc.array[i + 1] = end
            self.block_table.array[i, : len(blocks)] = blocks
            self.block_table.array[i, len(blocks) :] = 0
            widest = max(widest, len(blocks))
            query_lens.append(new)
            seq_lens.append(start + new)
            first_rows.append(first_row(blocks[0]))
        metadata = AttentionMetadata(
            query_lens=query_lens,
            seq_lens=seq_lens,
            query_start_loc=self.query_start_loc.send(len(query_lens) + 1),
            slot_mapping=self.slot_mapping.send(end),
            block_table=self.block_table.send(len(query_lens))[:, :widest],
            first_rows=first_rows,
            block_size=size,
        )
        return self.input_ids.send(end), self.positions.send(end), metadata

    def _sample(self, batch: ScheduledBatch, hidden: Tensor, output: ModelOutput) -> None:
        """One token for every request whose known tokens are all computed after this pass."""
        ids, last, end = [], [], 0
        for request_id, new in batch.num_scheduled_tokens.items():
            row = self.rows[request_id]
            end += new
            if row.num_computed_tokens + new == len(row.token_ids) and self._constrain(request_id, row, output):
                ids.append(request_id)
                last.append(end - 1)
        if not ids:
            return
        # Decode-only passes need every row: no copy then.
        chosen = hidden if len(last) == len(hidden) else hidden[torch.tensor(last, device=self.device)]
        sampled = self.sampler(self.model.compute_logits(chosen), [self.rows[i].sampling for i in ids])
        for request_id, token, logprobs in zip(ids, sampled.token_ids, sampled.logprobs, strict=True):
            output.sampled[request_id] = [token]
            if logprobs is not None:
                output.logprobs[request_id] = [logprobs]
            elif self.rows[request_id].grammar is not None:
                self._jump_forward(request_id, self.rows[request_id], output)

    def _constrain(self, request_id: str, row: Row, output: ModelOutput) -> bool:
        """Set what a row's grammar allows; False if that fails, of which the others of the batch must know nothing."""
        if row.grammar is None:
            return True
        try:
            row.grammar.follow(row.sampling.output_token_ids)
            row.sampling.allowed = row.grammar.allowed().to(self.device)
        except RuntimeError as error:
            output.failed[request_id] = str(error)
            return False
        return True

    def _jump_forward(self, request_id: str, row: Row, output: ModelOutput) -> None:
        """Add to the sampled token those that the grammar forces after it; the next pass computes all of them."""
        (token,) = output.sampled[request_id]
        params, sampled = row.sampling.params, [*row.sampling.output_token_ids, token]
        room = self.capacity - len(row.token_ids) - 1
        if params.max_tokens is not None:
            room = min(room, params.max_tokens - len(sampled))
        if not self.config.enable_jump_forward or room <= 0 or token in {*self.eos_token_ids, *params.stop_token_ids}:
            return
        try:
            row.grammar.follow(sampled)
            forced = row.grammar.forced(room)
        except RuntimeError:
            return  # the next pass meets it again, and says so
        if forced:
            output.sampled[request_id] += forced
            output.num_forced[request_id] = len(forced)

    def _prompt_logprobs(self, batch: ScheduledBatch, hidden: Tensor, output: ModelOutput) -> None:
        begin = 0
        for request_id, new in batch.num_scheduled_tokens.items():
            row = self.rows[request_id]
            wanted, prompt = row.sampling.params.prompt_logprobs, row.sampling.prompt_token_ids
            start = max(row.num_computed_tokens, row.prompt_logprobs_sent)
            # Row p predicts prompt token p + 1, so the last row of the prompt predicts none.
            count = min(row.num_computed_tokens + new, len(prompt) - 1) - start
            if wanted is not None and count > 0:
                first = begin + start - row.num_computed_tokens
                row.prompt_logprobs_sent = start + count
                logits = self.model.compute_logits(hidden[first : first + count])
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                following = prompt[start + 1 : start + 1 + count]
                output.prompt_logprobs[request_id] = top_logprobs(logits, following, [wanted] * count)
            begin += new
