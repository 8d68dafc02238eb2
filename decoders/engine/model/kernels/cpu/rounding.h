// Rounds dense weights to levels of 4 bits.
#pragma once
#include "parallel.h"
#include "vectors.h"

namespace {

// A group of weights is rounded to levels of 4 bits. The step and the value of level 8 are chosen for the least squared error, which may
// cut off outliers of the group. Eight numbers are processed at once.
constexpr int EIGHT = 8;

inline float level_of(float value, float per_step, float eight) {
    float level = (value - eight) * per_step + 8;
    level = level > 0 ? level : 0;
    level = level < 15 ? level : 15;
    return (level + 12582912.0f) - 12582912.0f;  // adding 1.5 · 2^23 rounds to an integer
}

template <class T>
void round_group(const T* from, long group, uint8_t* levels, bfloat16& best_step, bfloat16& best_middle) {
    constexpr float CUTS[] = {1.0f, 0.96f, 0.92f, 0.88f, 0.84f, 0.8f};
    float values[256], lows[EIGHT], highs[EIGHT];
    for (long i = 0; i < group; i++) values[i] = widen(from[i]);
    for (int c = 0; c < EIGHT; c++) lows[c] = highs[c] = values[c];
    for (long i = EIGHT; i < group; i += EIGHT) {
        for (int c = 0; c < EIGHT; c++) {
            lows[c] = values[i + c] < lows[c] ? values[i + c] : lows[c];
            highs[c] = values[i + c] > highs[c] ? values[i + c] : highs[c];
        }
    }
    float low = *std::min_element(lows, lows + EIGHT), high = *std::max_element(highs, highs + EIGHT), least = 0;
    for (float cut : CUTS) {
        bfloat16 step, middle;  // levels are computed from these rounded values
        narrow(std::max((high - low) * cut / 15, 1e-20f), step);
        narrow((high + low) / 2 + widen(step) / 2, middle);
        float unit = widen(step), eight = widen(middle), per_step = 1 / unit, errors[EIGHT] = {}, error = 0;
        for (long i = 0; i < group; i += EIGHT) {
            for (int c = 0; c < EIGHT; c++) {
                float off = (level_of(values[i + c], per_step, eight) - 8) * unit + eight - values[i + c];
                errors[c] += off * off;
            }
        }
        for (float part : errors) error += part;
        if (cut == CUTS[0] || error < least) least = error, best_step = step, best_middle = middle;
    }
    float eight = widen(best_middle), per_step = 1 / widen(best_step);
    for (long i = 0; i < group; i++) levels[i] = uint8_t(int(level_of(values[i], per_step, eight)));
}

// levels: [outputs, inputs], scales: [outputs, 2, groups].
template <class T>
void round_matrix(const T* matrix, long outputs, long inputs, long group, uint8_t* levels, bfloat16* scales, int threads) {
    in_threads(threads, [&](int thread, int of) {
        long begin, end, groups = inputs / group;
        share_of(outputs, 1, thread, of, begin, end);
        for (long o = begin; o < end; o++)
            for (long g = 0; g < groups; g++) {
                bfloat16* scale = scales + o * 2 * groups + g;
                round_group(matrix + o * inputs + g * group, group, levels + o * inputs + g * group, scale[0], scale[groups]);
            }
    });
}

}  // namespace
