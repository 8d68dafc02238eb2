// y = x @ W.T in bfloat16 with AMX. AMX reads tiles of 16 outputs and 32 inputs of W as W lies in memory. Rows of x are rearranged once, to
// [groups of up to 16 rows, steps of 32 inputs, 16 pairs of inputs, rows of a group]. A sum adds its steps in order, in any tile and for
// any number of rows.
#pragma once
#include "parallel.h"
#include "vectors.h"

#if defined(__AMX_BF16__)
namespace {

struct Tiles {
    static constexpr long OUTPUTS = 16, INPUTS = 32, PAIRS = INPUTS / 2;
    long inputs, steps, groups, columns;  // columns: number of rows of x in a group

    Tiles(long rows, long inputs)
        : inputs(inputs), steps((inputs + INPUTS - 1) / INPUTS), groups((rows + 15) / 16), columns(groups ? (rows + groups - 1) / groups : 0) {}

    long of_group() const { return steps * PAIRS * columns; }

    // to: [groups, steps, PAIRS, columns] pairs, padded with zeros.
    void arrange(const bfloat16* x, long rows, uint32_t* to, int threads) const {
        in_threads(rows * inputs > 32768 ? threads : 1, [&](int thread, int of) {
            long begin, end;
            share_of(groups * columns, 1, thread, of, begin, end);
            for (long row = begin; row < end; row++) {
                uint32_t* pair = to + row / columns * of_group() + row % columns;
                long given = row < rows ? inputs : 0;
                for (long k = 0; k < steps * INPUTS; k += 2, pair += columns) {
                    *pair = 0;
                    if (k < given) memcpy(pair, x + row * inputs + k, std::min(given - k, 2l) * sizeof *x);
                }
            }
        });
    }

    // Configures this thread's tiles until they are released: 0 to 3 are sums, 4 is a part of W, 5 to 7 are parts of x.
    void configure() const {
        struct alignas(64) {
            uint8_t palette = 1, rest[15] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } tiles;
        for (int t = 0; t < 8; t++) tiles.bytes[t] = t == 4 ? 64 : 4 * columns, tiles.rows[t] = 16;
        written(&tiles);
        _tile_loadconfig(&tiles);
    }

    // Tells the compiler that `memory` is read, because the compiler does not know that tiles are loaded from there.
    static void written(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

    // Multiplies up to 16 outputs by N groups of rows. y: [rows, 16].
    template <int N>
    void multiply_groups(const bfloat16* w, long stride, long outputs, const uint32_t* x, bool first, long rows, float* y) const {
        alignas(64) float sums[N][16][16];
        alignas(64) bfloat16 rest[OUTPUTS][INPUTS];
        const long of_row = 4 * columns;
        _tile_zero(0);
        if constexpr (N > 1) _tile_zero(1);
        if constexpr (N > 2) _tile_zero(2);
        if constexpr (N > 3) _tile_zero(3);
        for (long step = 0; step < steps; step++, w += INPUTS, x += PAIRS * columns) {
            if (long left = std::min(inputs - step * INPUTS, INPUTS); left == INPUTS && outputs == OUTPUTS) {
                _tile_loadd(4, w, stride * sizeof *w);
                if (first) for (long o = OUTPUTS; o < 2 * OUTPUTS; o++) prefetch<false>(w + o * stride);
            } else {  // the rest, without reading beyond the end
                memset(rest, 0, sizeof rest);
                for (long o = 0; o < outputs; o++) memcpy(rest[o], w + o * stride, left * sizeof *w);
                written(rest);
                _tile_loadd(4, rest, sizeof rest[0]);
            }
            _tile_loadd(5, x, of_row);
            _tile_dpbf16ps(0, 4, 5);
            if constexpr (N > 1) {
                _tile_loadd(6, x + of_group(), of_row);
                _tile_dpbf16ps(1, 4, 6);
            }
            if constexpr (N > 2) {
                _tile_loadd(7, x + 2 * of_group(), of_row);
                _tile_dpbf16ps(2, 4, 7);
            }
            if constexpr (N > 3) {
                _tile_loadd(5, x + 3 * of_group(), of_row);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, sums[0], sizeof sums[0][0]);
        if constexpr (N > 1) _tile_stored(1, sums[1], sizeof sums[0][0]);
        if constexpr (N > 2) _tile_stored(2, sums[2], sizeof sums[0][0]);
        if constexpr (N > 3) _tile_stored(3, sums[3], sizeof sums[0][0]);
        for (long row = 0; row < rows; row++)
            for (long o = 0; o < OUTPUTS; o++) y[row * OUTPUTS + o] = sums[row / columns][o][row % columns];
    }

    void multiply(const bfloat16* w, long stride, long outputs, const uint32_t* x, long rows, float* y) const {
        for (long group = 0; group < groups; group += 4, rows -= 4 * columns, x += 4 * of_group(), y += 4 * columns * OUTPUTS) {
            const long some = std::min(rows, 4 * columns);
            switch (std::min(groups - group, 4l)) {
                case 1: multiply_groups<1>(w, stride, outputs, x, !group, some, y); break;
                case 2: multiply_groups<2>(w, stride, outputs, x, !group, some, y); break;
                case 3: multiply_groups<3>(w, stride, outputs, x, !group, some, y); break;
                default: multiply_groups<4>(w, stride, outputs, x, !group, some, y);
            }
        }
    }
};

}  // namespace
#endif
