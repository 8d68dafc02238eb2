// Attention of a block of nodes to the slot cache. Keys and values are read once for the queries of all heads of a group. Slots that no
// query sees are not read.
//
// Sums over keys are ordered by place. A slot s before the block of nodes has place s; the k-th node that a query sees has place base + k.
// So a token's place is its position on the query's path, whatever its slot is, and a query's result has the same bits on a branch of a
// tree, in a chain, and in text. Places are cut into blocks, and blocks are grouped in stretches. Within a block, lane l of a vector adds
// places l, l + LANES, …; blocks and stretches are added in order. Tiles and threads never change this order. AMX adds 32 values at a time.
#pragma once
#include <atomic>
#include <climits>
#include <vector>

#include "attention_tiles.h"
#include "products.h"

namespace {

constexpr long STRETCH = 512;          // number of places of a stretch, a multiple of PLACES
constexpr long MOST_QUERIES = 256;     // most queries (times heads of a group) that share one read of keys and values
constexpr long TURNS = 8;              // pieces of work per thread: many pieces let threads end together, but a piece's first reads are not prefetched
constexpr long LEAST_SHARED = 200000;  // least number of multiplications for which several threads are worth starting

struct Attention {
    Type type;  // of queries, scales, sinks and the result
    Slots query, key, value, key_scales, value_scales;  // scales: only if keys and values are int8
    const void* sinks;                                   // [heads]; null for no sinks
    void* out;                                           // [rows, queries, heads, value_width]
    long rows, heads, kv_heads, queries, width, value_width, view;
    const int64_t* mask;  // [rows, nodes, columns]: words of bits, offset, base
    long mask_of_row, mask_of_node, nodes, columns;
    long window, chunk;  // 0 for no limit
    float scale, softcap;
};

// The slots that a query sees. The places of slots first … straight - 1 equal their numbers. The other `count` slots are gathered:
// slots[gathered + i] has place straight + i. A gathered slot is -1 if it is outside of the window, the chunk or the view.
struct Seen {
    long first, straight, count, gathered;
    long end() const { return straight + count; }
};

inline long floor_divide(long a, long b) { return a / b - (a % b < 0); }

// Returns what a query sees, and appends its gathered slots to `slots`. in_order: number of leading nodes with a depth equal to their index.
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

// Some queries of a row and a key head: query n of `count` is head `(begin + n) % group` of node `(begin + n) / group`.
template <class C>
struct Queries {
    static constexpr long STEP = Lane<C>::STEP, STEPS = PLACES / STEP;
    const Attention& a;
    const Seen* seen;  // what each node of the row sees
    const int* slots;
    long row, head, begin, count;
    float* space;
    long group = a.heads / a.kv_heads, wide = wide_of(a), lanes = lanes_of(a), length = round_up(lanes, 4), held = held_for(count);
    uint32_t* queries = (uint32_t*)space;
    float* keys = space + held * lanes + LANES;
    float* branch_keys = keys + length * PLACES;
    float* scores = branch_keys + length * PLACES;
    float* branch_scores = scores + Lane<C>::QUERIES * PLACES;
    float* key_rows = branch_scores + Lane<C>::QUERIES * PLACES;
    float scale = a.softcap ? a.scale : a.scale * LOG2_E;
    Mean stretch = mean(key_rows + LANES * length), all = mean(stretch.tops + held);
    // Only for tiles: values of a block and of a step, and up to Lane<C>::QUERIES queries.
    uint32_t *pairs = (uint32_t*)(all.tops + held), *branch_pairs = pairs + PLACES / 2 * wide, *few = branch_pairs + STEP / 2 * wide;
    const bool is_few = Lane<C>::TILES && count <= Lane<C>::QUERIES && a.width % (2 * Lane<C>::LENGTH) == 0;  // whether `few` has the queries
    bool finite[STEPS] = {};  // whether all values of a step are finite
    Transposed<C> transposed = {(const C*)a.key.data + a.key.at(row, head), a.key.of_slot, a.width, a.type, a.key_scales, a.key_scales.at(row, head), lanes, key_rows};
    const C* values = (const C*)a.value.data + a.value.at(row, head);
    const Seen* of_query[MOST_QUERIES] = {};  // what each query sees: looked up once, because a division takes long
    Ahead ahead_values = {}, ahead_keys = {};  // values of this block, or with tiles of the next one, and keys of the next one

    Mean mean(float* from) const { return {from, from + held * wide, from + held * (wide + LANES)}; }
    static long held_for(long count) { return Lane<C>::TILES ? round_up(count, Lane<C>::QUERIES) : count; }
    static long wide_of(const Attention& a) { return round_up(a.value_width, Lane<C>::NUMBERS * LANES); }
    static long lanes_of(const Attention& a) { return round_up((a.width + Lane<C>::NUMBERS - 1) / Lane<C>::NUMBERS, Lane<C>::LENGTH); }
    static long space_for(const Attention& a, long count) {
        long wide = wide_of(a), lanes = lanes_of(a), length = round_up(lanes, 4), held = held_for(count);
        return held * lanes + LANES + 2 * length * PLACES + 2 * Lane<C>::QUERIES * PLACES + LANES * length + 2 * held * (wide + LANES + 1) + LANES +
               Lane<C>::TILES * ((PLACES + STEP) / 2 * wide + lanes * Lane<C>::QUERIES);
    }
    // Whether the keys of a block are read as they lie, without a transposition.
    bool reads_keys(long block) const { return is_few && block + PLACES <= a.view; }
    const Seen& of(long n) const { return *of_query[n]; }

    // The slot that a query sees at a place, or -1.
    int slot_of(const Seen& s, long place) const {
        return place < s.first || place >= s.end() ? -1 : place < s.straight ? int(place) : slots[s.gathered + place - s.straight];
    }

    [[gnu::noinline]] void take() {
        if constexpr (Lane<C>::TILES) memset(keys, 0, 2 * length * PLACES * sizeof(float));
        for (long n = 0; n < count; n++) {
            of_query[n] = seen + (begin + n) / group;
            long from = a.query.at(row, head * group + (begin + n) % group) + (begin + n) / group * a.query.of_slot;
            uint32_t* own = queries + n * lanes;
            if constexpr (Lane<C>::NUMBERS > 1) {
                memset(own, 0, lanes * sizeof(uint32_t));
                memcpy(own, (const C*)a.query.data + from, a.width * sizeof(C));
            } else {
                for (long d = 0; d < lanes; d++) own[d] = as_bits(widen(a.type, a.query.data, from + d) * scale);
            }
        }
        if constexpr (Lane<C>::TILES)
            if (is_few) Lane<C>::pair_queries(queries, count, lanes, few);
    }

    void clear(const Mean& m) {
        memset(m.sums, 0, count * wide * sizeof(float));
        memset(m.totals, 0, count * LANES * sizeof(float));
        for (long n = 0; n < count; n++) m.tops[n] = -INFINITY;
    }

    // The places that some queries see: all lie from `first` to `end` - 1, those with equal slots for all of the queries that see them end
    // at `straight`, and every query sees the places common_first … common_end - 1, with equal slots.
    struct Range {
        long first = LONG_MAX, straight = 0, end = 0, common_first = 0, common_end = LONG_MAX;
    };
    Range range(long from, long some) const {
        Range all;
        for (long n = from; n < from + some; n++) {
            const Seen& s = of(n);
            all.first = std::min(all.first, s.first);
            all.straight = std::max(all.straight, s.straight);
            all.end = std::max(all.end, s.end());
            all.common_first = std::max(all.common_first, s.first);
            all.common_end = std::min(all.common_end, s.straight);
        }
        return all;
    }

    // Computes attention to places from … to - 1.
    [[gnu::noinline]] void attend(long from, long to) {
        clear(stretch);
        const Range places = range(0, count);
        const long first = places.first, straight = places.straight;
        if constexpr (Lane<C>::TILES) Lane<C>::configure(count);
        for (long block = std::max(from, first / PLACES * PLACES); block < std::min(to, places.end); block += PLACES) {
            const long ahead = Lane<C>::TILES ? PLACES : 0;
            ahead_values = {values + (block + ahead) * a.value.of_slot, PLACES * a.value.of_slot, Lane<C>::TILES ? 2 : LANES / 4};
            ahead_keys = {transposed.keys + (block + PLACES) * a.key.of_slot, PLACES * a.key.of_slot, (sizeof(C) + 1) / 2 * Lane<C>::NUMBERS};
            if (!reads_keys(block)) transposed.straight(block, std::max(block, first), std::min(block + PLACES, straight), keys, ahead_values);
            if constexpr (Lane<C>::TILES)
                for (long step = 0, begin = block; step < STEPS; step++, begin += STEP) {
                    const Seen some = {first, straight, 0, 0};
                    uint32_t* to = pairs + step * STEP / 2 * wide;
                    const bool seen_by_all = begin >= places.common_first && begin + STEP <= places.common_end;
                    finite[step] = seen_by_all ? pair_values<false>(some, begin, to) : pair_values<true>(some, begin, to);
                }
            for (long n = 0; n < count; n += Lane<C>::QUERIES) attend_tile(block, n, int(std::min(count - n, long(Lane<C>::QUERIES))));
        }
        if constexpr (Lane<C>::TILES) Lane<C>::release();
    }

    void attend_tile(long block, long tile, int size) {
        const Range places = range(tile, size);
        const long next = block + PLACES;
        if (places.first >= next || places.end <= block) return;
        if constexpr (Lane<C>::TILES) {
            const C* from = transposed.keys + block * a.key.of_slot;
            if (reads_keys(block)) Lane<C>::score_few(size, few, lanes, from, a.key.of_slot, scale, scores, ahead_values);
        }
        if (!reads_keys(block)) {
            const long first = std::max(places.first, block) - block, straight = std::clamp(places.straight, block, next) - block;
            Ahead& ahead = Lane<C>::TILES ? ahead_values : ahead_keys;
            score<C>(size, queries + tile * lanes, lanes, keys, scale, scores, first / LANES, (straight + LANES - 1) / LANES, ahead);
        }
        for (long n = tile, node_end; n < tile + size; n = node_end) {
            for (node_end = n + 1; node_end < tile + size && of_query[node_end] == of_query[n];) node_end++;
            if (of(n).count) score_branch(block, tile, n, int(node_end - n));
        }
        for (long n = tile; n < tile + size; n++) weigh_query(block, n, scores + (n - tile) * PLACES);
        if constexpr (Lane<C>::TILES) return add_steps(block, tile, size);
        const long common_first = round_up(std::max(places.common_first, block), Lane<C>::NUMBERS);
        const long common_end = std::min(places.common_end, next) / Lane<C>::NUMBERS * Lane<C>::NUMBERS;
        const bool common = common_first < common_end;
        for (long n = tile; common && n < tile + size; n++) add_places(block, std::max(of(n).first, block), common_first, n, tile);
        if (common)
            add_values(size, weights_at(common_first - block, 0), values + common_first * a.value.of_slot, a.value.of_slot, nullptr,
                       common_end - common_first, stretch.sums + tile * wide, wide, a.value_width, ahead_keys);
        for (long n = tile; n < tile + size; n++)
            add_places(block, common ? common_end : std::max(of(n).first, block), std::min(of(n).end(), next), n, tile);
    }

    const float* weights_at(long place, long row) const { return scores + row * PLACES + place / Lane<C>::NUMBERS; }

    // Pairs the values of a step's places, for a query that sees `s`. Returns whether all are finite.
    template <bool CHECKED>
    bool pair_values(const Seen& s, long begin, uint32_t* to) {
        int own[STEP];
        for (long i = 0; i < STEP; i++) own[i] = slot_of(s, begin + i);
        return Lane<C>::template pair_values<CHECKED>(values, a.value.of_slot, own, a.value_width, to, wide, ahead_keys);
    }

    // Adds the values of a block to the sums of a tile's queries, in steps. A query that sees gathered slots in a step has values of its own
    // there. So has every query if a value is not finite, because a query that does not see this value would multiply it by zero.
    [[gnu::noinline]] void add_steps(long block, long tile, int size) {
        float* sums = stretch.sums + tile * wide;
        uint32_t together[STEPS] = {}, apart[STEPS] = {};
        bool any = false;
        for (int n = 0; n < size; n++) {
            const Seen& s = of(tile + n);
            for (long step = 0, begin = block; step < STEPS; step++, begin += STEP) {
                if (s.first >= begin + STEP || s.end() <= begin) continue;
                bool alike = finite[step] && s.straight >= std::min(begin + STEP, s.end());
                (alike ? together : apart)[step] |= 1u << n;
            }
        }
        for (long step = 0; step < STEPS; step++) any |= apart[step] || !finite[step];
        if (!any) return Lane<C>::template add_pairs<true>(weights_at(0, 0), pairs, STEPS, 0, sums, wide, ahead_keys);
        for (long step = 0; step < STEPS; step++) {
            const float* weights = weights_at(step * STEP, 0);
            if (together[step]) Lane<C>::template add_pairs<false>(weights, pairs + step * STEP / 2 * wide, 1, together[step], sums, wide, ahead_keys);
            while (apart[step]) {
                const Seen* seen = of_query[tile + std::countr_zero(apart[step])];
                uint32_t same = 0;
                for (int n = 0; n < size; n++) same |= uint32_t(of_query[tile + n] == seen) << n;
                pair_values<false>(*seen, block + step * STEP, branch_pairs);
                Lane<C>::template add_pairs<false>(weights, branch_pairs, 1, same, sums, wide, ahead_keys);
                apart[step] &= ~same;
            }
        }
    }

    // Adds the values of places from … to - 1 of a block to the sums of a query.
    [[gnu::noinline]] void add_places(long block, long from, long to, long n, long tile) {
        if (from >= to) return;
        const Seen& s = of(n);
        int own[PLACES];
        long first = from / Lane<C>::NUMBERS * Lane<C>::NUMBERS, count = 0;
        for (long place = first; place < to || count % Lane<C>::NUMBERS; place++)
            own[count++] = place < from || place >= to ? -1 : slot_of(s, place);
        add_values(1, weights_at(first - block, n - tile), values, a.value.of_slot, own, count, stretch.sums + n * wide, wide, a.value_width, ahead_keys);
    }

    // Computes the scores of a node's queries for the gathered slots of a block of places.
    void score_branch(long block, long tile, long n, int size) {
        const Seen& s = of(n);
        long from = std::max(s.straight, block), to = std::min(s.end(), block + PLACES);
        if (from >= to) return;
        const int* own = slots + s.gathered + from - s.straight;
        transposed.gathered(block, from, to, own, branch_keys, ahead_values);
        score<C>(
            size, queries + n * lanes, lanes, branch_keys, scale, branch_scores, (from - block) / LANES, (to - block + LANES - 1) / LANES, ahead_keys);
        for (int i = 0; i < size; i++)
            memcpy(scores + (n - tile + i) * PLACES + from - block, branch_scores + i * PLACES + from - block, (to - from) * sizeof(float));
    }

    void weigh_query(long block, long n, float* own) {
        const Seen& s = of(n);
        long from = std::max(s.first, block), to = std::min(s.end(), block + PLACES);
        if (from >= to) return Lane<C>::round_weights(own, 0, 0);
        if (a.softcap) {
            for (long i = (from - block) / LANES * LANES; i < to - block; i += LANES)
                store(own + i, tangent(load(own + i) * broadcast(1 / a.softcap)) * broadcast(a.softcap * LOG2_E));
        }
        for (long place = std::max(s.straight, block); place < to; place++)
            if (slots[s.gathered + place - s.straight] < 0) own[place - block] = -INFINITY;
        weigh(own, from - block, to - block, stretch.sums + n * wide, wide, stretch.totals + n * LANES, stretch.tops[n]);
        if constexpr (std::is_same_v<C, int8_t>) {
            long place = from;
            if (a.value_scales.of_slot == 1)
                for (; place + LANES <= std::min(to, s.straight); place += LANES)
                    store(own + place - block, load(own + place - block) * load(a.type, a.value_scales.data, a.value_scales.at(row, head) + place));
            for (; place < to; place++) {
                long slot = place < s.straight ? place : slots[s.gathered + place - s.straight];
                if (slot >= 0) own[place - block] *= widen(a.type, a.value_scales.data, a.value_scales.at(row, head) + slot * a.value_scales.of_slot);
            }
        }
        Lane<C>::round_weights(own, from - block, to - block);
    }

    [[gnu::noinline]] void add_stretch(long n, const float* sums, float total, float top) {
        merge(all.sums + n * wide, all.totals[n * LANES], all.tops[n], sums, total, top, wide);
    }

    void all_stretches() {
        take();
        const Range places = range(0, count);
        clear(all);
        for (long from = places.first / STRETCH * STRETCH; from < places.end; from += STRETCH) {
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
        float share = total == 0 ? 0 : 1 / total;  // a query before the start of its row sees nothing
        float part[PLACES];
        for (long from = 0; from < a.value_width; from += PLACES) {
            for (long d = 0; d < PLACES && from + d < wide; d += 4) memcpy(part + d, sums + Lane<C>::sum_of(from + d), 4 * sizeof(float));
            narrow(part, std::min(a.value_width - from, PLACES), share, a.type, a.out, to + from);
        }
    }
};

// Calls `body(thread, number)` for every number below `count`, from the largest down. A thread that is ready takes the next number.
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
    std::vector<int>& slots = kept_slots;  // a reference, because in other threads the name kept_slots means another object
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
    const long wide = Queries<C>::wide_of(a), own = round_up(Queries<C>::space_for(a, most), LANES);
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
    const long turns = std::min(std::max(TURNS * threads / items, 1L), stretches);  // pieces of an item, with about as many stretches each
    take_turns(items * turns, threads, [&](int thread, long turn) {
        const long item = turn / turns;
        auto queries = queries_of(thread, item);
        queries.take();
        long stretch, stop;
        for (share_of(stretches, 1, int(turn % turns), int(turns), stretch, stop); stretch < stop; stretch++) {
            queries.attend(stretch * STRETCH, (stretch + 1) * STRETCH);
            float* to = kept + (item * stretches + stretch) * part;
            memcpy(to, queries.stretch.sums, queries.count * wide * sizeof(float));
            for (long n = 0; n < queries.count; n++) {
                to[most * wide + n] = total_of(queries.stretch.totals + n * LANES);
                to[most * (wide + 1) + n] = queries.stretch.tops[n];
            }
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
