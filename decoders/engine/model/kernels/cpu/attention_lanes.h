// How queries and keys, weights and values are multiplied: numbers as float32, pairs of bfloat16, or tiles of such pairs.
#pragma once
#include <algorithm>
#include <bit>
#include <type_traits>

#include "tiles.h"
#include "vector_math.h"

namespace {

constexpr long PLACES = 64;  // number of places of a block, a multiple of LANES in every variant
constexpr int TILE = 6;      // number of queries of a tile of vectors

inline long round_up(long count, long multiple) { return (count + multiple - 1) / multiple * multiple; }

inline void multiply_all(float* numbers, long count, float factor) {
    for (long i = 0; i < count; i += LANES) store(numbers + i, load(numbers + i) * broadcast(factor));
}

// Memory that is read after the current computation. Each step of the computation prefetches a few lines of it. If all lines were prefetched
// at once, the processor would wait for them, and the computation would take half as long again on a Zen 5.
struct Ahead {
    const char *line = nullptr, *end = nullptr;
    long lines = 0;  // number of lines of a step
    Ahead() = default;
    template <class C>
    Ahead(const C* from, long count, long lines) : line((const char*)from), end((const char*)(from + count)), lines(lines) {}
    void step(long steps = 1) {
        if (line < end)
            for (long i = 0; i < steps * lines; i++, line += 64) prefetch<false>(line);
    }
};

// The numbers that one instruction multiplies in a lane of 32 bits: one as float32, or a pair of bfloat16. A pair is of successive numbers
// of a key and a query, or of the values of successive places and their weights.
template <class C>
struct Lane {
    static constexpr int NUMBERS = 1;
    static constexpr bool TILES = false;  // whether lanes are multiplied in tiles of AMX
    static constexpr int QUERIES = TILE;  // most queries that are multiplied at once
    static constexpr int LENGTH = 1;      // the number of lanes of a key or a query is a multiple of this
    static constexpr int STEP = PLACES;   // number of places whose values are added at once, in tiles
    static Vec multiply_add(Vec a, Vec b, Vec sums) { return ::multiply_add(a, b, sums); }
    static void round_weights(float*, long, long) {}
    // Loads V vectors of the values of a place.
    template <int V>
    static void load_values(const C* place, const C*, Vec (&to)[V]) {
        for (int v = 0; v < V; v++) to[v] = load(place + v * LANES);
    }
    static long sum_of(long d) { return d; }
};
#if defined(__AVX512BF16__)
template <>
struct Lane<bfloat16> {
    static constexpr int NUMBERS = 2;
#if defined(__AMX_BF16__)
    static constexpr bool TILES = true;
    static constexpr int QUERIES = 16, LENGTH = 16, STEP = 32;
#else
    static constexpr bool TILES = false;
    static constexpr int QUERIES = TILE, LENGTH = 1, STEP = PLACES;
#endif
    static Vec multiply_add(Vec a, Vec b, Vec sums) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }
    // Rounds the weights of a block of places, in place. The weights of all places but first … last - 1 become zero.
    static void round_weights(float* own, long first, long last) {
        std::fill(own, own + first, 0.0f);
        std::fill(own + last, own + PLACES, 0.0f);
        for (int i = 0; i < PLACES; i += 2 * LANES) store(own + i / 2, (Vec)_mm512_cvtne2ps_pbh(load(own + i + LANES), load(own + i)));
    }
    // Loads the values of two places, as V vectors of pairs.
    template <int V>
    static void load_values(const bfloat16* place, const bfloat16* next, Vec (&to)[V]) {
        for (int v = 0; v < V; v += 2) {
            __m512i a = (__m512i)load_pairs(place + v * LANES), b = (__m512i)load_pairs(next + v * LANES);
            to[v] = (Vec)_mm512_unpacklo_epi16(a, b), to[v + 1] = (Vec)_mm512_unpackhi_epi16(a, b);
        }
    }
    // The index in a query's sums of the sum for number d of the values.
    static long sum_of(long d) { return d / 32 * 32 + d / 4 % 2 * 16 + d % 32 / 8 * 4 + d % 4; }

#if defined(__AMX_BF16__)
    // Configures this thread's tiles for `queries` queries: 0 to 3 are sums, 4 is of queries or weights, 5 and 6 are of keys or values. With
    // few queries, 5 is of keys, 6 of queries, and 7 of sums.
    static void configure(long queries) {
        configure_tiles([=](int t) { return t < 5 ? std::min(queries, long(QUERIES)) : LENGTH; }, [](int) { return 64; });
    }
    static void release() { _tile_release(); }

    // The scores of `count` queries for all places of a block. A sum adds 32 products at a time.
    static void score(int count, const uint32_t* queries, long lanes, const float* keys, float scale, float* scores, Ahead& ahead) {
        static_assert(PLACES == 4 * LANES);
        constexpr long STRIDE = PLACES * sizeof(float);
        written(keys);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (long d = 0; d < lanes; d += LENGTH, keys += LENGTH * PLACES) {
            _tile_loadd(4, queries + d, lanes * sizeof *queries);
            _tile_loadd(5, keys, STRIDE);
            _tile_loadd(6, keys + LANES, STRIDE);
            _tile_dpbf16ps(0, 4, 5);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(5, keys + 2 * LANES, STRIDE);
            _tile_loadd(6, keys + 3 * LANES, STRIDE);
            _tile_dpbf16ps(2, 4, 5);
            _tile_dpbf16ps(3, 4, 6);
            ahead.step(12);
        }
        _tile_stored(0, scores, STRIDE);
        _tile_stored(1, scores + LANES, STRIDE);
        _tile_stored(2, scores + 2 * LANES, STRIDE);
        _tile_stored(3, scores + 3 * LANES, STRIDE);
        multiply_all(scores, count * PLACES, scale);
    }

    // Puts up to QUERIES queries in pairs for `score_few`. to: [lanes, QUERIES].
    static void pair_queries(const uint32_t* queries, long count, long lanes, uint32_t* to) {
        for (long d = 0; d < lanes; d++)
            for (long n = 0; n < QUERIES; n++) *to++ = n < count ? queries[n * lanes + d] : 0;
    }

    // The same scores as those of `score`, for up to QUERIES queries, from keys as they lie in memory.
    static void score_few(
        long count, const uint32_t* queries, long lanes, const bfloat16* keys, long stride, float scale, float* scores, Ahead& ahead) {
        alignas(64) float sums[LANES][QUERIES];
        written(queries);
        for (long place = 0; place < PLACES; place += LANES, keys += LANES * stride) {
            _tile_zero(7);
            for (long d = 0; d < lanes; d += LENGTH) {
                _tile_loadd(5, keys + 2 * d, stride * sizeof *keys);
                _tile_loadd(6, queries + d * QUERIES, QUERIES * sizeof *queries);
                _tile_dpbf16ps(7, 5, 6);
                ahead.step(6);
            }
            _tile_stored(7, sums[0], sizeof sums[0]);
            transpose_rows(sums[0], QUERIES, round_up(count, 4), [] {}, [&](long n, Vec v) {
                store(scores + n * PLACES + place, v * broadcast(scale));
            });
        }
    }

    // Pairs the values of a step's places. slots: of the places; a slot of -1 has no values. to: [STEP / 2, wide]. Returns whether all
    // values are finite, if CHECKED.
    template <bool CHECKED>
    static bool pair_values(const bfloat16* values, long stride, const int* slots, long width, uint32_t* to, long wide, Ahead& ahead) {
        constexpr long UNIT = 2 * LANES;
        static const bfloat16 none[UNIT] = {};
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        __mmask32 infinite = 0;
        for (long i = 0; i < STEP; i += 2, to += wide) {
            ahead.step();
            for (long d = 0; d < wide; d += UNIT) {
                bfloat16 rest[2][UNIT] = {};
                const bfloat16* of[2];
                for (int n = 0; n < 2; n++) {
                    of[n] = slots[i + n] < 0 ? none : values + slots[i + n] * stride + d;
                    if (of[n] != none && d + UNIT > width)  // values are not read beyond their end
                        of[n] = (bfloat16*)memcpy(rest[n], of[n], (width - d) * sizeof(bfloat16));
                }
                Vec pairs[2];
                load_values(of[0], of[1], pairs);
                for (int n = 0; n < 2; n++) {
                    store((float*)to + d + n * LANES, pairs[n]);
                    if constexpr (CHECKED) infinite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512((__m512i)pairs[n], exponent), exponent);
                }
            }
        }
        return !infinite;
    }

    // Adds the values of some steps, times their weights [QUERIES, PLACES], to the sums of all queries, or only of those with a bit in `chosen`.
    template <bool ALL>
    static void add_pairs(const float* weights, const uint32_t* pairs, long steps, uint32_t chosen, float* sums, long wide, Ahead& ahead) {
        alignas(64) float results[2][QUERIES][LANES];
        const long of_row = wide * sizeof(float), of_step = STEP / 2 * wide;
        written(pairs);
        for (long d = 0; d < wide; d += 2 * LANES, sums += 2 * LANES, pairs += 2 * LANES) {
            _tile_loadd(0, sums, of_row);
            _tile_loadd(1, sums + LANES, of_row);
            for (long step = 0; step < steps; step++) {
                _tile_loadd(4, weights + step * STEP / 2, PLACES * sizeof(float));
                _tile_loadd(5, pairs + step * of_step, of_row);
                _tile_loadd(6, pairs + step * of_step + LANES, of_row);
                _tile_dpbf16ps(0, 4, 5);
                _tile_dpbf16ps(1, 4, 6);
                ahead.step(8);
            }
            _tile_stored(0, ALL ? sums : results[0][0], ALL ? of_row : sizeof results[0][0]);
            _tile_stored(1, ALL ? sums + LANES : results[1][0], ALL ? of_row : sizeof results[1][0]);
            for (uint32_t bits = ALL ? 0 : chosen; bits; bits &= bits - 1)
                for (int n = std::countr_zero(bits), v = 0; v < 2; v++) store(sums + n * wide + v * LANES, load(results[v][n]));
        }
    }
#endif
};
#endif

}  // namespace
