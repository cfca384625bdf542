// What products of weights of all kinds have in common: panels of columns, read in whole or in parts, for tiles of rows.
#pragma once

#include "level.h"
#include "vectors.h"

namespace {

using evenflow::PANEL;

// Vectors of a panel.
constexpr int ACROSS = PANEL / LANES;

// What a tile asks the memory for, a step's worth in each step. A panel that is read at once: its own lines, a little
// before they are read. One that is read in several parts: the next panel, if it is given, from one end to the other, a
// part at a time, since its own lines would be waited for in each part; and its own if it is `cold`, the first one.
template <int VECTORS, int WIDE>
class Ahead {
  public:
    // `near`: memory that is at hand.
    ALWAYS Ahead(const char* next, bool cold, const void* near)
        : at_(next ? next : static_cast<const char*>(near)), pace_(next ? WIDE * LANES * 4 : 0), own_(cold ? AHEAD : 0) {}
    // `from`: what this step reads, in panels `panel_bytes` apart.
    ALWAYS void step(const void* from, int64_t panel_bytes = 0) {
        _Pragma("GCC unroll 16") for (int v = 0; v < VECTORS; ++v) {
            if (v * LANES % (LINE / 4)) continue;
            const char* own = static_cast<const char*>(from) + v / WIDE * panel_bytes + v % WIDE * LANES * 4;
            if (WIDE == ACROSS) {
                soon(own);
            } else {
                __builtin_prefetch(own + own_);
                __builtin_prefetch(at_ + v * LANES * 4, 0, 2);
            }
        }
        at_ += pace_;
    }

  private:
    const char* at_;
    int64_t pace_, own_;
};

// Rows in as few tiles of at most `tallest` as there can be, all as high as each other or a row less: calls run(first
// row, height of a tile, tiles) for each height.
template <typename Run>
ALWAYS void each_height(int64_t rows, int64_t tallest, Run run) {
    const int64_t count = (rows + tallest - 1) / tallest, height = rows / count, higher = rows % count;
    if (higher) run(0, height + 1, higher);
    run(higher * (height + 1), height, count - higher);
}

}  // namespace
