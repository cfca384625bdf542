// x · weights in 8 or 4 bits: sums of products of whole numbers, which are exact in any order and at every level.
//
// Weights are unsigned bytes or halves of bytes, activations signed bytes (`quantise`), and what the weights' offset
// adds is taken from the activations' own sums. Four activations meet four weights of a column, which lie in 32 bits.
// Scaling rounds after each operation, never once for two: levels and the operations of torch agree to the bit.
#pragma once

#include "panels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

using evenflow::GROUP;
using evenflow::Quantised;
using evenflow::RUN4;
using evenflow::RUN8;
using evenflow::Whole;

typedef uint8_t B __attribute__((vector_size(LANES * 4)));
typedef uint8_t BU __attribute__((vector_size(LANES * 4), aligned(1), may_alias));
typedef int16_t S __attribute__((vector_size(LANES * 4)));
typedef int64_t L __attribute__((vector_size(LANES * 4)));
// Of half the size: bytes that are widened to a whole vector, sums of neighbours.
typedef uint8_t HalfB __attribute__((vector_size(LANES * 2)));
typedef uint8_t HalfBU __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
typedef int32_t HalfI __attribute__((vector_size(LANES * 2), may_alias));
typedef int8_t QuarterB __attribute__((vector_size(LANES)));
typedef int8_t QuarterBU __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t HalfS __attribute__((vector_size(LANES * 2)));
typedef int16_t HalfSU __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int32_t IU __attribute__((vector_size(LANES * 4), aligned(1), may_alias));

// Products and sums around it are not fused.
ALWAYS F rounded(F value) {
#if defined(__x86_64__)
    asm("" : "+v"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
    return value;
}

// Each lane: the sum of the products of two neighbours.
ALWAYS I pairs(S one, S other) {
#if LANES == 16
    return (I)_mm512_madd_epi16((__m512i)one, (__m512i)other);
#elif LANES == 8
    return (I)_mm256_madd_epi16((__m256i)one, (__m256i)other);
#elif defined(__x86_64__)
    return (I)_mm_madd_epi16((__m128i)one, (__m128i)other);
#elif defined(__ARM_NEON)
    const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)one), vget_low_s16((int16x8_t)other));
    const int32x4_t high = vmull_high_s16((int16x8_t)one, (int16x8_t)other);
    return (I)vpaddq_s32(low, high);
#else
    I sum;
    for (int lane = 0; lane < LANES; ++lane)
        sum[lane] = one[2 * lane] * other[2 * lane] + one[2 * lane + 1] * other[2 * lane + 1];
    return sum;
#endif
}

// Half precision, as float.
ALWAYS F load_half(const uint16_t* at) {
#if LANES == 16
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif LANES == 8
    return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(__aarch64__)
    return (F)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at)));
#else
    const U bits = __builtin_convertvector(*reinterpret_cast<const HU*>(at), U);
    // The exponent's bias is 112 less.
    const F size = (F)((bits & 0x7fff) << 13) * 0x1p112f;
    return (F)((U)size | (bits & 0x8000) << 16);
#endif
}

// How running sums of LANES columns are held, and what four activations of a row add to them.

// Activations in 16 bits; a column's two sums of two are beside each other.
struct Wide {
    typedef int16_t Value;
    struct Sum {
        I low, high;
    };
    struct Weight {
        S low, high;
    };
    // Sums that begin at `first`.
    static ALWAYS Sum start(int32_t first) {
        const I one = (I)((int64_t)(uint32_t)first - L{});
        return {one, one};
    }
    static ALWAYS Weight read(const uint8_t* at) {
        return {__builtin_convertvector(*reinterpret_cast<const HalfBU*>(at), S),
                __builtin_convertvector(*reinterpret_cast<const HalfBU*>(at + LANES * 2), S)};
    }
    static ALWAYS Weight of(B bytes) {
        HalfB halves[2];
        __builtin_memcpy(halves, &bytes, sizeof bytes);
        return {__builtin_convertvector(halves[0], S), __builtin_convertvector(halves[1], S)};
    }
    static ALWAYS S value(const Value* x) {
        int64_t four;
        __builtin_memcpy(&four, x, sizeof four);
        return (S)(four - L{});
    }
    static ALWAYS void add(Sum& sum, Weight weight, S x) {
        sum.low += pairs(weight.low, x);
        sum.high += pairs(weight.high, x);
    }
    static ALWAYS I total(Sum sum) {
#if LANES == 8
        return (I)_mm256_permute4x64_epi64(_mm256_hadd_epi32((__m256i)sum.low, (__m256i)sum.high), 0b11011000);
#endif
        HalfI halves[2] = {neighbours(sum.low), neighbours(sum.high)};
        I whole;
        __builtin_memcpy(&whole, halves, sizeof whole);
        return whole;
    }
    // The lower lane of each two is where the sum of both ends.
    static ALWAYS HalfI neighbours(I sum) { return __builtin_convertvector((L)(sum + (I)((L)sum >> 32)), HalfI); }
};

#if LANES == 16 || LANES == 8
ALWAYS B four_bytes(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, sizeof four);
    return (B)(four - I{});
}

// Sums in 16 bits, for weights of 4 bits only: eight times two products of 15 and 127 fit.
struct Short {
    typedef int8_t Value;
    typedef S Sum;
    typedef B Weight;
    static ALWAYS B of(B bytes) { return bytes; }
    static ALWAYS B value(const Value* x) { return four_bytes(x); }
    static ALWAYS void add(S& sum, B weight, B x) {
#if LANES == 16
        sum += (S)_mm512_maddubs_epi16((__m512i)weight, (__m512i)x);
#else
        sum += (S)_mm256_maddubs_epi16((__m256i)weight, (__m256i)x);
#endif
    }
    static ALWAYS I total(S sum) { return pairs(sum, (int16_t)1 - S{}); }
};
#endif

#if defined(LEVEL_VNNI)
struct Narrow {
    typedef int8_t Value;
    typedef I Sum;
    typedef B Weight;
    static ALWAYS I start(int32_t first) { return first - I{}; }
    static ALWAYS B read(const uint8_t* at) {
        return *reinterpret_cast<const BU*>(at);
    }
    static ALWAYS B of(B bytes) { return bytes; }
    static ALWAYS B value(const Value* x) { return four_bytes(x); }
    static ALWAYS void add(I& sum, B weight, B x) {
        sum = (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, (__m512i)x);
    }
    static ALWAYS I total(I sum) { return sum; }
};
#endif

// Sums of a tile are in registers: most rows for each width of weights, and vectors of a panel by rows.
#if defined(LEVEL_VNNI)
typedef Narrow Sums8;
typedef Narrow Sums4;
constexpr int TALL8 = 8, TALL4 = 4;
constexpr int width8(int) { return ACROSS; }
constexpr int width4(int) { return ACROSS; }
#elif LANES == 16
typedef Wide Sums8;
typedef Short Sums4;
constexpr int TALL8 = 3, TALL4 = 4;
constexpr int width8(int) { return ACROSS; }
constexpr int width4(int) { return ACROSS; }
#elif LANES == 8
typedef Wide Sums8;
typedef Short Sums4;
constexpr int TALL8 = 6, TALL4 = 3;
constexpr int width8(int rows) { return rows == 1 ? ACROSS : rows == 2 ? ACROSS / 2 : 1; }
constexpr int width4(int rows) { return rows == 1 ? ACROSS : 2; }
#else
typedef Wide Sums8;
typedef Wide Sums4;
constexpr int TALL8 = 3, TALL4 = 2;
constexpr int width8(int) { return 2; }
constexpr int width4(int) { return 2; }
#endif

#define EACH_ROW _Pragma("GCC unroll 8") for (int row = 0; row < ROWS; ++row)
#define EACH_VECTOR _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; ++v)

// Adds the bias to a tile's results, and stores those that exist.
template <int ROWS, int VECTORS>
ALWAYS void finish(F (&result)[ROWS][VECTORS], int64_t columns, const float* bias, float* out, int64_t out_stride) {
    EACH_ROW EACH_VECTOR {
        float* to = out + row * out_stride + v * LANES;
        if (columns >= (v + 1) * LANES) {
            store(to, bias ? rounded(result[row][v]) + load(bias + v * LANES) : result[row][v]);
            continue;
        }
        float lanes[LANES];
        store(lanes, rounded(result[row][v]));
        for (int64_t lane = 0; lane < LANES && v * LANES + lane < columns; ++lane)
            to[lane] = bias ? lanes[lane] + bias[v * LANES + lane] : lanes[lane];
    }
}

// In 8 bits, two groups of a panel: PANEL scales of each in half precision, then the weights, four of each column in 32
// bits.
constexpr int64_t RUN8_BYTES = PANEL * (2 * 2 + RUN8);

// Vectors of a panel for ROWS rows. `part`: the first of the panel's columns. `next` and `cold`: as for `Ahead`.
template <int ROWS>
__attribute__((noinline)) void tile8(const Quantised& x, int64_t first, const uint8_t* data, int64_t part,
                                     int64_t columns, const float* bias, float* out, int64_t out_stride,
                                     const char* next, bool cold) {
    constexpr int VECTORS = width8(ROWS);
    Ahead<VECTORS, VECTORS> ahead(next, cold, data);
    const Sums8::Value* at[ROWS];
    F result[ROWS][VECTORS];
    EACH_ROW {
        at[row] = static_cast<const Sums8::Value*>(x.values) + (first + row) * x.stride;
        EACH_VECTOR result[row][v] = F{};
    }
    for (int64_t group = 0; group < x.groups; ++group) {
        const uint8_t *run = data + group / 2 * RUN8_BYTES, *from = run + PANEL * (4 + group % 2 * GROUP) + part * 4;
        Sums8::Sum sum[ROWS][VECTORS];
        EACH_ROW EACH_VECTOR sum[row][v] = Sums8::start(-128 * x.sums[(first + row) * x.groups + group]);
        for (int64_t k = group * GROUP; k < (group + 1) * GROUP; k += 4, from += PANEL * 4) {
            ahead.step(from);
            if constexpr (ROWS < VECTORS) {
                decltype(Sums8::value(at[0])) value[ROWS];
                EACH_ROW value[row] = Sums8::value(at[row] + k);
                EACH_VECTOR {
                    const Sums8::Weight weight = Sums8::read(from + v * LANES * 4);
                    EACH_ROW Sums8::add(sum[row][v], weight, value[row]);
                }
            } else {
                Sums8::Weight weight[VECTORS];
                EACH_VECTOR weight[v] = Sums8::read(from + v * LANES * 4);
                EACH_ROW {
                    const auto value = Sums8::value(at[row] + k);
                    EACH_VECTOR Sums8::add(sum[row][v], weight[v], value);
                }
            }
        }
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(run) + group % 2 * PANEL + part;
        EACH_VECTOR {
            const F scale = load_half(scales + v * LANES);
            EACH_ROW {
                const F products = __builtin_convertvector(Sums8::total(sum[row][v]), F);
                const F term = rounded(products * x.scales[(first + row) * x.groups + group]) * scale;
                result[row][v] += rounded(term);
            }
        }
    }
    finish<ROWS, VECTORS>(result, columns, bias, out, out_stride);
}

// In 4 bits: PANEL scales and PANEL minima in half precision, then eight weights of each column in 32 bits: four in
// the lower halves of the bytes, the next four in the upper.
constexpr int64_t RUN4_BYTES = PANEL * (2 * 2 + RUN4 / 2);

template <int ROWS>
__attribute__((noinline)) void tile4(const Quantised& x, int64_t first, const uint8_t* data, int64_t part,
                                     int64_t columns, const float* bias, float* out, int64_t out_stride,
                                     const char* next, bool cold) {
    constexpr int VECTORS = width4(ROWS);
    Ahead<VECTORS, VECTORS> ahead(next, cold, data);
    const Sums4::Value* at[ROWS];
    F result[ROWS][VECTORS];
    EACH_ROW {
        at[row] = static_cast<const Sums4::Value*>(x.values) + (first + row) * x.stride;
        EACH_VECTOR result[row][v] = F{};
    }
    for (int64_t group = 0; group < x.groups; ++group, data += RUN4_BYTES) {
        Sums4::Sum sum[ROWS][VECTORS];
        EACH_ROW EACH_VECTOR sum[row][v] = Sums4::Sum{};
        const uint8_t* from = data + 4 * PANEL + part * 4;
        for (int64_t k = group * GROUP; k < (group + 1) * GROUP; k += 8, from += PANEL * 4) {
            B eight[VECTORS];
            Sums4::Weight weight[VECTORS];
            ahead.step(from);
            EACH_VECTOR eight[v] = *reinterpret_cast<const BU*>(from + v * LANES * 4);
            EACH_VECTOR weight[v] = Sums4::of(eight[v] & 15);
            EACH_ROW {
                const auto value = Sums4::value(at[row] + k);
                EACH_VECTOR Sums4::add(sum[row][v], weight[v], value);
            }
            EACH_VECTOR weight[v] = Sums4::of(eight[v] >> 4);
            EACH_ROW {
                const auto value = Sums4::value(at[row] + k + 4);
                EACH_VECTOR Sums4::add(sum[row][v], weight[v], value);
            }
        }
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(data) + part;
        EACH_VECTOR {
            const F scale = load_half(scales + v * LANES), least = load_half(scales + PANEL + v * LANES);
            EACH_ROW {
                const int64_t number = (first + row) * x.groups + group;
                const F products = __builtin_convertvector(Sums4::total(sum[row][v]), F);
                const F term = rounded(rounded(products * x.scales[number]) * scale);
                const F shift = rounded(rounded(splat((float)x.sums[number]) * x.scales[number]) * least);
                result[row][v] = rounded(result[row][v] + term) + shift;
            }
        }
    }
    finish<ROWS, VECTORS>(result, columns, bias, out, out_stride);
}

// The tiles of each width of weights.
struct Eight {
    static constexpr int TALL = TALL8;
    static constexpr int64_t RUN = RUN8, BYTES = RUN8_BYTES;
    static constexpr int width(int rows) { return width8(rows); }
    template <int ROWS>
    static constexpr auto tile = tile8<ROWS>;
};
struct Four {
    static constexpr int TALL = TALL4;
    static constexpr int64_t RUN = RUN4, BYTES = RUN4_BYTES;
    static constexpr int width(int rows) { return width4(rows); }
    template <int ROWS>
    static constexpr auto tile = tile4<ROWS>;
};

// Panels in parts, `count` tiles of ROWS rows each.
template <typename Kind, int ROWS>
void panels_whole(const Quantised& x, int64_t row, int64_t count, const Whole& w, float* out, int64_t out_stride,
                  int64_t first, int64_t last) {
    constexpr int WIDE = Kind::width(ROWS);
    const int64_t panel_bytes = x.groups * GROUP / Kind::RUN * Kind::BYTES;
    for (int64_t panel = first; panel < last; ++panel)
        for (int part = 0; part < ACROSS; part += WIDE) {
            const int64_t column = panel * PANEL + part * LANES, columns = w.out - column;
            if (columns <= 0) break;
            const uint8_t* data = w.data + panel * panel_bytes;
            const float* bias = w.bias ? w.bias + column : nullptr;
            for (int64_t number = 0; number < count; ++number) {
                const uint8_t* next = panel + 1 < last && !number ? data + panel_bytes + panel_bytes / ACROSS * part : nullptr;
                Kind::template tile<ROWS>(x, row + number * ROWS, data, part * LANES, columns, bias,
                                          out + number * ROWS * out_stride + column, out_stride,
                                          reinterpret_cast<const char*>(next), panel == first && !number);
            }
        }
}

template <typename Kind>
void matmul_whole(const Quantised& x, int64_t row, int64_t rows, const Whole& w, float* out, int64_t out_stride,
                  int64_t first, int64_t last) {
    each_height(rows, Kind::TALL, [&](int64_t from, int64_t height, int64_t count) {
        float* to = out + from * out_stride;
#define OF(ROWS)          \
    if constexpr (ROWS <= Kind::TALL) \
        if (height == ROWS) panels_whole<Kind, ROWS>(x, row + from, count, w, to, out_stride, first, last);
        OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8)
#undef OF
    });
}

constexpr evenflow::MatmulWhole matmul8 = matmul_whole<Eight>, matmul4 = matmul_whole<Four>;

#undef EACH_ROW
#undef EACH_VECTOR

ALWAYS void put_bytes(int8_t* to, QuarterB bytes) { *reinterpret_cast<QuarterBU*>(to) = bytes; }
ALWAYS void put_bytes(int16_t* to, QuarterB bytes) {
    *reinterpret_cast<HalfSU*>(to) = __builtin_convertvector(bytes, HalfS);
}

// One group of a row. What is no finite number makes the scale, and so all results, such.
template <typename T>
void quantise_group(const float* x, int64_t count, T* to, float& scale, int32_t& sum) {
    // Without its sign, a number's bits are in the order of its size; what is no number is above all.
    I most{};
    int32_t largest_bits = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const I bits = (I)(load_bits(x + i) & 0x7fffffffu);
        most = bits > most ? bits : most;
    }
    for (int lane = 0; lane < LANES; ++lane) largest_bits = most[lane] > largest_bits ? most[lane] : largest_bits;
    for (int64_t k = i; k < count; ++k) {
        const int32_t bits = __builtin_bit_cast(int32_t, x[k]) & 0x7fffffff;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    const float largest = __builtin_bit_cast(float, largest_bits);
    scale = largest / 127.0f;
    // Below this the inverse is no finite number, and the values count as zeros.
    const F inverse = splat(largest >= 1e-30f ? 127.0f / largest : 0.0f);
    const F shift = splat(12582912.0f);  // as in power_of_two
    I total{};
    for (i = 0; i < count; i += LANES) {
        float lanes[LANES] = {};
        const bool part = count - i < LANES;
        if (part) __builtin_memcpy(lanes, x + i, (uint64_t)(count - i) * sizeof(float));
        const F values = part ? load(lanes) : load(x + i);
        const QuarterB bytes = __builtin_convertvector((I)(rounded(values * inverse) + shift), QuarterB);
        total += __builtin_convertvector(bytes, I);
        if (!part) {
            put_bytes(to + i, bytes);
            continue;
        }
        for (int64_t k = i; k < count; ++k) to[k] = bytes[k - i];
    }
    sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += total[lane];
}

template <typename T>
void quantise_as(const float* x, int64_t x_stride, int64_t in, const Quantised& to, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        T* values = static_cast<T*>(to.values) + row * to.stride;
        for (int64_t group = 0; group < to.groups; ++group) {
            const int64_t from = group * GROUP, left = in - from, count = left < 0 ? 0 : left < GROUP ? left : GROUP;
            quantise_group(x + row * x_stride + from, count, values + from, to.scales[row * to.groups + group],
                           to.sums[row * to.groups + group]);
        }
        for (int64_t k = in; k < to.stride; ++k) values[k] = 0;
    }
}

void quantise(const float* x, int64_t x_stride, int64_t in, const Quantised& to, bool wide, int64_t begin, int64_t end) {
    if (wide)
        quantise_as<int16_t>(x, x_stride, in, to, begin, end);
    else
        quantise_as<int8_t>(x, x_stride, in, to, begin, end);
}

}  // namespace
