// The operators around the products of a layer.
#include "elementwise.h"
#include "tensors.h"

namespace {

// x: [..., H], weight: [H].
Tensor norm(Tensor x, Tensor weight, double epsilon, bool one_added, bool rounded_first) {
    int64_t width = x.size(x.dim() - 1);
    check_types(x, {&weight});
    STD_TORCH_CHECK(weight.numel() == width && weight.is_contiguous(), "a weight for every number of a row is needed");
    Tensor out = like(x), given = without_gaps(x);
    with_type(x, [&](auto type) {
        using T = decltype(type);
        rms_norm(data<T>(given), width ? x.numel() / width : 0, width, data<T>(weight), float(epsilon), one_added, rounded_first, data<T>(out), threads());
    });
    return out;
}

// The product with up to three matrices. The matrices are quantized if there are scales.
template <class Tensor>
Tensor product(const Tensor& x, List<Tensor> matrices, List<Tensor> scales, List<Tensor> biases, int64_t digits) {
    if (scales.empty()) return few_rows_linear(x, std::move(matrices), std::move(biases));
    return quantized_linear(x, std::move(matrices), std::move(scales), std::move(biases), digits);
}

// activation(x @ gate.T) * (x @ up.T). matrices: gate and up.
template <class Tensor>
Tensor gated_linear(Tensor x, List<Tensor> matrices, List<Tensor> scales, List<Tensor> biases, int64_t digits, int64_t kind) {
    Tensor both = product(x, std::move(matrices), std::move(scales), std::move(biases), digits);
    STD_TORCH_CHECK(kind == SILU || kind == GELU_TANH, "activation 0 or 1, not ", kind);
    int64_t width = both.size(both.dim() - 1) / 2;
    Tensor out = with_last_size(both, width);
    with_type(both, [&](auto type) {
        using T = decltype(type);
        int64_t rows = width ? out.numel() / width : 0;
        if (kind == SILU) gated<SILU>(data<T>(both), rows, width, data<T>(out), threads());
        if (kind == GELU_TANH) gated<GELU_TANH>(data<T>(both), rows, width, data<T>(out), threads());
    });
    return out;
}

template <class T, class Tensor>
Norm<T> norm_of(const std::optional<Tensor>& weight, const Tensor& x, int64_t width, double epsilon, bool one_added, bool rounded_first) {
    if (!weight) return {nullptr, 0, false, false};
    check_types(x, {&*weight});
    STD_TORCH_CHECK(weight->numel() == width && weight->is_contiguous(), "a weight for every number of a row is needed");
    return {data<T>(*weight), float(epsilon), one_added, rounded_first};
}

// Returns residual + before(x @ matrix.T), and this sum after the norm `after` (an empty tensor without a norm). residual: [..., H].
template <class Tensor>
std::tuple<Tensor, Tensor> linear_to_residual(
    Tensor x, List<Tensor> matrices, List<Tensor> scales, List<Tensor> biases, int64_t digits, Tensor residual,
    std::optional<Tensor> before, double before_epsilon, bool before_one_added, bool before_rounded_first,
    std::optional<Tensor> after, double after_epsilon, bool after_one_added, bool after_rounded_first) {
    Tensor added = product(x, std::move(matrices), std::move(scales), std::move(biases), digits), old = without_gaps(residual);
    int64_t width = residual.size(residual.dim() - 1);
    check_types(added, {&residual});
    STD_TORCH_CHECK(added.numel() == residual.numel() && added.size(added.dim() - 1) == width, "the residual has the sizes of the product");
    Tensor sum = like(residual), normed = after ? like(residual) : empty({0}, residual);
    with_type(added, [&](auto type) {
        using T = decltype(type);
        auto first = norm_of<T>(before, added, width, before_epsilon, before_one_added, before_rounded_first);
        auto second = norm_of<T>(after, added, width, after_epsilon, after_one_added, after_rounded_first);
        long rows = width ? sum.numel() / width : 0;
        add_with_norms(data<T>(added), data<T>(old), rows, width, first, second, data<T>(sum), data<T>(normed), threads());
    });
    return {sum, normed};
}

template <class Tensor>
Heads heads_of(const Tensor& x) {
    STD_TORCH_CHECK(x.dim() == 4 && (x.stride(3) == 1 || x.size(3) == 1), "[B, h, N, d] without gaps in d is needed");
    return {x.data_ptr(), x.size(0), x.size(1), x.size(2), x.size(3), x.stride(0), x.stride(1), x.stride(2)};
}

// Checks slots [B, N] for a buffer [B, h, L, d].
template <class Tensor>
void check_slots(const Tensor& slots, const Heads& buffer, int64_t nodes) {
    STD_TORCH_CHECK(slots.scalar_type() == torch::headeronly::ScalarType::Long && slots.is_contiguous(), "slots are int64 without gaps");
    STD_TORCH_CHECK(slots.numel() == buffer.rows * nodes, "every token has a slot");
    for (int64_t i = 0; i < slots.numel(); i++)
        STD_TORCH_CHECK(-buffer.nodes <= data<int64_t>(slots)[i] && data<int64_t>(slots)[i] < buffer.nodes, "a slot outside the cache");
}

// Computes norms and rotary positions of queries and keys. Returns queries [B, N, H, d], keys [B, h, N, d], and the whole product
// [B, N, (H + 2 h) d], which contains the values. heads: h, width: d.
template <class Tensor>
std::tuple<Tensor, Tensor, Tensor> linear_rotated(
    Tensor x, List<Tensor> matrices, List<Tensor> scales, List<Tensor> biases, int64_t digits, std::optional<Tensor> query_norm,
    std::optional<Tensor> key_norm, double epsilon, bool one_added, bool rounded_first, Tensor cos, Tensor sin, int64_t heads, int64_t width) {
    Tensor all = product(x, std::move(matrices), std::move(scales), std::move(biases), digits);
    STD_TORCH_CHECK(all.dim() == 3 && width > 0, "x is [B, N, H]");
    int64_t rows = all.size(0), nodes = all.size(1), turned = cos.size(2), own = all.size(2) / width - 2 * heads;
    check_types(all, {&cos, &sin});
    STD_TORCH_CHECK(own > 0 && all.size(2) == (own + 2 * heads) * width, "queries, keys and values have heads of one width");
    STD_TORCH_CHECK(cos.dim() == 3 && cos.size(1) == nodes && (cos.size(0) == 1 || cos.size(0) == rows) && sin.numel() == cos.numel() &&
                        turned <= width && turned % 2 == 0, "cos and sin of every token are needed");
    Tensor queries = empty({rows, nodes, own, width}, all), keys = empty({rows, heads, nodes, width}, all);
    Tensor cosines = without_gaps(cos), sines = without_gaps(sin);
    Heads to = {queries.data_ptr(), rows, own, nodes, width, nodes * own * width, width, own * width};
    with_type(all, [&](auto type) {
        using T = decltype(type);
        const Norm<T> norms[2] = {norm_of<T>(query_norm, all, width, epsilon, one_added, rounded_first),
                                  norm_of<T>(key_norm, all, width, epsilon, one_added, rounded_first)};
        split_heads(data<T>(all), norms, data<T>(cosines), data<T>(sines), turned, cos.size(0) == 1 ? 0 : nodes * turned, to, heads_of(keys), threads());
    });
    return {queries, keys, all};
}

// keys, values: [B, h, L, d], written in place; slots: [B, N] int64, negative slots count from the end; new states: [B, h, N, d].
// scales: [B, h, L, 1], written in place if keys and values are int8; null otherwise.
template <class Tensor>
void write_to_cache(Tensor keys, Tensor values, Tensor slots, Tensor new_keys, Tensor new_values, std::optional<Tensor> key_scales,
                    std::optional<Tensor> value_scales) {
    for (auto [buffer, states, scales] : {std::tuple(&keys, &new_keys, &key_scales), std::tuple(&values, &new_values, &value_scales)}) {
        Heads own = heads_of(*states), all = heads_of(*buffer), of_scales = *scales ? heads_of(**scales) : all;
        STD_TORCH_CHECK(own.rows == all.rows && own.heads == all.heads && own.width == all.width, "new keys and values have the sizes of the cache");
        check_slots(slots, all, own.nodes);
        check_types(*states, {*scales ? &**scales : buffer});
        const bool levels = buffer->scalar_type() == torch::headeronly::ScalarType::Char;
        STD_TORCH_CHECK(levels == scales->has_value() && of_scales.rows == all.rows && of_scales.heads == all.heads && of_scales.nodes == all.nodes,
                        "int8 keys and values have a scale for every head and slot");
        const bool half = states->scalar_type() == torch::headeronly::ScalarType::Half;
        const float least = half ? 0x1p-14f : std::numeric_limits<float>::min();  // a zero scale would divide by zero
        with_type(*states, [&, scales = of_scales](auto type) {
            using T = decltype(type);
            if (levels) quantize_slots<T>(own, data<int64_t>(slots), all, scales, least, threads());
            else write_slots<T>(own, data<int64_t>(slots), all, threads());
        });
    }
}

// With at most this many rows, results within layers are `Lent` tensors in scratch memory. For more rows this memory would be large, and
// the cost of torch's own tensors does not matter.
constexpr int64_t FEW = 64;

// Computes decoder layers with the operators above: attention over the first `view` slots of the cache, then a gated feed-forward layer.
// The first sum of a layer adds the attention's output to the residual, the second sum adds the feed-forward layer's output.
// x: [B, N, H]; reads: x after the first layer's first norm.
// keys, values, windows, chunks: one entry per layer. sinks, key_scales, value_scales (for int8): one entry per layer, or empty.
// The other lists have the tensors of one layer after another:
// matrices: seven per layer: queries, keys, values, the attention's output, gate, up and down.
// scales: one per matrix, or empty. biases: matrix i of a layer has a bias if bit i of `biased` is set.
// norms: up to six per layer: of queries, of keys, of the attention's output, of the first sum, of the feed-forward layer's output, and of
// the second sum (the next layer's first norm; the last layer may lack it). A layer has norm i if bit i of `normed` is set.
// Returns the second sum of each layer, and the last layer's second sum after its norm.
template <class Tensor, class Tensors = List<Tensor>>
std::tuple<List<TorchTensor>, TorchTensor> decoder_layers(
    Tensor x, Tensor reads, Tensors matrices, Tensors scales, Tensors biases, int64_t biased, int64_t digits, Tensors norms, int64_t normed,
    double epsilon, bool one_added, bool rounded_first, Tensor cos, Tensor sin, Tensor slots, Tensors keys, Tensors values, Tensors key_scales,
    Tensors value_scales, int64_t view, Tensor mask, Tensors sinks, std::vector<int64_t> windows, std::vector<int64_t> chunks, double scale,
    double softcap, int64_t kind) {
    if constexpr (std::is_same_v<Tensor, TorchTensor>) {
        if (x.dim() == 3 && x.size(0) * x.size(1) <= FEW) {
            Tensor own_x = without_gaps(x), own_reads = without_gaps(reads), cosines = without_gaps(cos), sines = without_gaps(sin);
            return decoder_layers(
                Lent(own_x), Lent(own_reads), lent(matrices), lent(scales), lent(biases), biased, digits, lent(norms), normed, epsilon, one_added,
                rounded_first, Lent(cosines), Lent(sines), Lent(slots), lent(keys), lent(values), lent(key_scales), lent(value_scales), view,
                Lent(mask), lent(sinks), std::move(windows), std::move(chunks), scale, softcap, kind);
        }
    }
    constexpr size_t OF_PRODUCTS[] = {3, 1, 2, 1}, MATRICES = 7;
    const size_t layers = keys.size();
    STD_TORCH_CHECK(matrices.size() == MATRICES * layers && (scales.empty() || scales.size() == matrices.size()), "seven matrices, and as many scales or none");
    STD_TORCH_CHECK(values.size() == layers && windows.size() == layers && chunks.size() == layers && (sinks.empty() || sinks.size() == layers) &&
                        key_scales.size() == value_scales.size() && (key_scales.empty() || key_scales.size() == layers),
                    "every layer has keys, values, a window and a chunk, and sinks and scales or none");
    size_t matrix = 0, bias = 0, norm = 0;  // the index of the next entry of each list
    auto part = [](const Tensors& from, size_t first, size_t count) {
        STD_TORCH_CHECK(first + count <= from.size(), "a tensor for every bit is needed");
        return Tensors(from.begin() + first, from.begin() + first + count);
    };
    struct Factors { Tensors matrices, scales, biases; };
    auto next_factors = [&](int product) {
        size_t count = OF_PRODUCTS[product], with_bias = biased >> matrix % MATRICES & 1 ? count : 0;
        Factors next = {part(matrices, matrix, count), scales.empty() ? Tensors() : part(scales, matrix, count), part(biases, bias, with_bias)};
        matrix += count;
        bias += with_bias;
        return next;
    };
    auto next_norm = [&](int place, bool needed = true) {
        bool given = normed >> place & 1 && (needed || norm < norms.size());
        return given ? std::optional(part(norms, norm++, 1)[0]) : std::nullopt;
    };

    List<TorchTensor> sums;
    for (size_t layer = 0; layer < layers; layer++) {
        Scratch::own().turn();
        auto [m, s, b] = next_factors(0);
        std::optional<Tensor> of_queries = next_norm(0), of_keys = next_norm(1), own_sinks, own_key_scales, own_value_scales;
        if (!key_scales.empty()) own_key_scales = key_scales[layer], own_value_scales = value_scales[layer];
        const int64_t kv_heads = keys[layer].size(1), width = keys[layer].size(3);
        auto [queries, new_keys, all] = linear_rotated(reads, m, s, b, digits, of_queries, of_keys, epsilon, one_added, rounded_first, cos, sin,
                                                       kv_heads, width);
        const int64_t rows = queries.size(0), nodes = queries.size(1), heads = queries.size(2), step = all.size(2);
        Tensor new_values = viewed(all, {rows, kv_heads, nodes, width}, {nodes * step, width, step, 1}, step - kv_heads * width);
        write_to_cache(keys[layer], values[layer], slots, new_keys, new_values, own_key_scales, own_value_scales);
        STD_TORCH_CHECK(0 < view && view <= keys[layer].size(2), "the cache has the slots of the view");
        auto seen = [&](const Tensor& all) {
            return viewed(all, {all.size(0), all.size(1), view, all.size(3)}, {all.stride(0), all.stride(1), all.stride(2), all.stride(3)});
        };
        if (!sinks.empty()) own_sinks = sinks[layer];
        if (own_key_scales) own_key_scales = seen(*own_key_scales), own_value_scales = seen(*own_value_scales);
        Tensor turned = viewed(queries, {rows, heads, nodes, width}, {nodes * heads * width, width, heads * width, 1});
        Tensor attended = slot_attention(turned, seen(keys[layer]), seen(values[layer]), mask, own_sinks, own_key_scales, own_value_scales,
                                         windows[layer], chunks[layer], scale, softcap);
        Tensor inner = viewed(attended, {rows, nodes, heads * width}, {nodes * heads * width, heads * width, 1});
        for (int step = 0; step < 2; step++) {
            if (step == 1) {
                auto [m, s, b] = next_factors(2);
                inner = gated_linear(reads, m, s, b, digits, kind);
            }
            auto [m, s, b] = next_factors(2 * step + 1);
            std::optional<Tensor> before = next_norm(2 + 2 * step), after = next_norm(3 + 2 * step, step == 0 || layer + 1 < layers);
            auto [sum, next] = linear_to_residual(inner, m, s, b, digits, x, before, epsilon, one_added, rounded_first, after, epsilon, one_added, rounded_first);
            x = sum;
            reads = after ? next : sum;
        }
        sums.push_back(owned(x));
    }
    STD_TORCH_CHECK(bias == biases.size() && norm == norms.size(), "a bit for every tensor is needed");
    return {sums, owned(reads)};
}

}  // namespace

#define OPERANDS "Tensor x, Tensor[] matrices, Tensor[] scales, Tensor[] biases, int digits"
#define TURNS "Tensor? query_norm, Tensor? key_norm, float epsilon, bool one_added, bool rounded_first, Tensor cos, Tensor sin"

DECODERS_FRAGMENT(DECODERS_NAMESPACE, m) {
    m.def("rms_norm(Tensor x, Tensor weight, float epsilon, bool one_added, bool rounded_first) -> Tensor");
    m.def("gated_linear(" OPERANDS ", int kind) -> Tensor");
    m.def("linear_to_residual(" OPERANDS ", Tensor residual, Tensor? before, float before_epsilon, bool before_one_added, "
          "bool before_rounded_first, Tensor? after, float after_epsilon, bool after_one_added, bool after_rounded_first) -> (Tensor, Tensor)");
    m.def("linear_rotated(" OPERANDS ", " TURNS ", int heads, int width) -> (Tensor, Tensor, Tensor)");
    m.def("decoder_layers(Tensor x, Tensor reads, Tensor[] matrices, Tensor[] scales, Tensor[] biases, int biased, int digits, Tensor[] norms, "
          "int normed, float epsilon, bool one_added, bool rounded_first, Tensor cos, Tensor sin, Tensor slots, Tensor(a!)[] keys, Tensor(b!)[] values, "
          "Tensor(c!)[] key_scales, Tensor(d!)[] value_scales, int view, Tensor mask, Tensor[] sinks, int[] windows, int[] chunks, float scale, float softcap, int kind) -> (Tensor[], Tensor)");
    m.def("write_to_cache(Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor new_keys, Tensor new_values, Tensor(c!)? key_scales, "
          "Tensor(d!)? value_scales) -> ()");
}
DECODERS_IMPL(DECODERS_NAMESPACE, m) {
    m.impl("rms_norm", TORCH_BOX(&norm));
    m.impl("gated_linear", TORCH_BOX(&gated_linear<Tensor>));
    m.impl("linear_to_residual", TORCH_BOX(&linear_to_residual<Tensor>));
    m.impl("linear_rotated", TORCH_BOX(&linear_rotated<Tensor>));
    m.impl("decoder_layers", TORCH_BOX(&decoder_layers<Tensor>));
    m.impl("write_to_cache", TORCH_BOX(&write_to_cache<Tensor>));
}
