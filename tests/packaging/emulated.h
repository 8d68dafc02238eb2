// What many a processor lacks, AVX-512's products of bfloat16 and AMX, in plain C++ as Intel documents it. Only tests include it, in
// front of the kernels, so that variants for such processors run on any with AVX-512.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

// Subnormal numbers count as zero before and after every addition; rounding is to the nearest, ties to even.
inline float flushed(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }
inline float multiply_add(float a, float b, float c) { return flushed(__builtin_fmaf(flushed(a), flushed(b), flushed(c))); }
inline float add(float a, float b) { return flushed(flushed(a) + flushed(b)); }
inline float widened(const void* from, long number) {
    uint32_t bits = 0;
    memcpy((char*)&bits + 2, (const char*)from + 2 * number, 2);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline void require(bool holds) {  // where a processor would raise an exception
    if (!holds) abort();
}

inline __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    for (int i = 0; i < 16; i++)
        for (int n = 2 * i + 1; n >= 2 * i; n--) sums[i] = multiply_add(widened(&a, n), widened(&b, n), sums[i]);
    return sums;
}

// `b` gives the first 16 numbers.
inline __m512bh cvtne2ps_pbh(__m512 a, __m512 b) {
    uint16_t rounded[32];
    for (int i = 0; i < 32; i++) {
        const float value = flushed(i < 16 ? b[i] : a[i - 16]);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        rounded[i] = uint16_t(value != value ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    __m512bh result;
    memcpy(&result, rounded, sizeof result);
    return result;
}

struct Tile {
    uint16_t bytes;
    uint8_t rows;
    unsigned char row[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local bool configured = false;

inline Tile& tile(int number) {
    require(configured && number < 8 && tiles[number].rows && tiles[number].bytes);
    return tiles[number];
}
inline void loadconfig(const void* from) {
    const unsigned char* config = (const unsigned char*)from;
    require(config[0] == 1 && config[1] == 0);
    for (int t = 0; t < 8; t++) {
        memset(&tiles[t], 0, sizeof tiles[t]);
        memcpy(&tiles[t].bytes, config + 16 + 2 * t, 2);
        tiles[t].rows = config[48 + t];
        require(tiles[t].bytes <= 64 && tiles[t].rows <= 16);
    }
    configured = true;
}
inline void release() { configured = false; }
inline void zero(int number) { memset(tile(number).row, 0, sizeof tiles[number].row); }
inline void loadd(int number, const void* from, long stride) {
    Tile& to = tile(number);
    memset(to.row, 0, sizeof to.row);
    for (int r = 0; r < to.rows; r++) memcpy(to.row[r], (const char*)from + r * stride, to.bytes);
}
inline void stored(int number, void* to, long stride) {
    for (int r = 0; r < tile(number).rows; r++) memcpy((char*)to + r * stride, tiles[number].row[r], tiles[number].bytes);
}
inline void fits(const Tile& c, const Tile& a, const Tile& b) {
    require(&c != &a && &a != &b && &b != &c && c.rows == a.rows && c.bytes == b.bytes && a.bytes / 4 == b.rows);
    require(a.bytes % 4 == 0 && b.bytes % 4 == 0);
}
inline void dpbf16ps(int to, int first, int second) {
    Tile &c = tile(to), &a = tile(first), &b = tile(second);
    fits(c, a, b);
    for (int m = 0; m < c.rows; m++) {
        float even[16] = {}, odd[16] = {}, sum;
        for (int k = 0; k < a.bytes / 4; k++)
            for (int n = 0; n < c.bytes / 4; n++) {
                even[n] = multiply_add(widened(a.row[m], 2 * k), widened(b.row[k], 2 * n), even[n]);
                odd[n] = multiply_add(widened(a.row[m], 2 * k + 1), widened(b.row[k], 2 * n + 1), odd[n]);
            }
        for (int n = 0; n < c.bytes / 4; n++) {
            memcpy(&sum, c.row[m] + 4 * n, sizeof sum);
            sum = add(sum, add(even[n], odd[n]));
            memcpy(c.row[m] + 4 * n, &sum, sizeof sum);
        }
    }
}
inline void dpbssd(int to, int first, int second) {
    Tile &c = tile(to), &a = tile(first), &b = tile(second);
    fits(c, a, b);
    for (int m = 0; m < c.rows; m++)
        for (int n = 0; n < c.bytes / 4; n++) {
            uint32_t sum;
            memcpy(&sum, c.row[m] + 4 * n, sizeof sum);
            for (int k = 0; k < a.bytes; k++) sum += uint32_t(int8_t(a.row[m][k]) * int8_t(b.row[k / 4][4 * n + k % 4]));
            memcpy(c.row[m] + 4 * n, &sum, sizeof sum);
        }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#define _tile_loadconfig emulated::loadconfig
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::loadd
#define _tile_stored emulated::stored
#define _tile_dpbf16ps emulated::dpbf16ps
#define _tile_dpbssd emulated::dpbssd
