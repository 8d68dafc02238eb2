// Functions of vectors besides products: maxima, exponentials, and the transposition of rows.
#pragma once
#include <cmath>
#include <utility>

#include "vectors.h"

namespace {

// Shuffles each group of four lanes of two vectors. Indices 0 to 3 are lanes of the first vector, 4 to 7 are lanes of the second vector.
template <int A, int B, int C, int D, size_t... LANE>
inline Vec mixed_lanes(Vec v, Vec w, std::index_sequence<LANE...>) {
    constexpr int FROM[] = {A, B, C, D};
    return __builtin_shufflevector(v, w, int(LANE / 4 * 4 + FROM[LANE % 4] % 4 + FROM[LANE % 4] / 4 * LANES)...);
}
template <int A, int B, int C, int D>
inline Vec mixed(Vec v, Vec w) {
    return mixed_lanes<A, B, C, D>(v, w, std::make_index_sequence<LANES>());
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline float largest(Vec v) {
    v = larger(v, mixed<2, 3, 0, 1>(v, v));
    v = larger(v, mixed<1, 0, 3, 2>(v, v));
    float most = v[0];
    for (int i = 4; i < LANES; i += 4) most = v[i] > most ? v[i] : most;
    return most;
}
inline Vec zero_where_less(Vec x, Vec limit, Vec v) { return x < limit ? zeros() : v; }
inline Vec absolute(Vec v) { return (Vec)((Bits)v & 0x7fffffff); }
inline Vec with_sign_of(Vec v, Vec sign) { return (Vec)((Bits)v | ((Bits)sign & 0x80000000)); }
// v · 2^n, for the integer n in the last bits of `n`.
inline Vec times_power(Vec v, Vec n) { return (Vec)((Bits)v + ((Bits)n << 23)); }
inline Vec load(const int8_t* from) {  // with intrinsics, because compilers would convert such vectors number by number
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    return Vec{float(from[0]), float(from[1]), float(from[2]), float(from[3])};
#endif
}

// Loads four numbers of every fourth row.
inline Vec load_fours(const float* from, [[maybe_unused]] long stride) {
#if defined(__AVX512F__)
    __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), _mm_loadu_ps(from + 4 * stride), 1);
    __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from + 8 * stride)), _mm_loadu_ps(from + 12 * stride), 1);
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
#elif defined(__AVX2__)
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), _mm_loadu_ps(from + 4 * stride), 1);
#else
    return load(from);
#endif
}
inline void transpose_fours(Vec (&v)[4]) {
    Vec a = mixed<0, 4, 1, 5>(v[0], v[1]), b = mixed<2, 6, 3, 7>(v[0], v[1]);
    Vec c = mixed<0, 4, 1, 5>(v[2], v[3]), d = mixed<2, 6, 3, 7>(v[2], v[3]);
    v[0] = mixed<0, 1, 4, 5>(a, c);
    v[1] = mixed<2, 3, 6, 7>(a, c);
    v[2] = mixed<0, 1, 4, 5>(b, d);
    v[3] = mixed<2, 3, 6, 7>(b, d);
}

// Transposes LANES rows of `count` floats, a multiple of 4: calls `write(i, float i of every row)`, and `before()` before every four floats.
template <class Before, class Write>
inline void transpose_rows(const float* from, long stride, long count, Before before, Write write) {
    for (long i = 0; i < count; i += 4) {
        before();
        Vec v[4];
        for (int j = 0; j < 4; j++) v[j] = load_fours(from + i + j * stride, stride);
        transpose_fours(v);
        for (int j = 0; j < 4; j++) write(i + j, v[j]);
    }
}

inline float widen(int8_t value) { return value; }

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float MAGIC = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer, which is then in the last bits of the sum

// 2^(n + rest) for the integer n in the last bits of `n`, where |rest| is at most 1/2.
inline Vec power(Vec n, Vec rest) {
    Vec power = broadcast(1.546144469e-04f);
    for (float factor : {1.340042818e-03f, 9.618056679e-03f, 5.550327227e-02f, 2.402265092e-01f, 6.931472067e-01f, 1.0f})
        power = multiply_add(power, rest, broadcast(factor));
    return times_power(power, n);
}

// 2^x for x <= 0, with an error of at most two units in the last place; 0 for x < -125.
inline Vec power_of_two(Vec x) {
    Vec shifted = x + MAGIC;
    return zero_where_less(x, broadcast(-125.0f), power(shifted, x - (shifted - MAGIC)));
}
inline float power_of_two(float x) { return power_of_two(broadcast(x))[0]; }

// e^x for x <= 0, with an error of at most two units in the last place; 0 for x < -86. log2(e) is the sum of two constants, so that
// `rest` is more precise than with a single constant.
inline Vec exponential(Vec x) {
    Vec shifted = multiply_add(x, broadcast(LOG2_E), broadcast(MAGIC)), rest = multiply_add(x, broadcast(LOG2_E), MAGIC - shifted);
    rest = multiply_add(x, broadcast(1.92596303e-8f), rest);
    return zero_where_less(x, broadcast(-86.0f), power(shifted, rest));
}

// The hyperbolic tangent.
inline Vec tangent(Vec x) {
    Vec small = power_of_two(absolute(x) * (-2 * LOG2_E));
    return with_sign_of((1 - small) / (1 + small), x);
}

}  // namespace
