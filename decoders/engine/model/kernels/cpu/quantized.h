// y = x @ W.T + bias, where W has 8 or 4 bits and a scale per output, or per output and group of inputs.
//
// Rows of x are rounded to 16-bit integers with a scale per row. Products of integers are added exactly; then a group's sum is converted to
// float32. If a row needs more precision, a second row of integers holds the rounding errors of the first.
#pragma once
#include <numeric>

#include "products.h"

namespace {

using Shorts = int16_t __attribute__((vector_size(4 * LANES)));

inline Shorts load_shorts(const void* from) { return load_as<Shorts>(from); }
inline Shorts widen(const int8_t* from) {
#if defined(__AVX512F__)
    return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
#elif defined(__ARM_NEON)
    return vmovl_s8(vld1_s8(from));
#else
    return Shorts{from[0], from[1], from[2], from[3], from[4], from[5], from[6], from[7]};
#endif
}
inline Sums no_sums() { return Sums{}; }
template <int PLACE>
inline Shorts four_bits(Shorts packed) {
    using Words = uint16_t __attribute__((vector_size(4 * LANES)));
    Words shifted = (Words)packed >> 4 * PLACE;
    return (Shorts)(PLACE == 3 ? shifted : shifted & 15);
}

// Multiplies integers, and adds the products of every two neighbours.
inline Sums multiply_pairs(Shorts a, Shorts b) {
#if defined(__AVX512F__)
    return (Sums)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Sums)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__ARM_NEON)
    return vmlal_s16(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vget_high_s16(a), vget_high_s16(b));
#else
    Sums x = (Sums)a, y = (Sums)b;
    return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}
inline Sums add_products(Shorts a, Shorts b, Sums sums) {
#if defined(__AVX512VNNI__)
    asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));  // with the intrinsic, GCC 12 copies all sums in every step
    return sums;
#elif defined(__ARM_NEON)
    return vmlal_s16(vmlal_s16(sums, vget_low_s16(a), vget_low_s16(b)), vget_high_s16(a), vget_high_s16(b));
#else
    return sums + multiply_pairs(a, b);
#endif
}
// Adds to every lane the product of its pair of integers and the pair `b`.
inline Sums add_pair(Shorts a, const int16_t* b, Sums sums) {
#if defined(__AVX512VNNI__)
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(a), "m"(*(const int16_t (*)[2])b));
    return sums;
#else
    int32_t pair;
    memcpy(&pair, b, sizeof pair);
    return sums + multiply_pairs(a, (Shorts)(no_sums() + pair));
#endif
}

constexpr long SHORTS = 2 * LANES;
constexpr int LARGEST = 127 << 8;  // of a row's integers, so that upper bytes fit into 8 bits although lower bytes have a sign
constexpr long HEADER = 32;        // space for a row's scale before its 16-bit integers, so large that the integers begin a cache line

inline long rounded_up(long number, long unit) { return (number + unit - 1) / unit * unit; }

inline float scale_of(const int16_t* row) {
    float scale;
    memcpy(&scale, row, sizeof scale);
    return scale;
}

// int8 weights [outputs, inputs]. Scales are float32 [outputs, groups]. A group fills whole vectors, unless it is the only group.
struct Bytes {
    using Weight = int8_t;
    using Row = int16_t;
    static constexpr bool QUANTIZED = true;
    static constexpr long STEP = SHORTS;
    static constexpr int MOST_ROWS = LANES == 16 ? 6 : 2;
    static constexpr bool HAS_OFFSETS = false;
    using Panels = VectorPanels<Bytes>;
    static constexpr long MOST = 256 * LANES;  // most inputs whose products fit into sums of 32 bits: 256 in a lane

    // This is a separate function, so that the sums stay in registers. inputs: a multiple of STEP; next: weights to prefetch.
    template <int R, int N, bool FIRST>
    __attribute__((noinline)) static void add_chunk(const int8_t* const (&w)[R], const int8_t* next, const int16_t* x, long ldx, long inputs, Sums (&to)[R][N]) {
        Sums sums[R][N];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sums[r][n] = no_sums();
        for (long k = 0; k < inputs; k += STEP) {
            Shorts rows[N];
            for (int n = 0; n < N; n++) rows[n] = load_shorts(x + n * ldx + k);
            for (int r = 0; r < R; r++) {
                Shorts weights = widen(w[r] + k);
                if constexpr (FIRST) prefetch<R == MANY_OUTPUTS>(next + R * k + r * STEP);
                for (int n = 0; n < N; n++) sums[r][n] = add_products(weights, rows[n], sums[r][n]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) to[r][n] = sums[r][n];
    }

    template <int R, int N, bool FIRST>
    static inline void multiply_tile(const Matrix& matrix, long output, const int16_t* x, long ldx, long inputs, float* y, long ldy) {
        Vec sums[R][N];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sums[r][n] = zeros();
        const int8_t* w[R];
        for (int r = 0; r < R; r++) w[r] = (const int8_t*)matrix.weights + (output + r) * matrix.stride;
        const int8_t* next = w[0] + R * matrix.stride;
        const float* scales = (const float*)matrix.scales + output * matrix.groups;
        const int16_t* row = x + HEADER;
        for (long g = 0, group = inputs / matrix.groups; g < matrix.groups; g++) {
            for (long left = group; left > 0;) {
                Sums part[R][N];
                long some = std::min(left, MOST), whole = some / STEP * STEP;
                add_chunk<R, N, FIRST>(w, next, row, ldx, whole, part);
                next += R * whole;
                for (int r = 0; r < R; r++) {
                    if (whole < some) {  // the rest, without reading beyond the end; x has zeros there
                        int8_t rest[STEP] = {};
                        memcpy(rest, w[r] + whole, some - whole);
                        for (int n = 0; n < N; n++) part[r][n] = add_products(widen(rest), load_shorts(row + n * ldx + whole), part[r][n]);
                    }
                    Vec scale = broadcast(scales[r * matrix.groups + g]);
                    for (int n = 0; n < N; n++) sums[r][n] = multiply_add(as_vector(part[r][n]), scale, sums[r][n]);
                    w[r] += some;
                }
                left -= some, row += some;
            }
        }
        add_lanes(sums, y, ldy);
        for (int n = 0; n < N; n++)
            for (int r = 0; r < R; r++) y[n * ldy + r] *= scale_of(x + n * ldx);
    }
};

#if defined(__AMX_INT8__)
// Multiplies int8 weights that have one scale per output, in tiles. prepared: the scale of row i of x is at `prepared + i * ldx`.
struct BytePanels : TilePanels<int8_t> {
    const int16_t* prepared;
    long ldx;

    long operator()(const Matrix& matrix, long o, long left, float* y) const {
        const float* scales = (const float*)matrix.scales + o;
        const long wide = TilePanels<int8_t>::operator()(matrix, o, left, y);
        for (long row = 0; row < rows; row++, y += WIDE)
            for (long i = 0; i < wide; i++) y[i] = y[i] * scales[i] * scale_of(prepared + row * ldx);
        return wide;
    }
};
#endif

// Weights of 4 bits, 0 to 15, in panels of OUTPUTS outputs. A panel has 64 bytes for every INPUTS inputs: a 32-bit word per output, with inputs
// 0, 2, 4, 6 in the lower half and 1, 3, 5, 7 in the upper half, the first in the lowest bits. So a lane of the sums belongs to one output, and
// x is read in its order. Scales are float32 or bfloat16: for every panel and group, the steps of OUTPUTS outputs, then their values of level 8.
constexpr long OUTPUTS = 16, INPUTS = 8;
// Most inputs in a group, so that the sum of a group's numbers of x is exact in float32.
constexpr long MOST_IN_GROUP = 512;

// Numbers for a row of x and a group of inputs. sum: the sum of the row's integers. first: -8 times this sum; products are added to it,
// because level 8 stands for zero.
struct OfGroup {
    int32_t first;
    float sum;
};

template <class Scale>
struct Fours {
    static constexpr long STEP = INPUTS, WIDE = OUTPUTS;
    static constexpr int PARTS = OUTPUTS / LANES, MOST_ROWS = LANES == 16 ? 8 : LANES == 8 ? 3 : 2;
    static constexpr bool HAS_OFFSETS = true;
    const int16_t* x;
    long ldx, rows, inputs;

    void begin() const {}
    void end() const {}

    // Adds the products of INPUTS inputs of N rows.
    template <int N>
    static inline void add_eight(const uint8_t* weights, const int16_t* x, long ldx, Sums (&sums)[N][PARTS]) {
#if defined(__ARM_NEON)
        for (int p = 0; p < PARTS; p += 2) {
            Shorts low = load_shorts(weights + 16 * p), high = load_shorts(weights + 16 * p + 16);
            Shorts even = vuzp1q_s16(low, high), odd = vuzp2q_s16(low, high);
            auto add = [&]<int I>(Shorts eight_outputs) {
                Shorts level = four_bits<I / 2>(eight_outputs);
                for (int n = 0; n < N; n++) {
                    Shorts row = load_shorts(x + n * ldx);
                    sums[n][p] = vmlal_laneq_s16(sums[n][p], vget_low_s16(level), row, I);
                    sums[n][p + 1] = vmlal_high_laneq_s16(sums[n][p + 1], level, row, I);
                }
            };
            add.template operator()<0>(even), add.template operator()<1>(odd), add.template operator()<2>(even), add.template operator()<3>(odd);
            add.template operator()<4>(even), add.template operator()<5>(odd), add.template operator()<6>(even), add.template operator()<7>(odd);
        }
#else
        Shorts pairs[PARTS][4];
        for (int p = 0; p < PARTS; p++) {
            Shorts packed = load_shorts(weights + p * 4 * LANES);
            pairs[p][0] = four_bits<0>(packed), pairs[p][1] = four_bits<1>(packed), pairs[p][2] = four_bits<2>(packed), pairs[p][3] = four_bits<3>(packed);
        }
        for (int n = 0; n < N; n++)
            for (int i = 0; i < 4; i++)
                for (int p = 0; p < PARTS; p++) sums[n][p] = add_pair(pairs[p][i], x + n * ldx + 2 * i, sums[n][p]);
#endif
    }

    // N rows times a panel. FIRST: the panel comes from memory, so the next panel is prefetched.
    template <int N, bool FIRST>
    void multiply_panel(const uint8_t* weights, const Scale* scales, const int16_t* x, long groups, float* y) const {
        Vec sums[N][PARTS];
        for (int n = 0; n < N; n++)
            for (int p = 0; p < PARTS; p++) sums[n][p] = zeros();
        const uint8_t* next = weights + inputs / INPUTS * 64;
        const int16_t* row = x + HEADER;
        const OfGroup* of_group = (const OfGroup*)(row + inputs);
        const long of_row = ldx * sizeof(int16_t) / sizeof(OfGroup);
        for (long g = 0; g < groups; g++, of_group++, scales += 2 * OUTPUTS) {
            Sums part[N][PARTS];
            for (int n = 0; n < N; n++)
                for (int p = 0; p < PARTS; p++) part[n][p] = no_sums() + of_group[n * of_row].first;
            for (long k = 0; k < inputs / groups; k += INPUTS, weights += 64, next += 64, row += INPUTS) {
                if constexpr (FIRST) prefetch<true>(next);
                add_eight<N>(weights, row, ldx, part);
            }
            for (int p = 0; p < PARTS; p++) {
                Vec step = load(scales + p * LANES), eight = load(scales + OUTPUTS + p * LANES);
                for (int n = 0; n < N; n++) {
                    sums[n][p] = multiply_add(as_vector(part[n][p]), step, sums[n][p]);
                    sums[n][p] = multiply_add(eight, broadcast(of_group[n * of_row].sum), sums[n][p]);
                }
            }
        }
        for (int n = 0; n < N; n++)
            for (int p = 0; p < PARTS; p++) store(y + n * WIDE + p * LANES, sums[n][p] * broadcast(scale_of(x + n * ldx)));
    }

    // `some` rows, at most N, times a panel.
    template <int N, bool FIRST>
    void multiply_rows(long some, const uint8_t* weights, const Scale* scales, const int16_t* x, long groups, float* y) const {
        if constexpr (N > 0) {
            if (some == N) return multiply_panel<N, FIRST>(weights, scales, x, groups, y);
            multiply_rows<N - 1, FIRST>(some, weights, scales, x, groups, y);
        }
    }

    // Computes the panel of outputs from `o` on, and returns their number. y: [rows, WIDE].
    long operator()(const Matrix& matrix, long o, long, float* y) const {
        const uint8_t* weights = (const uint8_t*)matrix.weights + o * matrix.stride;
        const Scale* scales = (const Scale*)matrix.scales + o * matrix.groups * 2;
        multiply_rows<MOST_ROWS, true>(std::min(rows, long(MOST_ROWS)), weights, scales, x, matrix.groups, y);
        for (long r = MOST_ROWS; r < rows; r += MOST_ROWS)
            multiply_rows<MOST_ROWS, false>(std::min(rows - r, long(MOST_ROWS)), weights, scales, x + r * ldx, matrix.groups, y + r * WIDE);
        return OUTPUTS;
    }
    using Panels = Fours;
};

// Writes a row's scale, the row as 16-bit integers and, if weights have offsets, an OfGroup per group. Returns the scale.
template <class S>
float round_row(const float* from, long inputs, long groups, int16_t* to) {
    uint32_t most = 0;
    for (long k = 0; k < inputs; k++) most = std::max(most, as_bits(from[k]) & 0x7fffffff);
    // A row with an infinity or a NaN gets NaN as its scale.
    float size = as_float(most), scale = size <= 3e38f ? std::max(size, 1e-30f) / LARGEST : as_float(0x7fc00000), per_step = 1 / scale;
    memcpy(to, &scale, sizeof scale);
    int16_t* row = to + HEADER;
    for (long k = 0; k < inputs; k++) row[k] = int16_t(as_bits(from[k] * per_step + 12582912.0f) - 0x4b400000);
    std::fill(row + inputs, row + rounded_up(inputs, S::STEP), 0);
    if constexpr (S::HAS_OFFSETS) {
        OfGroup* of_group = (OfGroup*)(row + inputs);
        for (long g = 0, group = inputs / groups; g < groups; g++, row += group) {
            int32_t sum = std::accumulate(row, row + group, 0);
            of_group[g] = {-8 * sum, float(sum)};
        }
    }
    return scale;
}

// digits: one or two integers per number of x. Two integers are as precise as float32.
template <class S, class T>
void multiply_quantized(const T* x, long rows, long inputs, int digits, const Matrix* matrices, int count, T* out, int threads) {
    long outputs = 0, padded = rounded_up(inputs, S::STEP), groups = matrices[0].groups;
    long ldx = HEADER + padded + (S::HAS_OFFSETS ? groups * sizeof(OfGroup) / sizeof(int16_t) : 0);
    const long at_once = rows_at_once(ldx * sizeof(int16_t)) / digits;
    for (int m = 0; m < count; m++) outputs += matrices[m].outputs;
    for (long row = 0; row < rows; row += at_once, x += at_once * inputs, out += at_once * outputs) {
        long some = std::min(rows - row, at_once);
        long bytes = some * digits * ldx * sizeof(int16_t) + threads * inputs * sizeof(float);
#if defined(__AMX_INT8__)
        const Tiles<int8_t> tiles(some * digits, inputs);
        const bool in_tiles = std::is_same_v<S, Bytes> && groups == 1 && inputs <= tiles.MOST_INPUTS;
        auto* words = (uint32_t*)workspace(in_tiles * tiles.words() * sizeof(uint32_t) + bytes);
        auto* prepared = (int16_t*)(words + in_tiles * tiles.words());
#else
        auto* prepared = (int16_t*)workspace(bytes);
#endif
        float* wide = (float*)(prepared + some * digits * ldx);
        in_threads(some * inputs > 32768 ? threads : 1, [&](int thread, int of) {
            long begin, end;
            share_of(some, 1, thread, of, begin, end);
            float* values = wide + thread * inputs;
            for (long r = begin; r < end; r++) {
                int16_t* to = prepared + r * ldx;
                for (long k = 0; k < inputs; k++) values[k] = widen(x[r * inputs + k]);
                float scale = round_row<S>(values, inputs, groups, to);
                if (digits == 1) continue;
                for (long k = 0; k < inputs; k++) values[k] = float(values[k] - double(to[HEADER + k]) * scale);
                round_row<S>(values, inputs, groups, to + some * ldx);
            }
        });
#if defined(__AMX_INT8__)
        if (in_tiles) {
            tiles.arrange(prepared + HEADER, ldx, some * digits, words, threads);
            multiply_block(BytePanels{{tiles, words, some * digits}, prepared, ldx}, some, digits, matrices, count, out, outputs, threads);
            continue;
        }
#endif
        multiply_block(typename S::Panels{prepared, ldx, some * digits, inputs}, some, digits, matrices, count, out, outputs, threads);
    }
}

}  // namespace
