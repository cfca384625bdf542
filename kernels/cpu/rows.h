// What is computed row by row: rotation and storing of keys, norms, the gated activation.
#pragma once

#include "level.h"
#include "vectors.h"

namespace {

using evenflow::NewKeys;

// One head, in place: its first half pairs with its second.
void rotate(float* head, const float* cos, const float* sin, int64_t half) {
    int64_t d = 0;
    for (; d + LANES <= half; d += LANES) {
        const F first = load(head + d), second = load(head + half + d), c = load(cos + d), s = load(sin + d);
        store(head + d, first * c - second * s);
        store(head + half + d, second * c + first * s);
    }
    for (; d < half; ++d) {
        const float first = head[d], second = head[half + d];
        head[d] = first * cos[d] - second * sin[d];
        head[half + d] = second * cos[d] + first * sin[d];
    }
}

template <typename T>
void place_as(const NewKeys& n, int64_t begin, int64_t end) {
    const int64_t size = n.block_size, dim = n.dim;
    for (int64_t token = begin; token < end; ++token) {
        float* row = n.qkv + token * n.stride;
        if (n.cos)
            for (int64_t head = 0; head < n.heads + n.kv_heads; ++head)
                rotate(row + head * dim, n.cos + token * (dim / 2), n.sin + token * (dim / 2), dim / 2);
        const int64_t slot = n.slot[token];
        if (slot < 0) continue;
        for (int64_t head = 0; head < n.kv_heads; ++head) {
            const int64_t block = slot / size * n.block_stride + head * size * dim, offset = slot % size;
            const float* key = row + (n.heads + head) * dim;
            const float* value = key + n.kv_heads * dim;
            T* keys = static_cast<T*>(n.keys) + block + offset;
            T* values = static_cast<T*>(n.values) + block + offset * dim;
            for (int64_t d = 0; d < dim; ++d) put(keys + d * size, key[d]);
            for (int64_t d = 0; d < dim; ++d) put(values + d, value[d]);
        }
    }
}

void place(const NewKeys& n, int64_t begin, int64_t end) {
    if (n.bf16)
        place_as<uint16_t>(n, begin, end);
    else
        place_as<float>(n, begin, end);
}

template <typename T>
void norm_as(T* x, int64_t x_stride, const float* delta, int64_t delta_stride, const float* weight, float eps,
             float* out, int64_t out_stride, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; ++row, x += x_stride, delta += delta ? delta_stride : 0, out += out_stride) {
        if (delta) {
            int64_t i = 0;
            for (; i + LANES <= size; i += LANES) store_narrow(x + i, load_wide(x + i) + load(delta + i));
            for (; i < size; ++i) put(x + i, wide(x[i]) + delta[i]);
        }
        F squares[2] = {F{}, F{}};
        int64_t i = 0;
        for (; i + 2 * LANES <= size; i += 2 * LANES) {
            const F one = load_wide(x + i), other = load_wide(x + i + LANES);
            squares[0] += one * one;
            squares[1] += other * other;
        }
        squares[0] += squares[1];
        float sum = 0;
        for (int lane = 0; lane < LANES; ++lane) sum += squares[0][lane];
        for (; i < size; ++i) sum += wide(x[i]) * wide(x[i]);
        const float inverse = 1.0f / __builtin_sqrtf(sum / (float)size + eps);
        for (i = 0; i + LANES <= size; i += LANES) store(out + i, load_wide(x + i) * inverse * load(weight + i));
        for (; i < size; ++i) out[i] = wide(x[i]) * inverse * weight[i];
    }
}

void norm(void* x, int64_t x_stride, bool bf16, const float* delta, int64_t delta_stride, const float* weight,
          float eps, float* out, int64_t out_stride, int64_t rows, int64_t size) {
    if (bf16)
        norm_as(static_cast<uint16_t*>(x), x_stride, delta, delta_stride, weight, eps, out, out_stride, rows, size);
    else
        norm_as(static_cast<float*>(x), x_stride, delta, delta_stride, weight, eps, out, out_stride, rows, size);
}

ALWAYS F gated(F gate, F up) {
    // The exponential is of what is not positive: it never overflows.
    const F falling = power_of_two((gate > 0.0f ? -gate : gate) * 1.44269504f);
    const F share = (gate > 0.0f ? splat(1.0f) : falling) / (1.0f + falling);
    return gate * share * up;
}

void gate(const float* x, int64_t x_stride, float* out, int64_t out_stride, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; ++row, x += x_stride, out += out_stride) {
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store(out + i, gated(load(x + i), load(x + size + i)));
        if (i < size) {
            float gates[LANES] = {}, ups[LANES] = {};
            for (int64_t k = i; k < size; ++k) gates[k - i] = x[k], ups[k - i] = x[size + k];
            const F values = gated(load(gates), load(ups));
            for (int64_t k = i; k < size; ++k) out[k] = values[k - i];
        }
    }
}

}  // namespace
