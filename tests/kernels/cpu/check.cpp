// One level's kernels without torch, on random shapes, against sums in double precision. Built by test_torch_free.py with
// sanitizers, or for another processor.
//
// Outputs and scratch memory hold NaN beforehand, and lie between guards of a pattern that must survive.
//
// Usage: check SEED CASES. Prints what differs, and exits with 1.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "level.h"

namespace evenflow {
extern const Level CHECKED;
}

namespace {

using namespace evenflow;

std::mt19937_64 draw;
int wrong = 0;

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(draw); }
bool maybe() { return between(0, 1) == 1; }
float normal() { return std::normal_distribution<float>()(draw); }

template <typename T>
T nothing();
template <>
float nothing<float>() { return NAN; }
template <>
uint16_t nothing<uint16_t>() { return 0x7fc0; }  // NaN in bfloat16
template <>
int8_t nothing<int8_t>() { return -128; }
template <>
int16_t nothing<int16_t>() { return -32768; }
template <>
int32_t nothing<int32_t>() { return INT32_MIN; }
template <>
uint8_t nothing<uint8_t>() { return 0xa5; }

// `size` values between two guards.
template <typename T>
class Memory {
  public:
    explicit Memory(int64_t size) : bytes_(size * sizeof(T) + 2 * GUARD, PATTERN), size_(size) {
        for (int64_t i = 0; i < size; ++i) at()[i] = nothing<T>();
    }
    T* at() { return reinterpret_cast<T*>(bytes_.data() + GUARD); }
    T& operator[](int64_t i) { return at()[i]; }
    bool intact() const {
        for (int64_t i = 0; i < GUARD; ++i)
            if (bytes_[i] != PATTERN || bytes_[bytes_.size() - 1 - i] != PATTERN) return false;
        return true;
    }
    int64_t size() const { return size_; }

  private:
    static constexpr int64_t GUARD = 256;
    static constexpr unsigned char PATTERN = 0x5a;
    std::vector<unsigned char> bytes_;
    int64_t size_;
};

uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

void fill(Memory<float>& memory) {
    for (int64_t i = 0; i < memory.size(); ++i) memory[i] = normal();
}

// `bound`: of the difference, beside a rounding of what is expected.
void expect(const char* kernel, int64_t row, int64_t column, double found, double expected, double bound) {
    if (std::fabs(found - expected) <= bound + 1e-6 * std::fabs(expected)) return;
    if (++wrong <= 20)
        std::printf("%s [%lld, %lld]: %.9g, not %.9g\n", kernel, (long long)row, (long long)column, found, expected);
}

template <typename T>
void expect_intact(const char* kernel, const Memory<T>& memory) {
    if (memory.intact()) return;
    if (++wrong <= 20) std::printf("%s wrote outside of its memory\n", kernel);
}

template <typename T>
void expect_untouched(const char* kernel, int64_t row, Memory<T>& memory, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const T kept = nothing<T>();
        if (std::memcmp(memory.at() + i, &kept, sizeof kept) == 0) continue;
        if (++wrong <= 20) std::printf("%s: what lies after row %lld was written\n", kernel, (long long)row);
        return;
    }
}

void check_matmul() {
    const int64_t rows = between(1, 40), in = between(1, 180), out = between(1, 200), panels = (out + PANEL - 1) / PANEL;
    const int64_t x_stride = in + between(0, 5), out_stride = out + between(0, 5);
    const bool bf16 = maybe(), biased = maybe();
    Memory<float> x(rows * x_stride), y(rows * out_stride), bias(out);
    fill(x), fill(bias);
    std::vector<float> weights(out * in);
    for (float& weight : weights) weight = bf16 ? from_bf16(to_bf16(normal())) : normal();
    const int64_t depth = bf16 ? (in + 1) / 2 * 2 : in;
    Memory<uint8_t> packed(panels * depth * PANEL * (bf16 ? 2 : 4));
    for (int64_t column = 0; column < panels * PANEL; ++column)
        for (int64_t k = 0; k < depth; ++k) {
            const float weight = column < out && k < in ? weights[column * in + k] : 0.0f;
            const int64_t panel = column / PANEL * depth * PANEL, place = column % PANEL;
            if (bf16) {
                const uint16_t half = to_bf16(weight);
                std::memcpy(packed.at() + 2 * (panel + k / 2 * 2 * PANEL + 2 * place + k % 2), &half, 2);
            } else {
                std::memcpy(packed.at() + 4 * (panel + k * PANEL + place), &weight, 4);
            }
        }
    const Weights w{packed.at(), biased ? bias.at() : nullptr, out, in, bf16};
    const int64_t cut = between(0, panels);
    // Where x is rounded before it meets weights of bfloat16, to pairs in memory of their own.
    const bool narrows = bf16 && CHECKED.narrow && maybe();
    const int64_t pairs = (in + 1) / 2;
    Memory<float> narrow(narrows ? rows * pairs : 0);
    if (narrows) {
        const int64_t middle = between(0, rows);
        CHECKED.narrow(x.at(), x_stride, in, narrow.at(), pairs, 0, middle);
        CHECKED.narrow(x.at(), x_stride, in, narrow.at(), pairs, middle, rows);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t k = 0; k < in; ++k) x[row * x_stride + k] = from_bf16(to_bf16(x[row * x_stride + k]));
    }
    const auto multiply = narrows ? CHECKED.matmul_pairs : CHECKED.matmul;
    const float* from = narrows ? narrow.at() : x.at();
    const int64_t stride = narrows ? pairs : x_stride;
    multiply(from, stride, rows, w, y.at(), out_stride, 0, cut);
    multiply(from, stride, rows, w, y.at(), out_stride, cut, panels);
    expect_intact("narrow", narrow);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < out; ++column) {
            double sum = biased ? bias[column] : 0, size = std::fabs(sum);
            for (int64_t k = 0; k < in; ++k) {
                const double term = static_cast<double>(x[row * x_stride + k]) * weights[column * in + k];
                sum += term, size += std::fabs(term);
            }
            expect("matmul", row, column, y[row * out_stride + column], sum, 2e-6 * size);
        }
        expect_untouched("matmul", row, y, row * out_stride + out, (row + 1) * out_stride);
    }
    expect_intact("matmul", y);
}

template <typename T>
T stored(float value);
template <>
float stored<float>(float value) { return value; }
template <>
uint16_t stored<uint16_t>(float value) { return to_bf16(value); }
double value_of(float value) { return value; }
double value_of(uint16_t half) { return from_bf16(half); }

template <typename T>
void check_attend() {
    const int64_t block = int64_t{8} << between(0, 2), dim = 2 * between(1, 36), kv_heads = between(1, 2);
    const int64_t group = between(1, 5), heads = group * kv_heads, size = maybe() ? 64 : dim;
    const int64_t length = between(1, 150), queries = between(1, length < 12 ? length : 12);
    const int64_t window = maybe() ? between(1, length) : 0, blocks = (length + block - 1) / block, pool = blocks + 3;
    const int64_t q_stride = heads * size + between(0, 4), out_stride = heads * size + between(0, 4);
    Memory<float> q(queries * q_stride), out(queries * out_stride);
    fill(q);
    const int64_t apart = kv_heads * size * block + between(0, 70);
    Memory<T> keys(pool * apart), values(pool * apart);
    std::vector<int32_t> table(blocks);
    for (int64_t i = 0; i < blocks; ++i) table[i] = static_cast<int32_t>((i * 2 + 1) % pool);
    if (pool % 2 == 0)
        for (int64_t i = 0; i < blocks; ++i) table[i] = static_cast<int32_t>(pool - 1 - i);
    const auto key_at = [&](int64_t key, int64_t head, int64_t d) {
        return table[key / block] * apart + head * size * block + d * block + key % block;
    };
    const auto value_at = [&](int64_t key, int64_t head, int64_t d) {
        return table[key / block] * apart + head * size * block + key % block * size + d;
    };
    for (int64_t key = 0; key < length; ++key)
        for (int64_t head = 0; head < kv_heads; ++head)
            for (int64_t d = 0; d < size; ++d) {
                keys[key_at(key, head, d)] = stored<T>(normal());
                values[value_at(key, head, d)] = stored<T>(normal());
            }
    const int32_t cu_q[2] = {0, static_cast<int32_t>(queries)}, kv_len[1] = {static_cast<int32_t>(length)};
    Attention a{};
    a.q = q.at(), a.out = out.at(), a.keys = keys.at(), a.values = values.at();
    a.cu_q = cu_q, a.kv_len = kv_len, a.table = table.data();
    a.q_stride = q_stride, a.out_stride = out_stride, a.table_stride = blocks;
    a.heads = heads, a.kv_heads = kv_heads, a.dim = size, a.block_size = block, a.block_stride = apart, a.window = window;
    a.scale = 1.0f / std::sqrt(static_cast<float>(size)), a.bf16 = sizeof(T) == 2;
    Memory<float> scratch(attend_scratch(a, queries));
    const int64_t cut = between(0, queries);
    for (int64_t head = 0; head < kv_heads; ++head)
        for (const auto& [begin, end] : {std::pair{int64_t{0}, cut}, std::pair{cut, queries}})
            if (begin < end) CHECKED.attend(a, 0, head, begin, end, scratch.at());
    // Where queries, as they are scaled, and weights are rounded to the type of keys and values.
    const bool rounds = a.bf16 && CHECKED.narrow;
    const float scale = a.scale * 1.44269504f;
    for (int64_t query = 0; query < queries; ++query) {
        const int64_t position = length - queries + query;
        const int64_t first = window && position - window + 1 > 0 ? position - window + 1 : 0;
        for (int64_t head = 0; head < heads; ++head) {
            std::vector<double> weights(position + 1);
            double peak = -INFINITY, total = 0;
            for (int64_t key = first; key <= position; ++key) {
                double score = 0;
                for (int64_t d = 0; d < size; ++d) {
                    const float scaled = q[query * q_stride + head * size + d] * scale;
                    const float used = rounds ? from_bf16(to_bf16(scaled)) : scaled;
                    score += used * value_of(keys[key_at(key, head / group, d)]);
                }
                weights[key] = score / 1.44269504;
                peak = std::max(peak, weights[key]);
            }
            for (int64_t key = first; key <= position; ++key) total += weights[key] = std::exp(weights[key] - peak);
            for (int64_t d = 0; d < size; ++d) {
                double sum = 0, terms = 0;
                for (int64_t key = first; key <= position; ++key) {
                    const double term = weights[key] * value_of(values[value_at(key, head / group, d)]);
                    sum += term, terms += std::fabs(term);
                }
                const double bound = 2e-5 + (rounds ? terms / total / 256 : 0);
                expect("attend", query, head * size + d, out[query * out_stride + head * size + d], sum / total, bound);
            }
        }
        expect_untouched("attend", query, out, query * out_stride + heads * size, (query + 1) * out_stride);
    }
    expect_intact("attend", out), expect_intact("attend", scratch);
}

template <typename T>
void check_place() {
    const int64_t dim = 2 * between(1, 40), kv_heads = between(1, 2), heads = kv_heads * between(1, 3);
    const int64_t block = int64_t{8} << between(0, 1), tokens = between(1, 6), pool = 4;
    const int64_t stride = (heads + 2 * kv_heads) * dim + between(0, 3);
    const bool rotated = maybe();
    Memory<float> qkv(tokens * stride), cosine(tokens * dim / 2), sine(tokens * dim / 2);
    fill(qkv), fill(cosine), fill(sine);
    std::vector<float> before(qkv.at(), qkv.at() + tokens * stride);
    const int64_t apart = kv_heads * dim * block + between(0, 9);
    Memory<T> keys(pool * apart), values(pool * apart);
    std::vector<int64_t> slots(tokens);
    for (int64_t i = 0; i < tokens; ++i) slots[i] = between(0, 4) ? i * 5 % (pool * block) : -1;
    NewKeys n{};
    n.qkv = qkv.at(), n.slot = slots.data(), n.keys = keys.at(), n.values = values.at();
    n.cos = rotated ? cosine.at() : nullptr, n.sin = rotated ? sine.at() : nullptr;
    n.stride = stride, n.heads = heads, n.kv_heads = kv_heads, n.dim = dim, n.block_size = block, n.block_stride = apart;
    n.bf16 = sizeof(T) == 2;
    CHECKED.place(n, 0, tokens);
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t head = 0; head < heads + 2 * kv_heads; ++head)
            for (int64_t d = 0; d < dim; ++d) {
                const int64_t half = dim / 2, from = token * stride + head * dim;
                double expected = before[from + d];
                if (rotated && head < heads + kv_heads) {
                    const double c = cosine[token * half + d % half], s = sine[token * half + d % half];
                    expected = d < half ? before[from + d] * c - before[from + half + d] * s
                                        : before[from + d] * c + before[from + d - half] * s;
                }
                expect("place", token, head * dim + d, qkv[from + d], expected, 4e-6);
                if (head < heads || slots[token] < 0) continue;
                const bool key = head < heads + kv_heads;
                const int64_t in_cache = slots[token] / block * apart + (head - heads) % kv_heads * block * dim;
                const int64_t offset = slots[token] % block;
                const T found = key ? keys[in_cache + d * block + offset] : values[in_cache + offset * dim + d];
                const double bound = sizeof(T) == 2 ? std::fabs(expected) / 250 + 1e-6 : 4e-6;
                expect("place, cache", token, head * dim + d, value_of(found), expected, bound);
            }
    expect_intact("place", qkv), expect_intact("place", keys), expect_intact("place", values);
}

template <typename T>
void check_norm() {
    const int64_t rows = between(1, 5), size = between(1, 150), stride = size + between(0, 4);
    const bool added = maybe();
    Memory<T> x(rows * stride);
    Memory<float> delta(rows * stride), weight(size), out(rows * stride);
    fill(delta), fill(weight);
    std::vector<double> before(rows * stride);
    for (int64_t i = 0; i < rows * stride; ++i) x[i] = stored<T>(normal()), before[i] = value_of(x[i]);
    CHECKED.norm(x.at(), stride, sizeof(T) == 2, added ? delta.at() : nullptr, stride, weight.at(), 1e-5f, out.at(),
                 stride, rows, size);
    for (int64_t row = 0; row < rows; ++row) {
        double squares = 0;
        for (int64_t i = 0; i < size; ++i) {
            const int64_t at = row * stride + i;
            const double sum = before[at] + (added ? delta[at] : 0.0f), bound = sizeof(T) == 2 ? std::fabs(sum) / 250 : 0;
            expect("norm, sum", row, i, value_of(x[at]), sum, bound + 1e-6);
            squares += value_of(x[at]) * value_of(x[at]);
        }
        const double inverse = 1 / std::sqrt(squares / size + 1e-5);
        for (int64_t i = 0; i < size; ++i)
            expect("norm", row, i, out[row * stride + i], value_of(x[row * stride + i]) * inverse * weight[i], 2e-5);
        expect_untouched("norm", row, out, row * stride + size, (row + 1) * stride);
    }
    expect_intact("norm", x), expect_intact("norm", out);
}

void check_gate() {
    const int64_t rows = between(1, 4), size = between(1, 100), stride = 2 * size + between(0, 3);
    Memory<float> x(rows * stride), out(rows * size);
    fill(x);
    for (int64_t i = 0; i < x.size(); i += 7) x[i] *= 60;
    CHECKED.gate(x.at(), stride, out.at(), size, rows, size);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < size; ++i) {
            const double gate = x[row * stride + i], up = x[row * stride + size + i];
            const double expected = gate / (1 + std::exp(-gate)) * up;
            expect("gate", row, i, out[row * size + i], expected, 3e-6 * std::fabs(gate * up) + 1e-30);
        }
    expect_intact("gate", out);
}

// A positive number that half precision holds, as its bits and as its value.
float half(uint16_t& bits) {
    const int exponent = static_cast<int>(between(5, 16)), mantissa = static_cast<int>(between(0, 1023));
    bits = static_cast<uint16_t>(exponent << 10 | mantissa);
    return std::ldexp(1.0f + mantissa / 1024.0f, exponent - 15);
}

// Weights in 8 or 4 bits, with activations as the level itself makes whole numbers of them.
template <typename T>
void check_whole(bool four) {
    const int64_t rows = between(1, 14), in = between(1, 200), out = between(1, 150), panels = (out + PANEL - 1) / PANEL;
    const int64_t run = four ? RUN4 : RUN8, groups = (in + run - 1) / run * run / GROUP, x_stride = in + between(0, 4);
    const int64_t out_stride = out + between(0, 4);
    const bool biased = maybe();
    Memory<float> x(rows * x_stride), y(rows * out_stride), bias(out), scales(rows * groups);
    Memory<int32_t> sums(rows * groups);
    Memory<T> values(rows * groups * GROUP);
    fill(x), fill(bias);
    if (maybe())
        for (int64_t k = 0; k < in; ++k) x[k] = 0;
    const Quantised q{values.at(), scales.at(), sums.at(), groups * GROUP, groups};
    CHECKED.quantise(x.at(), x_stride, in, q, sizeof(T) == 2, 0, rows);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t group = 0; group < groups; ++group) {
            int64_t sum = 0;
            for (int64_t k = group * GROUP; k < (group + 1) * GROUP; ++k) {
                const T value = values[row * groups * GROUP + k];
                sum += value;
                const double scale = scales[row * groups + group];
                const double expected = k < in ? x[row * x_stride + k] : 0.0f;
                expect("quantise", row, k, value * scale, expected, 0.501 * scale);
            }
            expect("quantise, sums", row, group, sums[row * groups + group], static_cast<double>(sum), 0);
        }
    expect_intact("quantise", values), expect_intact("quantise", scales), expect_intact("quantise", sums);

    const int64_t bytes = PANEL * (four ? 4 + RUN4 / 2 : 4 + RUN8), width = run / GROUP;
    Memory<uint8_t> data(panels * groups / width * bytes);
    std::vector<double> weights(panels * PANEL * groups * GROUP);
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t group = 0; group < groups; ++group) {
            uint8_t* to = data.at() + (panel * groups + group) / width * bytes;
            for (int64_t column = 0; column < PANEL; ++column) {
                double* of = weights.data() + ((panel * PANEL + column) * groups + group) * GROUP;
                if (four) {
                    uint16_t bits;
                    const double scale = half(bits);
                    std::memcpy(to + 2 * column, &bits, 2);
                    const double least = -half(bits);
                    bits |= 0x8000;
                    std::memcpy(to + 2 * (PANEL + column), &bits, 2);
                    for (int64_t k = 0; k < GROUP; ++k) {
                        const auto number = static_cast<uint8_t>(between(0, 15));
                        uint8_t& byte = to[4 * PANEL + k / 8 * 4 * PANEL + column * 4 + k % 4];
                        byte = k % 8 < 4 ? number : static_cast<uint8_t>(byte | number << 4);
                        of[k] = number * scale + least;
                    }
                } else {
                    uint16_t bits;
                    const double scale = half(bits);
                    std::memcpy(to + 2 * (group % 2 * PANEL + column), &bits, 2);
                    for (int64_t k = 0; k < GROUP; ++k) {
                        const auto number = static_cast<uint8_t>(between(0, 255));
                        to[PANEL * (4 + group % 2 * GROUP) + k / 4 * 4 * PANEL + column * 4 + k % 4] = number;
                        of[k] = (number - 128) * scale;
                    }
                }
            }
        }
    const Whole w{data.at(), biased ? bias.at() : nullptr, out};
    const MatmulWhole matmul = four ? CHECKED.matmul4 : CHECKED.matmul8;
    const int64_t cut = between(0, rows);
    if (cut) matmul(q, 0, cut, w, y.at(), out_stride, 0, panels);
    if (cut < rows) matmul(q, cut, rows - cut, w, y.at() + cut * out_stride, out_stride, 0, panels);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < out; ++column) {
            double sum = biased ? bias[column] : 0, most = std::fabs(sum);
            for (int64_t k = 0; k < groups * GROUP; ++k) {
                const double scale = scales[row * groups + k / GROUP];
                const double term = values[row * groups * GROUP + k] * scale * weights[column * groups * GROUP + k];
                sum += term, most += std::fabs(term);
            }
            const char* name = four ? "matmul4" : "matmul8";
            // With a minimum, what cancels is larger than the terms themselves.
            expect(name, row, column, y[row * out_stride + column], sum, (four ? 2e-5 : 2e-6) * most);
        }
        expect_untouched("matmul8, 4", row, y, row * out_stride + out, (row + 1) * out_stride);
    }
    expect_intact("matmul8, 4", y);
}

}  // namespace

int main(int count, char** words) {
    if (count != 3) return 2;
    draw.seed(std::strtoull(words[1], nullptr, 10));
    const long cases = std::strtol(words[2], nullptr, 10);
    for (long i = 0; i < cases; ++i) {
        check_matmul();
        check_attend<float>();
        check_attend<uint16_t>();
        check_place<float>();
        check_place<uint16_t>();
        check_norm<float>();
        check_norm<uint16_t>();
        check_gate();
        CHECKED.wide8 ? check_whole<int16_t>(false) : check_whole<int8_t>(false);
        CHECKED.wide4 ? check_whole<int16_t>(true) : check_whole<int8_t>(true);
    }
    std::printf("%s: %ld cases, %d wrong\n", CHECKED.name, cases, wrong);
    return wrong ? 1 : 0;
}
