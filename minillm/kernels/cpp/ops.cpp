// bfloat16 serving on a CPU: paged attention, the writing of K and V, and the small operations of a layer.
//
// Each operator is the twin of a few torch calls: paged_attention of kernels/paged_attention.py, kv_write of
// kernels/kv_write.py, rms_norm and add_rms_norm of RMSNorm, rotary of apply_rotary (models/layers), silu_mul of
// F.silu(gate) * up. What is stored is bfloat16, what is computed is float32, rounded once at the end.
//
// No result depends on the number of threads or on what else is in the batch: a row, or a request's share of keys, is
// one thread's work, and shares are merged in the order of the keys.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;

// -- vectors --------------------------------------------------------------------------------------------------------
// The compiler's own vector types: one AVX-512 register, or two of AVX2, or four of NEON, and no intrinsics.

constexpr int64_t LANES = 16, PAIR = 2 * LANES;
using Bits = uint16_t;  // a bfloat16: the upper half of a float
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
#define INLINE inline __attribute__((always_inline))

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31

// 32 numbers. A word of memory holds two in bfloat16; a shift makes a float of the one, a mask of the other: so they
// are kept as the even and the odd ones. Sums and products of numbers at equal places never notice.
struct Pair {
  Floats even, odd;
};

INLINE Floats all(float x) { return Floats{} + x; }
INLINE Pair operator*(Pair a, Pair b) { return {a.even * b.even, a.odd * b.odd}; }
INLINE Pair operator*(Pair a, float b) { return {a.even * b, a.odd * b}; }
INLINE Pair operator/(Pair a, Pair b) { return {a.even / b.even, a.odd / b.odd}; }
INLINE Pair operator+(Pair a, Pair b) { return {a.even + b.even, a.odd + b.odd}; }
INLINE Pair operator+(Pair a, float b) { return {a.even + b, a.odd + b}; }

// The first n numbers at an address, at most 32, and zeros: what lies behind them belongs to others.
template <typename T>
INLINE void copy(T* to, const T* from, int64_t n) {
  if (n >= PAIR)  // sizes that the compiler knows are an instruction or two, others a call
    std::memcpy(to, from, PAIR * sizeof(T));
  else if (n == LANES)
    std::memcpy(to, from, LANES * sizeof(T));
  else
    std::memcpy(to, from, n * sizeof(T));
}

INLINE Pair split(Words words) { return {(Floats)(words << 16), (Floats)(words & 0xffff0000)}; }

INLINE Pair load(const Bits* from, int64_t n = PAIR) {
  Words words = {};
  copy(reinterpret_cast<Bits*>(&words), from, n);
  return split(words);
}

INLINE Pair load_dims(const Bits* from, int64_t n) {  // of a head: where the last pair is not whole, it is a half
  Words words = {};
  if (n >= PAIR)
    std::memcpy(&words, from, sizeof words);
  else
    std::memcpy(&words, from, sizeof words / 2);
  return split(words);
}

INLINE Pair load(const float* from, int64_t n = PAIR) {
  Floats floats[2] = {};
  copy(reinterpret_cast<float*>(floats), from, n);
  return {SHUFFLE(floats[0], floats[1], EVENS), SHUFFLE(floats[0], floats[1], ODDS)};
}

INLINE Words rounded(Floats x) {  // to the nearest bfloat16, ties to even, in the upper half; a NaN stays one
  Words words = (Words)x;
  words += 0x7fff + ((words >> 16) & 1);
  return x == x ? words : Words{} + 0x7fc00000;
}

INLINE void store(Bits* to, Pair x, int64_t n = PAIR) {
  const Words words = (rounded(x.even) >> 16) | (rounded(x.odd) & 0xffff0000);
  copy(to, reinterpret_cast<const Bits*>(&words), n);
}

INLINE float sum(Floats x) {
  float total = 0;
  for (int64_t i = 0; i < LANES; i++) total += x[i];
  return total;
}

// Sixteen sums at once, lane i that of x[i]. Each step adds neighbours and so halves the number of vectors.
INLINE Floats sums(const Floats* x) {
  Floats a[8], b[4], c[2];
  for (int i = 0; i < 8; i++)
    a[i] = SHUFFLE(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(x[2 * i], x[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int i = 0; i < 4; i++)
    b[i] = SHUFFLE(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  for (int i = 0; i < 2; i++)
    c[i] = SHUFFLE(b[2 * i], b[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           SHUFFLE(b[2 * i], b[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  return SHUFFLE(c[0], c[1], EVENS) + SHUFFLE(c[0], c[1], ODDS);
}

// e^x with a relative error of about 1e-7: x = n·ln 2 + r, e^r by its series, 2^n into the exponent. 0 below −87.
INLINE Floats exponential(Floats x) {
  const float big = 12582912;  // 1.5 · 2^23: adding it leaves a whole number in the low bits
  Floats y = x > 88.0f ? all(88) : x;
  Floats shifted = y * 1.44269504f + big, n = shifted - big;
  Floats r = y - n * 0.693145752f - n * 1.42860677e-6f;
  Floats p = r * (1 / 720.0f) + 1 / 120.0f;
  p = p * r + 1 / 24.0f;
  p = p * r + 1 / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  p *= (Floats)(((Words)shifted + 127) << 23);
  return x < -87.0f ? Floats{} : p;
}
INLINE Pair exponential(Pair x) { return {exponential(x.even), exponential(x.odd)}; }

// -- checks ---------------------------------------------------------------------------------------------------------

const Bits* bits(const Tensor& x) { return reinterpret_cast<const Bits*>(x.const_data_ptr<at::BFloat16>()); }
Bits* mutable_bits(const Tensor& x) { return reinterpret_cast<Bits*>(x.mutable_data_ptr<at::BFloat16>()); }

void check(const char* name, const Tensor& x, int64_t dim, at::ScalarType dtype = at::kBFloat16) {
  TORCH_CHECK_VALUE(x.dim() == dim && x.scalar_type() == dtype && x.device().is_cpu(), name, " must have ", dim,
                    " dimensions of ", dtype, " on the CPU, not ", x.sizes(), " of ", x.scalar_type(), " on ",
                    x.device());
  TORCH_CHECK_VALUE(dtype != at::kBFloat16 || x.stride(-1) == 1 || x.size(-1) == 1, name,
                    " must have its last dimension contiguous, not strides ", x.strides());
}

constexpr int64_t GRAIN = 16384;  // numbers that are worth another thread

int64_t grain(int64_t numbers_of_a_row) { return std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, numbers_of_a_row)); }

// -- the small operations of a layer --------------------------------------------------------------------------------

INLINE void normalize(const Bits* from, const Bits* weight, Bits* to, int64_t size, float eps) {
  Pair squares = {};
  for (int64_t i = 0; i < size; i += PAIR) {
    const Pair v = load(from + i, size - i);
    squares = squares + v * v;
  }
  const float factor = 1 / std::sqrt(sum(squares.even + squares.odd) / size + eps);
  for (int64_t i = 0; i < size; i += PAIR)
    store(to + i, load(from + i, size - i) * factor * load(weight + i, size - i), size - i);
}

// x [..., N] of 1 to 3 dimensions, weight [N] -> x / sqrt(mean(x²) + eps) · weight.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.dim() <= 3, "x must have 1 to 3 dimensions, not ", x.sizes());
  check("x", x, x.dim());
  check("weight", weight, 1);
  const int64_t size = weight.size(0), inner = x.dim() > 1 ? x.size(-2) : 1, outer = x.dim() > 2 ? x.size(0) : 1;
  TORCH_CHECK_VALUE(x.size(-1) == size, "x must end with the weight's ", size, " numbers, not ", x.sizes());
  const int64_t inner_stride = x.dim() > 1 ? x.stride(-2) : 0, outer_stride = x.dim() > 2 ? x.stride(0) : 0;
  Tensor y = at::empty(x.sizes(), x.options());
  const Bits *from = bits(x), *w = bits(weight);
  Bits* to = mutable_bits(y);
  at::parallel_for(0, outer * inner, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      normalize(from + row / inner * outer_stride + row % inner * inner_stride, w, to + row * size, size, eps);
  });
  return y;
}

// x and residual [T, N], weight [N] -> rms_norm(x + residual), and that sum.
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  check("x", x, 2);
  check("residual", residual, 2);
  check("weight", weight, 1);
  const int64_t tokens = x.size(0), size = weight.size(0);
  TORCH_CHECK_VALUE(x.size(1) == size && residual.sizes() == x.sizes(), "x and residual must be [T, ", size,
                    "] as the weight is, not ", x.sizes(), " and ", residual.sizes());
  Tensor y = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
  const Bits *a = bits(x), *b = bits(residual), *w = bits(weight);
  Bits *to = mutable_bits(y), *both = mutable_bits(total);
  at::parallel_for(0, tokens, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      for (int64_t i = 0; i < size; i += PAIR)
        store(both + t * size + i,
              load(a + t * x.stride(0) + i, size - i) + load(b + t * residual.stride(0) + i, size - i), size - i);
      normalize(both + t * size, w, to + t * size, size, eps);
    }
  });
  return {y, total};
}

// gate_up [T, 2 N], the gate first -> gate · sigmoid(gate) · up [T, N].
Tensor silu_mul(const Tensor& gate_up) {
  check("gate_up", gate_up, 2);
  TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, "gate_up must be [T, 2 N], not ", gate_up.sizes());
  const int64_t tokens = gate_up.size(0), size = gate_up.size(1) / 2, stride = gate_up.stride(0);
  Tensor y = at::empty({tokens, size}, gate_up.options());
  const Bits* from = bits(gate_up);
  Bits* to = mutable_bits(y);
  at::parallel_for(0, tokens, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      for (int64_t i = 0; i < size; i += PAIR) {
        const Bits* in = from + t * stride + i;
        const Pair gate = load(in, size - i);
        store(to + t * size + i, gate / (exponential(gate * -1) + 1) * load(in + size, size - i), size - i);
      }
  });
  return y;
}

// x [T, H, D]; cos, sin float32 [T, 1, D], sin's first half negated -> x · cos + (x, its halves swapped) · sin.
Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check("x", x, 3);
  check("cos", cos, 3, at::kFloat);
  check("sin", sin, 3, at::kFloat);
  const int64_t tokens = x.size(0), heads = x.size(1), size = x.size(2), half = size / 2;
  const std::vector<int64_t> shape{tokens, 1, size};
  TORCH_CHECK_VALUE(size % 2 == 0 && cos.sizes() == shape && sin.sizes() == shape && cos.is_contiguous() &&
                    sin.is_contiguous(), "x must be [T, H, even D], cos and sin contiguous [T, 1, D], not ", x.sizes(),
                    ", ", cos.sizes(), " and ", sin.sizes());
  Tensor y = at::empty(x.sizes(), x.options());
  const Bits* from = bits(x);
  const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
  Bits* to = mutable_bits(y);
  at::parallel_for(0, tokens, grain(heads * size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      for (int64_t h = 0; h < heads; h++) {
        const Bits* in = from + t * x.stride(0) + h * x.stride(1);
        Bits* out = to + (t * heads + h) * size;
        const float *ct = c + t * size, *st = s + t * size;
        for (int64_t i = 0, j = half; i < half; i += PAIR, j += PAIR) {
          const int64_t n = half - i;
          const Pair a = load(in + i, n), b = load(in + j, n);
          store(out + i, a * load(ct + i, n) + b * load(st + i, n), n);
          store(out + j, b * load(ct + j, n) + a * load(st + j, n), n);
        }
      }
  });
  return y;
}

// -- KV -------------------------------------------------------------------------------------------------------------

void check_caches(const Tensor& k_cache, const Tensor& v_cache) {
  check("k_cache", k_cache, 3);
  check("v_cache", v_cache, 3);
  TORCH_CHECK_VALUE(k_cache.sizes() == v_cache.sizes() && k_cache.strides() == v_cache.strides(),
                    "k_cache and v_cache must be alike, not ", k_cache.sizes(), " and ", v_cache.sizes());
}

// k and v [T, Hkv, D] into rows slots int64 [T] of the caches [rows, Hkv, D]; slot −1 is stored nowhere.
void kv_write(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots) {
  check("k", k, 3);
  check("v", v, 3);
  check("slots", slots, 1, at::kLong);
  check_caches(k_cache, v_cache);
  const int64_t tokens = k.size(0), heads = k.size(1), size = k.size(2), rows = k_cache.size(0);
  TORCH_CHECK_VALUE(k.sizes() == v.sizes() && heads == k_cache.size(1) && size == k_cache.size(2) &&
                    slots.size(0) == tokens && slots.is_contiguous(), "k and v [T, Hkv, D], caches [rows, Hkv, D], "
                    "slots [T]: not ", k.sizes(), ", ", v.sizes(), ", ", k_cache.sizes(), " and ", slots.sizes());
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; t++)
    TORCH_CHECK_INDEX(-1 <= slot[t] && slot[t] < rows, "slot ", slot[t], " is outside the cache's ", rows, " rows");
  for (auto [values, cache] : {std::tuple(k, k_cache), std::tuple(v, v_cache)}) {
    const Bits* from = bits(values);
    Bits* to = mutable_bits(cache);
    const int64_t token = values.stride(0), head = values.stride(1);
    const int64_t row = cache.stride(0), cache_head = cache.stride(1);
    at::parallel_for(0, tokens, grain(heads * size), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < heads && slot[t] >= 0; h++)
          std::memcpy(to + slot[t] * row + h * cache_head, from + t * token + h * head, size * sizeof(Bits));
    });
  }
}

// -- paged attention ------------------------------------------------------------------------------------------------

constexpr int64_t CHUNK = 256;  // keys of a piece of work: their rows stay in a core's own cache
constexpr int64_t MAX_DIM = 256, MAX_PAIRS = MAX_DIM / PAIR;  // of a head
constexpr int64_t AHEAD = 16;  // keys: so early are rows fetched
constexpr int TILE = 4;        // query rows that share a pass over the keys

// The online softmax's state of some rows: largest score, sum of weights, weighted sum of values.
struct State {
  std::vector<float> m, l;
  std::vector<Pair> acc;
};

// Up to TILE query rows, q, against up to CHUNK keys of one KV head, each row with those from low to high.
// DIM: the head's, if the compiler shall know it, which saves a third of the time; 0 for any.
template <int R, int64_t DIM>
void attend_tile(const Pair (*q)[MAX_PAIRS], const Bits* k, const Bits* v, const int64_t* rows, int64_t keys,
                 int64_t any_dim, const int64_t* low, const int64_t* high, float* m, float* l, Pair* acc) {
  const int64_t dim = DIM ? DIM : any_dim, pairs = (dim + PAIR - 1) / PAIR;
  Floats weights[R][CHUNK / LANES], largest[R];
  const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int r = 0; r < R; r++) largest[r] = all(-INFINITY);
  for (int64_t j = 0; j < keys; j += LANES) {
    Floats products[R][LANES];
    for (int64_t i = 0; i < LANES; i++) {
      if (j + i >= keys) {  // such a row is not ours to read
        for (int r = 0; r < R; r++) products[r][i] = Floats{};
        continue;
      }
      const Bits* key = k + rows[j + i];
      const int64_t ahead = rows[std::min(j + i + AHEAD, keys - 1)];
      Floats product[R] = {};
      for (int64_t p = 0; p < pairs; p++) {
        __builtin_prefetch(k + ahead + p * PAIR);  // a pair is a line of the cache
        __builtin_prefetch(v + ahead + p * PAIR);
        const Pair x = load_dims(key + p * PAIR, dim - p * PAIR);
        for (int r = 0; r < R; r++) product[r] = q[r][p].odd * x.odd + (q[r][p].even * x.even + product[r]);
      }
      for (int r = 0; r < R; r++) products[r][i] = product[r];
    }
    const Ints place = lanes + static_cast<int32_t>(j);
    for (int r = 0; r < R; r++) {
      const Ints seen = (place >= static_cast<int32_t>(low[r])) & (place < static_cast<int32_t>(high[r]));
      const Floats scores = seen ? sums(products[r]) : all(-INFINITY);
      largest[r] = scores > largest[r] ? scores : largest[r];
      weights[r][j / LANES] = scores;
    }
  }
  for (int r = 0; r < R; r++) {
    m[r] = -INFINITY;
    for (int64_t i = 0; i < LANES; i++) m[r] = std::max(m[r], static_cast<float>(largest[r][i]));
    const float base = m[r] == -INFINITY ? 0 : m[r];  // of a row that sees none of these keys all weights are 0
    Floats total = {};
    for (int64_t j = 0; j < keys; j += LANES) {
      Floats& weight = weights[r][j / LANES];
      weight = exponential(weight - base);
      total += weight;
    }
    l[r] = sum(total);
  }
  for (int64_t p = 0; p < pairs; p += 2) {  // two pairs at a time, whose sums stay in registers
    const int64_t n = dim - p * PAIR;
    Pair part[R][2] = {};
    for (int64_t j = 0; j < keys; j++) {
      const Bits* value = v + rows[j] + p * PAIR;
      const Pair x = load_dims(value, n), y = n > PAIR ? load_dims(value + PAIR, n - PAIR) : Pair{};
      for (int r = 0; r < R; r++) {
        const float weight = reinterpret_cast<const float*>(weights[r])[j];
        part[r][0] = part[r][0] + x * weight;
        part[r][1] = part[r][1] + y * weight;
      }
    }
    for (int r = 0; r < R; r++)
      for (int64_t i = 0; i < 2 && p + i < pairs; i++) acc[r * pairs + p + i] = part[r][i];
  }
}

template <int64_t DIM>
constexpr decltype(&attend_tile<1, DIM>) TILES[TILE] = {attend_tile<1, DIM>, attend_tile<2, DIM>, attend_tile<3, DIM>,
                                                        attend_tile<4, DIM>};

// A chunk of one request's keys for one KV head: those from ``begin`` on. All ``chunks`` of such a pair follow one
// another in the list of work, from place ``first`` on.
struct Work {
  int64_t request, head, begin, chunks, first;
};

// Causal attention of some requests of a batch, aligned bottom right, over K and V in blocks; for few queries each.
//
// q                [T, Hq, D], D a multiple of 16 up to 256; o, of the same shape, gets the results of their tokens
// k_cache, v_cache [num_rows, Hkv, D], whole blocks; the last one ends with the cache, block 0 may be shorter
// requests         int32: which of the batch to serve
// query_start_loc  int32 [R + 1]; seq_lens int32 [R]; block_table int32 [R, most blocks of any]
void paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& o,
                     const Tensor& requests, const Tensor& query_start_loc, const Tensor& seq_lens,
                     const Tensor& block_table, int64_t block_size, double scale, std::optional<int64_t> window) {
  check("q", q, 3);
  check("o", o, 3);
  check_caches(k_cache, v_cache);
  check("requests", requests, 1, at::kInt);
  check("query_start_loc", query_start_loc, 1, at::kInt);
  check("seq_lens", seq_lens, 1, at::kInt);
  check("block_table", block_table, 2, at::kInt);
  const int64_t heads = q.size(1), dim = q.size(2), kv_heads = k_cache.size(1), num_rows = k_cache.size(0);
  TORCH_CHECK_VALUE(o.sizes() == q.sizes() && k_cache.size(2) == dim && kv_heads > 0 && heads % kv_heads == 0,
                    "q and o [T, Hq, D], caches [rows, Hkv, D], Hq a multiple of Hkv: not ", q.sizes(), ", ", o.sizes(),
                    " and ", k_cache.sizes());
  TORCH_CHECK_VALUE(dim % LANES == 0 && dim > 0 && dim <= MAX_DIM,
                    "the head dim must be a multiple of 16 up to 256, not ", dim);
  TORCH_CHECK_VALUE(block_size >= 1 && window.value_or(1) >= 1, "block_size and window must be at least 1, not ",
                    block_size, " and ", window.value_or(1));
  TORCH_CHECK_VALUE(requests.is_contiguous() && query_start_loc.is_contiguous() && seq_lens.is_contiguous(),
                    "requests, query_start_loc and seq_lens must be contiguous");
  const int64_t batch = seq_lens.size(0), group = heads / kv_heads, pairs = (dim + PAIR - 1) / PAIR;
  TORCH_CHECK_VALUE(query_start_loc.size(0) == batch + 1 && block_table.size(0) == batch,
                    "query_start_loc and block_table must suit ", batch, " requests, not ", query_start_loc.sizes(),
                    " and ", block_table.sizes());
  const int32_t *starts = query_start_loc.const_data_ptr<int32_t>(), *lens = seq_lens.const_data_ptr<int32_t>();
  const int32_t *table = block_table.const_data_ptr<int32_t>(), *ids = requests.const_data_ptr<int32_t>();
  const int64_t short_by = (block_size - num_rows % block_size) % block_size;  // what block 0 is short of

  std::vector<Work> work;
  for (int64_t i = 0; i < requests.size(0); i++) {
    const int64_t r = ids[i];
    TORCH_CHECK_INDEX(0 <= r && r < batch, "request ", r, " is outside the batch of ", batch);
    TORCH_CHECK_VALUE(0 <= starts[r] && starts[r] <= starts[r + 1] && starts[r + 1] <= q.size(0) && lens[r] >= 0 &&
                      lens[r] <= block_table.size(1) * block_size, "request ", r, ": queries ", starts[r], " to ",
                      starts[r + 1], " and ", lens[r], " keys do not fit q ", q.sizes(), " and its table of ",
                      block_table.size(1), " blocks");
    const int64_t n = starts[r + 1] - starts[r];
    if (n == 0) continue;
    // Chunks begin at multiples of their size, whatever the window. A request without keys has one, of none.
    const int64_t oldest = window ? std::max<int64_t>(0, lens[r] - n + 1 - *window) / CHUNK : 0;
    const int64_t chunks = std::max<int64_t>(1, (lens[r] + CHUNK - 1) / CHUNK - oldest);
    for (int64_t head = 0; head < kv_heads; head++)
      for (int64_t c = 0, first = work.size(); c < chunks; c++)
        work.push_back({r, head, (oldest + c) * CHUNK, chunks, first});
  }
  std::vector<State> states(work.size());
  std::vector<std::atomic<int64_t>> finished(work.size());  // chunks, counted at the first one's place
  const Bits *queries = bits(q), *k = bits(k_cache), *v = bits(v_cache);
  Bits* out = mutable_bits(o);

  const auto& attend = dim == 64 ? TILES<64> : dim == 128 ? TILES<128> : TILES<0>;
  auto do_chunk = [&](const Work& item, State& state) {
    const int64_t r = item.request, n = starts[r + 1] - starts[r], seq_len = lens[r], num = n * group;
    state.m.assign(num, -INFINITY);
    state.l.assign(num, 0);
    state.acc.assign(num * pairs, Pair{});
    const int64_t begin = item.begin, end = std::min(begin + CHUNK, seq_len);
    int64_t rows[CHUNK];  // where each key's numbers begin
    for (int64_t key = begin; key < end;) {
      const int64_t block = table[r * block_table.stride(0) + key / block_size * block_table.stride(1)];
      int64_t row = block * block_size - short_by + key % block_size;
      const int64_t next = std::min(end, key - key % block_size + block_size);
      TORCH_CHECK_INDEX(0 <= row && row + next - key <= num_rows, "block ", block, " of request ", r,
                        " is outside the cache");
      for (; key < next; key++, row++) rows[key - begin] = row * k_cache.stride(0) + item.head * k_cache.stride(1);
    }
    Pair tile[TILE][MAX_PAIRS];
    for (int64_t first = 0; first < num; first += TILE) {
      const int64_t size = std::min<int64_t>(TILE, num - first);
      int64_t low[TILE], high[TILE], least = end, most = begin;  // the keys that each row sees, and any
      for (int64_t i = 0; i < size; i++) {
        const int64_t query = (first + i) / group, head = item.head * group + (first + i) % group;
        const Bits* row = queries + (starts[r] + query) * q.stride(0) + head * q.stride(1);
        for (int64_t p = 0; p < pairs; p++)
          tile[i][p] = load(row + p * PAIR, dim - p * PAIR) * static_cast<float>(scale);
        high[i] = std::min(end, seq_len - n + query + 1);
        low[i] = window ? std::max(begin, seq_len - n + query + 1 - *window) : begin;
        least = std::min(least, low[i]);
        most = std::max(most, high[i]);
      }
      if (least >= most) continue;
      for (int64_t i = 0; i < size; i++) low[i] -= least, high[i] -= least;
      attend[size - 1](tile, k, v, rows + (least - begin), most - least, dim, low, high, &state.m[first],
                       &state.l[first], &state.acc[first * pairs]);
    }
  };
  auto merge = [&](const Work& item) {
    const int64_t r = item.request, n = starts[r + 1] - starts[r];
    const State* parts = &states[item.first];
    for (int64_t row = 0; row < n * group; row++) {
      float m = -INFINITY, l = 0;
      for (int64_t c = 0; c < item.chunks; c++) m = std::max(m, parts[c].m[row]);
      Pair acc[MAX_PAIRS] = {};
      for (int64_t c = 0; c < item.chunks; c++) {
        if (parts[c].l[row] == 0) continue;  // it sees none of these keys
        const float factor = std::exp(parts[c].m[row] - m);
        l += factor * parts[c].l[row];
        for (int64_t p = 0; p < pairs; p++) acc[p] = acc[p] + parts[c].acc[row * pairs + p] * factor;
      }
      const int64_t head = item.head * group + row % group;
      Bits* to = out + (starts[r] + row / group) * o.stride(0) + head * o.stride(1);
      for (int64_t p = 0; p < pairs; p++) store(to + p * PAIR, acc[p] * (l == 0 ? 0 : 1 / l), dim - p * PAIR);
    }
  };
  // Whoever is done takes the next one: lengths may differ widely. A lone thread finds all of them.
  std::atomic<size_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), work.size()), 1, [&](int64_t, int64_t) {
    for (size_t i; (i = next++) < work.size();) {
      do_chunk(work[i], states[i]);
      if (++finished[work[i].first] == work[i].chunks) merge(work[i]);
    }
  });
}

}  // namespace

TORCH_LIBRARY(minillm, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def("silu_mul(Tensor gate_up) -> Tensor");
  library.def("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  library.def("kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()");
  library.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor(a!) o, Tensor requests, "
      "Tensor query_start_loc, Tensor seq_lens, Tensor block_table, int block_size, float scale, "
      "int? window=None) -> ()");
}

TORCH_LIBRARY_IMPL(minillm, CPU, library) {
  library.impl("rms_norm", rms_norm);
  library.impl("add_rms_norm", add_rms_norm);
  library.impl("silu_mul", silu_mul);
  library.impl("rotary", rotary);
  library.impl("kv_write", kv_write);
  library.impl("paged_attention", paged_attention);
}
