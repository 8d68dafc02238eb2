// The operator of products with matrices in float32, bfloat16 and float16.
#include "products.h"
#include "tensors.h"

// x: [..., K]; biases: [O] for each matrix, or none; matrices: up to three [O, K], all stored by rows or all by columns. Matrices have the
// type of x; if x is float32, they may also all have one 16-bit type.
template <class Tensor>
Tensor DECODERS_NAMESPACE::few_rows_linear(Tensor x, List<Tensor> matrices, List<Tensor> biases) {
    constexpr auto FLOAT = torch::headeronly::ScalarType::Float;
    constexpr size_t MOST = 3;
    int64_t count = matrices.size(), inputs = x.size(x.dim() - 1), outputs = 0;
    STD_TORCH_CHECK(0 < count && count <= int64_t(MOST), "one to three matrices are multiplied at once, not ", count);
    STD_TORCH_CHECK(biases.empty() || int64_t(biases.size()) == count, "every matrix has a bias, or none");
    auto type = matrices[0].scalar_type();
    STD_TORCH_CHECK(type == x.scalar_type() || x.scalar_type() == FLOAT, "matrices have the type of x, or 16 bits");
    Matrix all[MOST];
    for (int64_t m = 0; m < count; m++) {
        const Tensor& matrix = matrices[m];
        STD_TORCH_CHECK(matrix.dim() == 2 && matrix.size(1) == inputs && matrix.scalar_type() == type,
                        "matrices have one type, and the inputs of x");
        STD_TORCH_CHECK(matrix.stride(1) == 1 || matrix.stride(0) == 1, "matrices are stored by rows or by columns");
        STD_TORCH_CHECK((matrix.stride(1) == 1) == (matrices[0].stride(1) == 1), "matrices are stored alike");
        const void* bias = biases.empty() ? nullptr : bias_of(biases[m], matrix, x);
        all[m] = {matrix.data_ptr(), bias, matrix.size(0), matrix.stride(0), matrix.stride(1)};
        outputs += matrix.size(0);
    }
    Tensor out = with_last_size(x, outputs), rows = without_gaps(x);
    int64_t number = inputs ? x.numel() / inputs : 0;
    with_type(matrices[0], [&](auto of_weights) {
        using W = decltype(of_weights);
        auto by_rows_of = [&](auto of_x) {
            using T = decltype(of_x);
            multiply<W>(data<T>(rows), number, inputs, all, count, data<T>(out), threads());
        };
        if (type == x.scalar_type()) by_rows_of(W());
        else by_rows_of(float());
    });
    return out;
}

template Lent DECODERS_NAMESPACE::few_rows_linear(Lent x, List<Lent> matrices, List<Lent> biases);

DECODERS_FRAGMENT(DECODERS_NAMESPACE, m) {
    m.def("few_rows_linear(Tensor x, Tensor[] matrices, Tensor[] biases) -> Tensor");
}
DECODERS_IMPL(DECODERS_NAMESPACE, m) {
    m.impl("few_rows_linear", TORCH_BOX(&few_rows_linear<Tensor>));
}
