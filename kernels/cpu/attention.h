// Paged attention over rows of one kv head: queries of all heads that share it lie together.
//
// Keys are taken in tiles of TILE from position 0. Scores are chains of additions over the head's dimensions, weighted
// values chains over the keys; a tile changes a row's running maximum, sum and values by operations of fixed shape. A
// key that a row does not see has the weight 0 and changes nothing. So a row's bits do not depend on the queries that
// are computed with it, on chunks, blocks or threads.
//
// Where the processor multiplies pairs of bfloat16 (LEVEL_BF16), and keys and values are that, so are queries and weights:
// chains take two dimensions, or two keys, at a time (PAIRED), the first of them even.
#pragma once

#include "level.h"
#include "vectors.h"

namespace {

using evenflow::Attention;
using evenflow::TILE;

// Rows and vectors that are computed together: their sums fit the registers.
constexpr int ROWS_AT_ONCE = 6;
#if LANES == 16 || defined(__aarch64__)
constexpr int VECTORS = 4;
#else
constexpr int VECTORS = 2;
#endif
// Stands for "no key seen yet": the difference of two infinities would be no number.
constexpr float NOTHING = -1e30f;

#if defined(LEVEL_BF16)
template <typename T>
constexpr bool PAIRED = sizeof(T) == 2;
#else
template <typename T>
constexpr bool PAIRED = false;
#endif
// Steps of a chain over `count` dimensions or keys.
template <typename T>
constexpr int64_t steps(int64_t count) { return PAIRED<T> ? (count + 1) / 2 : count; }

// sum += value · line; both are bits of pairs if PAIR.
template <bool PAIR>
ALWAYS void add_step(F& sum, F value, F line) {
#if defined(LEVEL_BF16)
    if constexpr (PAIR) {
        sum = (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)value, (__m512bh)line);
        return;
    }
#endif
    sum += value * line;
}
template <bool PAIR>
ALWAYS F everywhere(const float* at) {
#if defined(LEVEL_BF16)
    if constexpr (PAIR) return (F)_mm512_set1_ps(*at);  // bits of any kind
#endif
    return splat(*at);
}
// LANES values of two rows, as pairs; without the other row, beside zeros.
ALWAYS F load_pairs(const uint16_t* one, const uint16_t* other) {
    const U low = (U)load_wide(one) >> 16;
    return (F)(other ? low | (U)load_wide(other) : low);
}
// 2 * LANES values of two rows, as pairs: those of even and of odd places.
ALWAYS void load_two_pairs(const uint16_t* one, const uint16_t* other, F& even, F& odd) {
    const U first = load_bits(one), second = other ? load_bits(other) : U{};
    even = (F)((first & 0xffffu) | second << 16), odd = (F)(first >> 16 | (second & 0xffff0000u));
}
ALWAYS uint32_t pair_of(uint16_t one, uint16_t other) { return (uint32_t)other << 16 | one; }

// to[row, :] (+)= from[row, :count] · table[:count, :] for COLUMNS vectors; rows after `rows` are computed as the last
// and not stored.
template <int ROWS, int COLUMNS, bool ADD, bool PAIR>
__attribute__((noinline)) void mix(const float* from, int64_t stride, int64_t rows, int64_t count, const float* table,
                                   int64_t table_stride, float* to, int64_t to_stride) {
    F sum[ROWS][COLUMNS];
    const float* at[ROWS];
    _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row) {
        const int64_t real = row < rows ? row : rows - 1;
        at[row] = from + real * stride;
        _Pragma("GCC unroll 8") for (int v = 0; v < COLUMNS; ++v)
            sum[row][v] = ADD ? load(to + real * to_stride + v * LANES) : F{};
    }
    for (int64_t k = 0; k < count; ++k) {
        F line[COLUMNS];
        _Pragma("GCC unroll 8") for (int v = 0; v < COLUMNS; ++v) line[v] = load(table + k * table_stride + v * LANES);
        _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row) {
            const F value = everywhere<PAIR>(at[row] + k);
            _Pragma("GCC unroll 8") for (int v = 0; v < COLUMNS; ++v) add_step<PAIR>(sum[row][v], value, line[v]);
        }
    }
    _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row) if (row < rows)
        _Pragma("GCC unroll 8") for (int v = 0; v < COLUMNS; ++v) store(to + row * to_stride + v * LANES, sum[row][v]);
}

template <int COLUMNS, bool ADD, bool PAIR>
void mix_rows(const float* from, int64_t stride, int64_t rows, int64_t count, const float* table,
              int64_t table_stride, float* to, int64_t to_stride) {
    for (; rows > 0; rows -= ROWS_AT_ONCE, from += ROWS_AT_ONCE * stride, to += ROWS_AT_ONCE * to_stride) {
        const auto run = rows == 1   ? mix<1, COLUMNS, ADD, PAIR>
                         : rows == 2 ? mix<2, COLUMNS, ADD, PAIR>
                         : rows == 3 ? mix<3, COLUMNS, ADD, PAIR>
                         : rows == 4 ? mix<4, COLUMNS, ADD, PAIR>
                                     : mix<ROWS_AT_ONCE, COLUMNS, ADD, PAIR>;
        run(from, stride, rows < ROWS_AT_ONCE ? rows : ROWS_AT_ONCE, count, table, table_stride, to, to_stride);
    }
}

// All of `columns`, a multiple of 16.
template <bool ADD, bool PAIR>
void mix_columns(const float* from, int64_t stride, int64_t rows, int64_t count, const float* table, int64_t columns,
                 float* to, int64_t to_stride) {
    int64_t column = 0;
    for (; column + VECTORS * LANES <= columns; column += VECTORS * LANES)
        mix_rows<VECTORS, ADD, PAIR>(from, stride, rows, count, table + column, columns, to + column, to_stride);
    for (; column < columns; column += LANES)
        mix_rows<1, ADD, PAIR>(from, stride, rows, count, table + column, columns, to + column, to_stride);
}

// Scores of one row become weights, in the first half of their place if PAIR; keys before `from` and from `to` on are not seen. Scales what the row has so far.
template <bool PAIR>
ALWAYS void weigh(float* scores, int64_t from, int64_t to, float* peak, float* sums, float* values, int64_t padded) {
    F score[TILE / LANES];
    F high = splat(NOTHING);
    for (int v = 0; v < TILE / LANES; ++v) {
        score[v] = load(scores + v * LANES);
        if (from > v * LANES || to < (v + 1) * LANES) {
            I lane;
            for (int i = 0; i < LANES; ++i) lane[i] = v * LANES + i;
            const I seen = (lane >= (int32_t)from) & (lane < (int32_t)to);
            score[v] = seen ? score[v] : splat(-__builtin_inff());
        }
        high = larger(high, score[v]);
    }
    const F highest = largest(larger(high, splat(*peak)));
    F sum{};
    for (int v = 0; v < TILE / LANES; ++v) {
        const F weight = power_of_two(score[v] - highest);
        if constexpr (PAIR)
            store_narrow(reinterpret_cast<uint16_t*>(scores) + v * LANES, weight);
        else
            store(scores + v * LANES, weight);
        sum += weight;
    }
    if (highest[0] != *peak) {
        const float keep = power_of_two(splat(*peak) - highest)[0];
        *peak = highest[0];
        *sums *= keep;
        for (int64_t column = 0; column < padded; column += LANES)
            store(values + column, load(values + column) * keep);
    }
    *sums += total(sum)[0];
}

// Calls run(number of the first key in the tile, where its block's part of this head begins, the key's place in the
// block, how many keys of the tile follow in it) for each block of a tile.
template <typename Run>
ALWAYS void each_block(const Attention& a, const int32_t* table, int64_t head, int64_t first, int64_t count, Run run) {
    const int64_t size = a.block_size;
    for (int64_t key = first; key < first + count;) {
        const int64_t block = table[key / size] * a.block_stride + head * size * a.dim, offset = key % size;
        const int64_t taken = size - offset < first + count - key ? size - offset : first + count - key;
        run(key - first, block, offset, taken);
        key += taken;
    }
}

// Keys [dim, block] of a tile's blocks, as floats: [dim, TILE]; PAIRED: [dim / 2 rounded up, TILE].
template <typename T>
void gather_keys(const Attention& a, const int32_t* table, int64_t head, int64_t first, int64_t count, float* keys) {
    const int64_t size = a.block_size, dim = a.dim;
    each_block(a, table, head, first, count, [&](int64_t key, int64_t block, int64_t offset, int64_t taken) {
        const T* from = static_cast<const T*>(a.keys) + block + offset;
        float* to = keys + key;
        // Keys of the block that are not there are read, too, and never count.
        const bool whole = offset % LANES == 0 && size % LANES == 0;
        if constexpr (PAIRED<T>) {
            for (int64_t d = 0; d < dim; d += 2, from += 2 * size, to += TILE) {
                const T* other = d + 1 < dim ? from + size : nullptr;
                if (whole)
                    for (int64_t i = 0; i < taken; i += LANES)
                        store(to + i, load_pairs(from + i, other ? other + i : nullptr));
                else
                    for (int64_t i = 0; i < taken; ++i)
                        to[i] = __builtin_bit_cast(float, pair_of(from[i], other ? other[i] : 0));
            }
        } else if (whole) {
            for (int64_t d = 0; d < dim; ++d)
                for (int64_t i = 0; i < taken; i += LANES) store(to + d * TILE + i, load_wide(from + d * size + i));
        } else {
            for (int64_t d = 0; d < dim; ++d)
                for (int64_t i = 0; i < taken; ++i) to[d * TILE + i] = wide(from[d * size + i]);
        }
    });
}

// Values [block, dim] of a tile's blocks, as floats: [TILE, padded]; PAIRED: [TILE / 2, padded], with zeros beside a last
// one that has no other.
template <typename T>
void gather_values(const Attention& a, const int32_t* table, int64_t head, int64_t first, int64_t count,
                   float* values) {
    const int64_t dim = a.dim, padded = (dim + 15) / 16 * 16;
    each_block(a, table, head, first, count, [&](int64_t key, int64_t block, int64_t offset, int64_t taken) {
        const T* row = static_cast<const T*>(a.values) + block + offset * dim;
        for (int64_t i = 0; i < taken; ++i, row += dim) {
            int64_t d = 0;
            if constexpr (PAIRED<T>) {
                float* line = values + (key + i) / 2 * padded;
                const bool begins = (key + i) % 2 == 0, both = begins && i + 1 < taken;
                const T* other = both ? row + dim : nullptr;
                if (begins)
                    for (; d + LANES <= dim; d += LANES) store(line + d, load_pairs(row + d, other ? other + d : nullptr));
                for (; d < dim; ++d) {
                    // The first of a pair, perhaps with the second; or the second, from another block.
                    const uint32_t there = begins ? 0 : __builtin_bit_cast(uint32_t, line[d]);
                    line[d] = __builtin_bit_cast(
                        float, begins ? pair_of(row[d], other ? other[d] : 0) : pair_of((uint16_t)there, row[d]));
                }
                for (; d < padded; ++d) line[d] = 0;
                if (both) ++i, row += dim;
            } else {
                float* line = values + (key + i) * padded;
                for (; d + LANES <= dim; d += LANES) store(line + d, load_wide(row + d));
                for (; d < dim; ++d) line[d] = wide(row[d]);
                for (; d < padded; ++d) line[d] = 0;
            }
        }
    });
}

// The lines of memory of a tile's keys and values, asked for a few at a time while the tile before it is computed:
// processors look ahead within a page, and a block ends before that.
template <typename T>
class Next {
  public:
    // For a tile that `parts` calls of some() come before.
    Next(const Attention& a, const int32_t* table, int64_t head, int64_t first, int64_t count, int64_t parts) {
        if (count <= 0 || parts <= 0) return;
        const int64_t size = a.block_size, area = size * a.dim * (int64_t)sizeof(T);
        for (int64_t block = first / size; block * size < first + count; ++block) {
            const int64_t offset = table[block] * a.block_stride * (int64_t)sizeof(T) + head * area;
            starts_[areas_++] = static_cast<const char*>(a.keys) + offset;
            starts_[areas_++] = static_cast<const char*>(a.values) + offset;
        }
        area_ = area;
        each_ = ((area + LINE - 1) / LINE * areas_ + parts - 1) / parts;
    }
    ALWAYS void some() {
        for (int64_t left = each_; left > 0 && at_ < areas_; --left) {
            __builtin_prefetch(starts_[at_] + offset_, 0, 2);
            offset_ += LINE;
            if (offset_ >= area_) offset_ = 0, ++at_;
        }
    }

  private:
    const char* starts_[2 * (TILE + 1)];
    int64_t areas_ = 0, area_ = 0, each_ = 0, at_ = 0, offset_ = 0;
};

// Scores of ROWS queries for COUNT vectors of keys, each from a block's place on.
template <typename T, int ROWS, int COUNT>
void score(const float* queries, int64_t dim, int64_t size, const T* const* keys, float* to) {
    F sum[COUNT][ROWS];
    _Pragma("GCC unroll 8") for (int v = 0; v < COUNT; ++v)
        _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row) sum[v][row] = F{};
    // Few rows have dimensions of an even number.
    const int64_t depth = steps<T>(dim);
    for (int64_t d = 0; d < depth; ++d) {
        _Pragma("GCC unroll 8") for (int v = 0; v < COUNT; ++v) {
            F line;
            if constexpr (PAIRED<T>)
                line = load_pairs(keys[v] + 2 * d * size, keys[v] + (2 * d + 1) * size);
            else
                line = load_wide(keys[v] + d * size);
            _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row)
                add_step<PAIRED<T>>(sum[v][row], everywhere<PAIRED<T>>(queries + row * depth + d), line);
        }
    }
    _Pragma("GCC unroll 8") for (int v = 0; v < COUNT; ++v)
        _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row) store(to + row * TILE + v * LANES, sum[v][row]);
}

// A key's block and place in it, by a division of 32 bits: one of 64 takes as long as 16 keys, on older processors.
struct Spot {
    uint32_t block, offset;
    Spot(int64_t key, int64_t size) : block((uint32_t)key / (uint32_t)size), offset((uint32_t)key % (uint32_t)size) {}
};

// Vectors of keys whose scores fit the registers.
constexpr int KEYS_AT_ONCE = VECTORS;
// Rows up to which tiles are not gathered: by more rows a gathered one is used often enough.
constexpr int64_t FEW = 18;

// The scores of a tile's keys, and then what its values add to `result`: as `mix_columns` of gathered tiles does, by the
// same chains of operations, but straight from the blocks. Worth it where a gathered tile would be used by few rows.
template <typename T, int ROWS>
void score_tile(const Attention& a, const int32_t* table, int64_t head, int64_t first, int64_t count,
                const float* queries, float* scores) {
    const int64_t size = a.block_size, dim = a.dim;
    const T* keys[KEYS_AT_ONCE];
    for (int64_t from = 0; from < count;) {
        int together = 0;
        const int64_t start = from;
        for (; together < KEYS_AT_ONCE && from < count; ++together, from += LANES) {
            const Spot at(first + from, size);
            const int64_t block = table[at.block] * a.block_stride + head * size * dim;
            keys[together] = static_cast<const T*>(a.keys) + block + at.offset;
        }
        float* to = scores + start;
        if (together == KEYS_AT_ONCE)
            score<T, ROWS, KEYS_AT_ONCE>(queries, dim, size, keys, to);
        else
            for (int v = 0; v < together; ++v) score<T, ROWS, 1>(queries, dim, size, keys + v, to + v * LANES);
    }
}

template <typename T, int ROWS>
void add_tile(const Attention& a, const int32_t* table, int64_t head, int64_t first, int64_t count,
              const float* weights, float* result) {
    const int64_t size = a.block_size, dim = a.dim;
    for (int64_t column = 0; column < dim; column += VECTORS * LANES) {
        F sum[ROWS][VECTORS];
        _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row)
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; ++v)
                sum[row][v] = load(result + row * dim + column + v * LANES);
        for (int64_t key = first; key < first + count;) {
            const Spot at(key, size);
            const int64_t block = table[at.block] * a.block_stride + head * size * dim;
            const int64_t taken = size - at.offset < first + count - key ? size - at.offset : first + count - key;
            const T* line = static_cast<const T*>(a.values) + block + at.offset * dim + column;
            const float* weight = weights + (PAIRED<T> ? (key - first) / 2 : key - first);
            constexpr int64_t EACH = PAIRED<T> ? 2 : 1;
            for (int64_t i = 0; i < taken; i += EACH, line += EACH * dim) {
                F value[VECTORS];
                _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v += 2) {
                    if constexpr (PAIRED<T>)
                        load_two_pairs(line + v * LANES, i + 1 < taken ? line + dim + v * LANES : nullptr, value[v],
                                       value[v + 1]);
                    else
                        load_two(line + v * LANES, value[v], value[v + 1]);
                }
                _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row) {
                    const F factor = everywhere<PAIRED<T>>(weight + row * TILE + i / EACH);
                    _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; ++v)
                        add_step<PAIRED<T>>(sum[row][v], factor, value[v]);
                }
            }
            key += taken;
        }
        _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row)
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; ++v)
                store(result + row * dim + column + v * LANES, sum[row][v]);
    }
}

// Where column d of a result of add_tile is: `load_two` takes columns of bfloat16 by turns.
template <typename T>
ALWAYS int64_t place_of(int64_t d) {
    if (sizeof(T) == 4) return d;
    const int64_t lane = d % (2 * LANES);
    return d - lane + lane % 2 * LANES + lane / 2;
}

// Calls run.operator()<ROWS>(first row) for all rows, as many at once as there are registers for.
template <typename Run>
ALWAYS void in_groups(int64_t rows, Run run) {
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) switch (rows - row) {
            case 1: run.template operator()<1>(row); break;
            case 2: run.template operator()<2>(row); break;
            case 3: run.template operator()<3>(row); break;
            case 4: run.template operator()<4>(row); break;
            case 5: run.template operator()<5>(row); break;
            default: run.template operator()<ROWS_AT_ONCE>(row);
        }
}

template <typename T>
void attend_as(const Attention& a, int64_t row, int64_t head, int64_t begin, int64_t end, float* scratch) {
    const int64_t dim = a.dim, group = a.heads / a.kv_heads, padded = (dim + 15) / 16 * 16;
    const int64_t length = a.kv_len[row], rows = (end - begin) * group;
    // Position of the first query, and the keys that any of these queries sees.
    const int64_t position = length - (a.cu_q[row + 1] - begin), last = position + (end - begin);
    const int64_t lowest = a.window && position - a.window + 1 > 0 ? position - a.window + 1 : 0;
    const int32_t* table = a.table + row * a.table_stride;
    float* tile = scratch;  // keys, then values: both would fill the nearest cache
    float* queries = tile + TILE * padded;
    float* scores = queries + rows * dim;
    float* result = scores + rows * TILE;
    float* peak = result + rows * padded;
    float* total = peak + rows;
    const int64_t depth = steps<T>(dim);  // of queries
    const float scale = a.scale * 1.44269504f;  // weights are powers of two
    // Rows of results are as long as those of gathered values, a multiple of 16.
    const bool few = rows <= FEW && a.block_size % LANES == 0 && dim % 16 == 0 && dim % (VECTORS * LANES) == 0;
    for (int64_t r = 0; r < rows; ++r) {
        const float* from = a.q + (begin + r / group) * a.q_stride + (head * group + r % group) * dim;
        if constexpr (PAIRED<T>) {
            uint16_t* to = reinterpret_cast<uint16_t*>(queries + r * depth);
            for (int64_t d = 0; d < dim; ++d) to[d] = narrow(from[d] * scale);
            if (dim % 2) to[dim] = 0;
        } else {
            for (int64_t d = 0; d < dim; ++d) queries[r * dim + d] = from[d] * scale;
        }
        for (int64_t d = 0; d < padded; ++d) result[r * padded + d] = 0;
        peak[r] = NOTHING;
        total[r] = 0;
    }
    for (int64_t first = lowest / TILE * TILE; first < last; first += TILE) {
        const int64_t count = last - first < TILE ? last - first : TILE;
        const int64_t following = first + TILE;
        Next<T> next(a, table, head, following, last - following < TILE ? last - following : TILE,
                     few ? 3 : rows);
        if (few) {
            next.some();
            in_groups(rows, [&]<int ROWS>(int64_t r) {
                score_tile<T, ROWS>(a, table, head, first, count, queries + r * depth, scores + r * TILE);
            });
        } else {
            gather_keys<T>(a, table, head, first, count, tile);
            mix_columns<false, PAIRED<T>>(queries, depth, rows, depth, tile, TILE, scores, TILE);
        }
        if (few) next.some();
        for (int64_t r = 0; r < rows; ++r) {
            if (!few) next.some();
            const int64_t at = position + r / group, to = at + 1 - first;
            const int64_t from = a.window ? at - a.window + 1 - first : 0;
            weigh<PAIRED<T>>(scores + r * TILE, from, to, peak + r, total + r, result + r * padded, padded);
        }
        if (few) {
            next.some();
            in_groups(rows, [&]<int ROWS>(int64_t r) {
                add_tile<T, ROWS>(a, table, head, first, count, scores + r * TILE, result + r * dim);
            });
        } else {
            gather_values<T>(a, table, head, first, count, tile);
            mix_columns<true, PAIRED<T>>(scores, TILE, rows, steps<T>(count), tile, padded, result, padded);
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        float* to = a.out + (begin + r / group) * a.out_stride + (head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; ++d) to[d] = result[r * padded + (few ? place_of<T>(d) : d)] / total[r];
    }
}

void attend(const Attention& a, int64_t row, int64_t head, int64_t begin, int64_t end, float* scratch) {
    if (a.bf16)
        attend_as<uint16_t>(a, row, head, begin, end, scratch);
    else
        attend_as<float>(a, row, head, begin, end, scratch);
}

}  // namespace
