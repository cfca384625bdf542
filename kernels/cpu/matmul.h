// x · packed weights. Every element is one chain of additions over k, so its bits depend on nothing else.
#pragma once

#include "level.h"
#include "vectors.h"

namespace {

using evenflow::PANEL;
using evenflow::Weights;

// Vectors of a panel that are computed together, and rows of a tile: WIDE * TALL sums, WIDE weights and a value are
// in registers.
#if LANES == 16
constexpr int WIDE = 3, TALL = 8;
#elif defined(__aarch64__)
constexpr int WIDE = 4, TALL = 6;
#else
constexpr int WIDE = 2, TALL = 6;
#endif

#define EACH_ROW _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row)
#define EACH_VECTOR _Pragma("GCC unroll 16") for (int v = 0; v < PANELS * WIDE; ++v)

// Adds `value * weight` for one k of all rows and vectors.
template <int ROWS, int VECTORS>
ALWAYS void add(F (&sum)[ROWS][VECTORS], const float* const (&x)[ROWS], int64_t k,
                                              const F (&weight)[VECTORS]) {
    EACH_ROW {
        F value = splat(x[row][k]);
        _Pragma("GCC unroll 16") for (int v = 0; v < VECTORS; ++v) sum[row][v] += value * weight[v];
    }
}

// WIDE vectors of each of PANELS panels, `panel_bytes` apart, for up to ROWS rows: those after `rows` are computed as
// the last and not stored. `columns`: how many exist from the first on.
template <int ROWS, int PANELS, bool BF16>
__attribute__((noinline)) void tile(const float* x, int64_t stride, int64_t rows, const char* data,
                                    int64_t panel_bytes, int64_t in, const float* bias, int64_t columns, float* out,
                                    int64_t out_stride) {
    F sum[ROWS][PANELS * WIDE];
    const float* at[ROWS];
    EACH_ROW {
        at[row] = x + (row < rows ? row : rows - 1) * stride;
        EACH_VECTOR sum[row][v] = F{};
    }
    if constexpr (BF16) {
        U pair[PANELS * WIDE];
        F weight[PANELS * WIDE];
        int64_t k = 0;
        for (; k + 1 < in; k += 2) {
            EACH_VECTOR {
                const char* from = data + v / WIDE * panel_bytes + (k * PANEL / 2 + v % WIDE * LANES) * 4;
                pair[v] = load_bits(from);
                soon(from);
            }
            EACH_VECTOR weight[v] = low_half(pair[v]);
            add(sum, at, k, weight);
            EACH_VECTOR weight[v] = high_half(pair[v]);
            add(sum, at, k + 1, weight);
        }
        if (k < in) {
            EACH_VECTOR weight[v] =
                low_half(load_bits(data + v / WIDE * panel_bytes + (k * PANEL / 2 + v % WIDE * LANES) * 4));
            add(sum, at, k, weight);
        }
    } else {
        F weight[PANELS * WIDE];
        for (int64_t k = 0; k < in; ++k) {
            EACH_VECTOR {
                const char* from = data + v / WIDE * panel_bytes + (k * PANEL + v % WIDE * LANES) * 4;
                weight[v] = load(from);
                soon(from);
            }
            add(sum, at, k, weight);
        }
    }
    constexpr int64_t REACH = (PANELS - 1) * PANEL + WIDE * LANES;
    if (columns >= REACH) {
        if (bias)
            EACH_VECTOR {
                F term = load(bias + v / WIDE * PANEL + v % WIDE * LANES);
                EACH_ROW sum[row][v] += term;
            }
        EACH_ROW if (row < rows)
            EACH_VECTOR store(out + row * out_stride + v / WIDE * PANEL + v % WIDE * LANES, sum[row][v]);
        return;
    }
    // Some of the columns are not there.
    EACH_ROW if (row < rows)
        EACH_VECTOR {
            const int64_t first = v / WIDE * PANEL + v % WIDE * LANES;
            float lanes[LANES];
            store(lanes, sum[row][v]);
            for (int64_t lane = 0; lane < LANES && first + lane < columns; ++lane)
                out[row * out_stride + first + lane] = bias ? lanes[lane] + bias[first + lane] : lanes[lane];
        }
}

#undef EACH_ROW
#undef EACH_VECTOR

template <bool BF16>
void panels(const float* x, int64_t stride, int64_t rows, const char* data, int64_t panel_bytes, const Weights& w,
            float* out, int64_t out_stride, int64_t panel, int64_t together) {
    for (int64_t part = 0; part < PANEL; part += WIDE * LANES) {
        const int64_t column = panel * PANEL + part, columns = w.out - column;
        if (columns <= 0) return;
        const float* bias = w.bias ? w.bias + column : nullptr;
        const char* from = data + part * 4;
        // More sums than one panel gives hide the time that an addition takes.
        if (together == 4)
            tile<1, 4, BF16>(x, stride, rows, from, panel_bytes, w.in, bias, columns, out + column, out_stride);
        else if (together == 2 && rows <= 2)
            tile<2, 2, BF16>(x, stride, rows, from, panel_bytes, w.in, bias, columns, out + column, out_stride);
        else if (together == 2)
            tile<TALL / 2, 2, BF16>(x, stride, rows, from, panel_bytes, w.in, bias, columns, out + column, out_stride);
        else
            for (int64_t row = 0; row < rows; row += TALL)
                tile<TALL, 1, BF16>(x + row * stride, stride, rows - row < TALL ? rows - row : TALL, from,
                                    panel_bytes, w.in, bias, columns, out + row * out_stride + column, out_stride);
    }
}

void matmul(const float* x, int64_t stride, int64_t rows, const Weights& w, float* out, int64_t out_stride,
            int64_t first, int64_t last) {
    const int64_t panel_bytes = (w.bf16 ? (w.in + 1) / 2 : w.in) * PANEL * 4;
    const int64_t most = rows == 1 ? 4 : rows <= TALL / 2 ? 2 : 1;
    for (int64_t panel = first; panel < last;) {
        const char* data = static_cast<const char*>(w.data) + panel * panel_bytes;
        // The last few panels of one row: two, or one, at a time.
        const int64_t together = panel + most <= last ? most : most > 1 && panel + 2 <= last ? 2 : 1;
        const auto run = w.bf16 ? panels<true> : panels<false>;
        run(x, stride, rows, data, panel_bytes, w, out, out_stride, panel, together);
        panel += together;
    }
}

}  // namespace
