// Vectors of LANES floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if LANES > 4
#include <immintrin.h>
#endif

namespace {

#define ALWAYS inline __attribute__((always_inline))

typedef float F __attribute__((vector_size(LANES * 4)));
typedef uint32_t U __attribute__((vector_size(LANES * 4)));
typedef int32_t I __attribute__((vector_size(LANES * 4)));
typedef uint16_t H __attribute__((vector_size(LANES * 2)));
typedef float FU __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
// Pairs of bfloat16, which may begin at any of them.
typedef uint32_t UU __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef uint16_t HU __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

// What lies a little further on from `at` is wanted soon. Processors look ahead by themselves, but not from one page
// into the next: weights that are read once came a third faster in 8 rows, a seventh in one.
constexpr int64_t AHEAD = 3072, LINE = 64;
ALWAYS void soon(const void* at) { __builtin_prefetch(static_cast<const char*>(at) + AHEAD); }

ALWAYS F load(const void* at) { return *static_cast<const FU*>(at); }
ALWAYS U load_bits(const void* at) { return *static_cast<const UU*>(at); }
ALWAYS void store(float* at, F value) { *reinterpret_cast<FU*>(at) = value; }
ALWAYS F splat(float value) { return value - F{}; }

// The two bfloat16 values of each 32 bits.
ALWAYS F low_half(U pair) { return (F)(pair << 16); }
ALWAYS F high_half(U pair) { return (F)(pair & 0xffff0000u); }

// Values of either type, as float; LANES of them, or one.
ALWAYS F load_wide(const float* at) { return load(at); }
ALWAYS F load_wide(const uint16_t* at) {
    // Compilers make several instructions of the general form, on the one port that all of them want.
#if LANES == 16
    return (F)((U)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))) << 16);
#elif LANES == 8
    return (F)((U)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))) << 16);
#else
    const H halves = *reinterpret_cast<const HU*>(at);
    return (F)(__builtin_convertvector(halves, U) << 16);
#endif
}
// 2 * LANES values in any fixed order: for bfloat16 those of even and of odd places, which takes half the instructions.
ALWAYS void load_two(const float* at, F& one, F& other) { one = load(at), other = load(at + LANES); }
ALWAYS void load_two(const uint16_t* at, F& one, F& other) {
    const U pairs = load_bits(at);
    one = low_half(pairs), other = high_half(pairs);
}
ALWAYS float wide(float value) { return value; }
ALWAYS float wide(uint16_t value) { return __builtin_bit_cast(float, (uint32_t)value << 16); }

// To the nearest value of bfloat16, halves to even.
ALWAYS uint16_t narrow(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
ALWAYS void put(float* at, float value) { *at = value; }
ALWAYS void put(uint16_t* at, float value) { *at = narrow(value); }
ALWAYS void store_narrow(float* at, F value) { store(at, value); }
ALWAYS void store_narrow(uint16_t* at, F value) {
    const U bits = (U)value;
    const U rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const I nan = value != value;
    *reinterpret_cast<HU*>(at) = __builtin_convertvector(nan ? bits >> 16 | 0x40 : rounded, H);
}

// The same address, of which the compiler does not know that: what is there is read again rather than kept, for which
// there may be no registers.
template <typename T>
ALWAYS const T* again(const T* at) {
    asm("" : "+r"(at));
    return at;
}

// sum += one * other, rounded once. With 16 registers, compilers that choose its form themselves copy sums about and run
// out of them.
ALWAYS void add_product(F& sum, F one, F other) {
#if LANES == 8
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(one), "x"(other));
#else
    sum += one * other;
#endif
}

ALWAYS F larger(F one, F other) {
#if LANES == 16
    return (F)_mm512_max_ps((__m512)one, (__m512)other);
#elif LANES == 8
    return (F)_mm256_max_ps((__m256)one, (__m256)other);
#else
    return one > other ? one : other;
#endif
}

// In each lane the value of the one BY away.
template <int BY, size_t... LANE>
ALWAYS F crossed(F value, std::index_sequence<LANE...>) {
    return __builtin_shufflevector(value, value, (LANE ^ BY)...);
}
template <int BY>
ALWAYS F crossed(F value) { return crossed<BY>(value, std::make_index_sequence<LANES>{}); }

// Of all lanes, in each lane: by halves, since a chain through the lanes takes as long as all that is done with them.
template <int BY = LANES / 2>
ALWAYS F largest(F value) {
    value = larger(value, crossed<BY>(value));
    if constexpr (BY > 1) value = largest<BY / 2>(value);
    return value;
}
template <int BY = LANES / 2>
ALWAYS F total(F value) {
    value += crossed<BY>(value);
    if constexpr (BY > 1) value = total<BY / 2>(value);
    return value;
}

// 2 to the power of x <= 0 to 1e-7 of its size; 0 below -126, and for -inf.
ALWAYS F power_of_two(F x) {
#if LANES == 16
    const __mmask16 some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    const __m512 whole = _mm512_maskz_roundscale_ps(some, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F part = x - (F)whole;  // -0.5 … 0.5, or anything where the result is 0
#else
    const F shift = splat(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to a whole number
    const F bounded = x > -126.0f ? x : splat(-126.0f);
    const F moved = bounded + shift;
    const F part = bounded - (moved - shift);  // -0.5 … 0.5
#endif
    // The series of 2^part, its coefficients fitted for the least relative error.
    F value = splat(1.535336188319500e-4f);
    value = value * part + splat(1.339887440266574e-3f);
    value = value * part + splat(9.618437357674640e-3f);
    value = value * part + splat(5.550332471162809e-2f);
    value = value * part + splat(2.402264791363012e-1f);
    value = value * part + splat(6.931472028550421e-1f);
    value = value * part + splat(1.0f);
#if LANES == 16
    return (F)_mm512_maskz_scalef_ps(some, (__m512)value, whole);
#else
    const F power = (F)((I)value + ((I)moved << 23));
    return x >= -126.0f ? power : F{};
#endif
}

}  // namespace
