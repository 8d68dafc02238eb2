// Operations around the products of a layer, each with one pass over its data: norms, gated activations, rotary positions, writes to
// the cache.
#pragma once
#include <cmath>

#include "parallel.h"
#include "vector_math.h"

namespace {

constexpr long WORTH_THREADS = 1 << 15;  // elements from which on several threads are faster than one

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

constexpr int RUNNING = 16;  // running sums of a norm, for any size of vectors

// x / sqrt(mean(x^2) + epsilon) * weight, or * (1 + weight); rounded_first: the quotient is rounded to T before it is multiplied.
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

// x sigmoid(u): silu with u = x, tanh-gelu with another u.
template <int KIND>
inline Vec activated(Vec x) {
    Vec u = KIND == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x), small = exponential(absolute(u) * -1.0f);
    return x * larger(small, zero_where_less(u, zeros(), broadcast(1))) / (1 + small);
}

// activation(gate) * up, of rows [gate | up] or [up | gate]. x: [rows, 2 * width], out: [rows, width].
template <int KIND, class T>
void gated(const T* x, long rows, long width, bool gate_first, T* out, int threads) {
    constexpr long PART = 256;  // numbers whose activations wait for `up`
    by_rows(rows, width, threads, [&](long begin, long end) {
        alignas(64) float activations[PART];
        for (long first = begin * width; first < end * width;) {
            const long row = first / width, from = first % width, count = std::min(width - from, PART);
            const T* gate = x + row * 2 * width + (gate_first ? 0 : width) + from;
            const T* up = x + row * 2 * width + (gate_first ? width : 0) + from;
            long i = 0;
            for (; i + LANES <= count; i += LANES) store(activations + i, activated<KIND>(load(gate + i)));
            if (i < count) {  // the rest, without reading past the end
                T rest[LANES] = {};
                memcpy(rest, gate + i, (count - i) * sizeof(T));
                store(activations + i, activated<KIND>(load(rest)));
            }
            for (i = 0; i < count; i++) narrow(activations[i] * widen(up[i]), out[first + i]);
            first += count;
        }
    });
}

// x [B, h, N, d], contiguous along d.
struct Heads {
    void* values;
    long rows, heads, nodes, width;
    long row_stride, head_stride, node_stride;
};

// Rotary positions of the first `turned` numbers of every head: x cos + (-second half, first half) sin, each
// rounded as tensors are: compiled code, which cannot call this function, has the same bits. out: [B, N, h, d].
template <class T>
void rotate(const Heads& x, const T* cos, const T* sin, long turned, long position_stride, T* out, int threads) {
    by_rows(x.rows * x.nodes, x.heads * x.width, threads, [&](long begin, long end) {
        const long half = turned / 2;
        for (long token = begin; token < end; token++) {
            long row = token / x.nodes, node = token % x.nodes;
            const T* c = cos + row * position_stride + node * turned;
            const T* s = sin + row * position_stride + node * turned;
            for (long head = 0; head < x.heads; head++) {
                const T* from = (const T*)x.values + row * x.row_stride + head * x.head_stride + node * x.node_stride;
                T* to = out + (token * x.heads + head) * x.width;
                for (long i = 0; i < half; i++) {
                    float a = widen(from[i]), b = widen(from[i + half]);
                    narrow(rounded<T>(a * widen(c[i])) - rounded<T>(b * widen(s[i])), to[i]);
                    narrow(rounded<T>(b * widen(c[i + half])) + rounded<T>(a * widen(s[i + half])), to[i + half]);
                }
                for (long i = turned; i < x.width; i++) to[i] = from[i];
            }
        }
    });
}

// buffer[b, :, slots[b, n]] = states[b, :, n]; buffer: [B, h, L, d], slots: [B, N], negative slots count from the end.
template <class T>
void write_slots(const Heads& states, const int64_t* slots, const Heads& buffer, int threads) {
    by_rows(states.rows * states.nodes, states.heads * states.width, threads, [&](long begin, long end) {
        for (long token = begin; token < end; token++) {
            long row = token / states.nodes, slot = slots[token] < 0 ? slots[token] + buffer.nodes : slots[token];
            const T* from = (const T*)states.values + row * states.row_stride + token % states.nodes * states.node_stride;
            T* to = (T*)buffer.values + row * buffer.row_stride + slot * buffer.node_stride;
            for (long head = 0; head < states.heads; head++)
                memcpy(to + head * buffer.head_stride, from + head * states.head_stride, states.width * sizeof(T));
        }
    });
}

}  // namespace
