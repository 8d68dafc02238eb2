// What attention computes with vectors besides products: maxima, powers of two, and the transposition of rows.
#pragma once
#include <cmath>

#include "vectors.h"

namespace {

#if defined(__AVX512F__)

inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec zero_where_less(Vec x, Vec limit, Vec v) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), v); }
inline Vec absolute(Vec v) { return _mm512_abs_ps(v); }
inline Vec with_sign_of(Vec v, Vec sign) { return _mm512_or_ps(v, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f))); }
// v · 2^n, for the integer n in the last bits of `n`.
inline Vec times_power(Vec v, Vec n) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}
inline Bits bits_of(Vec v) { return _mm512_castps_si512(v); }
inline Vec load(const int8_t* from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from))); }
// Four numbers of every fourth row.
inline Vec load_fours(const float* from, long stride) {
    __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), _mm_loadu_ps(from + 4 * stride), 1);
    __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from + 8 * stride)), _mm_loadu_ps(from + 12 * stride), 1);
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}
inline void transpose_fours(Vec (&v)[4]) {
    Vec a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpackhi_ps(v[0], v[1]);
    Vec c = _mm512_unpacklo_ps(v[2], v[3]), d = _mm512_unpackhi_ps(v[2], v[3]);
    v[0] = _mm512_shuffle_ps(a, c, 0x44);
    v[1] = _mm512_shuffle_ps(a, c, 0xee);
    v[2] = _mm512_shuffle_ps(b, d, 0x44);
    v[3] = _mm512_shuffle_ps(b, d, 0xee);
}

#elif defined(__AVX2__)

inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline float largest(Vec v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline Vec zero_where_less(Vec x, Vec limit, Vec v) { return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), v); }
inline Vec absolute(Vec v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
inline Vec with_sign_of(Vec v, Vec sign) { return _mm256_or_ps(v, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f))); }
inline Vec times_power(Vec v, Vec n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
inline Bits bits_of(Vec v) { return _mm256_castps_si256(v); }
inline Vec load(const int8_t* from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from))); }
inline Vec load_fours(const float* from, long stride) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), _mm_loadu_ps(from + 4 * stride), 1);
}
inline void transpose_fours(Vec (&v)[4]) {
    Vec a = _mm256_unpacklo_ps(v[0], v[1]), b = _mm256_unpackhi_ps(v[0], v[1]);
    Vec c = _mm256_unpacklo_ps(v[2], v[3]), d = _mm256_unpackhi_ps(v[2], v[3]);
    v[0] = _mm256_shuffle_ps(a, c, 0x44);
    v[1] = _mm256_shuffle_ps(a, c, 0xee);
    v[2] = _mm256_shuffle_ps(b, d, 0x44);
    v[3] = _mm256_shuffle_ps(b, d, 0xee);
}

#elif defined(__ARM_NEON)

inline Vec larger(Vec a, Vec b) { return vmaxq_f32(a, b); }
inline float largest(Vec v) { return vmaxvq_f32(v); }
inline Vec zero_where_less(Vec x, Vec limit, Vec v) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vcltq_f32(x, limit)));
}
inline Vec absolute(Vec v) { return vabsq_f32(v); }
inline Vec with_sign_of(Vec v, Vec sign) { return vbslq_f32(vdupq_n_u32(0x80000000), sign, v); }
inline Vec times_power(Vec v, Vec n) {
    return vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(v), vshlq_n_u32(vreinterpretq_u32_f32(n), 23)));
}
inline Bits bits_of(Vec v) { return vreinterpretq_u32_f32(v); }
inline Vec load(const int8_t* from) { return Vec{float(from[0]), float(from[1]), float(from[2]), float(from[3])}; }
inline Vec load_fours(const float* from, long) { return vld1q_f32(from); }
inline void transpose_fours(Vec (&v)[4]) {
    float32x4x2_t a = vzipq_f32(v[0], v[2]), b = vzipq_f32(v[1], v[3]);
    float32x4x2_t low = vzipq_f32(a.val[0], b.val[0]), high = vzipq_f32(a.val[1], b.val[1]);
    v[0] = low.val[0];
    v[1] = low.val[1];
    v[2] = high.val[0];
    v[3] = high.val[1];
}

#else  // portable

template <class Operation>
inline Vec each_lane(Vec a, const Vec& b, Operation operation) {
    for (int i = 0; i < LANES; i++) a.lane[i] = operation(a.lane[i], b.lane[i]);
    return a;
}
inline Vec operator+(Vec a, Vec b) { return each_lane(a, b, [](float x, float y) { return x + y; }); }
inline Vec operator-(Vec a, Vec b) { return each_lane(a, b, [](float x, float y) { return x - y; }); }
inline Vec operator*(Vec a, Vec b) { return each_lane(a, b, [](float x, float y) { return x * y; }); }
inline Vec operator/(Vec a, Vec b) { return each_lane(a, b, [](float x, float y) { return x / y; }); }
inline Vec larger(Vec a, Vec b) { return each_lane(a, b, [](float x, float y) { return x > y ? x : y; }); }
inline float largest(Vec v) {
    float most = v.lane[0];
    for (float lane : v.lane) most = lane > most ? lane : most;
    return most;
}
inline Vec zero_where_less(Vec x, Vec limit, Vec v) {
    for (int i = 0; i < LANES; i++) v.lane[i] = x.lane[i] < limit.lane[i] ? 0 : v.lane[i];
    return v;
}
inline Vec absolute(Vec v) { return each_lane(v, v, [](float x, float) { return as_float(as_bits(x) & 0x7fffffff); }); }
inline Vec with_sign_of(Vec v, Vec sign) {
    return each_lane(v, sign, [](float x, float y) { return as_float(as_bits(x) | (as_bits(y) & 0x80000000)); });
}
inline Vec times_power(Vec v, Vec n) { return each_lane(v, n, [](float x, float y) { return as_float(as_bits(x) + (as_bits(y) << 23)); }); }
inline Bits bits_of(Vec v) {
    Bits bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}
inline Vec load(const int8_t* from) { return {{float(from[0]), float(from[1]), float(from[2]), float(from[3])}}; }
inline Vec load_fours(const float* from, long) { return load(from); }
inline void transpose_fours(Vec (&v)[4]) {
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++) std::swap(v[i].lane[j], v[j].lane[i]);
}

#endif

inline float widen(int8_t value) { return value; }

// 2^x for x <= 0, within two units in the last place; 0 for x < -125.
inline Vec power_of_two(Vec x) {
    const Vec magic = broadcast(12582912.0f);  // 1.5 · 2^23: adding it rounds to integers, which are then the last bits
    Vec shifted = x + magic, rest = x - (shifted - magic);
    Vec power = broadcast(1.546144469e-04f);
    for (float factor : {1.340042818e-03f, 9.618056679e-03f, 5.550327227e-02f, 2.402265092e-01f, 6.931472067e-01f, 1.0f})
        power = multiply_add(power, rest, broadcast(factor));
    return zero_where_less(x, broadcast(-125.0f), times_power(power, shifted));
}

inline float first_lane(Vec v) {
    float lanes[LANES];
    store(lanes, v);
    return lanes[0];
}

inline float power_of_two(float x) { return first_lane(power_of_two(broadcast(x))); }

constexpr float LOG2_E = 1.4426950408889634f;

// The hyperbolic tangent.
inline Vec tangent(Vec x) {
    Vec one = broadcast(1.0f), small = power_of_two(absolute(x) * broadcast(-2 * LOG2_E));
    return with_sign_of((one - small) / (one + small), x);
}

}  // namespace
