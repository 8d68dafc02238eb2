// Products in bfloat16 and int8 with AMX. A tile of AMX is a small matrix, of 16 rows of 64 bytes. One instruction multiplies a tile by a tile
// that has pairs of successive numbers (with int8, fours) of 16 columns in each row, and adds the result to a tile of sums.
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

// y = x @ W.T. AMX reads tiles of 16 outputs and 64 bytes of W as W lies in memory. Rows of x are rearranged once, to [groups of up to ROWS
// rows, steps of INPUTS, 16 pairs or fours, columns]. A sum adds its steps in order, in any tile and for any number of rows.
//
// If W is int8, x has 16-bit integers, and a row has two columns: the upper bytes of its integers, and the lower bytes, which have a sign, too.
// The sums of both are exact for up to MOST_INPUTS inputs.
template <class W>
struct Tiles {
    static constexpr long OUTPUTS = 32, INPUTS = 64 / sizeof(W), MOST_INPUTS = 1 << 16;  // outputs: of two tiles of W
    static constexpr long PARTS = sizeof(W) == 1 ? 2 : 1, ROWS = 16 / PARTS;             // parts: columns of a row
    long inputs, steps, groups, columns;                                                 // columns: of a group

    Tiles(long rows, long inputs)
        : inputs(inputs), steps((inputs + INPUTS - 1) / INPUTS), groups((rows + ROWS - 1) / ROWS), columns(PARTS * std::min(rows, ROWS)) {}

    long of_group() const { return steps * 16 * columns; }
    long words() const { return groups * of_group(); }

    // x: [rows, inputs], with `stride` numbers from row to row. to: `words()` words of 32 bits, padded with zeros.
    template <class X>
    void arrange(const X* x, long stride, long rows, uint32_t* to, int threads) const {
        in_threads(rows * inputs > 32768 ? threads : 1, [&](int thread, int of) {
            long begin, end;
            share_of(groups, 1, thread, of, begin, end);
            alignas(64) W step[16][INPUTS] = {};
            for (long group = begin; group < end; group++) {
                const long count = std::min(rows - group * ROWS, ROWS);
                uint32_t* words = to + group * of_group();
                for (long k = 0; k < inputs; k += INPUTS, words += 16 * columns) {
                    const long left = std::min(inputs - k, INPUTS);
                    if (count < ROWS || left < INPUTS) memset(step, 0, sizeof step);
                    for (long row = 0; row < count; row++) {
                        const X* from = x + (group * ROWS + row) * stride + k;
                        for (long i = 0; i < left; i++) {
                            W& lower = step[(PARTS - 1) * columns / 2 + row][i] = W(from[i]);
                            if constexpr (PARTS == 2) step[row][i] = W((from[i] - lower) >> 8);
                        }
                    }
                    const float* all = (const float*)step[0];
                    if (columns == 16) transpose_rows(all, 16, 16, [] {}, [&](long i, Vec v) { store((float*)words + 16 * i, v); });
                    else
                        for (long i = 0; i < 16 * columns; i++) memcpy(words + i, all + i % columns * 16 + i / columns, sizeof *words);
                }
            }
        });
    }

    // Tiles 0 to 3 are sums, 4 and 5 are parts of W, 6 and 7 are groups of x.
    void configure() const {
        configure_tiles([](int) { return 16; }, [&](int t) { return t / 2 == 2 ? 64 : 4 * columns; });
    }

    // Multiplies up to OUTPUTS outputs by N groups of rows, one or two. y: [rows, OUTPUTS].
    template <int N>
    void multiply_groups(const W* w, long stride, long outputs, const uint32_t* x, bool first, long rows, float* y) const {
        alignas(64) uint32_t sums[16][16];  // float32, or int32 if W is int8
        alignas(64) W rest[OUTPUTS][INPUTS];
        const long of_row = 4 * columns;
        _tile_zero(0);
        _tile_zero(2);
        if constexpr (N > 1) {
            _tile_zero(1);
            _tile_zero(3);
        }
        for (long step = 0; step < steps; step++, w += INPUTS, x += 16 * columns) {
            const W* from = w;
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
            if constexpr (N > 1) _tile_loadd(7, x + of_group(), of_row);
            if constexpr (PARTS == 2) {
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(2, 5, 6);
                if constexpr (N > 1) {
                    _tile_dpbssd(1, 4, 7);
                    _tile_dpbssd(3, 5, 7);
                }
            } else {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(2, 5, 6);
                if constexpr (N > 1) {
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
        auto take = [&](long row, long output) {
            alignas(64) float of_column[16][16];
            transpose_rows((const float*)sums[0], 16, (columns + 3) / 4 * 4, [] {}, [&](long i, Vec v) { store(of_column[i], v); });
            for (long i = 0; i < columns / PARTS && row + i < rows; i++) {
                Vec sum = load(of_column[i]);
                if constexpr (PARTS == 2) sum = multiply_add(as_vector((Sums)sum), broadcast(256), as_vector((Sums)load(of_column[columns / 2 + i])));
                store(y + (row + i) * OUTPUTS + output, sum);
            }
        };
        _tile_stored(0, sums[0], sizeof sums[0]);
        take(0, 0);
        _tile_stored(2, sums[0], sizeof sums[0]);
        take(0, 16);
        if constexpr (N > 1) {
            _tile_stored(1, sums[0], sizeof sums[0]);
            take(ROWS, 0);
            _tile_stored(3, sums[0], sizeof sums[0]);
            take(ROWS, 16);
        }
    }

    void multiply(const W* w, long stride, long outputs, const uint32_t* x, long rows, float* y) const {
        for (bool first = true; rows > 0; first = false, rows -= 2 * ROWS, x += 2 * of_group(), y += 2 * ROWS * OUTPUTS) {
            if (rows > ROWS) multiply_groups<2>(w, stride, outputs, x, first, rows, y);
            else multiply_groups<1>(w, stride, outputs, x, first, rows, y);
        }
    }
};

}  // namespace
#endif
