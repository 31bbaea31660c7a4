"""The mended interpreter: bfloat16 as torch computes it, loops over loaded numbers, bounds, traffic."""

import numpy as np
import pytest
import torch

import minillm.kernels  # noqa: F401  its switch must be set before anything imports Triton

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from minillm.kernels import interpreter
from minillm.kernels.interpreter import OutOfBounds, watch
from tests.kernels.support import compiled

pytestmark = [compiled, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, of overflows that are tested


@pytest.fixture(autouse=True)
def mended():
    interpreter.install()


# -- bfloat16 -------------------------------------------------------------------------------------------------------

# Every bfloat16 there is: zeros, subnormals, infinities and all NaNs among them.
ALL = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
OTHER = ALL[torch.randperm(65536, generator=torch.Generator().manual_seed(0))]


def around_ties() -> torch.Tensor:
    """float32: every bfloat16 followed by the low halves that decide a rounding; a tie is 0x8000."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    bits = (torch.arange(65536, dtype=torch.int64)[:, None] << 16) + low
    return bits.to(torch.int32).view(torch.float32).flatten()


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to the last bit, signs of zeros too; of a NaN only that it is one."""
    assert got.dtype == want.dtype
    if want.dtype.is_floating_point:
        assert torch.equal(got.isnan(), want.isnan())
        as_int = {1: torch.int8, 2: torch.int16, 4: torch.int32}[want.element_size()]
        got, want = (x.masked_fill(x.isnan(), 0).view(as_int) for x in (got, want))
    wrong = (got != want).nonzero().flatten()
    assert not len(wrong), f"{len(wrong)} of {len(want)} differ, the first at {int(wrong[0])}"


@triton.jit
def elementwise(a_ptr, b_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(a_ptr + at)
    b = tl.load(b_ptr + at)
    if OP == "add":
        out = a + b
    elif OP == "subtract":
        out = a - b
    elif OP == "multiply":
        out = a * b
    elif OP == "divide":
        out = a / b
    elif OP == "maximum":
        out = tl.maximum(a, b)
    elif OP == "minimum":
        out = tl.minimum(a, b)
    elif OP == "lt":
        out = a < b
    elif OP == "le":
        out = a <= b
    elif OP == "gt":
        out = a > b
    elif OP == "ge":
        out = a >= b
    elif OP == "eq":
        out = a == b
    elif OP == "ne":
        out = a != b
    elif OP == "where":
        out = tl.where(a < b, a, b)
    elif OP == "absolute":
        out = tl.abs(a)
    elif OP == "scale":
        out = a * 0.3 + 1
    elif OP == "full":
        out = tl.full((N,), 1.1, tl.bfloat16) + a
    else:
        out = a.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out)


def compute(op: str, a: torch.Tensor, b: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16):
    # A power of two of elements, as tl.arange wants it; what is added is cut off again.
    n = triton.next_power_of_2(len(a))
    a, b = (torch.cat((x, x[: n - len(x)])) for x in (a, a if b is None else b))
    out = torch.empty(n, dtype=dtype)
    with watch():
        elementwise[(1,)](a, b, out, OP=op, N=n)
    return out


ARITHMETIC = {"add": torch.add, "subtract": torch.subtract, "multiply": torch.multiply, "divide": torch.divide}
COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne"]


def check_arithmetic(op):
    assert_same_bits(compute(op, ALL, OTHER), ARITHMETIC[op](ALL, OTHER))


def check_comparison(op):
    assert_same_bits(compute(op, ALL, OTHER, torch.bool), getattr(torch, op)(ALL, OTHER))


def check_extremum(op):
    numbers = ~(ALL.isnan() | OTHER.isnan())  # a GPU's maximum drops a NaN and torch's keeps it
    got, want = compute(op, ALL, OTHER)[numbers], getattr(torch, op)(ALL, OTHER)[numbers]
    assert torch.equal(got, want)  # by value: either zero may win


def check_from_float32():
    values = around_ties()
    part = 65536
    for i in range(0, len(values), part):
        assert_same_bits(compute("cast", values[i : i + part]), values[i : i + part].to(torch.bfloat16))


def check_dot():
    a = torch.randint(-8, 8, (32, 64), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    b = torch.randint(-8, 8, (64, 16), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    c = torch.randn(32, 16, generator=torch.Generator().manual_seed(3))
    out = torch.empty(32, 16)
    with watch():
        dot[(1,)](a, b, c, out, M=32, N=16, K=64)
    assert torch.equal(out, a.float() @ b.float() + c)  # the products are whole numbers, so every order is exact


@triton.jit
def dot(a_ptr, b_ptr, c_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + inner[None, :])
    b = tl.load(b_ptr + inner[:, None] * N + columns[None, :])
    place = rows[:, None] * N + columns[None, :]
    tl.store(out_ptr + place, tl.dot(a, b, tl.load(c_ptr + place), input_precision="ieee"))


@pytest.mark.parametrize("op", ARITHMETIC)
def test_arithmetic_of_every_bfloat16(op):
    check_arithmetic(op)


@pytest.mark.parametrize("op", COMPARISONS)
def test_comparisons_of_every_bfloat16(op):
    check_comparison(op)


@pytest.mark.parametrize("op", ["maximum", "minimum"])
def test_maximum_and_minimum(op):
    check_extremum(op)


def test_choice_and_absolute_value_of_every_bfloat16():
    assert_same_bits(compute("where", ALL, OTHER), torch.where(ALL < OTHER, ALL, OTHER))
    assert_same_bits(compute("absolute", ALL), ALL.abs())


def test_python_numbers_take_part():
    scale, shift = torch.tensor([0.3, 1.0], dtype=torch.bfloat16)
    assert_same_bits(compute("scale", ALL), ALL * scale + shift)
    assert_same_bits(compute("full", ALL), torch.tensor(1.1, dtype=torch.bfloat16) + ALL)


def test_products():
    check_dot()


def test_float32_to_bfloat16_rounds_to_nearest_even():
    check_from_float32()
    values = around_ties()
    bits = torch.from_numpy(interpreter.float32_to_bfloat16(values.numpy()).view(np.int16))
    assert_same_bits(bits.view(torch.bfloat16), values.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_bfloat16_to_another_float(dtype):
    assert_same_bits(compute("cast", ALL, dtype=dtype), ALL.to(dtype))


def test_every_float16_to_bfloat16():
    values = ALL.view(torch.float16)
    assert_same_bits(compute("cast", values), values.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
def test_whole_numbers(dtype):
    if dtype == torch.bool:
        whole = torch.tensor([False, True])
    else:
        limits = torch.iinfo(dtype)
        whole = torch.randint(limits.min, limits.max, (4096,), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_same_bits(compute("cast", whole)[: len(whole)], whole.to(torch.bfloat16))
    if dtype != torch.bool:
        small = ALL[ALL.abs() < min(limits.max, 2**31)]
        assert_same_bits(compute("cast", small, dtype=dtype)[: len(small)], small.to(dtype))


def test_comparisons_become_numbers():
    """A comparison's result is no bfloat16, though it was made of two."""

    @triton.jit
    def count(a_ptr, out_ptr, N: tl.constexpr):
        a = tl.load(a_ptr + tl.arange(0, N))
        tl.store(out_ptr + tl.arange(0, N), (a > 0).to(tl.bfloat16) + (a > 1).to(tl.float32))

    a = torch.tensor([-1.0, 0.5, 3.0, 1.0], dtype=torch.bfloat16)
    out = torch.empty(4)
    with watch():
        count[(1,)](a, out, N=4)
    assert out.tolist() == [0, 1, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_float8_to_bfloat16_and_back(dtype):
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    every = every[every.float().isfinite()]
    wide = compute("cast", every)[: len(every)]
    assert_same_bits(wide, every.to(torch.bfloat16))
    back = compute("cast", wide, dtype=dtype)[: len(every)]
    assert torch.equal(back.view(torch.int8), every.view(torch.int8))


def test_reducing_bfloat16_is_refused():
    @triton.jit
    def total(a_ptr, out_ptr, N: tl.constexpr, WIDE: tl.constexpr):
        a = tl.load(a_ptr + tl.arange(0, N))
        if WIDE:
            a = a.to(tl.float32)
        tl.store(out_ptr, tl.sum(a, 0))

    a, out = torch.ones(16, dtype=torch.bfloat16), torch.empty(1)
    with pytest.raises(InterpreterError, match="cannot reduce bfloat16; cast it to float32 first"):
        total[(1,)](a, out, N=16, WIDE=False)
    total[(1,)](a, out, N=16, WIDE=True)
    assert out.item() == 16


def test_atomics_on_bfloat16_are_refused():
    @triton.jit
    def add(out_ptr, ONE: tl.constexpr):
        tl.atomic_add(out_ptr, tl.full((), 1, tl.bfloat16))

    with pytest.raises(InterpreterError, match="no atomics on bfloat16"):
        add[(1,)](torch.zeros(1, dtype=torch.bfloat16), ONE=1)


def truncate(values):
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def ties_up(values):
    values = np.ascontiguousarray(values, dtype=np.float32)
    rounded = (values.view(np.uint32) + 0x8000) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def nan_lost(values):
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


@pytest.mark.parametrize("wrong", [truncate, ties_up, nan_lost])
def test_a_wrong_rounding_is_seen(wrong, monkeypatch):
    monkeypatch.setattr(interpreter, "float32_to_bfloat16", wrong)
    with pytest.raises(AssertionError):
        check_from_float32()
    if wrong is truncate:
        for op in ARITHMETIC:
            with pytest.raises(AssertionError):
                check_arithmetic(op)


def test_arithmetic_on_bare_patterns_is_seen(monkeypatch):
    """What the interpreter does of its own accord."""
    monkeypatch.setattr(interpreter, "_is_bfloat16", lambda value: False)
    checks = [(check_arithmetic, op) for op in ARITHMETIC] + [(check_comparison, op) for op in COMPARISONS[:4]]
    for check, op in checks:
        with pytest.raises(AssertionError):
            check(op)
    with pytest.raises(AssertionError):
        check_dot()


# -- loops ----------------------------------------------------------------------------------------------------------


@triton.jit
def count_up(numbers_ptr, out_ptr):
    first = tl.load(numbers_ptr)
    end = tl.load(numbers_ptr + 1)
    step = tl.load(numbers_ptr + 2)
    total = 0
    for i in range(first, end, step):
        total += i
    for _ in range(end):
        total += 100
    tl.store(out_ptr, total)


def test_loops_over_loaded_numbers():
    out = torch.zeros(1, dtype=torch.int32)
    count_up[(1,)](torch.tensor([2, 11, 3], dtype=torch.int32), out)
    assert out.item() == 2 + 5 + 8 + 11 * 100
    count_up[(1,)](torch.tensor([2, 0, 1], dtype=torch.int32), out)
    assert out.item() == 0


# -- bounds ---------------------------------------------------------------------------------------------------------


@triton.jit
def copy(x_ptr, y_ptr, n, stride_x, stride_y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at * stride_y, tl.load(x_ptr + at * stride_x, mask=at < n), mask=at < n)


def test_a_launch_within_bounds_works_watched_or_not():
    x = torch.arange(20.0)
    for watched in (False, True):
        y = torch.zeros(20)
        if watched:
            with watch():
                copy[(2,)](x, y, 20, 1, 1, BLOCK=16)
        else:
            copy[(2,)](x, y, 20, 1, 1, BLOCK=16)
        assert torch.equal(x, y)


def test_a_load_one_too_far():
    base = torch.arange(21.0)
    with watch(), pytest.raises(OutOfBounds) as raised:
        copy[(2,)](base[:20], torch.zeros(32), 21, 1, 1, BLOCK=16)
    assert str(raised.value) == (
        "load: 1 of 5 active lanes lie outside every tensor; the first is 80 bytes from the start of 'x_ptr', "
        "which spans 80 bytes; program (1, 0, 0)"
    )


def test_a_store_one_too_far():
    base = torch.full((21,), -1.0)
    with (
        watch(),
        pytest.raises(OutOfBounds, match=r"^store: 1 of 5 .* 80 bytes from the start of 'y_ptr'.*\(1, 0, 0\)$"),
    ):
        copy[(2,)](torch.arange(32.0), base[:20], 21, 1, 1, BLOCK=16)
    assert base[20] == -1, "nothing was written there"


def test_before_the_beginning():
    base = torch.arange(21.0)
    with watch(), pytest.raises(OutOfBounds, match=r"load: 15 of 16 .* -4 bytes from the start of 'x_ptr'"):
        copy[(1,)](base[16:], torch.zeros(16), 16, -1, 1, BLOCK=16)


@pytest.mark.parametrize("n, step", [(11, 2), (10, 1)], ids=["past the view's end", "between its elements"])
def test_a_strided_view_is_its_own_elements_only(n, step):
    base = torch.arange(40.0)
    view = base[:20:2]
    y = torch.zeros(16)
    with watch() as traffic:
        copy[(1,)](view, y, 10, 2, 1, BLOCK=16)
    assert torch.equal(y[:10], view)
    assert traffic.loads == {"x_ptr": 40}
    with watch(), pytest.raises(OutOfBounds, match="'x_ptr', which spans 76 bytes"):
        copy[(1,)](view, y, n, step, 1, BLOCK=16)


def test_views_of_many_dimensions_hold_exactly_their_elements():
    base = torch.zeros(4, 6, 8, 2)
    views = {
        "columns": base[1:3, ::2, 2:5, 0],
        "transposed": base[:, 1, :, 1].T,
        "expanded": base[0, 0, :1, :].expand(5, 2),
        "one": base[2, 3, 4, 1:],
        "none": base[:0],
        "dense": base.transpose(0, 2),
    }
    addresses = np.arange(base.data_ptr() - 16, base.data_ptr() + base.numel() * 4 + 16)
    for name, view in views.items():
        mark = base.clone().zero_()
        mark.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
        want = np.zeros(len(addresses), dtype=bool)
        want[16:-16] = np.repeat(mark.numpy().ravel() == 1, 4)
        assert np.array_equal(interpreter._Region(name, view).holds(addresses), want), name


def test_masked_lanes_may_point_anywhere_and_count_nothing():
    @triton.jit
    def far(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        place = tl.where(at < n, at, 1 << 30)
        tl.store(y_ptr + place, tl.load(x_ptr + place, mask=at < n, other=7), mask=at < n)

    with watch() as traffic:
        far[(1,)](torch.zeros(3), torch.zeros(3), 3, BLOCK=16)
        far[(1,)](torch.zeros(3), torch.zeros(3), 0, BLOCK=16)
    assert traffic.loads == {"x_ptr": 12} and traffic.stores == {"y_ptr": 12}


def test_a_fault_in_a_helper_is_the_same_fault():
    with watch(), pytest.raises(OutOfBounds, match=r"load: 16 of 16 .* 4000 bytes from the start of 'x_ptr'"):
        outer[(1,)](torch.zeros(16), torch.zeros(16))
    with watch() as traffic:  # and the next launch starts afresh
        copy[(1,)](torch.zeros(16), torch.zeros(16), 16, 1, 1, BLOCK=16)
    assert traffic.total == 128


@triton.jit
def inner(x_ptr, offset):
    return tl.load(x_ptr + offset + tl.arange(0, 16))


@triton.jit
def outer(x_ptr, y_ptr):
    tl.store(y_ptr + tl.arange(0, 16), inner(x_ptr, 1000))


def test_other_errors_of_a_kernel_stay_as_they_are():
    @triton.jit
    def odd(x_ptr):
        tl.store(x_ptr + tl.arange(0, 3), 0.0)

    with watch(), pytest.raises(InterpreterError, match="power of 2"):
        odd[(1,)](torch.zeros(3))


def test_a_kernel_without_tensors():
    @triton.jit
    def nothing(n):
        _ = n + 1

    with watch() as traffic:
        nothing[(1,)](3)
    assert traffic.total == 0


# -- traffic --------------------------------------------------------------------------------------------------------


def test_bytes_by_argument():
    x, y = torch.zeros(20, dtype=torch.float16), torch.zeros(20, dtype=torch.float64)
    with watch() as traffic:
        copy[(2,)](x, y, 20, 1, 1, BLOCK=16)
        copy[(2,)](x, y, 10, 1, 1, BLOCK=16)
    assert traffic.loads == {"x_ptr": 60}
    assert traffic.stores == {"y_ptr": 240}
    assert traffic.total == 300


def test_slices_of_one_tensor_are_told_apart():
    """Q, K and V of one product lie interleaved, row by row."""
    both = torch.arange(64.0).view(16, 4)
    x, y = both[:, 0], both[:, 2]
    with watch() as traffic:
        copy[(1,)](x, y, 16, 4, 4, BLOCK=16)
    assert torch.equal(x, y)
    assert traffic.loads == {"x_ptr": 64} and traffic.stores == {"y_ptr": 64}
    with watch(), pytest.raises(OutOfBounds):
        copy[(1,)](x, y, 16, 1, 4, BLOCK=16)


def test_tensors_in_keyword_arguments():
    x, y = torch.zeros(16), torch.zeros(16)
    with watch() as traffic:
        copy[(1,)](x, n=16, y_ptr=y, stride_y=1, stride_x=1, BLOCK=16, num_warps=4)
    assert traffic.loads == {"x_ptr": 64} and traffic.stores == {"y_ptr": 64}
    with watch(), pytest.raises(OutOfBounds, match="'y_ptr'"):
        copy[(1,)](x, n=16, y_ptr=y[:15], stride_y=1, stride_x=1, BLOCK=16)


def test_tensors_in_tuples():
    @triton.jit
    def copy_pair(pair, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(pair[1] + at, tl.load(pair[0] + at, mask=at < n), mask=at < n)

    with watch() as traffic:
        copy_pair[(1,)]((torch.zeros(16), torch.zeros(16)), 16, BLOCK=16)
    assert traffic.loads == {"pair[0]": 64} and traffic.stores == {"pair[1]": 64}
    with watch(), pytest.raises(OutOfBounds, match=r"'pair\[1\]'"):
        copy_pair[(1,)]((torch.zeros(16), torch.zeros(15)), 16, BLOCK=16)


def test_tensor_descriptors_made_on_either_side():
    @triton.jit
    def copy_tile(x, y_ptr, rows, BLOCK: tl.constexpr):
        y = tl.make_tensor_descriptor(y_ptr, [rows, 16], [16, 1], [BLOCK, 16])
        y.store([0, 0], x.load([0, 0]))

    x, y = torch.arange(80.0).view(5, 16), torch.zeros(5, 16)
    with watch() as traffic:
        copy_tile[(1,)](TensorDescriptor.from_tensor(x, [8, 16]), y, 5, BLOCK=8)
    assert torch.equal(x, y)
    assert traffic.loads == {"x": 320} and traffic.stores == {"y_ptr": 320}
    with watch(), pytest.raises(OutOfBounds, match="'y_ptr'"):
        copy_tile[(1,)](TensorDescriptor.from_tensor(x, [8, 16]), y[:4], 5, BLOCK=8)


def test_atomics_load_and_store():
    @triton.jit
    def add(x_ptr, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.atomic_add(x_ptr + at, 1, mask=at < n)

    x = torch.zeros(5, dtype=torch.int32)
    with watch() as traffic:
        add[(1,)](x, 5, BLOCK=8)
    assert x.tolist() == [1] * 5
    assert traffic.loads == {"x_ptr": 20} and traffic.stores == {"x_ptr": 20}
    with watch(), pytest.raises(OutOfBounds, match="1 of 6"):
        add[(1,)](x, 6, BLOCK=8)


def test_nested_watches_each_count_what_runs_inside():
    x, y = torch.zeros(16), torch.zeros(16)

    def run():
        copy[(1,)](x, y, 16, 1, 1, BLOCK=16)

    with watch() as all_of_it:
        with watch() as first:  # until its end it has counted the same as the one round it
            run()
        run()
        with watch() as second:
            run()
    run()
    assert [traffic.total for traffic in (all_of_it, first, second)] == [3 * 128, 128, 128]
    assert not interpreter._watchers and not interpreter._regions


def test_install_again_changes_nothing():
    def patched():
        names = ("binary_op", "unary_op", "create_dot", "cast_impl", "create_fp_to_fp", "create_masked_load")
        yield from (getattr(InterpreterBuilder, name) for name in (*names, "create_masked_store", "create_atomic_rmw"))
        yield from (GridExecutor.__call__, GridExecutor._init_args_hst)
        yield from (
            interpreter.interpreter._patch_lang_tensor,
            interpreter.interpreter.ReduceScanOpInterface.check_tensor,
        )

    before = list(patched())
    interpreter.install()
    with watch():
        pass
    assert list(patched()) == before
    assert all(function.__module__ == interpreter.__name__ for function in before)


def test_watch_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(interpreter, "interpreting", lambda: False)
    with pytest.raises(RuntimeError, match="kernels are compiled in this process"), watch():
        pass
