// Attention of a block of nodes to the slot cache. Keys and values are read where they are, once for the queries of all heads of a
// group, and what does not count is not read at all.
//
// Sums over keys are ordered by place. A committed slot s, before the block, has place s; the k-th node of the block that a query may
// see has place base + k. On a path a token's place is its position, in whichever slots the path is, so that it has the same bits on
// a branch of a tree, in a chain, and as text. Within a block of places the lanes of a vector add places modulo their number, blocks
// follow each other, and stretches of blocks are added in order. Tiles and threads change what is computed together, never an order.
#pragma once
#include <atomic>
#include <bit>
#include <climits>
#include <type_traits>
#include <vector>

#include "products.h"
#include "vector_math.h"

namespace {

constexpr long PLACES = 64;        // of a block; a multiple of the lanes of every vector
constexpr long STRETCH = 512;      // places of a stretch, a multiple of PLACES
constexpr long MOST_QUERIES = 256;  // queries (times heads of a group) for which keys and values are read once
constexpr int TILE = 6;            // queries of a tile
constexpr long LEAST_SHARED = 200000;  // products for which several threads are worth their start
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int SUMS = 24;  // vectors of sums that are in registers
#elif defined(__AVX2__)
constexpr int SUMS = 12;
#else
constexpr int SUMS = 6;
#endif

// A tensor [rows, heads, slots, width] of which `width` has no gaps.
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

inline void narrow(float value, Type type, void* to, long i) {
    if (type == Type::float32) ((float*)to)[i] = value;
    else if (type == Type::bfloat16) narrow(value, ((bfloat16*)to)[i]);
    else narrow(value, ((float16*)to)[i]);
}

struct Attention {
    Type type;  // of queries, scales, sinks and the result
    Slots query, key, value, key_scales, value_scales;  // scales: where keys and values are int8
    const void* sinks;                                   // [heads], null: none
    void* out;                                           // [rows, queries, heads, value_width]
    long rows, heads, kv_heads, queries, width, value_width, view;
    const int64_t* mask;  // [rows, nodes, columns]: words of bits, offset, base
    long mask_of_row, mask_of_node, nodes, columns;
    long window, chunk;  // 0: none
    float scale, softcap;
};

// What a query sees: the slots first … straight - 1, whose places are their numbers, and then, at places straight + i, the slots
// gathered[i], of which those that are out of its reach are -1.
struct Seen {
    long first, straight, count, gathered;
    long end() const { return straight + count; }
};

inline long floor_divide(long a, long b) { return a / b - (a % b < 0); }

// Appends the slots of the query's branch to `slots`. in_order: how many nodes, from the first, are at the depth of their number.
inline Seen seen_by(const Attention& a, long row, long query, long in_order, std::vector<int>& slots) {
    const int64_t *nodes = a.mask + row * a.mask_of_row, *own = nodes + (a.nodes - a.queries + query) * a.mask_of_node;
    const long words = a.columns - 2, base = own[words + 1], depth = own[words], position = base + depth;
    Seen seen = {0, std::max(base, 0L), 0, long(slots.size())};
    if (a.window) seen.first = std::max(seen.first, position - a.window + 1);
    if (a.chunk) seen.first = std::max(seen.first, floor_divide(position, a.chunk) * a.chunk);
    if (!words) {
        seen.straight = std::min({position + 1, base + a.nodes, a.view});
    } else {
        auto is_seen = [&](long node) { return own[node / 64] >> (node % 64) & 1; };
        long node = std::max(-base, 0L), last = std::min({in_order, depth + 1, a.view - base});
        while (node < last && is_seen(node)) node++;
        seen.straight = std::min(std::max(base, 0L) + node - std::max(-base, 0L), a.view);
        for (long word = node / 64; word < words; word++) {
            uint64_t bits = own[word];
            if (word == node / 64) bits &= ~uint64_t(0) << (node % 64);
            for (; bits; bits &= bits - 1) {
                long other = word * 64 + std::countr_zero(bits);
                if (other >= a.nodes) break;
                long place = base + nodes[other * a.mask_of_node + words];
                bool out = base + other >= a.view || (a.window && position - place >= a.window) ||
                           (a.chunk && floor_divide(position, a.chunk) != floor_divide(place, a.chunk));
                slots.push_back(out ? -1 : int(base + other));
            }
        }
    }
    seen.straight = std::max(seen.straight, 0L);
    seen.first = std::min(seen.first, seen.straight);
    seen.count = long(slots.size()) - seen.gathered;
    return seen;
}

// Calls `body` with the constant `count`, of 1 to TILE.
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

// Calls `body(constant number of vectors, first vector)` until all of begin … end - 1 were in a call.
template <int QUERIES, class Body>
inline void in_vectors(long begin, long end, Body body) {
    constexpr int MOST = std::min(SUMS / QUERIES, 4);
    if constexpr (MOST > 1) for (; end - begin >= MOST; begin += MOST) body(std::integral_constant<int, MOST>(), begin);
    for (; begin < end; begin++) body(std::integral_constant<int, 1>(), begin);
}

// Scores of N queries for V vectors of places. keys: [width, PLACES].
template <int N, int V>
inline void score_tile(const float* queries, long width, const float* keys, float* scores) {
    Vec sums[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) sums[n][v] = zeros();
    for (long d = 0; d < width; d++, keys += PLACES) {
        Vec k[V];
        for (int v = 0; v < V; v++) k[v] = load(keys + v * LANES);
        for (int n = 0; n < N; n++) {
            Vec x = broadcast(queries[n * width + d]);
            for (int v = 0; v < V; v++) sums[n][v] = multiply_add(x, k[v], sums[n][v]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(scores + n * PLACES + v * LANES, sums[n][v]);
}

// Scores of `count` queries for the places of vectors begin … end - 1 of a block.
[[gnu::noinline]] inline void score(int count, const float* queries, long width, const float* keys, float* scores, long begin, long end) {
    with_count(count, [&](auto constant) {
        constexpr int N = decltype(constant)::value;
        in_vectors<N>(begin, end, [&](auto vectors, long v) {
            score_tile<N, decltype(vectors)::value>(queries, width, keys + v * LANES, scores + v * LANES);
        });
    });
}

// Adds the values of `count` places times their weights [N, PLACES] to V vectors of the sums of N queries. slots: null if the places
// are neighbours.
template <int N, int V, class C>
[[gnu::noinline]] void value_tile(const float* weights, const C* values, long stride, const int* slots, long count, float* sums, long wide) {
    Vec own[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) own[n][v] = load(sums + n * wide + v * LANES);
    for (long i = 0; i < count; i++) {
        const C* value = values + (slots ? slots[i] : i) * stride;
        Vec x[V];
        for (int v = 0; v < V; v++) x[v] = load(value + v * LANES);
        for (int n = 0; n < N; n++) {
            Vec weight = broadcast(weights[n * PLACES + i]);
            for (int v = 0; v < V; v++) own[n][v] = multiply_add(weight, x[v], own[n][v]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(sums + n * wide + v * LANES, own[n][v]);
}

template <int N, class C>
inline void add_values_of(const float* weights, const C* values, long stride, const int* slots, long count, float* sums, long wide, long width) {
    long whole = width / LANES;
    in_vectors<N>(0, whole, [&](auto vectors, long v) {
        value_tile<N, decltype(vectors)::value>(weights, values + v * LANES, stride, slots, count, sums + v * LANES, wide);
    });
    if (long rest = width - whole * LANES) {  // not read past its end
        for (long i = 0; i < count; i++) {
            C part[LANES] = {};
            long slot = slots ? slots[i] : i;
            memcpy(part, values + slot * stride + whole * LANES, rest * sizeof(C));
            value_tile<N, 1>(weights + i, part, 0, nullptr, 1, sums + whole * LANES, wide);
        }
    }
}

template <class C>
[[gnu::noinline]] void add_values(int queries, const float* weights, const C* values, long stride, const int* slots, long count, float* sums, long wide, long width) {
    with_count(queries, [&](auto constant) {
        add_values_of<decltype(constant)::value>(weights, values, stride, slots, count, sums, wide, width);
    });
}

// A part of the keys of one row and head, transposed: to[d * PLACES + i] is number d of the key at slot i.
template <class C>
struct Transposed {
    const C* keys;
    long stride, width;
    Type type;  // of the scales
    const Slots& scales;
    long first_scale;
    float* rows;  // [LANES, width rounded up to 4]

    // count: at most LANES; slots: null if they are neighbours from `slot` on, -1 for none.
    [[gnu::noinline]] void some(long slot, const int* slots, long count, float* to) const {
        const float* from = rows;
        long length = (width + 3) / 4 * 4, ld = length;
        if (!slots && count == LANES && std::is_same_v<C, float> && width % 4 == 0) {
            from = (const float*)(keys + slot * stride);
            ld = stride;
        } else if (!slots && count == LANES && std::is_same_v<C, bfloat16> && width % 8 == 0 && stride % 2 == 0) {
            return pairs(slot, to);
        } else {
            for (long i = 0; i < LANES; i++) {
                long one = i < count ? slots ? slots[i] : slot + i : -1;
                float* row = rows + i * length;
                if (one < 0) {
                    memset(row, 0, length * sizeof(float));
                    continue;
                }
                const C* key = keys + one * stride;
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
        }
        for (long d = 0; d < length; d += 4) {
            Vec v[4];
            for (int i = 0; i < 4; i++) v[i] = load_fours(from + d + i * ld, ld);
            transpose_fours(v);
            for (int i = 0; i < 4; i++) store(to + (d + i) * PLACES, v[i]);
        }
    }

    // Pairs of 16-bit numbers are transposed as one, and taken apart then.
    void pairs(long slot, float* to) const {
        const float* from = (const float*)(keys + slot * stride);
        long ld = stride / 2;
        for (long d = 0; d < width / 2; d += 4) {
            Vec v[4];
            for (int i = 0; i < 4; i++) v[i] = load_fours(from + d + i * ld, ld);
            transpose_fours(v);
            for (int i = 0; i < 4; i++) {
                store(to + (2 * (d + i)) * PLACES, first_of_pairs(bits_of(v[i])));
                store(to + (2 * (d + i) + 1) * PLACES, second_of_pairs(bits_of(v[i])));
            }
        }
    }

    // Slots begin … end - 1 of the block of places that begins at `block`.
    void straight(long block, long begin, long end, float* to) const {
        for (long i = (begin - block) / LANES * LANES; i < end - block; i += LANES) {
            if (long before = begin - block - i; before > 0) {
                int slots[LANES];
                for (long n = 0; n < LANES; n++) slots[n] = n >= before && block + i + n < end ? int(block + i + n) : -1;
                some(0, slots, LANES, to + i);
            } else {
                some(block + i, nullptr, std::min(end - block - i, long(LANES)), to + i);
            }
        }
    }

    // The slots of places begin … end - 1 of the same block.
    void gathered(long block, long begin, long end, const int* from, float* to) const {
        for (long i = (begin - block) / LANES * LANES; i < end - block; i += LANES) {
            int slots[LANES];
            for (long n = 0, place = block + i; n < LANES; n++, place++) slots[n] = place >= begin && place < end ? from[place - begin] : -1;
            some(0, slots, LANES, to + i);
        }
    }
};

// A weighted mean in the making.
struct Mean {
    float* sums;    // [queries, wide], weighted values
    float* totals;  // [queries, LANES], weights by places modulo LANES; [queries, 1] once `closed`
    float* tops;    // [queries], the largest score, of which powers are taken relatively
};

inline float total_of(const float* lanes) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

inline void multiply_all(float* numbers, long count, float factor) {
    for (long i = 0; i < count; i += LANES) store(numbers + i, load(numbers + i) * broadcast(factor));
}

// Turns the scores of one query for places begin … end - 1 of a block into weights, relative to its largest score so far.
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

// Adds a stretch to those before it.
inline void merge(float* sums, float& total, float& top, const float* more_sums, float more_total, float more_top, long wide) {
    float highest = std::max(top, more_top);
    if (highest == -INFINITY) return;
    float own = power_of_two(top - highest), others = power_of_two(more_top - highest);
    for (long i = 0; i < wide; i += LANES)
        store(sums + i, multiply_add(load(more_sums + i), broadcast(others), load(sums + i) * broadcast(own)));
    total = multiply_add(more_total, others, total * own);
    top = highest;
}

// Queries of one row and head of the keys: query n of `count` is head `(begin + n) % group` of node `(begin + n) / group`.
template <class C>
struct Queries {
    const Attention& a;
    const Seen* seen;  // of each node of the row
    const int* slots;
    long row, head, begin, count;
    float* space;
    long group = a.heads / a.kv_heads, wide = (a.value_width + LANES - 1) / LANES * LANES, length = (a.width + 3) / 4 * 4;
    float* queries = space;
    float* keys = queries + count * a.width + LANES;
    float* branch_keys = keys + length * PLACES;
    float* scores = branch_keys + length * PLACES;
    float* branch_scores = scores + TILE * PLACES;
    float* key_rows = branch_scores + TILE * PLACES;
    Mean stretch = mean(key_rows + LANES * length), all = mean(stretch.tops + count);
    Transposed<C> transposed = {(const C*)a.key.data + a.key.at(row, head), a.key.of_slot, a.width, a.type, a.key_scales, a.key_scales.at(row, head), key_rows};
    const C* values = (const C*)a.value.data + a.value.at(row, head);

    Mean mean(float* from) const { return {from, from + count * wide, from + count * (wide + LANES)}; }
    static long space_for(const Attention& a, long count) {
        long wide = (a.value_width + LANES - 1) / LANES * LANES, length = (a.width + 3) / 4 * 4;
        return count * a.width + LANES + 2 * length * PLACES + 2 * TILE * PLACES + LANES * length + 2 * count * (wide + LANES + 1) + LANES;
    }
    const Seen& of(long n) const { return seen[(begin + n) / group]; }

    [[gnu::noinline]] void take() {
        float scale = a.softcap ? a.scale : a.scale * LOG2_E;
        for (long n = 0; n < count; n++) {
            long from = a.query.at(row, head * group + (begin + n) % group) + (begin + n) / group * a.query.of_slot;
            for (long d = 0; d < a.width; d++) queries[n * a.width + d] = widen(a.type, a.query.data, from + d) * scale;
        }
    }

    void clear(const Mean& m) {
        memset(m.sums, 0, count * wide * sizeof(float));
        memset(m.totals, 0, count * LANES * sizeof(float));
        for (long n = 0; n < count; n++) m.tops[n] = -INFINITY;
    }

    // What all queries together see.
    void range(long& first, long& straight, long& end) const {
        first = LONG_MAX, straight = end = 0;
        for (long node = begin / group; node <= (begin + count - 1) / group; node++) {
            first = std::min(first, seen[node].first);
            straight = std::max(straight, seen[node].straight);
            end = std::max(end, seen[node].end());
        }
    }

    // Attends to places from … to - 1.
    [[gnu::noinline]] void attend(long from, long to) {
        clear(stretch);
        long first, straight, end;
        range(first, straight, end);
        for (long block = std::max(from, first / PLACES * PLACES); block < std::min(to, end); block += PLACES) {
            transposed.straight(block, std::max(block, first), std::min(block + PLACES, straight), keys);
            for (long n = 0; n < count; n += TILE) attend_tile(block, n, std::min(count - n, long(TILE)));
        }
    }

    void attend_tile(long block, long tile, int size) {
        long next = block + PLACES, first = next, end = block, straight = block, common_first = block, common_end = next;
        for (long n = tile; n < tile + size; n++) {
            first = std::min(first, of(n).first);
            end = std::max(end, of(n).end());
            straight = std::max(straight, of(n).straight);
            common_first = std::max(common_first, of(n).first);
            common_end = std::min(common_end, of(n).straight);
        }
        if (first >= next || end <= block) return;
        first = std::max(first, block) - block;
        straight = std::min(straight, next) - block;
        score(size, queries + tile * a.width, a.width, keys, scores, first / LANES, (straight + LANES - 1) / LANES);
        for (long n = tile; n < tile + size;) {
            long node_end = std::min(tile + size, n + group - (begin + n) % group);
            if (of(n).count) score_branch(block, tile, n, int(node_end - n));
            n = node_end;
        }
        for (long n = tile; n < tile + size; n++) weigh_query(block, n, scores + (n - tile) * PLACES);
        if (common_first < common_end) {
            for (long n = tile; n < tile + size; n++) add_straight(block, std::max(of(n).first, block), common_first, n, tile);
            add_values(size, scores + common_first - block, values + common_first * a.value.of_slot, a.value.of_slot, nullptr,
                       common_end - common_first, stretch.sums + tile * wide, wide, a.value_width);
        }
        for (long n = tile; n < tile + size; n++) {
            const Seen& s = of(n);
            add_straight(block, common_first < common_end ? common_end : std::max(s.first, block), std::min(s.straight, next), n, tile);
            for (long place = std::max(s.straight, block); place < std::min(s.end(), next); place++) {
                const int* slot = slots + s.gathered + place - s.straight;
                if (*slot >= 0) add_one(scores + (n - tile) * PLACES + place - block, values, slot, 1, n);
            }
        }
    }

    // Scores for what is not straight, of queries of one node.
    void score_branch(long block, long tile, long n, int size) {
        const Seen& s = of(n);
        long from = std::max(s.straight, block), to = std::min(s.end(), block + PLACES);
        if (from >= to) return;
        const int* own = slots + s.gathered + from - s.straight;
        transposed.gathered(block, from, to, own, branch_keys);
        score(size, queries + n * a.width, a.width, branch_keys, branch_scores, (from - block) / LANES, (to - block + LANES - 1) / LANES);
        for (int i = 0; i < size; i++)
            memcpy(scores + (n - tile + i) * PLACES + from - block, branch_scores + i * PLACES + from - block, (to - from) * sizeof(float));
    }

    void weigh_query(long block, long n, float* own) {
        const Seen& s = of(n);
        long from = std::max(s.first, block), to = std::min(s.end(), block + PLACES);
        if (from >= to) return;
        if (a.softcap) {
            for (long i = (from - block) / LANES * LANES; i < to - block; i += LANES)
                store(own + i, tangent(load(own + i) * broadcast(1 / a.softcap)) * broadcast(a.softcap * LOG2_E));
        }
        for (long place = std::max(s.straight, block); place < to; place++)
            if (slots[s.gathered + place - s.straight] < 0) own[place - block] = -INFINITY;
        weigh(own, from - block, to - block, stretch.sums + n * wide, wide, stretch.totals + n * LANES, stretch.tops[n]);
        if constexpr (std::is_same_v<C, int8_t>) {
            for (long place = from; place < to; place++) {
                long slot = place < s.straight ? place : slots[s.gathered + place - s.straight];
                if (slot >= 0) own[place - block] *= widen(a.type, a.value_scales.data, a.value_scales.at(row, head) + slot * a.value_scales.of_slot);
            }
        }
    }

    void add_straight(long block, long from, long to, long n, long tile) {
        if (from < to) add_one(scores + (n - tile) * PLACES + from - block, values + from * a.value.of_slot, nullptr, to - from, n);
    }

    [[gnu::noinline]] void add_one(const float* weights, const C* from, const int* at, long number, long n) {
        add_values(1, weights, from, a.value.of_slot, at, number, stretch.sums + n * wide, wide, a.value_width);
    }

    [[gnu::noinline]] void add_stretch(long n, const float* sums, float total, float top) {
        merge(all.sums + n * wide, all.totals[n * LANES], all.tops[n], sums, total, top, wide);
    }

    void all_stretches() {
        take();
        long first, straight, end;
        range(first, straight, end);
        first = first / STRETCH * STRETCH;
        clear(all);
        for (long from = first; from < end; from += STRETCH) {
            attend(from, from + STRETCH);
            for (long n = 0; n < count; n++) add_stretch(n, stretch.sums + n * wide, total_of(stretch.totals + n * LANES), stretch.tops[n]);
        }
        write_all(all);
    }

    [[gnu::noinline]] void write_all(const Mean& m) {
        for (long n = 0; n < count; n++) write(m.sums + n * wide, m.totals[n * LANES], m.tops[n], n);
    }

    void write(float* sums, float total, float top, long n) {
        long own = head * group + (begin + n) % group;
        if (a.sinks) {
            float sink = widen(a.type, a.sinks, own) * LOG2_E, highest = std::max(top, sink), factor = power_of_two(top - highest);
            multiply_all(sums, wide, factor);
            total = total * factor + power_of_two(sink - highest);
        }
        long to = ((row * a.queries + (begin + n) / group) * a.heads + own) * a.value_width;
        float share = total == 0 ? 0 : 1 / total;  // a query in front of its row sees nothing
        for (long d = 0; d < a.value_width; d++) narrow(sums[d] * share, a.type, a.out, to + d);
    }
};

// Calls `body(thread, number)` for every number below `count`; who is ready takes the next, the last numbers first.
template <class Body>
inline void take_turns(long count, int threads, Body body) {
    std::atomic<long> left = count;
    in_threads(int(std::min(count, long(threads))), [&](int thread, int) {
        for (long number; (number = left.fetch_sub(1) - 1) >= 0;) body(thread, number);
    });
}

template <class C>
void attend_to_slots(const Attention& a, int threads) {
    thread_local std::vector<Seen> kept_seen;
    thread_local std::vector<int> kept_slots;
    std::vector<Seen>& seen = kept_seen;
    std::vector<int>& slots = kept_slots;  // in other threads their names mean other objects
    seen.clear();
    slots.clear();
    long end = 0, seen_places = 0;
    for (long row = 0; row < a.rows; row++) {
        const int64_t* offsets = a.mask + row * a.mask_of_row + a.columns - 2;
        long in_order = 0;
        while (in_order < a.nodes && offsets[in_order * a.mask_of_node] == in_order) in_order++;
        for (long query = 0; query < a.queries; query++) {
            seen.push_back(seen_by(a, row, query, in_order, slots));
            end = std::max(end, seen.back().end());
            seen_places += seen.back().end() - seen.back().first;
        }
    }
    const long group = a.heads / a.kv_heads, all = a.queries * group, most = std::min(all, MOST_QUERIES), parts = (all + most - 1) / most;
    const long items = a.rows * a.kv_heads * parts, stretches = std::max((end + STRETCH - 1) / STRETCH, 1L);
    if (seen_places * a.heads * (a.width + a.value_width) < LEAST_SHARED) threads = 1;
    const bool split = threads > 1 && stretches > 1 && items < 4 * threads;
    const long wide = (a.value_width + LANES - 1) / LANES * LANES, own = (Queries<C>::space_for(a, most) + LANES - 1) / LANES * LANES;
    const long part = most * (wide + 2);
    float* space = (float*)workspace((threads * own + (split ? items * stretches * part : 0)) * sizeof(float));
    auto queries_of = [&](int thread, long item) {
        long row = item / parts / a.kv_heads, begin = item % parts * most;
        return Queries<C>{a, seen.data() + row * a.queries, slots.data(), row, item / parts % a.kv_heads, begin, std::min(most, all - begin), space + thread * own};
    };
    if (!split) {
        take_turns(items, threads, [&](int thread, long item) { queries_of(thread, item).all_stretches(); });
        return;
    }
    float* kept = space + threads * own;
    take_turns(items * stretches, threads, [&](int thread, long unit) {
        auto queries = queries_of(thread, unit / stretches);
        queries.take();
        queries.attend(unit % stretches * STRETCH, (unit % stretches + 1) * STRETCH);
        float* to = kept + unit * part;
        memcpy(to, queries.stretch.sums, queries.count * wide * sizeof(float));
        for (long n = 0; n < queries.count; n++) {
            to[most * wide + n] = total_of(queries.stretch.totals + n * LANES);
            to[most * (wide + 1) + n] = queries.stretch.tops[n];
        }
    });
    take_turns(items, threads, [&](int thread, long item) {
        auto queries = queries_of(thread, item);
        queries.clear(queries.all);
        for (const float* from = kept + item * stretches * part; from < kept + (item + 1) * stretches * part; from += part)
            for (long n = 0; n < queries.count; n++) queries.add_stretch(n, from + n * wide, from[most * wide + n], from[most * (wide + 1) + n]);
        queries.write_all(queries.all);
    });
}

}  // namespace
