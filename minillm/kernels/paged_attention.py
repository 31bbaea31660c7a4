"""PagedAttention (Kwon et al. 2023, equation 4) over a ragged batch: K and V lie in blocks that a table finds.

    A_ij = exp(q_iᵀ K_j · scale) / Σ_t exp(q_iᵀ K_t · scale) · 1        o_i = Σ_j V_j A_ijᵀ

with K_j, V_j the keys and values of block j, wherever it lies. Summed block after block this is chapter 1's online
softmax, so the step is imported from there and only the rows are new: key j of a request is row j mod B of the block
that its table names at j // B. One rule for prompts, chunks and decodes: a tile holds the query heads of one KV head,
token after token, so that a decode fills it with its group. The paper's kernel took one query; vLLM's has grown into
this one since.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels import HAS_TRITON
from minillm.kernels.ahead_of_time import CompileCase
from minillm.kernels.flash_attention import _check, _check_kernel, flash_attention_torch
from minillm.kernels.flash_attention import launch_settings as prompt_settings

if HAS_TRITON:
    import triton
    import triton.language as tl

    from minillm.kernels.flash_attention import _update

    @triton.jit
    def _origin(table_ptr, stride, start, n_k, short, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
        """int64 [BLOCK_N]: for keys start …, where the request would begin if all of it lay as this key's block does.

        Looked up key by key, so tiles and blocks may be of any two sizes; equal addresses are one access.
        """
        keys = start + tl.arange(0, BLOCK_N)
        block = tl.load(table_ptr + keys // BLOCK_SIZE * stride, mask=keys < n_k, other=0)
        return (block.to(tl.int64) - keys // BLOCK_SIZE) * BLOCK_SIZE - short

    @triton.jit
    def paged_attention_kernel(
        q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, query_start_ptr, seq_len_ptr, table_ptr, short, scale, window,
        stride_qt, stride_qh, stride_qd, stride_kt, stride_kh, stride_kd, stride_vt, stride_vh, stride_vd,
        stride_ot, stride_oh, stride_od, stride_lt, stride_lh, stride_br, stride_bb,
        GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    ):  # fmt: skip
        """Grid: (tiles of the longest request, requests, KV heads)."""
        first, request = tl.program_id(0) * BLOCK_M, tl.program_id(1)
        kv_head = tl.program_id(2).to(tl.int64)  # times the stride of a head-major cache it can pass 2³¹
        query_start = tl.load(query_start_ptr + request)
        n_q = tl.load(query_start_ptr + request + 1) - query_start
        if first >= n_q * GROUP:
            return
        n_k = tl.load(seq_len_ptr + request)
        table_ptr += request.to(tl.int64) * stride_br
        k_ptr += kv_head * stride_kh
        v_ptr += kv_head * stride_vh

        rows = first + tl.arange(0, BLOCK_M)  # row r is query r // GROUP in head r mod GROUP of the group
        dims = tl.arange(0, BLOCK_D)
        tokens = (query_start + rows // GROUP).to(tl.int64)
        heads = kv_head * GROUP + rows % GROUP
        inside = (rows[:, None] < n_q * GROUP) & (dims[None, :] < HEAD_DIM)
        q_place = tokens[:, None] * stride_qt + heads[:, None] * stride_qh + dims[None, :] * stride_qd
        q = tl.load(q_ptr + q_place, mask=inside, other=0.0)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)  # noqa: E741
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

        row_limit = rows // GROUP + n_k - n_q  # bottom right: query i sees keys up to i + n_k − n_q
        first_limit = first // GROUP + n_k - n_q
        end = tl.maximum(tl.minimum(n_k, (first + BLOCK_M - 1) // GROUP + n_k - n_q + 1), 0)
        begin = 0
        whole = tl.maximum(tl.minimum(first_limit + 1, end), 0) // BLOCK_N * BLOCK_N  # keys that all rows see
        if WINDOW:
            begin = tl.maximum(first_limit - window + 1, 0) // BLOCK_N * BLOCK_N
            whole = begin  # a tile at the window's edge needs its mask: spend it on all
        for start in range(begin, whole, BLOCK_N):
            origin = _origin(table_ptr, stride_bb, start, n_k, short, BLOCK_SIZE, BLOCK_N)
            m, l, acc = _update(  # noqa: E741
                m, l, acc, q, k_ptr, v_ptr, origin, start, row_limit, n_k, scale, window,
                stride_kt, stride_kd, stride_vt, stride_vd, HEAD_DIM, BLOCK_D, BLOCK_N, False, WINDOW,
            )  # fmt: skip
        for start in range(whole, end, BLOCK_N):
            origin = _origin(table_ptr, stride_bb, start, n_k, short, BLOCK_SIZE, BLOCK_N)
            m, l, acc = _update(  # noqa: E741
                m, l, acc, q, k_ptr, v_ptr, origin, start, row_limit, n_k, scale, window,
                stride_kt, stride_kd, stride_vt, stride_vd, HEAD_DIM, BLOCK_D, BLOCK_N, True, WINDOW,
            )  # fmt: skip

        o = acc / tl.where(l == 0, 1.0, l)[:, None]
        o_place = tokens[:, None] * stride_ot + heads[:, None] * stride_oh + dims[None, :] * stride_od
        tl.store(o_ptr + o_place, o.to(o_ptr.dtype.element_ty), mask=inside)
        lse = tl.where(l == 0, float("-inf"), m + tl.log(tl.where(l == 0, 1.0, l)))
        tl.store(lse_ptr + tokens * stride_lt + heads * stride_lh, lse, mask=rows < n_q * GROUP)


def launch_settings(dtype: torch.dtype, head_dim: int, rows: int) -> tuple[int, int, int, int]:
    """(block_m, block_n, num_warps, num_stages); ``rows``: query rows of the longest request in one KV head's group.

    A decode is bound by the reading of K and V: the smallest tile that the tensor cores take, and more keys in flight.
    """
    if dtype == torch.float32 and head_dim > 64:
        return 16, 16, 8, 2  # chapter 1's tile and the rows of its keys are more than the registers hold
    if rows > 16:
        return prompt_settings(dtype, head_dim)
    if dtype == torch.float32:
        return 16, 32, 8, 2
    return (16, 128, 4, 3) if head_dim <= 64 else (16, 64, 4, 3) if head_dim <= 128 else (16, 32, 4, 3)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of R requests, aligned bottom right, over K and V in blocks, in Triton.

    q                [T, Hq, D], any head dim to 256; float32, float16 or bfloat16
    k_cache, v_cache [num_rows, Hkv, D]: whole blocks, the last one ends with the cache; block 0 may be shorter
    query_start_loc  int32 [R + 1]; seq_lens int32 [R]: rows that a request attends to, its new ones included
    block_table      int32 [R, most blocks of any]: blocks in row order; what is past seq_lens is never followed
    max_query_len    the longest request's queries, known on the host: what the grid must cover
    window           keys that a query sees, its own included; None: all up to it
    block_m, block_n query rows (tokens · heads of a group) and keys of a tile, powers of 2 from 16 on
    Returns o [T, Hq, D] in q's dtype and logsumexp float32 [T, Hq].
    """
    _check(q, k_cache, v_cache, True, window)
    _check_kernel(q, "paged_attention_torch")
    (tokens, heads, head_dim), kv_heads = q.shape, k_cache.shape[1]
    rows = max_query_len * (heads // kv_heads)
    tile_m, tile_n, num_warps, num_stages = launch_settings(q.dtype, head_dim, rows)
    block_m, block_n = block_m or tile_m, block_n or tile_n
    o = torch.empty_like(q)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(rows, block_m), len(seq_lens), kv_heads)
    paged_attention_kernel[grid](
        q, k_cache, v_cache, o, lse, query_start_loc, seq_lens, block_table,
        -len(k_cache) % block_size,  # rows that the null block is short of: block b begins at b · block_size less these
        scale, window or 0,
        *q.stride(), *k_cache.stride(), *v_cache.stride(), *o.stride(), *lse.stride(), *block_table.stride(),
        GROUP=heads // kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        WINDOW=window is not None,
        num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
    return o, lse


def paged_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The twin: follow the tables, lay all keys end to end, then chapter 1's twin; any dtype and head dim."""
    ends = seq_lens.cumsum(0, dtype=torch.int32)
    request = torch.repeat_interleave(torch.arange(len(seq_lens), device=q.device), seq_lens)
    key = torch.arange(len(request), device=q.device) - (ends - seq_lens)[request]
    short = -len(k_cache) % block_size
    rows = block_table[request, key // block_size].long() * block_size - short + key % block_size
    where = query_start_loc, ends - seq_lens, seq_lens, max_query_len
    return flash_attention_torch(q, k_cache[rows], v_cache[rows], *where, scale, True, window, block_m, block_n)


def _compile_case(
    dtype: torch.dtype,
    head_dim: int,
    max_shared: int,
    queries: int = 1,
    window: int | None = None,
    block_size: int = 16,
) -> CompileCase:
    def launch() -> None:
        q = torch.empty(128, 8, head_dim, dtype=dtype)
        cache = torch.empty(256, 2, head_dim, dtype=dtype)
        numbers = torch.zeros(16, dtype=torch.int32)
        where = numbers[:2], numbers[:1], numbers[None], block_size
        paged_attention(q, cache, cache, *where, queries, head_dim**-0.5, window)

    what = "decode" if queries == 1 else "prompt"
    what += f" window {window}" if window else f" blocks of {block_size}" if block_size != 16 else ""
    return CompileCase(f"{str(dtype).removeprefix('torch.')} d={head_dim} {what}", launch, max_shared)


# No register spills; the most shared memory in bytes, by measure, so that a step up is seen.
COMPILE_CASES = [
    *(
        _compile_case(dtype, head_dim, max_shared, queries)
        for dtype, head_dim, queries, max_shared in (
            (torch.bfloat16, 64, 1, 49_152),
            (torch.bfloat16, 64, 128, 65_536),
            (torch.bfloat16, 128, 1, 49_152),
            (torch.bfloat16, 128, 128, 98_304),
            (torch.bfloat16, 256, 1, 49_152),
            (torch.bfloat16, 256, 128, 98_304),
            (torch.float16, 80, 1, 49_152),
            (torch.float32, 64, 1, 32_768),
            (torch.float32, 64, 128, 49_152),
            (torch.float32, 128, 1, 32_768),
            (torch.float32, 256, 1, 65_536),
        )
    ),
    _compile_case(torch.bfloat16, 256, 98_304, 128, window=4096),
    _compile_case(torch.bfloat16, 128, 49_152, block_size=1),
]
