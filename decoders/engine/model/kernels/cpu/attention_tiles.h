// Attention of a few queries to a block of places: scores, weights, weighted sums of values.
#pragma once
#include <algorithm>

#include "attention_lanes.h"

namespace {

#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int SUMS = 24;  // number of vectors of sums that are kept in registers
#elif defined(__AVX2__)
constexpr int SUMS = 12;
#else
constexpr int SUMS = 6;
#endif

// A tensor [rows, heads, slots, width], contiguous along `width`.
struct Slots {
    const void* data;
    long of_row, of_head, of_slot;
    long at(long row, long head) const { return row * of_row + head * of_head; }
};

enum class Type { float32, bfloat16, float16 };

inline float widen(Type type, const void* from, long i) {
    if (type == Type::float32) return ((const float*)from)[i];
    return type == Type::bfloat16 ? widen(((const bfloat16*)from)[i]) : widen(((const float16*)from)[i]);
}

// LANES numbers from number `i` on.
inline Vec load(Type type, const void* from, long i) {
    if (type == Type::float32) return load((const float*)from + i);
    return type == Type::bfloat16 ? load((const bfloat16*)from + i) : load((const float16*)from + i);
}

// Multiplies `count` numbers by a factor and stores them from number `i` on.
inline void narrow(const float* numbers, long count, float factor, Type type, void* to, long i) {
    auto all = [&](auto* out) {
        for (long n = 0; n < count; n++) narrow(numbers[n] * factor, out[i + n]);
    };
    if (type == Type::float32) all((float*)to);
    else if (type == Type::bfloat16) all((bfloat16*)to);
    else all((float16*)to);
}

// Calls `body` with `count`, from 1 to TILE, as a compile-time constant.
template <class Body>
inline void with_count(int count, Body body) {
    switch (count) {
        case 1: return body(std::integral_constant<int, 1>());
        case 2: return body(std::integral_constant<int, 2>());
        case 3: return body(std::integral_constant<int, 3>());
        case 4: return body(std::integral_constant<int, 4>());
        case 5: return body(std::integral_constant<int, 5>());
        default: return body(std::integral_constant<int, TILE>());
    }
}

// Calls `body(number of vectors, as a constant; first vector)` for all vectors from `begin` to `end` - 1, several at a time, at least LEAST.
template <int QUERIES, int LEAST = 1, class Body>
inline void in_vectors(long begin, long end, Body body) {
    constexpr int MOST = std::min(SUMS / QUERIES, 4);
    if constexpr (MOST > LEAST) for (; end - begin >= MOST; begin += MOST) body(std::integral_constant<int, MOST>(), begin);
    for (; begin < end; begin += LEAST) body(std::integral_constant<int, LEAST>(), begin);
}

// The scores of N queries for V vectors of places. keys: [lanes, PLACES]. scale: multiplies the scores of queries in bfloat16; float32
// queries are scaled before the product, but scaled bfloat16 queries would be rounded.
template <class C, int N, int V>
inline void score_tile(const uint32_t* queries, long lanes, const float* keys, float scale, float* scores, Ahead& ahead) {
    Vec sums[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) sums[n][v] = zeros();
    for (long d = 0; d < lanes; d++, keys += PLACES) {
        ahead.step();
        Vec k[V];
        for (int v = 0; v < V; v++) k[v] = load(keys + v * LANES);
        for (int n = 0; n < N; n++) {
            Vec x = broadcast_bits(queries[n * lanes + d]);
            for (int v = 0; v < V; v++) sums[n][v] = Lane<C>::multiply_add(x, k[v], sums[n][v]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(scores + n * PLACES + v * LANES, Lane<C>::NUMBERS > 1 ? sums[n][v] * broadcast(scale) : sums[n][v]);
}

// The scores of `count` queries for the places in vectors begin … end - 1 of a block, at least.
template <class C>
[[gnu::noinline]] void score(
    int count, const uint32_t* queries, long lanes, const float* keys, float scale, float* scores, long begin, long end, Ahead& ahead) {
    if constexpr (Lane<C>::TILES) return Lane<C>::score(count, queries, lanes, keys, scale, scores, ahead);
    with_count(count, [&](auto constant) {
        constexpr int N = decltype(constant)::value;
        in_vectors<N>(begin, end, [&](auto vectors, long v) {
            score_tile<C, N, decltype(vectors)::value>(queries, lanes, keys + v * LANES, scale, scores + v * LANES, ahead);
        });
    });
}

// Adds the values of `count` places, times their weights [N, PLACES], to V vectors of the sums of N queries. slots: null for successive
// slots; a slot of -1 has no values. Places that share a lane are added by one instruction.
template <int N, int V, class C>
[[gnu::noinline]] void value_tile(
    const float* weights, const C* values, long stride, const int* slots, long count, float* sums, long wide, Ahead& ahead) {
    constexpr int NUMBERS = Lane<C>::NUMBERS;
    static const C none[V * LANES] = {};
    auto of = [&](long i) { return slots ? slots[i] < 0 ? none : values + slots[i] * stride : values + i * stride; };
    Vec own[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) own[n][v] = load(sums + n * wide + v * LANES);
    for (long i = 0; i < count; i += NUMBERS) {
        Vec x[V];
        Lane<C>::load_values(of(i), of(i + NUMBERS - 1), x);
        ahead.step();
        for (int n = 0; n < N; n++) {
            Vec weight = broadcast_bits(as_bits(weights[n * PLACES + i / NUMBERS]));
            for (int v = 0; v < V; v++) own[n][v] = Lane<C>::multiply_add(weight, x[v], own[n][v]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(sums + n * wide + v * LANES, own[n][v]);
}

template <int N, class C>
inline void add_values_of(
    const float* weights, const C* values, long stride, const int* slots, long count, float* sums, long wide, long width, Ahead& ahead) {
    constexpr int NUMBERS = Lane<C>::NUMBERS, UNIT = NUMBERS * LANES;
    long whole = width / UNIT * NUMBERS;
    in_vectors<N, NUMBERS>(0, whole, [&](auto vectors, long v) {
        value_tile<N, decltype(vectors)::value>(weights, values + v * LANES, stride, slots, count, sums + v * LANES, wide, ahead);
    });
    if (long rest = width - whole * LANES) {  // values are not read beyond their end
        for (long i = 0; i < count; i += NUMBERS) {
            C part[NUMBERS][UNIT] = {};
            for (int n = 0; n < NUMBERS; n++)
                if (long slot = slots ? slots[i + n] : i + n; slot >= 0) memcpy(part[n], values + slot * stride + whole * LANES, rest * sizeof(C));
            value_tile<N, NUMBERS>(weights + i / NUMBERS, part[0], UNIT, nullptr, NUMBERS, sums + whole * LANES, wide, ahead);
        }
    }
}

template <class C>
[[gnu::noinline]] void add_values(
    int queries, const float* weights, const C* values, long stride, const int* slots, long count, float* sums, long wide, long width, Ahead& ahead) {
    with_count(queries, [&](auto constant) {
        add_values_of<decltype(constant)::value>(weights, values, stride, slots, count, sums, wide, width, ahead);
    });
}

// Transposes the keys of a row and head: to[d * PLACES + i] is lane d of the key at place i of the block.
template <class C>
struct Transposed {
    const C* keys;
    long stride, width;
    Type type;  // of the scales
    const Slots& scales;
    long first_scale;
    long lanes;   // of a key, see Lane; in tiles also zeros behind it
    float* rows;  // [LANES, lanes rounded up to 4]

    // Transposes `count` keys, at most LANES. slots: null for successive slots from `slot` on; a slot of -1 gives zeros.
    [[gnu::noinline]] void some(long slot, const int* slots, long count, float* to, Ahead& ahead) const {
        constexpr int NUMBERS = Lane<C>::NUMBERS;
        constexpr bool AS_GIVEN = sizeof(C) * NUMBERS == sizeof(float);
        const float* from = (const float*)(keys + slot * stride);
        if (!slots && count == LANES && AS_GIVEN && width % (4 * NUMBERS) == 0 && stride % NUMBERS == 0) {
            in_fours(from, stride / NUMBERS, width / NUMBERS, ahead, [&](long d, Vec v) { store(to + d * PLACES, v); });
        } else if (!slots && count == LANES && std::is_same_v<C, bfloat16> && width % 8 == 0 && stride % 2 == 0) {
            in_fours(from, stride / 2, width / 2, ahead, [&](long d, Vec v) {
                store(to + 2 * d * PLACES, first_of_pairs((Bits)v));
                store(to + (2 * d + 1) * PLACES, second_of_pairs((Bits)v));
            });
        } else if (!slots && count == LANES && std::is_same_v<C, int8_t> && width % 16 == 0 && stride % 4 == 0 && scales.of_slot == 1) {
            const Vec scale = load(type, scales.data, first_scale + slot);  // a lane is a place, with a scale of its own
            in_fours(from, stride / 4, width / 4, ahead, [&](long d, Vec v) {
                store(to + 4 * d * PLACES, int8_of_fours<0>((Bits)v) * scale);
                store(to + (4 * d + 1) * PLACES, int8_of_fours<1>((Bits)v) * scale);
                store(to + (4 * d + 2) * PLACES, int8_of_fours<2>((Bits)v) * scale);
                store(to + (4 * d + 3) * PLACES, int8_of_fours<3>((Bits)v) * scale);
            });
        } else {
            const long length = round_up(lanes, 4);
            for (long i = 0; i < LANES; i++) {
                long one = i < count ? slots ? slots[i] : slot + i : -1;
                float* row = rows + i * length;
                if (one < 0) {
                    memset(row, 0, length * sizeof(float));
                    continue;
                }
                const C* key = keys + one * stride;
                if constexpr (AS_GIVEN) {
                    memset(row + width / NUMBERS, 0, (length - width / NUMBERS) * sizeof(float));
                    memcpy(row, key, width * sizeof(C));
                    continue;
                }
                float scale = 1;
                if constexpr (std::is_same_v<C, int8_t>) scale = widen(type, scales.data, first_scale + one * scales.of_slot);
                long d = 0;
                for (; d + LANES <= width; d += LANES) {
                    Vec v = load(key + d);
                    if constexpr (std::is_same_v<C, int8_t>) v = v * broadcast(scale);
                    store(row + d, v);
                }
                for (; d < width; d++) row[d] = widen(key[d]) * scale;
                for (; d < length; d++) row[d] = 0;
            }
            in_fours(rows, length, length, ahead, [&](long d, Vec v) { store(to + d * PLACES, v); });
        }
    }

    // `from`: floats that may hold several numbers each.
    template <class Write>
    static void in_fours(const float* from, long stride, long count, Ahead& ahead, Write write) {
        transpose_rows(from, stride, count, [&] { ahead.step(); }, write);
    }

    // Transposes the keys of slots begin … end - 1, whose places equal their numbers, in the block that begins at place `block`.
    void straight(long block, long begin, long end, float* to, Ahead& ahead) const {
        for (long i = (begin - block) / LANES * LANES; i < end - block; i += LANES) {
            if (long before = begin - block - i; before > 0) {
                int slots[LANES];
                for (long n = 0; n < LANES; n++) slots[n] = n >= before && block + i + n < end ? int(block + i + n) : -1;
                some(0, slots, LANES, to + i, ahead);
            } else {
                some(block + i, nullptr, std::min(end - block - i, long(LANES)), to + i, ahead);
            }
        }
    }

    // Transposes the keys of the gathered slots `from`, at places begin … end - 1 of the block that begins at place `block`.
    void gathered(long block, long begin, long end, const int* from, float* to, Ahead& ahead) const {
        for (long i = (begin - block) / LANES * LANES; i < end - block; i += LANES) {
            int slots[LANES];
            for (long n = 0, place = block + i; n < LANES; n++, place++) slots[n] = place >= begin && place < end ? from[place - begin] : -1;
            some(0, slots, LANES, to + i, ahead);
        }
    }
};

// Running weighted means of values, one per query. Blocks are added one after another.
struct Mean {
    float* sums;    // [queries, wide], the sums of weighted values
    float* totals;  // [queries, LANES], the sums of weights by place modulo LANES; over all stretches, the whole sum in lane 0
    float* tops;    // [queries], the largest score so far, which is subtracted before exp
};

inline float total_of(const float* lanes) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

// Turns the scores of a query for places begin … end - 1 of a block into weights, relative to the query's largest score so far.
inline void weigh(float* scores, long begin, long end, float* sums, long wide, float* total, float& top) {
    const float none = -INFINITY;
    long first = begin / LANES * LANES, last = (end + LANES - 1) / LANES * LANES;
    for (long i = first; i < begin; i++) scores[i] = none;
    for (long i = end; i < last; i++) scores[i] = none;
    Vec most = load(scores + first);
    for (long i = first + LANES; i < last; i += LANES) most = larger(most, load(scores + i));
    float block_top = largest(most);
    if (block_top > top) {
        float factor = power_of_two(top - block_top);
        if (factor != 1 && top != none) {
            multiply_all(sums, wide, factor);
            multiply_all(total, LANES, factor);
        }
        top = block_top;
    }
    Vec sum = load(total), relative = broadcast(top == none ? 0 : top);
    for (long i = first; i < last; i += LANES) {
        Vec weight = power_of_two(load(scores + i) - relative);
        store(scores + i, weight);
        sum = sum + weight;
    }
    store(total, sum);
}

// Adds the results of a stretch to the results of the stretches before it.
inline void merge(float* sums, float& total, float& top, const float* more_sums, float more_total, float more_top, long wide) {
    float highest = std::max(top, more_top);
    if (highest == -INFINITY) return;
    float own = power_of_two(top - highest), others = power_of_two(more_top - highest);
    for (long i = 0; i < wide; i += LANES)
        store(sums + i, multiply_add(load(more_sums + i), broadcast(others), load(sums + i) * broadcast(own)));
    total = multiply_add(more_total, others, total * own);
    top = highest;
}

}  // namespace
