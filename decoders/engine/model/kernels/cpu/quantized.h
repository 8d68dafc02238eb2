// y = x @ W.T + bias, where W has 8 or 4 bits and a scale per output, or per output and group of inputs.
//
// Rows of x are rounded to 16-bit integers with a scale per row. Products of integers are added exactly; then a group's sum is converted to
// float32. If a row needs more precision, a second row of integers holds the rounding errors of the first.
#pragma once
#include "products.h"

namespace {

// Vectors of 2 LANES 16-bit integers, and of LANES 32-bit sums.
using Shorts = int16_t __attribute__((vector_size(4 * LANES)));
using Sums = int32_t __attribute__((vector_size(4 * LANES)));

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
inline Vec as_vector(Sums sums) { return __builtin_convertvector(sums, Vec); }
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

constexpr long SHORTS = 2 * LANES;
constexpr long HEADER = 32;   // space for a row's scale before its 16-bit integers, so large that the integers begin a cache line
constexpr long SIXTEENS = 16; // the number of groups is rounded up to a multiple of this: whole vectors in every variant

inline long rounded_up(long number, long unit) { return (number + unit - 1) / unit * unit; }

// Multiplies the products by the rows' scales.
template <int N>
inline void scale_rows(const int16_t* x, long ldx, float* y, long ldy, int outputs) {
    for (int n = 0; n < N; n++) {
        float scale;
        memcpy(&scale, x + n * ldx, sizeof scale);
        for (int r = 0; r < outputs; r++) y[n * ldy + r] *= scale;
    }
}

// int8 weights [outputs, inputs]. Scales are float32 [outputs, groups]. A group fills whole vectors, unless it is the only group.
struct Bytes {
    using Weight = int8_t;
    using Row = int16_t;
    static constexpr bool QUANTIZED = true;
    static constexpr long STEP = SHORTS;
    static constexpr int MOST_ROWS = LANES == 16 ? 6 : 2;
    static constexpr bool HAS_OFFSETS = false;
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
        scale_rows<N>(x, ldx, y, ldy, R);
    }

    // The index of inputs 8 i … 8 i + 7 in a row of 16-bit integers.
    static inline long place(long i) { return 8 * i; }
};

// Weights of 4 bits, 0 to 15. A block is 128 inputs in 64 bytes: the four numbers in the 16-bit word 8 g + c belong to inputs
// 32 g + c, 32 g + 8 + c, 32 g + 16 + c, 32 g + 24 + c, so that a lane of the sums gets inputs of one group only (of at least 32 inputs).
// A row's last block may reach into the next row: x has zeros there. Behind the last row, ROOM more bytes may be read.
// Scales [outputs, 2, groups], float32 or bfloat16: a group's step and value of level 8. SIXTEENS numbers behind the scales may be read.
template <class Scale>
struct Fours {
    using Weight = uint8_t;
    using Row = int16_t;
    static constexpr bool QUANTIZED = true;
    static constexpr long STEP = 128;
    static constexpr int MOST_ROWS = LANES == 16 ? 6 : 2;
    static constexpr bool HAS_OFFSETS = true;
    static constexpr int PARTS = 32 / SHORTS;
    static constexpr long ROOM = 48;  // the bytes of a block, minus the 16 bytes of 32 inputs

    // Returns a vector with the steps of a block's groups, each in the lanes of its inputs. `shift`: a group has 32 << shift inputs.
    struct Spread {
#if defined(__AVX512F__)
        __m512i lanes;
        explicit Spread(int shift) { lanes = _mm512_srli_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), shift); }
        inline Vec operator()(const float* steps, int) const { return _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(_mm_loadu_ps(steps))); }
        inline Vec operator()(const bfloat16* steps, int) const {
            __m512i wide = _mm512_castsi128_si512(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)steps)));
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_permutexvar_epi32(lanes, wide), 16));
        }
#elif defined(__AVX2__)
        __m256i lanes[2];
        explicit Spread(int shift) {
            for (int i = 0; i < 2; i++)
                lanes[i] = _mm256_srli_epi32(_mm256_add_epi32(_mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1), _mm256_set1_epi32(2 * i)), shift);
        }
        inline Vec operator()(const float* steps, int part) const {
            return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(steps)), lanes[part]);
        }
        inline Vec operator()(const bfloat16* steps, int part) const {
            __m256i wide = _mm256_castsi128_si256(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)steps)));
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_permutevar8x32_epi32(wide, lanes[part]), 16));
        }
#else
        int shift;
        explicit Spread(int shift) : shift(shift) {}
        inline Vec operator()(const Scale* steps, int part) const { return broadcast(::widen(steps[part >> shift])); }
#endif
    };

    template <int R, int N, bool FIRST>
    static inline void multiply_tile(const Matrix& matrix, long output, const int16_t* x, long ldx, long inputs, float* y, long ldy) {
        Vec sums[R][N];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sums[r][n] = zeros();
        const uint8_t* w[R];
        const Scale* steps[R];
        long groups = matrix.groups, blocks = rounded_up(inputs, STEP) / STEP;
        int shift = 0;
        while (32l << shift < inputs / groups) shift++;
        for (int r = 0; r < R; r++) {
            w[r] = (const uint8_t*)matrix.weights + (output + r) * matrix.stride;
            steps[r] = (const Scale*)matrix.scales + (output + r) * 2 * groups;
        }
        const Spread spread(shift);
        const int16_t* row = x + HEADER;
        for (long b = 0; b < blocks; b++) {
            for (int r = 0; r < R; r++) {
                const Scale* of_block = steps[r] + (b * 4 >> shift);
                if constexpr (FIRST) prefetch<R == MANY_OUTPUTS>(w[0] + R * matrix.stride + (b * R + r) * 64);
                for (int part = 0; part < PARTS; part++) {
                    Shorts packed = load_shorts(w[r] + b * 64 + part * 2 * SHORTS);
                    Shorts first = four_bits<0>(packed), second = four_bits<1>(packed), third = four_bits<2>(packed), fourth = four_bits<3>(packed);
                    Vec step = spread(of_block, part);
                    for (int n = 0; n < N; n++) {
                        const int16_t* at = row + n * ldx + b * STEP + part * SHORTS;
                        Sums products = multiply_pairs(first, load_shorts(at));
                        products = add_products(second, load_shorts(at + 32), products);
                        products = add_products(third, load_shorts(at + 64), products);
                        products = add_products(fourth, load_shorts(at + 96), products);
                        sums[r][n] = multiply_add(as_vector(products), step, sums[r][n]);
                    }
                }
            }
        }
        const int16_t* of_groups = row + blocks * STEP;  // the sums of x by group, then zeros
        for (long g = 0; g < groups; g += LANES) {
            for (int r = 0; r < R; r++) {
                Vec zero = multiply_add(load(steps[r] + g), broadcast(-8), load(steps[r] + groups + g));  // the value of level 0
                for (int n = 0; n < N; n++) sums[r][n] = multiply_add(zero, load((const float*)(of_groups + n * ldx) + g), sums[r][n]);
            }
        }
        add_lanes(sums, y, ldy);
        scale_rows<N>(x, ldx, y, ldy, R);
    }

    static inline long place(long i) { return i / 16 * STEP + i % 4 * 32 + i / 4 % 4 * 8; }
};

// Writes a row's scale, the row as 16-bit integers and, if weights have offsets, the integers' sums by group. Returns the scale.
template <class S>
float round_row(const float* from, long inputs, long groups, int16_t* to) {
    uint32_t most = 0;
    for (long k = 0; k < inputs; k++) most = std::max(most, as_bits(from[k]) & 0x7fffffff);
    // A row with an infinity or a NaN gets NaN as its scale.
    float size = as_float(most), scale = size <= 3e38f ? std::max(size, 1e-30f) / 32767 : as_float(0x7fc00000), per_step = 1 / scale;
    memcpy(to, &scale, sizeof scale);
    int16_t* row = to + HEADER;
    long padded = rounded_up(inputs, S::STEP);
    auto rounded = [&](float value) { return int16_t(as_bits(value * per_step + 12582912.0f) - 0x4b400000); };
    for (long i = 0; i < padded / 8; i++) {
        int16_t* eight = row + S::place(i);
        if (8 * i + 8 <= inputs) {
            for (int c = 0; c < 8; c++) eight[c] = rounded(from[8 * i + c]);
        } else {
            for (int c = 0; c < 8; c++) eight[c] = 8 * i + c < inputs ? rounded(from[8 * i + c]) : 0;
        }
    }
    if constexpr (S::HAS_OFFSETS) {
        float* sums = (float*)(row + padded);
        long eights = inputs / groups / 8;
        for (long g = 0; g < rounded_up(groups, SIXTEENS); g++) {
            int32_t sum = 0;
            for (long i = g * eights; g < groups && i < (g + 1) * eights; i++)
                for (int c = 0; c < 8; c++) sum += row[S::place(i) + c];
            sums[g] = float(sum);
        }
    }
    return scale;
}

// digits: one or two integers per number of x. Two integers are as precise as float32.
template <class S, class T>
void multiply_quantized(const T* x, long rows, long inputs, int digits, const Matrix* matrices, int count, T* out, int threads) {
    long outputs = 0, padded = rounded_up(inputs, S::STEP), groups = matrices[0].groups;
    long ldx = HEADER + padded + (S::HAS_OFFSETS ? 2 * rounded_up(groups, SIXTEENS) : 0);
    const long at_once = rows_at_once(ldx * sizeof(int16_t)) / digits;
    for (int m = 0; m < count; m++) outputs += matrices[m].outputs;
    for (long row = 0; row < rows; row += at_once, x += at_once * inputs, out += at_once * outputs) {
        long some = std::min(rows - row, at_once);
        auto* prepared = (int16_t*)workspace(some * digits * ldx * sizeof(int16_t) + threads * inputs * sizeof(float));
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
                for (long k = 0; k < inputs; k++) values[k] = float(values[k] - double(to[HEADER + S::place(k / 8) + k % 8]) * scale);
                round_row<S>(values, inputs, groups, to + some * ldx);
            }
        });
        multiply_block(VectorPanels<S>{prepared, ldx, some * digits, inputs}, some, digits, matrices, count, out, outputs, threads);
    }
}

}  // namespace
