// The operators of torch that this file's variant gives, by torch's stable ABI: one object works with every version from 2.11 on.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attention.h"
#include "elementwise.h"
#include "products.h"
#include "quantized.h"
#include "rounding.h"

namespace {

using torch::stable::Tensor;

// A new contiguous tensor of the type of `x`. torch's own wrapper takes twice as long, by its dispatcher.
Tensor empty(const std::vector<int64_t>& sizes, const Tensor& x) {
    std::vector<int64_t> strides(sizes.size());
    int64_t elements = 1;
    for (size_t i = sizes.size(); i--; elements *= sizes[i]) strides[i] = elements;
    int32_t type;
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), type, aoti_torch_device_type_cpu(), 0, &made));
    return Tensor(made);
}

// A new contiguous tensor with the sizes of `x` but the last.
Tensor with_last_size(const Tensor& x, int64_t last) {
    STD_TORCH_CHECK(x.dim() > 0, "a tensor of one dimension or more is needed");
    std::vector<int64_t> sizes(x.dim());
    for (size_t i = 0; i < sizes.size(); i++) sizes[i] = x.size(i);
    sizes.back() = last;
    return empty(sizes, x);
}

Tensor without_gaps(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

template <class T>
T* data(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

// Calls `kernel` with a value of the element type.
template <class Kernel>
void with_type(const Tensor& x, Kernel kernel) {
    switch (x.scalar_type()) {
        case torch::headeronly::ScalarType::Float: return kernel(float());
        case torch::headeronly::ScalarType::BFloat16: return kernel(bfloat16());
        case torch::headeronly::ScalarType::Half: return kernel(float16());
        default: STD_TORCH_CHECK(false, "float32, bfloat16 or float16 are needed");
    }
}

int threads() { return torch::stable::get_num_threads(); }

const void* bias_of(const Tensor& bias, const Tensor& matrix, const Tensor& x) {
    STD_TORCH_CHECK(bias.numel() == matrix.size(0) && bias.is_contiguous() && bias.scalar_type() == x.scalar_type(),
                    "biases have the type of x and as many outputs as their matrices");
    return bias.data_ptr();
}

// From so many rows on torch multiplies by float32, faster by a third. In 16 bits it is slower, and the bits of a row would be others.
constexpr int64_t MANY_ROWS = 96;

// The same by torch's products. x: [R, K], out: [R, all outputs].
void many_rows_linear(const Tensor& x, const std::vector<Tensor>& matrices, const std::vector<Tensor>& biases, Tensor& out) {
    int64_t rows = x.size(0), outputs = out.size(1), first = 0;
    for (size_t m = 0; m < matrices.size(); m++) {
        int64_t own = matrices[m].size(0);
        Tensor weights = torch::stable::transpose(matrices[m], 0, 1), part = torch::stable::narrow(out, 1, first, own);
        std::array<StableIValue, 3> stack{
            torch::stable::detail::from(x), torch::stable::detail::from(weights), torch::stable::detail::from(part)};
        TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
        torch::stable::detail::to<Tensor>(stack[0]);  // the result, which is `part`
        if (!biases.empty()) {
            const float* bias = data<float>(biases[m]);
            in_threads(threads(), [&](int thread, int of) {
                long begin, end;
                share_of(rows, 1, thread, of, begin, end);
                for (float* y = data<float>(out) + begin * outputs + first; begin < end; begin++, y += outputs)
                    for (int64_t o = 0; o < own; o++) y[o] += bias[o];
            });
        }
        first += own;
    }
}

// x: [..., K], matrices: up to three of [O, K], all stored by rows or all by columns, biases: as many of [O], or none.
Tensor few_rows_linear(Tensor x, std::vector<Tensor> matrices, std::vector<Tensor> biases) {
    constexpr size_t MOST = 3;
    int64_t count = matrices.size(), inputs = x.size(x.dim() - 1), outputs = 0;
    STD_TORCH_CHECK(0 < count && count <= int64_t(MOST), "one to three matrices are multiplied at once, not ", count);
    STD_TORCH_CHECK(biases.empty() || int64_t(biases.size()) == count, "every matrix has a bias, or none");
    Matrix all[MOST];
    for (int64_t m = 0; m < count; m++) {
        const Tensor& matrix = matrices[m];
        STD_TORCH_CHECK(matrix.dim() == 2 && matrix.size(1) == inputs && matrix.scalar_type() == x.scalar_type(),
                        "matrices have the type of x and as many inputs");
        STD_TORCH_CHECK(matrix.stride(1) == 1 || matrix.stride(0) == 1, "matrices are stored by rows or by columns");
        STD_TORCH_CHECK((matrix.stride(1) == 1) == (matrices[0].stride(1) == 1), "matrices are stored alike");
        const void* bias = biases.empty() ? nullptr : bias_of(biases[m], matrix, x);
        all[m] = {matrix.data_ptr(), bias, matrix.size(0), matrix.stride(0), matrix.stride(1)};
        outputs += matrix.size(0);
    }
    Tensor out = with_last_size(x, outputs), rows = without_gaps(x);
    int64_t number = inputs ? x.numel() / inputs : 0;
    if (number >= MANY_ROWS && x.scalar_type() == torch::headeronly::ScalarType::Float) {
        Tensor flat = torch::stable::view(out, {number, outputs});
        many_rows_linear(torch::stable::view(rows, {number, inputs}), matrices, biases, flat);
        return out;
    }
    with_type(x, [&](auto type) {
        using T = decltype(type);
        multiply(data<T>(rows), number, inputs, all, count, data<T>(out), threads());
    });
    return out;
}

Tensor like(const Tensor& x) { return with_last_size(x, x.size(x.dim() - 1)); }

void check_types(const Tensor& x, std::initializer_list<const Tensor*> others) {
    for (const Tensor* other : others) STD_TORCH_CHECK(other->scalar_type() == x.scalar_type(), "tensors of one type are needed");
}

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

// x: [..., 2 I], gates and what they multiply side by side. Returns [..., I].
Tensor gated_activation(Tensor x, int64_t kind, bool gate_first) {
    int64_t width = x.size(x.dim() - 1) / 2;
    STD_TORCH_CHECK(kind == SILU || kind == GELU_TANH, "activation 0 or 1, not ", kind);
    Tensor out = with_last_size(x, width), given = without_gaps(x);
    with_type(x, [&](auto type) {
        using T = decltype(type);
        int64_t rows = width ? out.numel() / width : 0;
        if (kind == SILU) gated<SILU>(data<T>(given), rows, width, gate_first, data<T>(out), threads());
        if (kind == GELU_TANH) gated<GELU_TANH>(data<T>(given), rows, width, gate_first, data<T>(out), threads());
    });
    return out;
}

Heads heads_of(const Tensor& x) {
    STD_TORCH_CHECK(x.dim() == 4 && (x.stride(3) == 1 || x.size(3) == 1), "[B, h, N, d] without gaps in d is needed");
    return {x.data_ptr(), x.size(0), x.size(1), x.size(2), x.size(3), x.stride(0), x.stride(1), x.stride(2)};
}

// x: [B, h, N, d], cos, sin: [B or 1, N, R]. Returns [B, N, h, d].
Tensor rotary(Tensor x, Tensor cos, Tensor sin) {
    Heads heads = heads_of(x);
    int64_t turned = cos.size(2);
    check_types(x, {&cos, &sin});
    STD_TORCH_CHECK(cos.dim() == 3 && cos.is_contiguous() && sin.is_contiguous() && sin.numel() == cos.numel() && cos.size(1) == heads.nodes &&
                        (cos.size(0) == 1 || cos.size(0) == heads.rows) && turned <= heads.width && turned % 2 == 0,
                    "cos and sin of every token are needed");
    Tensor out = empty({heads.rows, heads.nodes, heads.heads, heads.width}, x);
    with_type(x, [&](auto type) {
        using T = decltype(type);
        rotate(heads, data<T>(cos), data<T>(sin), turned, cos.size(0) == 1 ? 0 : heads.nodes * turned, data<T>(out), threads());
    });
    return out;
}

// keys, values: [B, h, L, d], written in place; slots: [B, N] int64, negative ones counted from the end, new ones: [B, h, N, d].
void write_to_cache(Tensor keys, Tensor values, Tensor slots, Tensor new_keys, Tensor new_values) {
    STD_TORCH_CHECK(slots.scalar_type() == torch::headeronly::ScalarType::Long && slots.is_contiguous(), "slots are int64 without gaps");
    for (auto [buffer, states] : {std::pair(&keys, &new_keys), std::pair(&values, &new_values)}) {
        check_types(*buffer, {states});
        Heads own = heads_of(*states), all = heads_of(*buffer);
        STD_TORCH_CHECK(own.rows == all.rows && own.heads == all.heads && own.width == all.width && slots.numel() == own.rows * own.nodes,
                        "new keys and values have the sizes of the cache, and a slot each");
        for (int64_t i = 0; i < slots.numel(); i++)
            STD_TORCH_CHECK(-all.nodes <= data<int64_t>(slots)[i] && data<int64_t>(slots)[i] < all.nodes, "a slot outside the cache");
        with_type(*buffer, [&, buffer = buffer](auto type) {
            using T = decltype(type);
            write_slots<T>(own, data<int64_t>(slots), all, threads());
        });
    }
}

Slots slots(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

// query: [B, heads, N, D], key and value: [B, kv_heads, view, D or Dv], mask: [B, 1, nodes, columns] int64, sinks: [heads],
// scales: [B, kv_heads, view, 1] if keys and values are int8. The last dimension of each has no gaps.
Tensor slot_attention(Tensor query, Tensor key, Tensor value, Tensor mask, std::optional<Tensor> sinks, std::optional<Tensor> key_scales,
                      std::optional<Tensor> value_scales, int64_t window, int64_t chunk, double scale, double softcap) {
    using torch::headeronly::ScalarType;
    auto fits = [&](const Tensor& x) { return x.dim() == 4 && x.size(0) == query.size(0) && (x.size(3) <= 1 || x.stride(3) == 1); };
    STD_TORCH_CHECK(fits(query) && fits(key) && fits(value) && fits(mask), "queries, keys, values and the mask have four dimensions, the last without gaps");
    STD_TORCH_CHECK(key.size(1) == value.size(1) && key.size(2) == value.size(2) && key.size(3) == query.size(3), "keys have the width of queries and the slots of values");
    STD_TORCH_CHECK(key.size(1) > 0 && query.size(1) % key.size(1) == 0, "every head of the keys has as many heads of queries");
    STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Long && mask.size(3) >= 2 && mask.size(2) >= query.size(2), "the mask has a node for each query");
    const bool levels = key.scalar_type() == ScalarType::Char;
    STD_TORCH_CHECK(value.scalar_type() == key.scalar_type() && (levels || key.scalar_type() == query.scalar_type()), "keys and values have the type of queries, or int8");
    STD_TORCH_CHECK(levels == key_scales.has_value() && levels == value_scales.has_value(), "int8 keys and values have scales");
    Tensor out = empty({query.size(0), query.size(2), query.size(1), value.size(3)}, query);
    Slots none = {};
    Attention given = {
        query.scalar_type() == ScalarType::Float ? Type::float32 : query.scalar_type() == ScalarType::Half ? Type::float16 : Type::bfloat16,
        slots(query), slots(key), slots(value), levels ? slots(*key_scales) : none, levels ? slots(*value_scales) : none,
        sinks ? sinks->data_ptr() : nullptr, out.data_ptr(),
        query.size(0), query.size(1), key.size(1), query.size(2), query.size(3), value.size(3), key.size(2),
        data<const int64_t>(mask), mask.stride(0), mask.stride(2), mask.size(2), mask.size(3), window, chunk, float(scale), float(softcap),
    };
    if (!out.numel()) return out;
    if (levels) attend_to_slots<int8_t>(given, threads());
    else with_type(query, [&](auto type) { attend_to_slots<decltype(type)>(given, threads()); });
    return out;
}

// Bytes behind the last element of a contiguous tensor.
int64_t storage_behind(const Tensor& tensor) {
    int64_t size, offset;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &size));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
    return size - (offset + tensor.numel()) * tensor.element_size();
}

// x: [..., K]. levels: up to three of int8 [O, K], with scales of float32 [O, groups]; or of uint8 [O, K / 2], whose numbers of 4 bits are
// in the order of `Fours`, K being rounded up to 128, with scales of float32 or bfloat16 [O, 2, groups].
Tensor quantized_linear(Tensor x, std::vector<Tensor> levels, std::vector<Tensor> scales, std::vector<Tensor> biases, int64_t digits) {
    using torch::headeronly::ScalarType;
    constexpr size_t MOST = 3;
    int64_t count = levels.size(), inputs = x.size(x.dim() - 1), outputs = 0;
    STD_TORCH_CHECK(0 < count && count <= int64_t(MOST) && int64_t(scales.size()) == count, "one to three matrices have as many scales");
    STD_TORCH_CHECK(biases.empty() || int64_t(biases.size()) == count, "every matrix has a bias, or none");
    STD_TORCH_CHECK(digits == 1 || digits == 2, "one or two digits");
    bool bytes = levels[0].scalar_type() == ScalarType::Char;
    ScalarType type = scales[0].scalar_type();
    Matrix all[MOST];
    for (int64_t m = 0; m < count; m++) {
        const Tensor &matrix = levels[m], &scale = scales[m];
        int64_t wide = bytes ? inputs : (inputs + 127) / 128 * 64, groups = scale.size(scale.dim() - 1);
        STD_TORCH_CHECK(matrix.scalar_type() == (bytes ? ScalarType::Char : ScalarType::Byte) && matrix.dim() == 2 && matrix.size(1) == wide &&
                            matrix.stride(1) == 1,
                        "levels are int8 or packed, one type for all, and have the inputs of x");
        STD_TORCH_CHECK(scale.is_contiguous() && scale.scalar_type() == type && scale.numel() == matrix.size(0) * groups * (bytes ? 1 : 2) &&
                            groups == scales[0].size(scales[0].dim() - 1),
                        "scales are contiguous and alike, and have the outputs of their levels");
        STD_TORCH_CHECK(type == ScalarType::Float || (!bytes && type == ScalarType::BFloat16), "scales are float32, of 4 bits also bfloat16");
        int64_t group = groups ? inputs / groups : 0;
        STD_TORCH_CHECK(groups && inputs % groups == 0 && (bytes ? groups == 1 || group % 32 == 0 : group >= 32 && (group & (group - 1)) == 0),
                        "groups are 32 doubled any number of times, or multiples of 32 for int8, or one");
        STD_TORCH_CHECK(bytes || storage_behind(scale) >= int64_t(SIXTEENS * scale.element_size()), "of scales for 4 bits 16 more may be read");
        const void* bias = biases.empty() ? nullptr : bias_of(biases[m], matrix, x);
        all[m] = {matrix.data_ptr(), bias, matrix.size(0), matrix.stride(0), 1, scale.data_ptr(), groups};
        outputs += matrix.size(0);
    }
    Tensor out = with_last_size(x, outputs), rows = without_gaps(x);
    int64_t number = inputs ? x.numel() / inputs : 0;
    with_type(x, [&](auto of_x) {
        using T = decltype(of_x);
        auto multiply = [&](auto format) {
            multiply_quantized<decltype(format)>(data<T>(rows), number, inputs, digits, all, count, data<T>(out), threads());
        };
        if (bytes) multiply(Bytes());
        else if (type == ScalarType::Float) multiply(Fours<float>());
        else multiply(Fours<bfloat16>());
    });
    return out;
}

// matrix: [O, K] -> levels 0 to 15, uint8 [O, K], and scales, bfloat16 [O, 2, K / group] and SIXTEENS zeros, flat.
std::tuple<Tensor, Tensor> round_to_four_bits(Tensor matrix, int64_t group) {
    STD_TORCH_CHECK(matrix.dim() == 2 && group >= 8 && group <= 256 && group % 8 == 0 && matrix.size(1) % group == 0,
                    "a matrix of whole groups is needed, and groups of 8 to 256");
    using torch::headeronly::ScalarType;
    Tensor whole = without_gaps(matrix);
    int64_t outputs = matrix.size(0), inputs = matrix.size(1);
    Tensor levels = torch::stable::empty({outputs, inputs}, ScalarType::Byte);
    int64_t groups = inputs / group;
    Tensor scales = torch::stable::empty({outputs * 2 * groups + SIXTEENS}, ScalarType::BFloat16);
    memset(data<bfloat16>(scales), 0, scales.numel() * sizeof(bfloat16));
    with_type(matrix, [&](auto type) {
        round_matrix(data<decltype(type)>(whole), outputs, inputs, group, data<uint8_t>(levels), data<bfloat16>(scales), threads());
    });
    return {levels, scales};
}

}  // namespace

// The name of the variant is part of the namespace, so that a process can compare several.
#define DECODERS_FRAGMENT(name, m) STABLE_TORCH_LIBRARY_FRAGMENT(name, m)
#define DECODERS_IMPL(name, m) STABLE_TORCH_LIBRARY_IMPL(name, CPU, m)

DECODERS_FRAGMENT(DECODERS_NAMESPACE, m) {
    m.def("few_rows_linear(Tensor x, Tensor[] matrices, Tensor[] biases) -> Tensor");
    m.def("quantized_linear(Tensor x, Tensor[] levels, Tensor[] scales, Tensor[] biases, int digits) -> Tensor");
    m.def("round_to_four_bits(Tensor matrix, int group) -> (Tensor, Tensor)");
    m.def("rms_norm(Tensor x, Tensor weight, float epsilon, bool one_added, bool rounded_first) -> Tensor");
    m.def("gated_activation(Tensor x, int kind, bool gate_first) -> Tensor");
    m.def("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor");
    m.def("write_to_cache(Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor new_keys, Tensor new_values) -> ()");
    m.def("slot_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor? sinks, Tensor? key_scales, Tensor? value_scales, "
          "int window, int chunk, float scale, float softcap) -> Tensor");
}
DECODERS_IMPL(DECODERS_NAMESPACE, m) {
    m.impl("few_rows_linear", TORCH_BOX(&few_rows_linear));
    m.impl("quantized_linear", TORCH_BOX(&quantized_linear));
    m.impl("round_to_four_bits", TORCH_BOX(&round_to_four_bits));
    m.impl("rms_norm", TORCH_BOX(&norm));
    m.impl("gated_activation", TORCH_BOX(&gated_activation));
    m.impl("rotary", TORCH_BOX(&rotary));
    m.impl("write_to_cache", TORCH_BOX(&write_to_cache));
    m.impl("slot_attention", TORCH_BOX(&slot_attention));
}
