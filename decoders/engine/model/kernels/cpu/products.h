// y = x @ W.T + bias for few rows of x. W is read once, without a copy. The order of a sum does not depend on the number of rows.
//
// Lane l of a vector adds the products of inputs l, l + LANES, l + 2 LANES, … in this order. Then the lanes are added as a tree.
// Tiles, blocks and threads never change the order of a sum.
#pragma once
#include <memory>
#include <type_traits>

#include "parallel.h"
#include "tiles.h"
#include "vectors.h"

namespace {

struct Matrix {
    const void* weights;
    const void* bias;  // null for no bias
    long outputs;
    long stride;        // elements between the weights of successive outputs; this or `input_stride` is 1
    long input_stride;  // elements between the weights of successive inputs
    const void* scales = nullptr;  // the scales of quantized weights, see quantized.h
    long groups = 0;               // number of groups of inputs with their own scale
};

// Products of rows of type X with weights of type T, STEP inputs at a time. `prepare` converts STEP inputs of a row to the form that `add`
// reads. Rows in float32 have the same sums for weights in 16 bits as for the same numbers in float32.
template <class T, class X = T>
struct Steps {
    using Weight = T;
    using Row = float;
    using Sum = Vec;
    static constexpr int STEP = LANES;
    static constexpr bool AS_GIVEN = std::is_same_v<X, float>;
    template <int R, int N>
    static inline void add(const T* const (&w)[R], const float* x, long ldx, Vec (&sums)[R][N]) {
        Vec rows[N];
        for (int n = 0; n < N; n++) rows[n] = load(x + n * ldx);
        for (int r = 0; r < R; r++) {
            Vec weights = load(w[r]);
            for (int n = 0; n < N; n++) sums[r][n] = multiply_add(weights, rows[n], sums[r][n]);
        }
    }
    static inline void prepare(const X* from, float* to) {
        for (int i = 0; i < STEP; i++) to[i] = widen(from[i]);
    }
};

#if defined(__AVX512BF16__)
// One instruction multiplies pairs of bfloat16 and adds the products, so rows stay in bfloat16.
template <>
struct Steps<bfloat16, bfloat16> {
    using Weight = bfloat16;
    using Row = bfloat16;
    static constexpr int STEP = 2 * LANES;
    static constexpr bool AS_GIVEN = true;
    template <int R, int N>
    static inline void add(const bfloat16* const (&w)[R], const bfloat16* x, long ldx, Vec (&sums)[R][N]) {
        __m512bh rows[N];
        for (int n = 0; n < N; n++) rows[n] = (__m512bh)load_pairs(x + n * ldx);
        for (int r = 0; r < R; r++) {
            __m512bh weights = (__m512bh)load_pairs(w[r]);
            for (int n = 0; n < N; n++) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], weights, rows[n]);
        }
    }
    static inline void prepare(const bfloat16* from, bfloat16* to) { memcpy(to, from, STEP * sizeof *from); }
};
#else
// In a vector of pairs of weights, a shift widens the first numbers and a mask widens the second numbers. So `prepare` also separates the
// first and second numbers of a row's pairs.
template <>
struct Steps<bfloat16, bfloat16> {
    using Weight = bfloat16;
    using Row = float;
    static constexpr int STEP = 2 * LANES;
    static constexpr bool AS_GIVEN = false;
    template <int R, int N>
    static inline void add(const bfloat16* const (&w)[R], const float* x, long ldx, Vec (&sums)[R][N]) {
        for (int r = 0; r < R; r++) {
            Bits pairs = load_pairs(w[r]);
            Vec first = first_of_pairs(pairs), second = second_of_pairs(pairs);
            for (int n = 0; n < N; n++) {
                sums[r][n] = multiply_add(first, load(x + n * ldx), sums[r][n]);
                sums[r][n] = multiply_add(second, load(x + n * ldx + LANES), sums[r][n]);
            }
        }
    }
    static inline void prepare(const bfloat16* from, float* to) {
        for (int i = 0; i < LANES; i++) {
            to[i] = widen(from[2 * i]);
            to[i + LANES] = widen(from[2 * i + 1]);
        }
    }
};
#endif

#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int MOST_ROWS = 6;  // rows of x in a tile of four outputs, so that all sums are in registers
constexpr int FEW_ROWS = 3;   // rows of x in a tile of MANY_OUTPUTS, which loads more weights at a time, and each weight once
constexpr int COLUMNS = 4;    // vectors of outputs in a tile of four rows
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 3;
constexpr int FEW_ROWS = 1;
constexpr int COLUMNS = 2;
#else
constexpr int MOST_ROWS = 2;
constexpr int FEW_ROWS = 1;
constexpr int COLUMNS = 1;
#endif
constexpr int MANY_OUTPUTS = 8;  // outputs in a tile of FEW_ROWS
constexpr long MOST_ROWS_AT_ONCE = 192;
constexpr long CACHE = 512 << 10;  // most bytes of rows of x, so that they stay in the L2 cache while all weights are read

// How many outputs are multiplied by all rows at once, so that their weights stay in the L1 cache.
template <class T>
constexpr long PANEL = sizeof(T) == 4 ? 8 : 16;

// How many rows of x are multiplied at once: whole tiles of rows.
inline long rows_at_once(long bytes_of_row) {
    long rows = std::clamp(CACHE / std::max(bytes_of_row, 1L), 48L, MOST_ROWS_AT_ONCE);
    return rows - rows % MOST_ROWS;
}

// Adds the lanes of each vector in `sums`.
template <int R, int N>
inline void add_lanes(const Vec (&sums)[R][N], float* y, long ldy) {
    for (int n = 0; n < N; n++) {
        if constexpr (R % 4 == 0) {
            for (int r = 0; r < R; r += 4) sum_of_four(sums[r][n], sums[r + 1][n], sums[r + 2][n], sums[r + 3][n], y + n * ldy + r);
        } else {
            float sum[4];
            sum_of_four(sums[0][n], sums[0][n], sums[0][n], sums[0][n], sum);
            y[n * ldy] = sum[0];
        }
    }
}

// N rows of x times R outputs of a matrix, from `output` on. FIRST: the weights come from memory, so the weights of the next R outputs are
// prefetched in the order of their addresses. If they were prefetched in the order of their use, the product would take a fifth longer on a Zen 5.
template <class S, int R, int N, bool FIRST>
inline void multiply_dense_tile(const Matrix& matrix, long output, const typename S::Row* x, long ldx, long inputs, float* y, long ldy) {
    using T = typename S::Weight;
    Vec sums[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sums[r][n] = zeros();
    const long stride = matrix.stride;
    const T* w[R];
    for (int r = 0; r < R; r++) w[r] = (const T*)matrix.weights + (output + r) * stride;
    const T* next = w[0] + R * stride;
    long whole = inputs - inputs % S::STEP, k = 0;
    for (; k < whole; k += S::STEP) {
        S::template add<R, N>(w, x + k, ldx, sums);
        for (int r = 0; r < R; r++, next += S::STEP) {
            if constexpr (FIRST) prefetch<R == MANY_OUTPUTS>(next);
            w[r] += S::STEP;
        }
    }
    if (k < inputs) {  // the rest, without reading beyond the end
        T rest[R][S::STEP] = {};
        for (int r = 0; r < R; r++) {
            memcpy(rest[r], w[r], (inputs - k) * sizeof(T));
            w[r] = rest[r];
        }
        S::template add<R, N>(w, x + k, ldx, sums);
    }
    add_lanes(sums, y, ldy);
}

template <class S, int R, int N, bool FIRST>
inline void multiply_tile(const Matrix& matrix, long output, const typename S::Row* x, long ldx, long inputs, float* y, long ldy) {
    if constexpr (requires { S::QUANTIZED; })
        S::template multiply_tile<R, N, FIRST>(matrix, output, x, ldx, inputs, y, ldy);
    else
        multiply_dense_tile<S, R, N, FIRST>(matrix, output, x, ldx, inputs, y, ldy);
}

// Multiplies `rows` rows of x, at most N, by R outputs, in a tile of exactly this size.
template <class S, int R, int N, bool FIRST>
inline void multiply_rows(const Matrix& matrix, long output, const typename S::Row* x, long ldx, long rows, long inputs, float* y, long ldy) {
    if constexpr (N > 0) {
        if (rows == N) return multiply_tile<S, R, N, FIRST>(matrix, output, x, ldx, inputs, y, ldy);
        multiply_rows<S, R, N - 1, FIRST>(matrix, output, x, ldx, rows, inputs, y, ldy);
    }
}

template <class S>
constexpr int most_rows() {
    if constexpr (requires { S::MOST_ROWS; }) return S::MOST_ROWS;
    else return MOST_ROWS;
}

// All rows times some outputs, R outputs at a time. A tile's rows are multiplied by all outputs while the rows are in the L1 cache.
template <class S, int R>
void multiply_outputs(const Matrix& matrix, long output, const typename S::Row* x, long ldx, long rows, long inputs, long outputs, float* y, long ldy) {
    constexpr int MOST = most_rows<S>();
    for (long row = 0; row < rows; row += MOST) {
        long some = std::min(rows - row, long(MOST));
        for (long o = 0; o < outputs; o += R) {
            float* to = y + row * ldy + o;
            if (row == 0) {
                multiply_rows<S, R, MOST, true>(matrix, output + o, x, ldx, some, inputs, to, ldy);
            } else {
                multiply_rows<S, R, MOST, false>(matrix, output + o, x + row * ldx, ldx, some, inputs, to, ldy);
            }
        }
    }
}

// Adds biases to the sums `y` of all rows, rounds the results and stores them in `out`.
template <class T>
void finish(const float* y, long ldy, long outputs, const T* bias, long rows, T* out, long ldo) {
    for (long row = 0; row < rows; row++, y += ldy, out += ldo)
        for (long o = 0; o < outputs; o++) narrow(bias ? y[o] + widen(bias[o]) : y[o], out[o]);
}

// For matrices stored as [inputs, outputs]: a vector holds the weights of neighbouring outputs, and a sum adds inputs in their order.
template <int V, int N, class T>
inline void multiply_columns(const T* weights, long stride, const float* x, long ldx, long inputs, float* y, long ldy) {
    Vec sums[V][N];
    for (int v = 0; v < V; v++)
        for (int n = 0; n < N; n++) sums[v][n] = zeros();
    for (long k = 0; k < inputs; k++, weights += stride) {
        prefetch<false>(weights + 16 * stride);
        for (int v = 0; v < V; v++) {
            Vec column = load(weights + v * LANES);
            for (int n = 0; n < N; n++) sums[v][n] = multiply_add(column, broadcast(x[n * ldx + k]), sums[v][n]);
        }
    }
    for (int v = 0; v < V; v++)
        for (int n = 0; n < N; n++) store(y + n * ldy + v * LANES, sums[v][n]);
}

template <int V, class T>
void multiply_column_rows(const T* weights, long stride, const float* x, long ldx, long rows, long inputs, float* y, long ldy) {
    long row = 0;
    for (; row + 4 <= rows; row += 4) multiply_columns<V, 4>(weights, stride, x + row * ldx, ldx, inputs, y + row * ldy, ldy);
    for (; row < rows; row++) multiply_columns<V, 1>(weights, stride, x + row * ldx, ldx, inputs, y + row * ldy, ldy);
}

template <class W, class T>
void multiply_column_block(const float* x, long ldx, long rows, long inputs, const Matrix& matrix, T* out, long ldo, int threads) {
    constexpr long WIDE = COLUMNS * LANES;
    in_threads(threads, [&](int thread, int of) {
        long begin, end;
        share_of(matrix.outputs, WIDE, thread, of, begin, end);
        alignas(64) float y[MOST_ROWS_AT_ONCE * WIDE];
        const T* bias = (const T*)matrix.bias;
        for (long o = begin; o < end; o += WIDE) {
            const W* w = (const W*)matrix.weights + o;
            long wide = std::min(end - o, WIDE);
            if (wide == WIDE) {
                multiply_column_rows<COLUMNS>(w, matrix.input_stride, x, ldx, rows, inputs, y, WIDE);
            } else {  // the rest, without reading beyond the end
                for (long row = 0; row < rows; row++) {
                    for (long c = 0; c < wide; c++) {
                        float sum = 0;
                        for (long k = 0; k < inputs; k++) sum = multiply_add(widen(w[k * matrix.input_stride + c]), x[row * ldx + k], sum);
                        y[row * WIDE + c] = sum;
                    }
                }
            }
            finish(y, WIDE, wide, bias ? bias + o : nullptr, rows, out + o, ldo);
        }
    });
}

// Multiplies all rows by some outputs of a matrix, with vectors.
template <class S>
struct VectorPanels {
    static constexpr long WIDE = PANEL<typename S::Weight>;
    const typename S::Row* x;
    long ldx, rows, inputs;

    void begin() const {}
    void end() const {}
    // Computes up to WIDE of the `left` outputs from `o` on, and returns how many. y: [rows, WIDE].
    long operator()(const Matrix& matrix, long o, long left, float* y) const {
        if (left >= MANY_OUTPUTS && rows <= FEW_ROWS) {
            multiply_rows<S, MANY_OUTPUTS, FEW_ROWS, true>(matrix, o, x, ldx, rows, inputs, y, WIDE);
            return MANY_OUTPUTS;
        }
        long wide = left >= WIDE ? WIDE : left >= 8 ? 8 : left >= 4 ? 4 : 1;
        if (wide >= 4) multiply_outputs<S, 4>(matrix, o, x, ldx, rows, inputs, wide, y, WIDE);
        else multiply_outputs<S, 1>(matrix, o, x, ldx, rows, inputs, 1, y, WIDE);
        return wide;
    }
};

// Multiplies many rows by a matrix with few inputs, such as an adapter's second matrix. VectorPanels would spend most of the time on adding the
// lanes of each sum. Here a vector has an input's weights of LANES outputs, and the additions of a sum have the same order.
template <class T>
struct FewInputsPanels {
    static constexpr long WIDE = LANES, MOST_INPUTS = 4 * LANES, LEAST_ROWS = 8;
    static constexpr int TOGETHER = 4;  // rows
    const float* x;
    long ldx, rows, inputs;

    void begin() const {}
    void end() const {}
    long operator()(const Matrix& matrix, long o, long left, float* y) const {
        const long outputs = std::min(left, WIDE);
        alignas(64) float weights[MOST_INPUTS][WIDE] = {};
        for (long output = 0; output < outputs; output++)
            for (long k = 0; k < inputs; k++) weights[k][output] = widen(((const T*)matrix.weights)[(o + output) * matrix.stride + k]);
        long row = 0;
        for (; row + TOGETHER <= rows; row += TOGETHER) multiply_rows<TOGETHER>(weights, x + row * ldx, y + row * WIDE);
        for (; row < rows; row++) multiply_rows<1>(weights, x + row * ldx, y + row * WIDE);
        return outputs;
    }

  private:
    template <int N>
    void multiply_rows(const float (*weights)[WIDE], const float* x, float* y) const {
        Vec sums[N];
        add_lanes<0, 0>(weights, x, sums);
        for (int n = 0; n < N; n++) store(y + n * WIDE, sums[n]);
    }
    // The sums of lane LANE and of all lanes that `sum_of_four` adds to it before its last DEPTH additions.
    template <int LANE, int DEPTH, int N>
    void add_lanes(const float (*weights)[WIDE], const float* x, Vec (&sums)[N]) const {
        constexpr int DISTANCES[] = {2, 1, 4, 8};  // between two lanes, from the last addition to the first
        if constexpr (1 << DEPTH == LANES) {
            for (Vec& sum : sums) sum = zeros();
            for (long k = LANE; k < inputs; k += LANES) {
                Vec column = load(weights[k]);
                for (int n = 0; n < N; n++) sums[n] = multiply_add(column, broadcast(x[n * ldx + k]), sums[n]);
            }
        } else {
            add_lanes<LANE, DEPTH + 1>(weights, x, sums);
            Vec others[N];
            add_lanes<LANE + DISTANCES[DEPTH], DEPTH + 1>(weights, x, others);
            for (int n = 0; n < N; n++) sums[n] += others[n];
        }
    }
};

#if defined(__AMX_BF16__)
template <class W>
struct TilePanels : Tiles<W> {
    static constexpr long WIDE = Tiles<W>::OUTPUTS;
    const uint32_t* x;
    long rows;

    void begin() const { this->configure(); }
    void end() const { _tile_release(); }
    long operator()(const Matrix& matrix, long o, long left, float* y) const {
        this->multiply((const W*)matrix.weights + o * matrix.stride, matrix.stride, std::min(left, WIDE), x, rows, y);
        return std::min(left, WIDE);
    }
};
#endif

// Multiplies a block of rows. `parts` is 1 or 2. If it is 2, each row is the sum of two rows of x: the products of row `rows` + i are added to
// the products of row i. rows * parts is at most MOST_ROWS_AT_ONCE.
template <class T, class Panels>
void multiply_block(const Panels& panels, long rows, int parts, const Matrix* matrices, int count, T* out, long ldo, int threads) {
    constexpr long WIDE = Panels::WIDE;
    long outputs = 0;
    for (int m = 0; m < count; m++) outputs += matrices[m].outputs;
    in_threads(threads, [&](int thread, int of) {
        long begin, end, first = 0;
        share_of(outputs, WIDE, thread, of, begin, end);
        alignas(64) float y[MOST_ROWS_AT_ONCE * WIDE];
        panels.begin();
        for (int m = 0; m < count; first += matrices[m].outputs, m++) {
            const Matrix& matrix = matrices[m];
            const T* bias = (const T*)matrix.bias;
            for (long o = std::max(begin - first, 0L), last = std::min(end - first, matrix.outputs); o < last;) {
                long wide = panels(matrix, o, last - o, y);
                for (float *to = y, *end = y + rows * WIDE; parts == 2 && to < end; to++) *to += to[rows * WIDE];
                finish(y, WIDE, wide, bias ? bias + o : nullptr, rows, out + first + o, ldo);
                o += wide;
            }
        }
        panels.end();
    });
}

// Returns memory for temporary results, which the calling thread keeps for its next call.
inline void* workspace(size_t bytes) {
    thread_local std::unique_ptr<char[]> kept;
    thread_local size_t size = 0;
    if (bytes + 64 > size) {
        kept.reset(new char[bytes + 64]);
        size = bytes + 64;
    }
    return (void*)(((uintptr_t)kept.get() + 63) & ~uintptr_t(63));
}

// Returns rows in the form that `prepare` gives them, padded with zeros to whole steps. Rows that have this form already are not copied.
template <class Row, int STEP, bool AS_GIVEN, class T, class Prepare>
const Row* prepare_rows(const T* x, long rows, long inputs, long& ldx, int threads, Prepare prepare) {
    ldx = (inputs + STEP - 1) / STEP * STEP;
    if constexpr (AS_GIVEN) {
        if (ldx == inputs) return x;
    }
    Row* space = (Row*)workspace(rows * ldx * sizeof(Row));
    in_threads(rows * inputs > 32768 ? threads : 1, [&](int thread, int of) {
        long begin, end;
        share_of(rows, 1, thread, of, begin, end);
        for (long row = begin; row < end; row++) {
            const T* from = x + row * inputs;
            Row* to = space + row * ldx;
            long k = 0;
            for (; k + STEP <= inputs; k += STEP) prepare(from + k, to + k);
            if (k < inputs) {
                T rest[STEP] = {};
                memcpy(rest, from + k, (inputs - k) * sizeof(T));
                prepare(rest, to + k);
            }
        }
    });
    return space;
}

// W: the type of the weights, which is T or a 16-bit type.
template <class W, class T>
void multiply(const T* x, long rows, long inputs, const Matrix* matrices, int count, T* out, int threads) {
    using S = Steps<W, T>;
    long outputs = 0, ldx;
    bool columns = matrices[0].input_stride != 1;
    for (int m = 0; m < count; m++) outputs += matrices[m].outputs;
    const long most = rows_at_once(inputs * sizeof(typename S::Row));
    for (long row = 0; row < rows; row += most, x += most * inputs, out += most * outputs) {
        long some = std::min(rows - row, most);
        if (columns) {
            auto widened = [](const T* from, float* to) { *to = widen(*from); };
            const float* wide = prepare_rows<float, 1, sizeof(T) == sizeof(float)>(x, some, inputs, ldx, threads, widened);
            long first = 0;
            for (int m = 0; m < count; first += matrices[m].outputs, m++)
                multiply_column_block<W>(wide, ldx, some, inputs, matrices[m], out + first, outputs, threads);
        } else {
#if defined(__AMX_BF16__)
            if constexpr (std::is_same_v<T, bfloat16>) {
                Tiles<T> tiles(some, inputs);
                auto* words = (uint32_t*)workspace(tiles.words() * sizeof(uint32_t));
                tiles.arrange(x, inputs, some, words, threads);
                multiply_block(TilePanels<T>{tiles, words, some}, some, 1, matrices, count, out, outputs, threads);
                continue;
            }
#endif
            const auto* prepared = prepare_rows<typename S::Row, S::STEP, S::AS_GIVEN>(x, some, inputs, ldx, threads, S::prepare);
            if constexpr (S::STEP == LANES) {
                using Panels = FewInputsPanels<W>;
                if (inputs <= Panels::MOST_INPUTS && some >= Panels::LEAST_ROWS) {
                    multiply_block(Panels{prepared, ldx, some, inputs}, some, 1, matrices, count, out, outputs, threads);
                    continue;
                }
            }
            multiply_block(VectorPanels<S>{prepared, ldx, some, inputs}, some, 1, matrices, count, out, outputs, threads);
        }
    }
}

}  // namespace
