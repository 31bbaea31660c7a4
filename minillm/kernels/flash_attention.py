"""FlashAttention forward (Dao et al. 2022; loop order of FlashAttention-2) over a ragged batch, K and V contiguous.

Each program owns one tile of queries of one head of one request and walks over that request's keys, tile by tile, with
the online softmax: no score ever leaves the chip. HBM traffic of one head, in elements: (2 + 2⌈N/BLOCK_M⌉) N d, and
half of the second term if causal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.kernels import HAS_TRITON
from minillm.kernels.ahead_of_time import CompileCase

MAX_HEAD_DIM = 256

if HAS_TRITON:
    import triton
    import triton.language as tl

    from minillm.kernels import interpreter

    interpreter.install()

    @triton.jit
    def _update(
        m, l, acc, q, k_ptr, v_ptr, first_row, start, row_limit, n_k, scale, window,  # noqa: E741
        stride_kt, stride_kd, stride_vt, stride_vd,
        HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
        MASKED: tl.constexpr, WINDOW: tl.constexpr,
    ):  # fmt: skip
        """Algorithm 1, lines 6 and 9 to 12, for a tile of keys. ``row_limit``: last key that each query row may see."""
        columns = start + tl.arange(0, BLOCK_N)
        dims = tl.arange(0, BLOCK_D)
        rows = (first_row + columns).to(tl.int64)
        inside = (columns[:, None] < n_k) & (dims[None, :] < HEAD_DIM)
        k = tl.load(k_ptr + rows[:, None] * stride_kt + dims[None, :] * stride_kd, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:  # only tiles on the diagonal or at the window's edge
            seen = columns[None, :] <= row_limit[:, None]
            if WINDOW:
                seen = seen & (columns[None, :] > row_limit[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp(m - base)
        p = tl.exp(scores - base[:, None])
        v = tl.load(v_ptr + rows[:, None] * stride_vt + dims[None, :] * stride_vd, mask=inside, other=0.0)
        l_new = l * rescale + tl.sum(p, 1)
        acc_new = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        return m_new, l_new, acc_new

    @triton.jit
    def flash_attention_kernel(
        q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, query_start_ptr, first_row_ptr, seq_len_ptr, scale, window,
        stride_qt, stride_qh, stride_qd, stride_kt, stride_kh, stride_kd, stride_vt, stride_vh, stride_vd,
        stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
        GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    ):  # fmt: skip
        """Grid: (query tiles of the longest request, requests, query heads)."""
        tile, request = tl.program_id(0), tl.program_id(1)
        head = tl.program_id(2).to(tl.int64)  # times the stride of a head-major tensor it can pass 2³¹
        query_start = tl.load(query_start_ptr + request)
        n_q = tl.load(query_start_ptr + request + 1) - query_start
        if tile * BLOCK_M >= n_q:
            return
        n_k = tl.load(seq_len_ptr + request)
        first_row = tl.load(first_row_ptr + request)
        k_ptr += (head // GROUP) * stride_kh  # grouped-query attention is this one division
        v_ptr += (head // GROUP) * stride_vh

        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        tokens = (query_start + rows).to(tl.int64)
        inside = (rows[:, None] < n_q) & (dims[None, :] < HEAD_DIM)
        q_place = tokens[:, None] * stride_qt + head * stride_qh + dims[None, :] * stride_qd
        q = tl.load(q_ptr + q_place, mask=inside, other=0.0)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)  # noqa: E741
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

        if CAUSAL:  # bottom right: query row i sees keys up to i + n_k − n_q
            row_limit = rows + n_k - n_q
            first_limit = tile * BLOCK_M + n_k - n_q
        else:
            row_limit = rows * 0 + n_k - 1
            first_limit = n_k - 1
        end = tl.maximum(tl.minimum(n_k, first_limit + BLOCK_M), 0)
        begin = 0
        whole = tl.maximum(tl.minimum(first_limit + 1, end), 0) // BLOCK_N * BLOCK_N  # keys that all rows see
        if WINDOW:
            begin = tl.maximum(first_limit - window + 1, 0) // BLOCK_N * BLOCK_N
            whole = begin  # a tile at the window's edge needs its mask: spend it on all
        for start in range(begin, whole, BLOCK_N):
            m, l, acc = _update(  # noqa: E741
                m, l, acc, q, k_ptr, v_ptr, first_row, start, row_limit, n_k, scale, window,
                stride_kt, stride_kd, stride_vt, stride_vd, HEAD_DIM, BLOCK_D, BLOCK_N, False, WINDOW,
            )  # fmt: skip
        for start in range(whole, end, BLOCK_N):
            m, l, acc = _update(  # noqa: E741
                m, l, acc, q, k_ptr, v_ptr, first_row, start, row_limit, n_k, scale, window,
                stride_kt, stride_kd, stride_vt, stride_vd, HEAD_DIM, BLOCK_D, BLOCK_N, True, WINDOW,
            )  # fmt: skip

        o = acc / tl.where(l == 0, 1.0, l)[:, None]
        o_place = tokens[:, None] * stride_ot + head * stride_oh + dims[None, :] * stride_od
        tl.store(o_ptr + o_place, o.to(o_ptr.dtype.element_ty), mask=inside)
        lse = tl.where(l == 0, float("-inf"), m + tl.log(tl.where(l == 0, 1.0, l)))
        tl.store(lse_ptr + tokens * stride_lt + head * stride_lh, lse, mask=rows < n_q)


def launch_settings(dtype: torch.dtype, head_dim: int) -> tuple[int, int, int, int]:
    """(block_m, block_n, num_warps, num_stages) that fit the registers and shared memory of sm_80 and sm_90.

    The test is the compiler's own report (ahead_of_time.py). A product of IEEE float32 has no tensor core to run on and
    holds its operands in registers, so its tiles are small.
    """
    if dtype == torch.float32:
        return (64, 32, 8, 2) if head_dim <= 64 else (32, 16, 8, 2)
    if head_dim <= 64:
        return 128, 64, 8, 3
    return (128, 32, 8, 3) if head_dim <= 128 else (64, 32, 8, 2)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    first_rows: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of R requests, causal aligned bottom right, in Triton.

    q                [T, Hq, D], any head dim to 256; float32, float16 or bfloat16
    k, v             [num_rows, Hkv, D]: request r's keys are rows first_rows[r] … + seq_lens[r]
    query_start_loc  int32 [R + 1]; first_rows, seq_lens int32 [R]
    max_query_len    the longest request's queries, known on the host: what the grid must cover
    window           of causal attention: keys that a query sees, its own included; None: all up to it
    block_m, block_n queries and keys of a tile, powers of 2 from 16 on; None: what suits dtype and head dim
    Returns o [T, Hq, D] in q's dtype and logsumexp float32 [T, Hq].
    """
    _check(q, k, v, causal, window)
    _check_kernel(q, "flash_attention_torch")
    tokens, heads, head_dim = q.shape
    tile_m, tile_n, num_warps, num_stages = launch_settings(q.dtype, head_dim)
    block_m, block_n = block_m or tile_m, block_n or tile_n
    o = torch.empty_like(q)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(max_query_len, block_m), len(seq_lens), heads)
    flash_attention_kernel[grid](
        q, k, v, o, lse, query_start_loc, first_rows, seq_lens, scale, window or 0,
        *q.stride(), *k.stride(), *v.stride(), *o.stride(), *lse.stride(),
        GROUP=heads // k.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        CAUSAL=causal,
        WINDOW=window is not None,
        num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
    return o, lse


def flash_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    first_rows: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The twin: the same tiles in torch, all heads of a request at once; float64 too, then logsumexp is float64."""
    _check(q, k, v, causal, window)
    block_m, block_n = block_m or 64, block_n or 256  # fewer, larger tiles: in torch the calls cost more than the work
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    starts, firsts, lens = query_start_loc.tolist(), first_rows.tolist(), seq_lens.tolist()
    for r, (first, n_k) in enumerate(zip(firsts, lens, strict=True)):
        keys, values = k[first : first + n_k].to(wide), v[first : first + n_k].to(wide)
        n_q = starts[r + 1] - starts[r]
        for row in range(0, n_q, block_m):
            tile = slice(starts[r] + row, min(starts[r] + row + block_m, starts[r + 1]))
            limits = torch.arange(row, row + tile.stop - tile.start, device=q.device) + n_k - n_q
            if not causal:
                limits = torch.full_like(limits, n_k - 1)
            o[tile], lse[tile] = _tile(q[tile].to(wide) * scale, keys, values, limits, window, block_n)
    return o, lse


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> None:
    if k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q [T, Hq, D] with k and v [rows, Hkv, D], Hq a multiple of Hkv: "
            f"not {list(q.shape)} with {list(k.shape)} and {list(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must be of one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"a window is of causal attention and at least 1: not {window} with causal={causal}")


def _check_kernel(q: Tensor, twin: str) -> None:
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or q.shape[2] > MAX_HEAD_DIM:
        raise ValueError(
            f"the kernel takes float32, float16 or bfloat16 and a head dim to {MAX_HEAD_DIM}, "
            f"not {q.dtype} and {q.shape[2]}; {twin} takes any"
        )


def _tile(q: Tensor, k: Tensor, v: Tensor, limits: Tensor, window: int | None, block_n: int) -> tuple[Tensor, Tensor]:
    """One tile of queries [n, Hq, D], scaled; row i sees keys up to limits[i]. -> o [n, Hq, D], lse [n, Hq]."""
    n, heads, d = q.shape
    kv_heads = k.shape[1]
    # Queries of a group share their keys, so they are rows of one product: [Hkv, G · n, D].
    rows = q.view(n, kv_heads, heads // kv_heads, d).permute(1, 2, 0, 3).reshape(kv_heads, -1, d)
    m = rows.new_full(rows.shape[:2], float("-inf"))
    l, acc = torch.zeros_like(m), torch.zeros_like(rows)  # noqa: E741
    lowest, highest = int(limits[0]), int(limits[-1])
    begin = 0 if window is None else max(0, lowest - window + 1) // block_n * block_n
    for start in range(begin, min(len(k), highest + 1), block_n):
        end = min(start + block_n, len(k))
        scores = torch.bmm(rows, k[start:end].permute(1, 2, 0))
        if end > lowest + 1 or (window is not None and start <= highest - window):  # not seen by all rows
            columns = torch.arange(start, end, device=q.device)
            blind = columns > limits[:, None]
            if window is not None:
                blind |= columns <= limits[:, None] - window
            scores.view(kv_heads, -1, n, end - start).masked_fill_(blind, float("-inf"))
        m_new = torch.maximum(m, scores.max(dim=-1).values)
        base = torch.where(m_new == float("-inf"), 0.0, m_new)
        rescale, p = torch.exp(m - base), torch.exp(scores - base[..., None])
        l = l * rescale + p.sum(-1)  # noqa: E741
        acc = acc * rescale[..., None] + torch.bmm(p, v[start:end].transpose(0, 1))
        m = m_new
    lse = torch.where(l == 0, float("-inf"), m + torch.log(l)).view(heads, n).T
    o = acc / torch.where(l == 0, 1.0, l)[..., None]
    return o.view(kv_heads, heads // kv_heads, n, d).permute(2, 0, 1, 3).reshape(n, heads, d), lse


def _compile_case(
    dtype: torch.dtype, head_dim: int, max_shared: int, causal: bool = True, window: int | None = None
) -> CompileCase:
    def launch() -> None:
        q = torch.empty(128, 8, head_dim, dtype=dtype)
        k = torch.empty(128, 2, head_dim, dtype=dtype)
        numbers = torch.zeros(2, dtype=torch.int32)
        flash_attention(q, k, k, numbers, numbers[:1], numbers[:1], 128, head_dim**-0.5, causal, window)

    mask = f"window {window}" if window else "causal" if causal else "full"
    return CompileCase(f"{str(dtype).removeprefix('torch.')} d={head_dim} {mask}", launch, max_shared)


# No register spills; the most shared memory in bytes, by measure, so that a step up is seen.
COMPILE_CASES = [
    *(
        _compile_case(dtype, head_dim, max_shared)
        for dtype in (torch.bfloat16, torch.float16)
        for head_dim, max_shared in ((64, 65_536), (128, 98_304), (256, 98_304))
    ),
    *(
        _compile_case(torch.float32, head_dim, max_shared)
        for head_dim, max_shared in ((64, 49_152), (128, 49_152), (256, 81_920))
    ),
    _compile_case(torch.bfloat16, 80, 98_304),
    _compile_case(torch.bfloat16, 128, 98_304, causal=False),
    _compile_case(torch.bfloat16, 128, 98_304, window=4096),
    _compile_case(torch.bfloat16, 256, 98_304, window=4096),
]
