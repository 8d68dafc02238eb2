// Compares the functions of the CPU's kernels with float64, and rows with each other, where neither Python nor torch runs.
#include <array>
#include <cstdio>
#include <cstdlib>

#include "attention.h"
#include "elementwise.h"
#include "quantized.h"
#include "rounding.h"

namespace {

uint32_t state = 1;
float drawn() {  // -1 to 1
    state = state * 1664525u + 1013904223u;
    return int32_t(state) * 0x1p-31f;
}

template <class T>
std::vector<T> numbers(long count) {
    std::vector<T> all(count);
    for (T& one : all) narrow(drawn(), one);
    return all;
}

int failures = 0;
void compare(const char* what, double result, double exact, double tolerance) {
    if (std::abs(result - exact) <= tolerance) return;
    if (failures++ < 20) printf("%s: %.9g, not %.9g\n", what, result, exact);
}

template <class T>
constexpr double PRECISION = sizeof(T) == 4 ? 1e-6 : std::is_same_v<T, float16> ? 0x1p-10 : 0x1p-7;

// W: the type of the weights.
template <class T, class W = T>
void products() {
    const std::array<long, 3> sizes[] = {{{1, 1, 1}}, {{3, 7, 5}}, {{13, 131, 45}}, {{70, 96, 33}}, {{200, 64, 17}}};
    for (auto [rows, inputs, outputs] : sizes) {
        for (bool columns : {false, true}) {
            auto x = numbers<T>(rows * inputs), bias = numbers<T>(outputs);
            auto w = numbers<W>(inputs * outputs + 8);
            std::vector<T> out(rows * outputs), one(outputs);
            Matrix matrix = {w.data(), bias.data(), outputs, columns ? 1 : inputs, columns ? outputs : 1};
            multiply<W>(x.data(), rows, inputs, &matrix, 1, out.data(), 1);
            for (long row = 0; row < rows; row++) {
                multiply<W>(x.data() + row * inputs, 1, inputs, &matrix, 1, one.data(), 1);
                if (memcmp(one.data(), &out[row * outputs], outputs * sizeof(T))) compare("a row alone has other bits", row, -1, 0);
                for (long o = 0; o < outputs; o++) {
                    double exact = widen(bias[o]), size = 0;
                    for (long k = 0; k < inputs; k++) {
                        double part = double(widen(x[row * inputs + k])) * widen(w[columns ? k * outputs + o : o * inputs + k]);
                        exact += part, size += std::abs(part);
                    }
                    compare("product", widen(out[row * outputs + o]), exact, PRECISION<T> * std::abs(exact) + 1e-6 * (1 + size));
                }
            }
        }
    }
}

void quantized() {
    const long rows = 11;
    for (int digits : {1, 2}) {
        for (auto [inputs, groups] : {std::pair(77l, 1l), std::pair(192l, 2l), std::pair(416l, 13l), std::pair(512l, 4l)}) {
            for (bool bytes : {true, false}) {
                if (!bytes && groups < 4) continue;
                const long group = inputs / groups, outputs = bytes ? 27 : 3 * OUTPUTS;
                auto x = numbers<float>(rows * inputs), steps = numbers<float>(outputs * 2 * groups);
                std::vector<int8_t> levels(outputs * inputs), packed(outputs * inputs / 2);
                std::vector<float> out(rows * outputs), one(outputs);
                for (long o = 0; o < outputs; o++) {
                    for (long k = 0; k < inputs; k++) {
                        int level = int(drawn() * (bytes ? 127 : 8));
                        levels[o * inputs + k] = int8_t(level);
                        long word = (o / OUTPUTS * inputs + k / INPUTS * INPUTS) * OUTPUTS / 2 + o % OUTPUTS * 4, place = k % INPUTS / 2;
                        if (!bytes) packed[word + k % 2 * 2 + place / 2] |= (level + 8) << place % 2 * 4;
                    }
                }
                Matrix matrix = {bytes ? levels.data() : packed.data(), nullptr, outputs, bytes ? inputs : inputs / 2, 1, steps.data(), groups};
                auto multiplied = [&](const float* from, long count, float* to) {
                    if (bytes) multiply_quantized<Bytes>(from, count, inputs, digits, &matrix, 1, to, 1);
                    else multiply_quantized<Fours<float>>(from, count, inputs, digits, &matrix, 1, to, 1);
                };
                multiplied(x.data(), rows, out.data());
                for (long row = 0; row < rows; row++) {
                    multiplied(&x[row * inputs], 1, one.data());
                    if (memcmp(one.data(), &out[row * outputs], outputs * sizeof(float))) compare("a quantized row alone has other bits", row, -1, 0);
                    for (long o = 0; o < outputs; o++) {
                        double exact = 0, size = 0;
                        for (long k = 0; k < inputs; k++) {
                            const float* step = &steps[bytes ? o * groups + k / group : (o / OUTPUTS * groups + k / group) * 2 * OUTPUTS + o % OUTPUTS];
                            double weight = double(levels[o * inputs + k]) * *step + (bytes ? 0 : step[OUTPUTS]);
                            exact += x[row * inputs + k] * weight;
                            size += std::abs(x[row * inputs + k] * weight);
                        }
                        compare("quantized product", out[row * outputs + o], exact, (digits == 1 ? 1e-4 : 1e-6) * (1 + size));
                    }
                }
            }
        }
    }
}

template <class T>
void elementwise() {
    const long rows = 3, width = 54;
    auto x = numbers<T>(rows * 2 * width), weight = numbers<T>(width);
    std::vector<T> out(rows * 2 * width);
    rms_norm(x.data(), rows, width, weight.data(), 1e-5f, true, false, out.data(), 1);
    for (long row = 0; row < rows; row++) {
        double squares = 0;
        for (long i = 0; i < width; i++) squares += std::pow(widen(x[row * width + i]), 2);
        for (long i = 0; i < width; i++) {
            double exact = widen(x[row * width + i]) / std::sqrt(squares / width + 1e-5) * (1 + widen(weight[i]));
            compare("norm", widen(out[row * width + i]), exact, PRECISION<T> * (1 + std::abs(exact)));
        }
    }
    for (T& one : x) narrow(widen(one) * 30, one);
    for (int kind : {SILU, GELU_TANH}) {
        if (kind == SILU) gated<SILU>(x.data(), rows, width, out.data(), 1);
        else gated<GELU_TANH>(x.data(), rows, width, out.data(), 1);
        for (long i = 0; i < rows * width; i++) {
            double gate = widen(x[i / width * 2 * width + i % width]), up = widen(x[i / width * 2 * width + width + i % width]);
            double u = kind == SILU ? gate : 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate), exact = gate / (1 + std::exp(-u)) * up;
            compare("activation", widen(out[i]), exact, 2 * PRECISION<T> * std::abs(exact) + 1e-7);
        }
    }
}

// A block of six nodes, two branches, behind so many tokens.
template <class T>
void attention() {
    const long committed = 70, nodes = 6, heads = 6, kv_heads = 2, view = 90, width = 36, value_width = 20;
    const int parents[] = {-1, 0, 1, 0, 3, 4};
    auto query = numbers<T>(heads * nodes * width), key = numbers<T>(kv_heads * view * width), value = numbers<T>(kv_heads * view * value_width);
    int64_t mask[nodes][3];
    for (int node = 0; node < nodes; node++) {
        mask[node][0] = 1 << node, mask[node][1] = 0, mask[node][2] = committed;
        if (parents[node] >= 0) mask[node][0] |= mask[parents[node]][0], mask[node][1] = mask[parents[node]][1] + 1;
    }
    std::vector<T> out(nodes * heads * value_width);
    auto slots = [](const auto& from, long of_head, long of_slot) { return Slots{from.data(), 0, of_head, of_slot}; };
    Attention given = {sizeof(T) == 4 ? Type::float32 : std::is_same_v<T, float16> ? Type::float16 : Type::bfloat16,
                       slots(query, nodes * width, width), slots(key, view * width, width), slots(value, view * value_width, value_width), {}, {},
                       nullptr, out.data(), 1, heads, kv_heads, nodes, width, value_width, view, &mask[0][0], 0, 3, nodes, 3, 0, 0, 0.5f, 3.0f};
    attend_to_slots<T>(given, 1);
    for (long node = 0; node < nodes; node++) {
        for (long head = 0; head < heads; head++) {
            double total = 0, sums[value_width] = {};
            for (long slot = 0; slot < committed + nodes; slot++) {
                if (slot >= committed && !(mask[node][0] >> (slot - committed) & 1)) continue;
                double score = 0;
                for (long d = 0; d < width; d++) score += double(widen(query[(head * nodes + node) * width + d])) * widen(key[(head / 3 * view + slot) * width + d]);
                double part = std::exp(3 * std::tanh(score * 0.5 / 3));
                total += part;
                for (long d = 0; d < value_width; d++) sums[d] += part * widen(value[(head / 3 * view + slot) * value_width + d]);
            }
            for (long d = 0; d < value_width; d++)
                compare("attention", widen(out[(node * heads + head) * value_width + d]), sums[d] / total, PRECISION<T> * 4);
        }
    }
}

template <class T>
void all() {
    products<T>();
    elementwise<T>();
    attention<T>();
    auto matrix = numbers<T>(4 * 64);
    std::vector<uint8_t> levels(4 * 64);
    std::vector<bfloat16> scales(4 * 2 * 2);
    round_matrix(matrix.data(), 4, 64, 32, levels.data(), scales.data(), 1);
    for (long i = 0; i < 4 * 64; i++) {
        double step = widen(scales[i / 64 * 4 + i % 64 / 32]), eight = widen(scales[i / 64 * 4 + 2 + i % 64 / 32]);
        compare("4 bits", (levels[i] - 8) * step + eight, widen(matrix[i]), step * 1.6);
    }
}

}  // namespace

int main() {
    all<float>();
    all<bfloat16>();
    all<float16>();
    products<float, bfloat16>();
    products<float, float16>();
    quantized();
    printf("%d differences from float64\n", failures);
    return failures != 0;
}
