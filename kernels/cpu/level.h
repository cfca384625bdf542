// What each instruction set level offers: one table of functions a level, filled by level.cpp.
//
// A level's file is compiled with that level's instructions. It must not define anything that the linker could share
// with another level (no templates or inline functions of the standard library): the program would then run code
// that the processor may not have.
#pragma once

#include <cstdint>

namespace evenflow {

// Columns of a packed matrix that lie together: 3, 6 or 12 vectors.
constexpr int64_t PANEL = 48;
// Keys of an attention tile.
constexpr int64_t TILE = 64;

// Weights [out, in], packed: for each panel of columns, for each k of `in`, PANEL values; absent columns are zeros.
// bfloat16: k and k + 1 share 32 bits, k in the lower half; an odd `in` is filled up with zeros.
struct Weights {
    const void* data;
    const float* bias;  // [out], or null
    int64_t out, in;
    bool bf16;
};

// out[m, n] = x[m, :] · weights[n, :] + bias[n] for the columns of panels first … last - 1.
using Matmul = void (*)(const float* x, int64_t x_stride, int64_t rows, const Weights& weights, float* out,
                        int64_t out_stride, int64_t first, int64_t last);

// Rows begin … end - 1 of x, rounded to bfloat16: rows of `to` are `stride` apart and hold a pair in each place, the last
// filled up with a zero.
using Narrow = void (*)(const float* x, int64_t x_stride, int64_t in, float* to, int64_t stride, int64_t begin,
                        int64_t end);

// Inputs that share a scale, for weights in 8 and in 4 bits.
constexpr int64_t GROUP = 32;
// Inputs that lie beside each other in packed weights: groups of 8 bits in twos, so that they begin at a cache line.
constexpr int64_t RUN8 = 2 * GROUP, RUN4 = GROUP;

// Rows of activations as whole numbers: value = round(x * 127 / largest), halves to even, with the largest of each
// group. (One scale for a whole row costs SmolLM2 several percent of perplexity: few inputs are many times larger.)
struct Quantised {
    void* values;   // [rows, stride], int8, or int16 (Level::wide8, Level::wide4); zeros after the row's end
    float* scales;  // [rows, groups]: largest / 127
    int32_t* sums;  // [rows, groups]: of the values
    int64_t stride, groups;
};

// Rows begin … end - 1 of x. Groups beyond a row's end are zeros.
using Quantise = void (*)(const float* x, int64_t x_stride, int64_t in, const Quantised& to, bool wide, int64_t begin,
                          int64_t end);

// Weights [out, in] in 8 bits, (number - 128) * scale, or in 4 bits, number * scale + minimum, with these for each group
// of a column; whole.h has the order of both.
struct Whole {
    const uint8_t* data;
    const float* bias;  // [out], or null
    int64_t out;
};

// out = x · weights + bias, for `rows` rows from `row` on (out: those rows) and panels first … last - 1.
using MatmulWhole = void (*)(const Quantised& x, int64_t row, int64_t rows, const Whole& weights, float* out,
                             int64_t out_stride, int64_t first, int64_t last);

// One layer's attention. The cache holds for each block and kv head keys [dim, block_size] and values
// [block_size, dim], in float32 or bfloat16; blocks are block_stride values apart.
struct Attention {
    const float* q;  // [T, heads * dim], rows q_stride apart
    float* out;      // likewise
    const void *keys, *values;
    const int32_t *cu_q, *kv_len, *table;  // as in AttnBatch; rows of the table are table_stride apart
    int64_t q_stride, out_stride, table_stride, heads, kv_heads, dim, block_size, block_stride, window;
    float scale;
    bool bf16;
};

// Queries begin … end - 1 (numbers in T) of one row, for the heads that share kv head `head`. `scratch` holds
// attend_scratch() floats.
using Attend = void (*)(const Attention& a, int64_t row, int64_t head, int64_t begin, int64_t end, float* scratch);

inline int64_t attend_scratch(const Attention& a, int64_t queries) {
    const int64_t padded = (a.dim + 15) / 16 * 16, rows = queries * (a.heads / a.kv_heads);
    return TILE * padded + rows * (a.dim + TILE + padded + 2);
}

// New keys and values of a layer: rows of q, k and v heads side by side.
struct NewKeys {
    float* qkv;             // [T, (heads + 2 * kv_heads) * dim], rows `stride` apart
    const float *cos, *sin;  // [T, dim / 2], or null: no rotation
    const int64_t* slot;    // block * block_size + offset; -1: do not write
    void *keys, *values;
    int64_t stride, heads, kv_heads, dim, block_size, block_stride;
    bool bf16;
};

// Rotates queries and keys of tokens begin … end - 1 in place, and stores keys and values.
using Place = void (*)(const NewKeys& n, int64_t begin, int64_t end);

// x (bfloat16 or float32, [rows, size]) += delta (unless null); out = x scaled to unit mean square, times weight.
using Norm = void (*)(void* x, int64_t x_stride, bool bf16, const float* delta, int64_t delta_stride,
                      const float* weight, float eps, float* out, int64_t out_stride, int64_t rows, int64_t size);

// out[r, i] = silu(x[r, i]) * x[r, size + i].
using Gate = void (*)(const float* x, int64_t x_stride, float* out, int64_t out_stride, int64_t rows, int64_t size);

struct Level {
    const char* name;
    Matmul matmul;
    // With weights of bfloat16, for x that was narrowed; both null where the processor has no such products.
    Matmul matmul_pairs;
    Narrow narrow;
    Attend attend;
    Place place;
    Norm norm;
    Gate gate;
    Quantise quantise;
    MatmulWhole matmul8, matmul4;
    // Whether activations for weights in 8 and 4 bits have 16 bits.
    bool wide8, wide4;
};

}  // namespace evenflow
