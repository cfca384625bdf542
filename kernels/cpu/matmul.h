// x · packed weights. Every element is one chain of additions over k, so its bits depend on nothing else.
//
// Where the processor multiplies pairs of bfloat16 (LEVEL_BF16), x is rounded to bfloat16 for weights of that type, and
// such a chain takes two k at a time: twice the rate, and no weight is widened.
#pragma once

#include "panels.h"

namespace {

using evenflow::Weights;

// Rows of the tallest tile, and registers.
#if LANES == 16
constexpr int TALL = 8, REGISTERS = 32;
#elif defined(__aarch64__)
constexpr int TALL = 6, REGISTERS = 32;
#else
constexpr int TALL = 6, REGISTERS = 16;
#endif
// Whether the sums of a tile are in registers, beside a value of each row or as many weights, whichever are fewer, one
// of the others, and a mask.
constexpr bool fits(int rows, int vectors) {
    return rows * vectors + (rows < vectors ? rows : vectors) + 2 <= REGISTERS;
}
// Of a tile of so many rows: vectors of a panel that are computed together, and panels. The more of a panel's, the more
// of what is read lies together; and there must be enough sums to hide the time that an addition takes.
constexpr int width(int rows) {
    int most = ACROSS;
    while (ACROSS % most || !fits(rows, most)) --most;
    return most;
}
constexpr int together(int rows) {
    int most = rows == 1 ? 4 : rows <= TALL / 2 ? 2 : 1;
    if (width(rows) < ACROSS) return 1;
    while (!fits(rows, most * ACROSS)) most /= 2;
    return most;
}

#define EACH_ROW _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row)
#define EACH_VECTOR _Pragma("GCC unroll 16") for (int v = 0; v < VECTORS; ++v)

// The weights of one k: of bfloat16 the lower or the upper half of each pair, or both, as are those of x then.
enum class Half { LOW, HIGH, BOTH, NONE };
template <Half HALF>
ALWAYS F weight_at(const char* from) {
    if constexpr (HALF == Half::NONE || HALF == Half::BOTH) return load(from);
    return HALF == Half::LOW ? low_half(load_bits(from)) : high_half(load_bits(from));
}
template <Half HALF>
ALWAYS F value_at(const float* x) {
#if defined(LEVEL_BF16)
    if constexpr (HALF == Half::BOTH) return (F)_mm512_set1_ps(*x);  // bits of any kind
#endif
    return splat(*x);
}
template <Half HALF>
ALWAYS void add_at(F& sum, F value, F weight) {
#if defined(LEVEL_BF16)
    if constexpr (HALF == Half::BOTH) {
        sum = (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)value, (__m512bh)weight);
        return;
    }
#endif
    add_product(sum, value, weight);
}

// Of x and the weights: float32 both, float32 and bfloat16, pairs of bfloat16 both (a pair of x has the place of a float).
enum class Kind { FLOATS, MIXED, PAIRS };

// Adds value * weight for one k of all rows and vectors, of which WIDE lie together from `from` on; what there is fewer
// of is kept meanwhile.
template <Half HALF, int ROWS, int VECTORS, int WIDE>
ALWAYS void add(F (&sum)[ROWS][VECTORS], const float* const (&x)[ROWS], int64_t k, const char* from,
                int64_t panel_bytes) {
    if constexpr (ROWS < VECTORS) {
        F value[ROWS];
        EACH_ROW value[row] = value_at<HALF>(x[row] + k);
        EACH_VECTOR {
            const char* at = from + v / WIDE * panel_bytes + v % WIDE * LANES * 4;
            const F weight = weight_at<HALF>(at);
            EACH_ROW add_at<HALF>(sum[row][v], value[row], weight);
        }
    } else {
        F weight[VECTORS];
        EACH_VECTOR {
            const char* at = from + v / WIDE * panel_bytes + v % WIDE * LANES * 4;
            weight[v] = weight_at<HALF>(at);
        }
        EACH_ROW {
            const F value = value_at<HALF>(x[row] + k);
            EACH_VECTOR add_at<HALF>(sum[row][v], value, weight[v]);
        }
    }
}

// WIDE vectors of each of PANELS panels, `panel_bytes` apart, for ROWS rows. `columns`: how many exist from the first
// on. `next` and `cold`: as for `Ahead`.
template <int ROWS, int PANELS, Kind KIND>
__attribute__((noinline)) void tile(const float* x, int64_t stride, const char* data, int64_t panel_bytes, int64_t in,
                                    const float* bias, int64_t columns, float* out, int64_t out_stride,
                                    const char* next, bool cold) {
    constexpr int WIDE = width(ROWS), VECTORS = PANELS * WIDE;
    Ahead<VECTORS, WIDE> ahead(next, cold, data);
    F sum[ROWS][VECTORS];
    const float* at[ROWS];
    EACH_ROW {
        at[row] = x + row * stride;
        EACH_VECTOR sum[row][v] = F{};
    }
    if constexpr (KIND == Kind::MIXED) {
        int64_t k = 0;
        for (; k + 1 < in; k += 2) {
            const char* from = data + k * PANEL * 2;
            ahead.step(from, panel_bytes);
            add<Half::LOW, ROWS, VECTORS, WIDE>(sum, at, k, from, panel_bytes);
            add<Half::HIGH, ROWS, VECTORS, WIDE>(sum, at, k + 1, again(from), panel_bytes);
        }
        if (k < in) add<Half::LOW, ROWS, VECTORS, WIDE>(sum, at, k, data + k * PANEL * 2, panel_bytes);
    } else {
        for (int64_t k = 0; k < in; ++k) {
            const char* from = data + k * PANEL * 4;
            ahead.step(from, panel_bytes);
            add<KIND == Kind::PAIRS ? Half::BOTH : Half::NONE, ROWS, VECTORS, WIDE>(sum, at, k, from, panel_bytes);
        }
    }
    constexpr int64_t REACH = (PANELS - 1) * PANEL + WIDE * LANES;
    if (columns >= REACH) {
        if (bias)
            EACH_VECTOR {
                const F term = load(bias + v / WIDE * PANEL + v % WIDE * LANES);
                EACH_ROW sum[row][v] += term;
            }
        EACH_ROW EACH_VECTOR store(out + row * out_stride + v / WIDE * PANEL + v % WIDE * LANES, sum[row][v]);
        return;
    }
    // Some of the columns are not there.
    EACH_ROW EACH_VECTOR {
        const int64_t first = v / WIDE * PANEL + v % WIDE * LANES;
        float lanes[LANES];
        store(lanes, sum[row][v]);
        for (int64_t lane = 0; lane < LANES && first + lane < columns; ++lane)
            out[row * out_stride + first + lane] = bias ? lanes[lane] + bias[first + lane] : lanes[lane];
    }
}

#undef EACH_ROW
#undef EACH_VECTOR

// `count` tiles of ROWS rows, one below the other, for PANELS panels. `next`: the panel after these, or null. `cold`:
// nothing came before.
template <int ROWS, int PANELS, Kind KIND>
ALWAYS void tiles(int64_t count, const float* x, int64_t stride, const char* data, int64_t panel_bytes,
                  const Weights& w, float* out, int64_t out_stride, int64_t column, const char* next, bool cold) {
    constexpr int WIDE = width(ROWS);
    for (int part = 0; part < ACROSS; part += WIDE) {
        const int64_t first = column + part * LANES, columns = w.out - first;
        if (columns <= 0) return;
        const float* bias = w.bias ? w.bias + first : nullptr;
        const char* from = data + part * LANES * 4;
        for (int64_t number = 0; number < count; ++number)
            tile<ROWS, PANELS, KIND>(x + number * ROWS * stride, stride, from, panel_bytes, w.in, bias, columns,
                                     out + number * ROWS * out_stride + first, out_stride,
                                     next && !number ? next + panel_bytes / ACROSS * part : nullptr, cold && !number);
    }
}

// Panels first … last - 1 for `count` tiles of ROWS rows.
template <int ROWS, Kind KIND>
void panels(int64_t count, const float* x, int64_t stride, const Weights& w, float* out, int64_t out_stride,
            int64_t first, int64_t last) {
    constexpr int MOST = together(ROWS);
    const int64_t panel_bytes = (KIND == Kind::MIXED ? (w.in + 1) / 2 : w.in) * PANEL * 4;
    for (int64_t panel = first; panel < last;) {
        const char* data = static_cast<const char*>(w.data) + panel * panel_bytes;
        const char* next = panel + 1 < last ? data + panel_bytes : nullptr;
        if (MOST == 1 || panel + MOST > last) {
            tiles<ROWS, 1, KIND>(count, x, stride, data, panel_bytes, w, out, out_stride, panel * PANEL, next,
                                 panel == first);
            ++panel;
        } else {
            tiles<ROWS, MOST, KIND>(count, x, stride, data, panel_bytes, w, out, out_stride, panel * PANEL, next,
                                    panel == first);
            panel += MOST;
        }
    }
}

template <Kind KIND>
void rows_of(int64_t height, int64_t count, const float* x, int64_t stride, const Weights& w, float* out,
             int64_t out_stride, int64_t first, int64_t last) {
#define OF(ROWS) \
    case ROWS: return panels<ROWS, KIND>(count, x, stride, w, out, out_stride, first, last);
    switch (height) {
        OF(1) OF(2) OF(3) OF(4) OF(5) OF(6)
#if LANES == 16
        OF(7) OF(8)
#endif
    }
#undef OF
}

template <Kind KIND>
void matmul_as(const float* x, int64_t stride, int64_t rows, const Weights& w, float* out, int64_t out_stride,
               int64_t first, int64_t last) {
    each_height(rows, TALL, [&](int64_t from, int64_t height, int64_t count) {
        rows_of<KIND>(height, count, x + from * stride, stride, w, out + from * out_stride, out_stride, first, last);
    });
}

void matmul(const float* x, int64_t stride, int64_t rows, const Weights& w, float* out, int64_t out_stride,
            int64_t first, int64_t last) {
    (w.bf16 ? matmul_as<Kind::MIXED> : matmul_as<Kind::FLOATS>)(x, stride, rows, w, out, out_stride, first, last);
}

#if defined(LEVEL_BF16)
void matmul_pairs(const float* x, int64_t stride, int64_t rows, const Weights& w, float* out, int64_t out_stride,
                  int64_t first, int64_t last) {
    Weights of_pairs = w;
    of_pairs.in = (w.in + 1) / 2;
    matmul_as<Kind::PAIRS>(x, stride, rows, of_pairs, out, out_stride, first, last);
}

void narrow_rows(const float* x, int64_t x_stride, int64_t in, float* to, int64_t stride, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* from = x + row * x_stride;
        char* at = reinterpret_cast<char*>(to + row * stride);
        for (int64_t k = 0; k < in; k += LANES, at += 2 * LANES) {
            const int64_t left = in - k, pair = left + (left & 1);
            const __mmask16 there = left < LANES ? (1u << left) - 1 : 0xffff;
            const __mmask16 written = pair < LANES ? (1u << pair) - 1 : 0xffff;
            const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, from + k));
            _mm256_mask_storeu_epi16(at, written, (__m256i)rounded);
        }
    }
}
#else
constexpr evenflow::Matmul matmul_pairs = nullptr;
constexpr evenflow::Narrow narrow_rows = nullptr;
#endif

}  // namespace
