// Products in bfloat16 with AMX. A tile of AMX is a small matrix. One instruction multiplies a tile of 32 numbers per row by a tile of 16
// pairs of numbers per column, and adds the result to a tile of sums.
#pragma once
#include "parallel.h"
#include "vector_math.h"

#if defined(__AMX_BF16__)
namespace {

// Tells the compiler that `memory` is read, because the compiler does not know that tiles are loaded from there.
inline void written(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// Configures this thread's tiles until they are released. rows(t), bytes(t): number of rows of tile t, and bytes of a row.
template <class Rows, class Bytes>
inline void configure_tiles(Rows rows, Bytes bytes) {
    struct alignas(64) {
        uint8_t palette = 1, rest[15] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } tiles;
    for (int t = 0; t < 8; t++) tiles.bytes[t] = uint16_t(bytes(t)), tiles.rows[t] = uint8_t(rows(t));
    written(&tiles);
    _tile_loadconfig(&tiles);
}

// y = x @ W.T. AMX reads tiles of 16 outputs and 32 inputs of W as W lies in memory. Rows of x are rearranged once, to [groups of up to 16
// rows, steps of 32 inputs, 16 pairs of inputs, rows of a group]. A sum adds its steps in order, in any tile and for any number of rows.
struct Tiles {
    static constexpr long OUTPUTS = 32, INPUTS = 32, PAIRS = INPUTS / 2;  // outputs: of two tiles of W
    long inputs, steps, groups, columns;  // columns: number of rows of x in a group

    Tiles(long rows, long inputs)
        : inputs(inputs), steps((inputs + INPUTS - 1) / INPUTS), groups((rows + 15) / 16), columns(std::min(rows, 16L)) {}

    long of_group() const { return steps * PAIRS * columns; }

    // to: [groups, steps, PAIRS, columns] pairs, padded with zeros.
    void arrange(const bfloat16* x, long rows, uint32_t* to, int threads) const {
        in_threads(rows * inputs > 32768 ? threads : 1, [&](int thread, int of) {
            long begin, end;
            share_of(groups, 1, thread, of, begin, end);
            for (long group = begin; group < end; group++) {
                const bfloat16* from = x + group * columns * inputs;
                uint32_t* pairs = to + group * of_group();
                const long count = std::min(rows - group * columns, columns), whole = count == 16 && inputs % 2 == 0 ? inputs / 8 * 8 : 0;
                transpose_rows((const float*)from, inputs / 2, whole / 2, [] {}, [&](long i, Vec v) { store((float*)pairs + i * columns, v); });
                for (long row = 0; row < columns; row++)
                    for (long k = whole, given = row < count ? inputs : 0; k < steps * INPUTS; k += 2) {
                        uint32_t& pair = pairs[k / 2 * columns + row] = 0;
                        if (k < given) memcpy(&pair, from + row * inputs + k, std::min(given - k, 2L) * sizeof *from);
                    }
            }
        });
    }

    // Tiles 0 to 3 are sums, 4 and 5 are parts of W, 6 and 7 are parts of x.
    void configure() const {
        configure_tiles([](int) { return 16; }, [&](int t) { return t / 2 == 2 ? 64 : 4 * columns; });
    }

    // Multiplies up to OUTPUTS outputs by N groups of rows, one or two. y: [rows, OUTPUTS].
    template <int N>
    void multiply_groups(const bfloat16* w, long stride, long outputs, const uint32_t* x, bool first, long rows, float* y) const {
        alignas(64) float sums[16][16];
        alignas(64) bfloat16 rest[OUTPUTS][INPUTS];
        const long of_row = 4 * columns;
        _tile_zero(0);
        _tile_zero(2);
        if constexpr (N > 1) {
            _tile_zero(1);
            _tile_zero(3);
        }
        for (long step = 0; step < steps; step++, w += INPUTS, x += PAIRS * columns) {
            const bfloat16* from = w;
            long of_output = stride;
            if (long left = std::min(inputs - step * INPUTS, INPUTS); left < INPUTS || outputs < OUTPUTS) {  // nothing is read beyond the end
                memset(rest, 0, sizeof rest);
                for (long o = 0; o < outputs; o++) memcpy(rest[o], w + o * stride, left * sizeof *w);
                written(rest);
                from = rest[0], of_output = INPUTS;
            } else if (first) {
                for (long o = OUTPUTS; o < 2 * OUTPUTS; o++) prefetch<false>(w + o * stride);
            }
            _tile_loadd(4, from, of_output * sizeof *w);
            _tile_loadd(5, from + 16 * of_output, of_output * sizeof *w);
            _tile_loadd(6, x, of_row);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (N > 1) {
                _tile_loadd(7, x + of_group(), of_row);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        auto take = [&](long row, long output) {
            transpose_rows(sums[0], 16, 16, [] {}, [&](long i, Vec v) {
                if (row + i < rows) store(y + (row + i) * OUTPUTS + output, v);
            });
        };
        _tile_stored(0, sums[0], sizeof sums[0]);
        take(0, 0);
        _tile_stored(2, sums[0], sizeof sums[0]);
        take(0, 16);
        if constexpr (N > 1) {
            _tile_stored(1, sums[0], sizeof sums[0]);
            take(16, 0);
            _tile_stored(3, sums[0], sizeof sums[0]);
            take(16, 16);
        }
    }

    void multiply(const bfloat16* w, long stride, long outputs, const uint32_t* x, long rows, float* y) const {
        for (long group = 0; group < groups; group += 2, rows -= 32, x += 2 * of_group(), y += 32 * OUTPUTS) {
            if (rows > 16) multiply_groups<2>(w, stride, outputs, x, !group, rows, y);
            else multiply_groups<1>(w, stride, outputs, x, !group, rows, y);
        }
    }
};

}  // namespace
#endif
