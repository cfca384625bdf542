// The kernels as torch operations, over torch's stable ABI: one library for every torch from 2.11 on.
//
// Work is cut into units that threads take one after the other; each unit is computed by one thread in a fixed order,
// so results do not depend on the number of threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "level.h"
#include "pool.h"

namespace evenflow {

extern const Level level_baseline;
#if defined(__x86_64__)
extern const Level level_avx2, level_avx512, level_avx512vnni, level_avx512bf16;
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::vector<const Level*> supported() {
    std::vector<const Level*> levels{&level_baseline};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        levels.push_back(&level_avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        levels.push_back(&level_avx512);
        if (__builtin_cpu_supports("avx512vnni")) {
            levels.push_back(&level_avx512vnni);
            if (__builtin_cpu_supports("avx512bf16")) levels.push_back(&level_avx512bf16);
        }
    }
#endif
    return levels;
}

const Level* current = supported().back();

// Runs `body(unit)` for all units, on as many threads as torch has.
template <typename Body>
void each_unit(int64_t units, const Body& body) {
    pool().run(torch::stable::get_num_threads(), units,
               [](const void* context, int64_t unit) { (*static_cast<const Body*>(context))(unit); }, &body);
}

float* scratch(int64_t floats) {
    thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((address + 63) & ~uintptr_t{63});
}

// Rows whose activations stay in the second-level cache while panels pass by, a multiple of every tile's height.
constexpr int64_t CACHED_BYTES = 384 << 10, ROWS_STEP = 24;

bool is(const Tensor& tensor, ScalarType type, int64_t dim) {
    return tensor.scalar_type() == type && tensor.dim() == dim && (dim == 0 || tensor.stride(dim - 1) == 1);
}

// Cuts `rows` rows of `size` values into units, one for all if they are few.
template <typename Body>
void each_rows(int64_t rows, int64_t size, const Body& body) {
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t step = rows * size < (1 << 15) ? rows : std::max<int64_t>((rows + 4 * threads - 1) / (4 * threads), 1);
    if (rows > 0)
        each_unit((rows + step - 1) / step, [&](int64_t unit) { body(unit * step, std::min((unit + 1) * step, rows)); });
}

// Memory of the calling thread that its units share: activations as whole numbers.
struct Rows {
    std::vector<char> values;
    std::vector<float> scales;
    std::vector<int32_t> sums;
};

// The rows of x, filled up to whole runs.
Quantised quantised(const Tensor& x, int64_t run, bool wide) {
    thread_local Rows memory;
    const int64_t rows = x.size(0), in = x.size(1), stride = (in + run - 1) / run * run, groups = stride / GROUP;
    Quantised result{nullptr, nullptr, nullptr, stride, groups};
    const auto grown = [](auto& vector, int64_t count) {
        if (static_cast<int64_t>(vector.size()) < count) vector.resize(count);
        return vector.data();
    };
    result.values = grown(memory.values, rows * result.stride * (wide ? 2 : 1));
    result.scales = grown(memory.scales, rows * groups);
    result.sums = grown(memory.sums, rows * groups);
    const float* from = x.const_data_ptr<float>();
    const int64_t x_stride = x.stride(0);
    const Level* level = current;
    each_rows(rows, in, [&](int64_t begin, int64_t end) {
        level->quantise(from, x_stride, in, result, wide, begin, end);
    });
    return result;
}

// Cuts rows and panels into units: body(row, rows, first panel, last panel). Units are smaller than a thread's share, so
// that a thread that loses its core does not keep the others waiting.
template <typename Body>
void each_tile(int64_t rows, int64_t columns, int64_t row_bytes, const Body& body) {
    const int64_t panels = (columns + PANEL - 1) / PANEL, threads = torch::stable::get_num_threads();
    const int64_t height = std::max(CACHED_BYTES / std::max<int64_t>(row_bytes, 1) / ROWS_STEP * ROWS_STEP, 2 * ROWS_STEP);
    const int64_t width = std::clamp<int64_t>((panels + 3 * threads - 1) / (3 * threads), 1, 32);
    const int64_t parts = (panels + width - 1) / width;
    each_unit((rows + height - 1) / height * parts, [&](int64_t unit) {
        const int64_t row = unit / parts * height, first = unit % parts * width;
        body(row, std::min(height, rows - row), first, std::min(first + width, panels));
    });
}

// The rows of x, rounded to bfloat16, in memory of the calling thread that its units share.
const float* narrowed(const Tensor& x) {
    thread_local std::vector<float> memory;
    const int64_t rows = x.size(0), in = x.size(1), stride = (in + 1) / 2;
    if (static_cast<int64_t>(memory.size()) < rows * stride) memory.resize(rows * stride);
    const float* from = x.const_data_ptr<float>();
    float* to = memory.data();
    const int64_t x_stride = x.stride(0);
    const Level* level = current;
    each_rows(rows, in, [&](int64_t begin, int64_t end) { level->narrow(from, x_stride, in, to, stride, begin, end); });
    return to;
}

void matmul(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, Tensor out) {
    const bool bf16 = packed.scalar_type() == ScalarType::BFloat16;
    STD_TORCH_CHECK(bf16 || packed.scalar_type() == ScalarType::Float, "weights must be float32 or bfloat16");
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && out.scalar_type() == ScalarType::Float,
                    "activations and results must be float32");
    STD_TORCH_CHECK(x.dim() == 2 && out.dim() == 2 && x.size(0) == out.size(0), "rows of x and out must agree");
    const int64_t rows = x.size(0), in = x.size(1), columns = out.size(1), panels = (columns + PANEL - 1) / PANEL;
    STD_TORCH_CHECK(packed.is_contiguous() && packed.numel() == panels * PANEL * (bf16 ? (in + 1) / 2 * 2 : in),
                    "packed weights are not those of these shapes");
    STD_TORCH_CHECK((x.stride(1) == 1 || in <= 1) && (out.stride(1) == 1 || columns <= 1),
                    "rows must be contiguous");
    STD_TORCH_CHECK(!bias || (bias->scalar_type() == ScalarType::Float && bias->is_contiguous() &&
                              bias->numel() == columns),
                    "the bias must be float32[out]");
    if (rows == 0 || columns == 0) return;
    const Weights weights{packed.const_data_ptr(), bias ? bias->const_data_ptr<float>() : nullptr, columns, in, bf16};
    const Level* level = current;
    const bool pairs = bf16 && level->narrow;
    const float* from = pairs ? narrowed(x) : x.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    const int64_t x_stride = pairs ? (in + 1) / 2 : x.stride(0), out_stride = out.stride(0);
    const Matmul multiply = pairs ? level->matmul_pairs : level->matmul;
    each_tile(rows, columns, (pairs ? (in + 1) / 2 : in) * 4,
              [&](int64_t row, int64_t count, int64_t first, int64_t last) {
                  multiply(from + row * x_stride, x_stride, count, weights, to + row * out_stride, out_stride, first,
                           last);
              });
}

// `bytes`: of a run of one column.
void matmul_whole(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, Tensor& out, int64_t run,
                  int64_t bytes, bool wide, MatmulWhole multiply) {
    STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && packed.is_contiguous(), "weights must be uint8");
    STD_TORCH_CHECK(is(x, ScalarType::Float, 2) && is(out, ScalarType::Float, 2) && x.size(0) == out.size(0),
                    "x and out must be float32[rows, in] and float32[rows, out]");
    STD_TORCH_CHECK(!bias || (is(*bias, ScalarType::Float, 1) && bias->size(0) == out.size(1)),
                    "the bias must be float32[out]");
    const int64_t columns = out.size(1), panels = (columns + PANEL - 1) / PANEL;
    STD_TORCH_CHECK(packed.numel() == panels * PANEL * ((x.size(1) + run - 1) / run) * bytes,
                    "packed weights are not those of these shapes");
    const Whole weights{packed.const_data_ptr<uint8_t>(), bias ? bias->const_data_ptr<float>() : nullptr, columns};
    const Quantised rows = quantised(x, run, wide);
    float* to = out.mutable_data_ptr<float>();
    const int64_t out_stride = out.stride(0);
    each_tile(x.size(0), columns, rows.stride * (wide ? 2 : 1),
              [&](int64_t row, int64_t count, int64_t first, int64_t last) {
                  multiply(rows, row, count, weights, to + row * out_stride, out_stride, first, last);
              });
}

void matmul8(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, Tensor out) {
    matmul_whole(x, packed, bias, out, RUN8, 4 + RUN8, current->wide8, current->matmul8);
}

void matmul4(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, Tensor out) {
    matmul_whole(x, packed, bias, out, RUN4, 4 + RUN4 / 2, current->wide4, current->matmul4);
}

// Queries of one row that share a pass over its keys.
constexpr int64_t QUERIES = 32;

// A layer's blocks, one after the other or with those of other layers between them.
bool is_cache(const Tensor& keys, const Tensor& values) {
    const auto type = keys.scalar_type();
    const auto blocks = [](const Tensor& t) {
        return t.dim() == 4 && t.stride(3) == 1 && t.stride(2) == t.size(3) && t.stride(1) == t.size(2) * t.size(3) &&
               t.stride(0) >= t.size(1) * t.stride(1);
    };
    return blocks(keys) && blocks(values) && keys.stride(0) == values.stride(0) &&
           (type == ScalarType::Float || type == ScalarType::BFloat16) && values.scalar_type() == type &&
           keys.size(0) == values.size(0) && keys.size(1) == values.size(1) && keys.size(2) == values.size(3) &&
           keys.size(3) == values.size(2);
}

// The queries are the first columns of q, as many as out has.
void attend(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& cu_q, const Tensor& kv_len,
            const Tensor& table, double scale, int64_t window, Tensor out) {
    STD_TORCH_CHECK(is_cache(keys, values), "keys must be [blocks, kv heads, dim, block], values [.., block, dim]");
    const int64_t kv_heads = keys.size(1), dim = keys.size(2), rows = kv_len.size(0);
    STD_TORCH_CHECK(is(q, ScalarType::Float, 2) && is(out, ScalarType::Float, 2) && q.size(1) >= out.size(1) &&
                        out.size(1) % (kv_heads * dim) == 0 && q.size(0) == out.size(0),
                    "q and out must be float32[T, >= heads * dim] and float32[T, heads * dim]");
    STD_TORCH_CHECK(is(cu_q, ScalarType::Int, 1) && is(kv_len, ScalarType::Int, 1) && cu_q.size(0) == rows + 1 &&
                        is(table, ScalarType::Int, 2) && table.size(0) == rows && window >= 0,
                    "cu_q, kv_len and table must be int32[R + 1], [R] and [R, blocks]");
    const Attention a{
        q.const_data_ptr<float>(), out.mutable_data_ptr<float>(), keys.const_data_ptr(), values.const_data_ptr(),
        cu_q.const_data_ptr<int32_t>(), kv_len.const_data_ptr<int32_t>(), table.const_data_ptr<int32_t>(),
        q.stride(0), out.stride(0), table.stride(0), out.size(1) / dim, kv_heads, dim, keys.size(3),
        keys.stride(0), window, static_cast<float>(scale), keys.scalar_type() == ScalarType::BFloat16};
    const int64_t blocks = keys.size(0), width = table.size(1);
    struct Unit {
        int64_t row, head, begin, end, products;
    };
    std::vector<Unit> units;
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t begin = a.cu_q[row], end = a.cu_q[row + 1], length = a.kv_len[row];
        STD_TORCH_CHECK(0 <= begin && begin <= end && end <= q.size(0) && end - begin <= length &&
                            length <= width * a.block_size,
                        "queries or keys of a row lie outside");
        for (int64_t block = 0; block * a.block_size < length; ++block) {
            const int32_t id = a.table[row * a.table_stride + block];
            STD_TORCH_CHECK(0 <= id && id < blocks, "a block of the table is not in the cache");
        }
        for (int64_t from = begin; from < end; from += QUERIES) {
            const int64_t to = std::min(from + QUERIES, end);
            for (int64_t head = 0; head < kv_heads; ++head)
                units.push_back({row, head, from, to, (to - from) * (length - (end - to))});
        }
    }
    // The longest is the work to begin with: what fills the time until the last one ends is then short.
    std::stable_sort(units.begin(), units.end(), [](const Unit& x, const Unit& y) { return x.products > y.products; });
    const Level* level = current;
    each_unit(static_cast<int64_t>(units.size()), [&](int64_t number) {
        const Unit& unit = units[number];
        level->attend(a, unit.row, unit.head, unit.begin, unit.end,
                      scratch(attend_scratch(a, unit.end - unit.begin)));
    });
}

void place(Tensor qkv, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& slot,
           Tensor keys, Tensor values) {
    STD_TORCH_CHECK(is_cache(keys, values), "keys must be [blocks, kv heads, dim, block], values [.., block, dim]");
    const int64_t kv_heads = keys.size(1), dim = keys.size(2), size = keys.size(3), tokens = slot.size(0);
    STD_TORCH_CHECK(is(qkv, ScalarType::Float, 2) && is(slot, ScalarType::Long, 1) && qkv.size(0) >= tokens &&
                        qkv.size(1) % dim == 0 && qkv.size(1) / dim >= 2 * kv_heads,
                    "qkv must be float32[>= T, (heads + 2 kv heads) * dim], slot int64[T]");
    STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "cos and sin come together");
    for (const auto* table : {&cos, &sin})
        STD_TORCH_CHECK(!*table || ((*table)->scalar_type() == ScalarType::Float && (*table)->is_contiguous() &&
                                    (*table)->numel() >= tokens * (dim / 2) && dim % 2 == 0),
                        "cos and sin must be float32[>= T, dim / 2]");
    const NewKeys n{qkv.mutable_data_ptr<float>(), cos ? cos->const_data_ptr<float>() : nullptr,
                    sin ? sin->const_data_ptr<float>() : nullptr, slot.const_data_ptr<int64_t>(),
                    keys.mutable_data_ptr(), values.mutable_data_ptr(), qkv.stride(0), qkv.size(1) / dim - 2 * kv_heads,
                    kv_heads, dim, size, keys.stride(0), keys.scalar_type() == ScalarType::BFloat16};
    for (int64_t token = 0; token < tokens; ++token)
        STD_TORCH_CHECK(n.slot[token] < keys.size(0) * size, "a slot lies outside the cache");
    const Level* level = current;
    each_rows(tokens, qkv.size(1), [&](int64_t begin, int64_t end) { level->place(n, begin, end); });
}

void norm(Tensor x, const std::optional<Tensor>& delta, const Tensor& weight, double eps, Tensor out) {
    const bool bf16 = x.scalar_type() == ScalarType::BFloat16;
    const int64_t rows = x.size(0), size = x.size(1);
    STD_TORCH_CHECK((bf16 || x.scalar_type() == ScalarType::Float) && x.dim() == 2 && x.stride(1) == 1,
                    "x must be float32 or bfloat16[rows, size]");
    STD_TORCH_CHECK(is(out, ScalarType::Float, 2) && out.size(0) == rows && out.size(1) == size &&
                        is(weight, ScalarType::Float, 1) && weight.size(0) == size &&
                        (!delta || (is(*delta, ScalarType::Float, 2) && delta->size(0) == rows && delta->size(1) == size)),
                    "delta and out must be float32[rows, size], weight float32[size]");
    char* data = static_cast<char*>(x.mutable_data_ptr());
    const float* change = delta ? delta->const_data_ptr<float>() : nullptr;
    const float* scales = weight.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    const int64_t x_stride = x.stride(0), delta_stride = delta ? delta->stride(0) : 0, out_stride = out.stride(0);
    const Level* level = current;
    each_rows(rows, size, [&](int64_t begin, int64_t end) {
        level->norm(data + begin * x_stride * (bf16 ? 2 : 4), x_stride, bf16,
                    change ? change + begin * delta_stride : nullptr, delta_stride, scales, static_cast<float>(eps),
                    to + begin * out_stride, out_stride, end - begin, size);
    });
}

void gate(const Tensor& x, Tensor out) {
    STD_TORCH_CHECK(is(x, ScalarType::Float, 2) && is(out, ScalarType::Float, 2) && x.size(0) == out.size(0) &&
                        x.size(1) == 2 * out.size(1),
                    "x must be float32[rows, 2 * size], out float32[rows, size]");
    const float* from = x.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    const int64_t x_stride = x.stride(0), out_stride = out.stride(0), size = out.size(1);
    const Level* level = current;
    each_rows(x.size(0), 2 * size, [&](int64_t begin, int64_t end) {
        level->gate(from + begin * x_stride, x_stride, to + begin * out_stride, out_stride, end - begin, size);
    });
}

// The product of the kind whose size the packed weights have.
void linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, Tensor out) {
    if (packed.scalar_type() != ScalarType::Byte) return matmul(x, packed, bias, out);
    const int64_t columns = (out.size(1) + PANEL - 1) / PANEL * PANEL, runs = (x.size(1) + RUN8 - 1) / RUN8;
    return packed.numel() == columns * runs * (4 + RUN8) ? matmul8(x, packed, bias, out)
                                                              : matmul4(x, packed, bias, out);
}

// One layer: the operations above in their order, so a row has the bits that they give it. x += delta first if `add`;
// at the end delta is what is yet to be added. The last five tensors are memory for what lies between.
void layer(Tensor x, bool add, Tensor delta, const Tensor& attention_norm, const Tensor& qkv_weight,
           const std::optional<Tensor>& qkv_bias, const Tensor& output_weight, const std::optional<Tensor>& output_bias,
           const Tensor& mlp_norm, const Tensor& up_weight, const std::optional<Tensor>& up_bias,
           const Tensor& down_weight, const std::optional<Tensor>& down_bias, const Tensor& cos, const Tensor& sin,
           const Tensor& slot, Tensor keys, Tensor values, const Tensor& cu_q, const Tensor& kv_len,
           const Tensor& table, double eps, double scale, int64_t window, Tensor normed, Tensor qkv, Tensor attended,
           Tensor gates, Tensor gated) {
    norm(x, add ? std::optional<Tensor>(delta) : std::nullopt, attention_norm, eps, normed);
    linear(normed, qkv_weight, qkv_bias, qkv);
    place(qkv, cos, sin, slot, keys, values);
    attend(qkv, keys, values, cu_q, kv_len, table, scale, window, attended);
    linear(attended, output_weight, output_bias, delta);
    norm(x, delta, mlp_norm, eps, normed);
    linear(normed, up_weight, up_bias, gates);
    gate(gates, gated);
    linear(gated, down_weight, down_bias, delta);
}

std::string levels() {
    std::string names;
    for (const Level* level : supported()) names += (names.empty() ? "" : " ") + std::string(level->name);
    return names;
}

// Whether there is such a level on this processor, which is then used.
bool use_level(std::string name) {
    for (const Level* level : supported())
        if (name == level->name) {
            current = level;
            return true;
        }
    return false;
}

}  // namespace
}  // namespace evenflow

STABLE_TORCH_LIBRARY(evenflow, library) {
    library.def("matmul(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) out) -> ()");
    library.def("matmul8(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) out) -> ()");
    library.def("matmul4(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) out) -> ()");
    library.def(
        "attend(Tensor q, Tensor keys, Tensor values, Tensor cu_q, Tensor kv_len, Tensor table, float scale, "
        "int window, Tensor(a!) out) -> ()");
    library.def(
        "place(Tensor(a!) qkv, Tensor? cos, Tensor? sin, Tensor slot, Tensor(b!) keys, Tensor(c!) values) -> ()");
    library.def("norm(Tensor(a!) x, Tensor? delta, Tensor weight, float eps, Tensor(b!) out) -> ()");
    library.def("gate(Tensor x, Tensor(a!) out) -> ()");
    library.def(
        "layer(Tensor(a!) x, bool add, Tensor(b!) delta, Tensor attention_norm, Tensor qkv_weight, Tensor? qkv_bias, "
        "Tensor output_weight, Tensor? output_bias, Tensor mlp_norm, Tensor up_weight, Tensor? up_bias, "
        "Tensor down_weight, Tensor? down_bias, Tensor cos, Tensor sin, Tensor slot, Tensor(c!) keys, "
        "Tensor(d!) values, Tensor cu_q, Tensor kv_len, Tensor table, float eps, float scale, int window, "
        "Tensor(e!) normed, Tensor(f!) qkv, Tensor(g!) attended, Tensor(h!) gates, Tensor(i!) gated) -> ()");
    library.def("levels() -> str");
    library.def("use_level(str name) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(evenflow, CPU, library) {
    library.impl("matmul", TORCH_BOX(&evenflow::matmul));
    library.impl("matmul8", TORCH_BOX(&evenflow::matmul8));
    library.impl("matmul4", TORCH_BOX(&evenflow::matmul4));
    library.impl("attend", TORCH_BOX(&evenflow::attend));
    library.impl("place", TORCH_BOX(&evenflow::place));
    library.impl("norm", TORCH_BOX(&evenflow::norm));
    library.impl("gate", TORCH_BOX(&evenflow::gate));
    library.impl("layer", TORCH_BOX(&evenflow::layer));
}

STABLE_TORCH_LIBRARY_IMPL(evenflow, CompositeExplicitAutograd, library) {
    library.impl("levels", TORCH_BOX(&evenflow::levels));
    library.impl("use_level", TORCH_BOX(&evenflow::use_level));
}
