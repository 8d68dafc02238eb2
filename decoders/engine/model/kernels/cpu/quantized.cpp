// The operators of products with matrices of 8 and 4 bits.
#include "quantized.h"
#include "rounding.h"
#include "tensors.h"

// x: [..., K]. levels: up to three matrices, either int8 [O, K] with scales float32 [O, groups]; or uint8 [O, K / 2] with scales float32 or
// bfloat16 [O, 2, groups], both in the panels of `Fours`.
template <class Tensor>
Tensor DECODERS_NAMESPACE::quantized_linear(Tensor x, List<Tensor> levels, List<Tensor> scales, List<Tensor> biases, int64_t digits) {
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
        int64_t wide = bytes ? inputs : inputs / 2, groups = scale.size(scale.dim() - 1);
        STD_TORCH_CHECK(matrix.scalar_type() == (bytes ? ScalarType::Char : ScalarType::Byte) && matrix.dim() == 2 && matrix.size(1) == wide &&
                            matrix.stride(1) == 1,
                        "levels are int8 or packed, one type for all, and have the inputs of x");
        STD_TORCH_CHECK(scale.is_contiguous() && scale.scalar_type() == type && scale.numel() == matrix.size(0) * groups * (bytes ? 1 : 2) &&
                            groups == scales[0].size(scales[0].dim() - 1),
                        "scales are contiguous and alike, and have the outputs of their levels");
        STD_TORCH_CHECK(type == ScalarType::Float || (!bytes && type == ScalarType::BFloat16), "scales are float32, of 4 bits also bfloat16");
        int64_t group = groups ? inputs / groups : 0;
        STD_TORCH_CHECK(groups && inputs % groups == 0 && (bytes ? groups == 1 || group % 32 == 0 : group % INPUTS == 0 && group <= MOST_IN_GROUP),
                        "of 4 bits, groups are multiples of 8 up to 512; of 8 bits, multiples of 32, or all inputs are one group");
        STD_TORCH_CHECK(bytes || (matrix.is_contiguous() && matrix.size(0) % OUTPUTS == 0), "levels of 4 bits fill panels of 16 outputs");
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

namespace {

// matrix [O, K] -> levels 0 to 15, uint8 [O, K], and scales bfloat16 [O, 2, K / group].
std::tuple<Tensor, Tensor> round_to_four_bits(Tensor matrix, int64_t group) {
    STD_TORCH_CHECK(matrix.dim() == 2 && group >= 8 && group <= 256 && group % 8 == 0 && matrix.size(1) % group == 0,
                    "a matrix of whole groups is needed, and groups of 8 to 256");
    using torch::headeronly::ScalarType;
    Tensor whole = without_gaps(matrix);
    int64_t outputs = matrix.size(0), inputs = matrix.size(1);
    Tensor levels = torch::stable::empty({outputs, inputs}, ScalarType::Byte);
    int64_t groups = inputs / group;
    Tensor scales = torch::stable::empty({outputs, 2, groups}, ScalarType::BFloat16);
    with_type(matrix, [&](auto type) {
        round_matrix(data<decltype(type)>(whole), outputs, inputs, group, data<uint8_t>(levels), data<bfloat16>(scales), threads());
    });
    return {levels, scales};
}

}  // namespace

template Lent DECODERS_NAMESPACE::quantized_linear(Lent x, List<Lent> levels, List<Lent> scales, List<Lent> biases, int64_t digits);

DECODERS_FRAGMENT(DECODERS_NAMESPACE, m) {
    m.def("quantized_linear(Tensor x, Tensor[] levels, Tensor[] scales, Tensor[] biases, int digits) -> Tensor");
    m.def("round_to_four_bits(Tensor matrix, int group) -> (Tensor, Tensor)");
}
DECODERS_IMPL(DECODERS_NAMESPACE, m) {
    m.impl("quantized_linear", TORCH_BOX(&quantized_linear<Tensor>));
    m.impl("round_to_four_bits", TORCH_BOX(&round_to_four_bits));
}
