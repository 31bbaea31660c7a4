"""The front door: prompts in, texts out. vLLM's LLM, as far as the course has built it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from minillm.core.config import EngineConfig
from minillm.core.metrics import EngineMetrics
from minillm.core.model_config import ModelConfig
from minillm.core.outputs import RequestOutput
from minillm.core.parts import my_parts
from minillm.core.sampling_params import SamplingParams
from minillm.engine.engine import Engine
from minillm.models.fetch import resolve
from minillm.models.loader import load_model
from minillm.models.tokenizer import Tokenizer

Prompt = str | dict
SMALL = 20_000_000  # parameters of a model whose layers do less than what calling them takes


class LLM:
    """A model with an engine round it.

    model        an embedded model ("tiny", "tiny-draft"), a fetched one ("smollm2"), a folder or a hub id
    config       an EngineConfig, such as ``EngineConfig.at_chapter(0)``; None: the full engine
    parts        in place of the engine's own: {"attention": f, "scheduler": g}, factories called as Engine says; or
                 "mine", those that you wrote in the labs and that stand in work/mine
    attention, scheduler, block_pool, prefix_cache   the same, one by one
    engine_args  any EngineConfig argument, by vLLM's names; they override ``config``

    Use it as a context manager, or ``close`` it: the KV cache is given back then and not before.
    """

    def __init__(
        self,
        model: str,
        *,
        config: EngineConfig | None = None,
        parts: str | dict[str, Callable] | None = None,
        attention: Callable | None = None,
        scheduler: Callable | None = None,
        block_pool: Callable | None = None,
        prefix_cache: Callable | str | None = None,
        **engine_args,
    ):
        if isinstance(prefix_cache, str):  # the engine argument of this name, not a part
            engine_args["prefix_cache"], prefix_cache = prefix_cache, None
        single = {"scheduler": scheduler, "block_pool": block_pool, "prefix_cache": prefix_cache}
        parts = _chosen(parts, attention=attention, **single)
        config = (config or EngineConfig.latest()).override(**engine_args)
        self.folder = folder = resolve(model)
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if config.kernel_backend == "auto" and device == "cpu" and _is_small(folder):
            config = config.override(kernel_backend="torch")  # not worth the compiler's ten seconds
        dtype = None if config.dtype == "auto" else config.dtype
        weights = load_model(folder, dtype, device, config.kernel_backend)
        self.engine = Engine(weights, config, Tokenizer(folder), **parts)
        self._ids = map(str, itertools.count())
        self._inbox: dict[str, list[RequestOutput]] = {}  # of prompts that a caller here waits for

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def metrics(self) -> EngineMetrics:
        return self.engine.metrics

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = False,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (strings or {"prompt_token_ids": [...]}), in their order. One params for all, or a list.

        ``priority``: one number a prompt, the smaller goes first, with scheduling_policy="priority". ValueError for
        anything that can't be served; none of the list is then queued.
        """
        ids = self._add(prompts, sampling_params, priority)
        bar = None
        if use_tqdm:
            from tqdm.auto import tqdm

            bar = tqdm(total=len(ids), desc="prompts", unit="prompt")
        done: dict[str, RequestOutput] = {}
        for output in self._stream(ids):
            if output.finished:
                done[output.request_id] = output
                if bar is not None:
                    bar.update()
        if bar is not None:
            bar.close()
        return [done[i] for i in ids]

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations [{"role": …, "content": …}, …] through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [{"prompt_token_ids": self.tokenizer.encode_chat(conversation)} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete prompts, yielding an output whenever one gains a token; ``outputs[i].delta`` is the new text.

        Prompts are checked and queued at the call. Leaving the loop early, or dropping the stream unread, aborts
        what is not finished.
        """
        return self._stream(self._add(prompts, sampling_params))

    def enqueue(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        priority: list[int] | None = None,
    ) -> list[str]:
        """Queue prompts as ``generate`` does, and return their ids at once, for ``poll`` and ``abort``."""
        return self._add(prompts, sampling_params, priority)

    def poll(self, request_ids: list[str]) -> list[RequestOutput]:
        """What came of these prompts since the last call; if nothing has, after one forward pass.

        Prompts of others go on in that pass too. With its last output a prompt is gone: do not ask for it again.
        """
        arrived = self._arrived(request_ids)
        if not arrived:
            outputs = self.engine.step()
            if not outputs and not self.engine.has_runnable_requests():
                raise RuntimeError(
                    f"prompts {', '.join(request_ids)} were ended elsewhere or are blocked; end them with LLM.abort"
                )
            for output in outputs:
                if output.request_id in self._inbox:
                    self._inbox[output.request_id].append(output)
            arrived = self._arrived(request_ids)
        return arrived

    def abort(self, request_id: str | list[str]) -> None:
        """End prompts by the ``request_id`` of their outputs; their last output says "abort"."""
        for i in [request_id] if isinstance(request_id, str) else request_id:
            output = self.engine.abort(i)
            if output is not None and i in self._inbox:
                self._inbox[i].append(output)

    def reset_prefix_cache(self) -> bool:
        """Drop the KV that is kept of earlier prompts; False, and nothing is dropped, while a request uses any."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Abort what runs and give memory back. Every later call raises."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _add(self, prompts, sampling_params, priority=None) -> list[str]:
        prompts = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        if not isinstance(sampling_params, list):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(sampling_params)} sampling_params; give one for each")
        priority = [0] * len(prompts) if priority is None else priority
        if len(priority) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(priority)} priorities; give one for each")
        ids: list[str] = []
        try:
            for number, (prompt, params, rank) in enumerate(zip(prompts, sampling_params, priority, strict=True)):
                request_id = next(self._ids)
                try:
                    self.engine.add_request(request_id, prompt, params, rank)
                except ValueError as error:
                    raise ValueError(f"prompt {number}: {error}" if len(prompts) > 1 else str(error)) from None
                ids.append(request_id)
                self._inbox[request_id] = []
        except BaseException:
            self._forget(ids)
            raise
        return ids

    def _stream(self, ids: list[str]) -> Iterator[RequestOutput]:
        outputs = self._outputs(ids)
        next(outputs)  # the body of a generator that was never started is not left either: nothing would be aborted
        return outputs

    def _outputs(self, ids: list[str]) -> Iterator[RequestOutput]:
        """The outputs of these prompts as they come, None before the first.

        Several such loops may run interleaved on one engine.
        """
        waiting = dict.fromkeys(ids)
        try:
            yield None
            while waiting:
                for output in self.poll(list(waiting)):
                    if output.finished:
                        del waiting[output.request_id]
                    yield output
        finally:
            self._forget(list(waiting))

    def _arrived(self, ids: list[str]) -> list[RequestOutput]:
        """Empty the boxes of these prompts, and take away those of the finished ones."""
        arrived = []
        for i in ids:
            outputs = self._inbox[i]
            self._inbox[i] = []
            if outputs and outputs[-1].finished:
                del self._inbox[i]
            arrived += outputs
        return arrived

    def _forget(self, ids: list[str]) -> None:
        for i in ids:
            self._inbox.pop(i, None)
            if self.engine.alive:
                self.engine.abort(i)


def _is_small(folder: Path) -> bool:
    return ModelConfig.from_folder(folder).num_parameters < SMALL


def _chosen(parts: str | dict[str, Callable] | None, **single: Callable | None) -> dict[str, Callable]:
    """What takes the place of the engine's own; a part named by itself goes before one of ``parts``."""
    if not (parts is None or parts == "mine" or isinstance(parts, dict)):
        raise ValueError(f"parts is {parts!r}; it must be 'mine' or a dict such as {{'attention': MyAttention}}")
    parts = my_parts() if parts == "mine" else parts or {}
    if unknown := parts.keys() - single.keys():
        raise ValueError(f"{min(unknown)!r} is no part of the engine; there are {', '.join(single)}")
    return parts | {name: part for name, part in single.items() if part is not None}
