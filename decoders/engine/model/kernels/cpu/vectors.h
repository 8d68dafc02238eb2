// Vectors of float32 for the processor that the compiler compiles for.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(DECODERS_PORTABLE)
#undef __ARM_NEON
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

// This file uses the compiler's vector types, and intrinsics only where no operator is compiled to the wanted instruction.
#if defined(__AVX512F__)
constexpr int LANES = 16;
using Vec = __m512;
#elif defined(__AVX2__)
constexpr int LANES = 8;
using Vec = __m256;
#else
constexpr int LANES = 4;
using Vec = float __attribute__((vector_size(16)));
#endif
using Bits = uint32_t __attribute__((vector_size(4 * LANES)));
using Sums = int32_t __attribute__((vector_size(4 * LANES)));
inline Vec as_vector(Sums sums) { return __builtin_convertvector(sums, Vec); }

// A vector at an address without alignment. memcpy instead would copy it through integer registers.
template <class V>
struct [[gnu::packed, gnu::may_alias]] Anywhere {
    V vector;
};
template <class V>
inline V load_as(const void* from) {
    return ((const Anywhere<V>*)from)->vector;
}

inline Vec zeros() { return Vec{}; }
inline Vec broadcast(float value) { return value - Vec{}; }
inline Vec broadcast_bits(uint32_t bits) { return (Vec)(bits + Bits{}); }
// Loads use intrinsics, because with assignments GCC 12 also keeps the sums of loops in memory.
#if defined(__AVX512F__)
inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vec v) { _mm512_storeu_ps(to, v); }
#elif defined(__AVX2__)
inline Vec load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vec v) { _mm256_storeu_ps(to, v); }
#else
inline Vec load(const float* from) { return load_as<Vec>(from); }
inline void store(float* to, Vec v) { memcpy(to, &v, sizeof v); }
#endif
inline Vec load(const bfloat16* from) {  // with intrinsics, because compilers would convert such vectors in halves
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#elif defined(__ARM_NEON)
    return (Vec)vshll_n_u16(vld1_u16((const uint16_t*)from), 16);
#else
    return (Vec)Bits{uint32_t(from[0].bits) << 16, uint32_t(from[1].bits) << 16, uint32_t(from[2].bits) << 16, uint32_t(from[3].bits) << 16};
#endif
}
inline Bits load_pairs(const bfloat16* from) { return load_as<Bits>(from); }
inline Vec first_of_pairs(Bits pairs) { return (Vec)(pairs << 16); }
inline Vec second_of_pairs(Bits pairs) { return (Vec)(pairs & 0xffff0000); }
// The int8 number at byte BYTE of every lane.
template <int BYTE>
inline Vec int8_of_fours(Bits fours) {
    using Ints = int32_t __attribute__((vector_size(4 * LANES)));
    return __builtin_convertvector((Ints)(fours << (24 - 8 * BYTE)) >> 24, Vec);
}

inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float widen(float value) { return value; }
inline float widen(bfloat16 value) { return as_float(uint32_t(value.bits) << 16); }
inline float widen(float16 value) {
#if defined(__F16C__)
    return _cvtsh_ss(value.bits);
#elif defined(__ARM_NEON)
    __fp16 half;
    memcpy(&half, &value, sizeof half);
    return half;
#else
    uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
    if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // After the shift, the exponent is too small by 112; the multiplication also corrects subnormal numbers.
    return as_float(sign | as_bits(as_float(rest << 13) * as_float(uint32_t(127 + 112) << 23)));
#endif
}

// Rounds to the nearest number, ties to even.
inline void narrow(float value, float& to) { to = value; }
inline void narrow(float value, bfloat16& to) {
    uint32_t bits = as_bits(value);
    to.bits = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void narrow(float value, float16& to) {
#if defined(__F16C__)
    to.bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__ARM_NEON)
    __fp16 half = value;
    memcpy(&to, &half, sizeof half);
#else
    uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000;
    float size = as_float(bits & 0x7fffffff);
    if (!(size < 65520.0f)) {
        to.bits = sign | (size != size ? 0x7e00 : 0x7c00);
        return;
    }
    // The last bit of `unit` has the value of the result's last bit, so adding `unit` rounds the sum to that bit.
    uint32_t exponent = as_bits(size) >> 23;
    float unit = as_float(((exponent < 113 ? 113 : exponent) + 13) << 23);
    float rounded = (size + unit) - unit;
    uint32_t wide = as_bits(rounded);
    to.bits = sign | (rounded < as_float(113u << 23) ? uint32_t(rounded * 16777216.0f) : (wide - (112u << 23)) >> 13);
#endif
}

inline Vec load(const float16* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__ARM_NEON)
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)from)));
#else
    return Vec{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
#endif
}

// multiply_add for single numbers.
inline float multiply_add(float a, float b, float c) {
#if defined(__AVX2__) || defined(__ARM_NEON)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// The sum of each of four vectors. All four use the same additions, so that a sum does not depend on its neighbours.
inline void sum_of_four(Vec a, Vec b, Vec c, Vec d, float* to) {
#if defined(__AVX512F__)
    Vec ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    Vec cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    Vec all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all)));
#elif defined(__AVX2__)
    Vec ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    Vec cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    Vec all = _mm256_hadd_ps(_mm256_hadd_ps(ab, cd), zeros());
    _mm_storeu_ps(to, _mm_unpacklo_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#elif defined(__ARM_NEON)
    vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
#else
    const Vec all[] = {a, b, c, d};
    for (int i = 0; i < 4; i++) to[i] = (all[i][0] + all[i][1]) + (all[i][2] + all[i][3]);
#endif
}

// Whether to prefetch data that is read once by non-temporal prefetches. With them a Zen 5 takes a tenth less time for a step of SmolLM2,
// because weights hardly displace what the caches hold. Intel's processors put such data in a small part of the L1 cache and lose it before
// it is used: products of few rows took twice as long as with prefetches into the L2 cache.
inline bool is_amd() {
#if defined(__AVX2__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}
const bool NON_TEMPORAL = is_amd();

// ONCE: the data is read only once.
template <bool ONCE>
inline void prefetch(const void* address) {
#if defined(__GNUC__)
    if (ONCE && NON_TEMPORAL) __builtin_prefetch(address, 0, 0);
    else __builtin_prefetch(address, 0, ONCE ? 2 : 3);
#endif
}

}  // namespace
