"""Engine configuration: vLLM's argument names, and one switch per paper.

``EngineConfig.at_chapter(n)`` is the engine as it stands after chapter n.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

from minillm.core.chapters import is_there
from minillm.core.model_config import ModelConfig

# What each chapter turns on, on top of all before it.
CHAPTER_SWITCHES: dict[int, dict[str, object]] = {
    0: {"attention_backend": "naive", "kv_layout": "contiguous", "batching": "static"},
    1: {"attention_backend": "flash"},
    2: {"kv_layout": "paged"},
    3: {"batching": "iteration"},
    4: {"enable_chunked_prefill": True},
    5: {"prefix_cache": "radix"},
}
# A chapter is built if its files are there: a copy of the package that ends earlier (minillm build) has fewer.
LAST_BUILT = max(n for n in CHAPTER_SWITCHES if is_there(n))

CHOICES = {
    "attention_backend": ("naive", "flash"),
    "kv_layout": ("contiguous", "paged"),
    "batching": ("static", "iteration"),
    "scheduling_policy": ("fcfs", "priority", "mlfq", "lpm"),
    "prefix_cache": ("none", "block_hash", "radix"),
    "preemption_mode": ("recompute", "swap"),
    "kernel_backend": ("auto", "torch", "triton", "cpp"),
    "dtype": ("auto", "float32", "float64", "float16", "bfloat16"),
}
CONTIGUOUS_MAX_MODEL_LEN = 2048
DEFAULT_STEP_BUDGET = 2048
CPU_CHUNK_BUDGET = 256  # with chunked prefill: there a pass reaches its full rate of tokens and takes a quarter second


@dataclass(frozen=True)
class EngineConfig:
    """All an engine can be told. Sizes left at None are filled in by ``resolve`` from the model's shape.

    max_num_seqs             requests resident at a time
    max_num_batched_tokens   tokens of one forward pass
    max_model_len            prompt and output tokens of one request
    block_size               KV rows of a block; contiguous KV ignores it and has one block of max_model_len rows
                             for each request
    kv_cache_memory_bytes    size of the KV cache; None: on a CPU the smaller of 1 GiB and a quarter of free memory
    num_gpu_blocks_override  blocks instead of bytes; for contiguous KV, requests
    gpu_memory_utilization   on a GPU, the share of its memory that weights and KV cache may take together
    kernel_backend           "auto": Triton on a GPU; in bfloat16 on a CPU the C++ operators, if they can be built and
                             the model is not tiny; else torch. "triton", "cpp": by all means, or ValueError; "torch":
                             never anything else
    enable_chunked_prefill   a prompt may be computed over several passes, each of max_num_batched_tokens at most
    enable_jump_forward      tokens that a request's grammar forces are appended without a pass for each
    prefix_cache             whose KV is kept for later prompts that begin alike: "none", "block_hash" (full blocks) or
                             "radix" (any number of tokens)
    scheduling_policy        who runs first: "fcfs", by arrival; "priority", the smaller number; "mlfq", skip-join MLFQ;
                             "lpm", who waits with the longest prefix in the cache
    preemption_mode          what becomes of the KV of a request that must give way: computed again, or kept in host
                             memory of swap_space GiB while that has room
    """

    attention_backend: str = "naive"
    kv_layout: str = "contiguous"
    batching: str = "static"
    enable_chunked_prefill: bool = False
    enable_jump_forward: bool = True
    prefix_cache: str = "none"
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "recompute"
    swap_space: float = 4.0
    kernel_backend: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, known))}")
        optional = ("max_num_batched_tokens", "max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override")
        for name in ("max_num_seqs", "block_size", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number, at least 0")
        space = self.swap_space
        if isinstance(space, bool) or not isinstance(space, int | float) or not 0 <= space < float("inf"):
            raise ValueError(f"swap_space is {space!r}; it must be a number of GiB, at least 0")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization is {share!r}; it must be a number above 0, at most 1")
        for name in ("enable_chunked_prefill", "enable_jump_forward"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.enable_chunked_prefill and self.batching != "iteration":
            raise ValueError(f"enable_chunked_prefill is True with batching {self.batching!r}; it needs 'iteration'")
        if self.prefix_cache != "none" and self.kv_layout != "paged":
            raise ValueError(
                f"prefix_cache is {self.prefix_cache!r} with kv_layout {self.kv_layout!r}; it needs 'paged'"
            )
        if self.scheduling_policy == "lpm" and self.prefix_cache == "none":
            raise ValueError("scheduling_policy is 'lpm' and prefix_cache 'none'; it orders by what a cache holds")
        if not isinstance(self.device, str) or not self.device:
            raise ValueError(f"device is {self.device!r}; it must be a name such as 'auto', 'cpu' or 'cuda:0'")

    @classmethod
    def at_chapter(cls, chapter: int, **overrides) -> EngineConfig:
        """The engine after a chapter. ValueError for one that is not built yet."""
        if isinstance(chapter, bool) or not isinstance(chapter, int) or not 0 <= chapter <= LAST_BUILT:
            raise ValueError(f"chapter {chapter!r} is not built; built are 0 to {LAST_BUILT}")
        switches: dict[str, object] = {}
        for n in range(chapter + 1):
            switches |= CHAPTER_SWITCHES.get(n, {})
        return cls().override(**(switches | overrides))

    @classmethod
    def latest(cls, **overrides) -> EngineConfig:
        """The full engine: the last chapter built."""
        return cls.at_chapter(LAST_BUILT, **overrides)

    def override(self, **changes) -> EngineConfig:
        """A copy with some arguments changed; ValueError for a name that is none of them.

        ``enable_prefix_caching`` is vLLM's switch: True is prefix_cache="radix" unless there is a cache, False "none".
        """
        names = [f.name for f in fields(self)]
        if "enable_prefix_caching" in changes:
            changes["prefix_cache"] = self._prefix_cache(changes.pop("enable_prefix_caching"), changes)
        for name in changes:
            if name not in names:
                raise ValueError(f"{name!r} is no engine argument; there are {', '.join(names)}")
        return replace(self, **changes)

    def resolve(self, model: ModelConfig, device: str = "cpu") -> EngineConfig:
        """A copy whose lengths, budget and dtype are settled for this model on this kind of device."""
        longest = model.max_position_embeddings
        length = self.max_model_len
        if length is None:
            length = min(longest, CONTIGUOUS_MAX_MODEL_LEN) if self.kv_layout == "contiguous" else longest
        if length > longest:
            raise ValueError(f"max_model_len is {length}; this model's positions end at {longest}")
        return replace(
            self,
            max_model_len=length,
            max_num_batched_tokens=self.max_num_batched_tokens or self._default_budget(length, device),
            dtype=model.dtype if self.dtype == "auto" else self.dtype,
        )

    def _prefix_cache(self, enabled: bool, changes: dict) -> str:
        if not isinstance(enabled, bool):
            raise ValueError(f"enable_prefix_caching is {enabled!r}; it must be True or False")
        cache = changes.get("prefix_cache", self.prefix_cache)
        if "prefix_cache" in changes and enabled == (cache == "none"):
            raise ValueError(f"enable_prefix_caching is {enabled} and prefix_cache {cache!r}; give one of them")
        if not enabled:
            return "none"
        return "radix" if cache == "none" else cache

    def _default_budget(self, length: int, device: str) -> int:
        if self.enable_chunked_prefill and device == "cpu":
            return CPU_CHUNK_BUDGET
        return max(DEFAULT_STEP_BUDGET, length)

    def to_dict(self) -> dict:
        return asdict(self)
