// The kernels of one level, in vectors of the compiler's own (GCC and Clang).
#include "level.h"

#if defined(LEVEL_BF16)
#define LEVEL avx512bf16
#define LANES 16
#elif defined(LEVEL_VNNI)
#define LEVEL avx512vnni
#define LANES 16
#elif defined(LEVEL_AVX512)
#define LEVEL avx512
#define LANES 16
#elif defined(LEVEL_AVX2)
#define LEVEL avx2
#define LANES 8
#else
#define LEVEL baseline
#define LANES 4
#endif
#include "attention.h"
#include "matmul.h"
#include "rows.h"
#include "whole.h"

#define NAME_OF(level) NAME_AS(level)
#define NAME_AS(level) level_##level
#define TEXT_OF(level) TEXT_AS(level)
#define TEXT_AS(level) #level

namespace evenflow {
extern const Level NAME_OF(LEVEL);
const Level NAME_OF(LEVEL) = {TEXT_OF(LEVEL), matmul,   matmul_pairs,
                              narrow_rows,    attend,   place,
                              norm,           gate,     quantise,
                              matmul8,        matmul4,  sizeof(Sums8::Value) == 2,
                              sizeof(Sums4::Value) == 2};
}  // namespace evenflow
