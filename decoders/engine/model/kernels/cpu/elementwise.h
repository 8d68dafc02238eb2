// The operations around the products of a layer: norms, gated activations, rotary positions, and writes to the cache. Each operation reads
// its data once.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "vector_math.h"

namespace {

constexpr long WORTH_THREADS = 1 << 15;  // for at least this many elements, several threads are faster than one

// Calls `body(begin, end)` for shares of `count` rows of `width` elements.
template <class Body>
void by_rows(long count, long width, int threads, Body body) {
    in_threads(count * width < WORTH_THREADS ? 1 : threads, [&](int thread, int of) {
        long begin, end;
        share_of(count, 1, thread, of, begin, end);
        body(begin, end);
    });
}

template <class T>
inline float rounded(float value) {
    T narrowed;
    narrow(value, narrowed);
    return widen(narrowed);
}

constexpr int RUNNING = 16;  // number of running sums of a norm, the same for all vector sizes

// x / sqrt(mean(x^2) + epsilon) * weight; one_added: * (1 + weight); rounded_first: the quotient is rounded to T before the product.
template <class T>
void rms_norm(const T* x, long rows, long width, const T* weight, float epsilon, bool one_added, bool rounded_first, T* out, int threads) {
    by_rows(rows, width, threads, [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            const T* from = x + row * width;
            T* to = out + row * width;
            float sums[RUNNING] = {};
            long i = 0;
            for (; i + RUNNING <= width; i += RUNNING)
                for (int s = 0; s < RUNNING; s++) {
                    float value = widen(from[i + s]);
                    sums[s] += value * value;
                }
            for (int s = 0; i + s < width; s++) sums[s] += widen(from[i + s]) * widen(from[i + s]);
            for (int half = RUNNING / 2; half; half /= 2)
                for (int s = 0; s < half; s++) sums[s] += sums[s + half];
            const float factor = 1.0f / std::sqrt(sums[0] / width + epsilon), added = one_added ? 1.0f : 0.0f;
            if (rounded_first) {
                for (i = 0; i < width; i++) narrow((widen(weight[i]) + added) * rounded<T>(widen(from[i]) * factor), to[i]);
            } else {
                for (i = 0; i < width; i++) narrow((widen(weight[i]) + added) * (widen(from[i]) * factor), to[i]);
            }
        }
    });
}

enum Activation { SILU = 0, GELU_TANH = 1 };

// x sigmoid(u): silu if u = x, tanh-gelu with another u.
template <int KIND>
inline Vec activated(Vec x) {
    Vec u = KIND == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x), small = exponential(absolute(u) * -1.0f);
    return x * larger(small, zero_where_less(u, zeros(), broadcast(1))) / (1 + small);
}

// activation(gate) * up, for rows [gate | up]. x: [rows, 2 * width], out: [rows, width].
template <int KIND, class T>
void gated(const T* x, long rows, long width, T* out, int threads) {
    constexpr long PART = 256;  // how many activations are computed before they are multiplied by `up`
    by_rows(rows, width, threads, [&](long begin, long end) {
        alignas(64) float activations[PART];
        for (long first = begin * width; first < end * width;) {
            const long row = first / width, from = first % width, count = std::min(width - from, PART);
            const T *gate = x + row * 2 * width + from, *up = gate + width;
            long i = 0;
            for (; i + LANES <= count; i += LANES) store(activations + i, activated<KIND>(load(gate + i)));
            if (i < count) {  // the rest, without reading beyond the end
                T rest[LANES] = {};
                memcpy(rest, gate + i, (count - i) * sizeof(T));
                store(activations + i, activated<KIND>(load(rest)));
            }
            for (i = 0; i < count; i++) narrow(activations[i] * widen(up[i]), out[first + i]);
            first += count;
        }
    });
}

// A root-mean-square norm. A null weight means that there is no norm.
template <class T>
struct Norm {
    const T* weight;
    float epsilon;
    bool one_added, rounded_first;

    void operator()(const T* x, long rows, long width, T* out) const { rms_norm(x, rows, width, weight, epsilon, one_added, rounded_first, out, 1); }
};

// sum = residual + before(x), normed = after(sum). Each result is rounded to T, as if a tensor stored it. A norm without a weight changes
// nothing; `normed` is written only if `after` has a weight.
template <class T>
void add_with_norms(const T* x, const T* residual, long rows, long width, Norm<T> before, Norm<T> after, T* sum, T* normed, int threads) {
    by_rows(rows, width, threads, [&](long begin, long end) {
        long from = begin * width;
        if (before.weight) before(x + from, end - begin, width, sum + from);
        const T* added = before.weight ? sum : x;
        for (long i = from; i < end * width; i++) narrow(widen(residual[i]) + widen(added[i]), sum[i]);
        if (after.weight) after(sum + from, end - begin, width, normed + from);
    });
}

// A tensor [B, h, N, d], contiguous along d.
struct Heads {
    void* values;
    long rows, heads, nodes, width;
    long row_stride, head_stride, node_stride;

    template <class T>
    T* at(long row, long head, long node) const {
        return (T*)values + row * row_stride + head * head_stride + node * node_stride;
    }
};

// Rotary positions of a head's first `turned` numbers: x cos + (-second half, first half) sin. Each term is rounded to T.
template <class T>
inline void rotate(const T* from, const T* cos, const T* sin, long turned, long width, T* to) {
    const long half = turned / 2;
    // In two loops, because for one loop compilers would have to check too many pairs of arrays for overlaps, and would not use vectors.
    for (long i = 0; i < half; i++)
        narrow(rounded<T>(widen(from[i]) * widen(cos[i])) - rounded<T>(widen(from[i + half]) * widen(sin[i])), to[i]);
    for (long i = half; i < 2 * half; i++)
        narrow(rounded<T>(widen(from[i]) * widen(cos[i])) + rounded<T>(widen(from[i - half]) * widen(sin[i])), to[i]);
    for (long i = turned; i < width; i++) to[i] = from[i];
}

// Computes norms and rotary positions of queries and keys. x: [B, N, (H + 2 h) d], the heads of queries, then keys, then values. Writes
// queries [B, N, H, d] and keys [B, h, N, d].
template <class T>
void split_heads(
    const T* x, const Norm<T> (&norms)[2], const T* cos, const T* sin, long turned, long position_stride, const Heads& queries,
    const Heads& keys, int threads) {
    const long width = queries.width, all = queries.heads + 2 * keys.heads;
    by_rows(queries.rows * queries.nodes, all * width, threads, [&](long begin, long end) {
        std::vector<T> normed(width);
        for (long token = begin; token < end; token++) {
            const long row = token / queries.nodes, node = token % queries.nodes;
            const long place = row * position_stride + node * turned;
            const T* from = x + token * all * width;
            for (long head = 0; head < queries.heads + keys.heads; head++, from += width) {
                const bool is_key = head >= queries.heads;
                const Norm<T>& norm = norms[is_key];
                if (norm.weight) norm(from, 1, width, normed.data());
                T* to = is_key ? keys.at<T>(row, head - queries.heads, node) : queries.at<T>(row, head, node);
                rotate(norm.weight ? normed.data() : from, cos + place, sin + place, turned, width, to);
            }
        }
    });
}

// Calls `body(row, head, node, slot)` for every state [B, h, N, d] and its slot [B, N] of `nodes`; negative slots count from the end.
template <class Body>
void by_slots(const Heads& states, const int64_t* slots, long nodes, int threads, Body body) {
    by_rows(states.rows * states.nodes, states.heads * states.width, threads, [&](long begin, long end) {
        for (long token = begin; token < end; token++) {
            long slot = slots[token] < 0 ? slots[token] + nodes : slots[token];
            for (long head = 0; head < states.heads; head++) body(token / states.nodes, head, token % states.nodes, slot);
        }
    });
}

// Sets buffer[b, :, slots[b, n]] = states[b, :, n]. buffer: [B, h, L, d].
template <class T>
void write_slots(const Heads& states, const int64_t* slots, const Heads& buffer, int threads) {
    by_slots(states, slots, buffer.nodes, threads, [&](long row, long head, long node, long slot) {
        memcpy(buffer.at<T>(row, head, slot), states.at<T>(row, head, node), states.width * sizeof(T));
    });
}

// Like write_slots, but in int8, with a scale per head and slot, [B, h, L, 1]. Attention reads the scale rounded to T, so it is rounded
// before the division.
template <class T>
void quantize_slots(const Heads& states, const int64_t* slots, const Heads& levels, const Heads& scales, float least, int threads) {
    by_slots(states, slots, levels.nodes, threads, [&](long row, long head, long node, long slot) {
        const T* from = states.at<T>(row, head, node);
        int8_t* to = levels.at<int8_t>(row, head, slot);
        float largest = 0;
        bool numbers = true;
        for (long i = 0; i < states.width; i++) {
            const float size = std::abs(widen(from[i]));
            largest = std::max(largest, size);
            numbers &= size == size;
        }
        const float scale = numbers ? rounded<T>(std::max(largest / 127, least)) : NAN;
        narrow(scale, *scales.at<T>(row, head, slot));
        for (long i = 0; i < states.width; i++) to[i] = numbers ? int8_t(std::clamp(std::nearbyint(widen(from[i]) / scale), -127.0f, 127.0f)) : 0;
    });
}

}  // namespace
