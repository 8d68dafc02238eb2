// The operator of products with matrices in float32, bfloat16 and float16.
#include "products.h"
#include "tensors.h"

namespace {

constexpr auto FLOAT = torch::headeronly::ScalarType::Float;
// From this many rows on, torch multiplies float32 rows where it is faster (`torch_is_faster`). A row's bits then differ from its bits in a
// smaller product. So only chunks of prompts should have so many rows, not blocks of nodes. For 16-bit rows torch is slower.
constexpr int64_t MANY_ROWS = 512;

// Whether torch multiplies many float32 rows faster than the kernels. On Intel's processors it is faster by a third. On Arm this was not
// measured, and is assumed. On AMD's processors, torch's library uses AVX2 only: it takes as long as the kernels with AVX2, and twice as
// long as the kernels with AVX-512.
bool torch_is_faster() {
#if defined(__AVX2__)
    return __builtin_cpu_is("intel");
#else
    return true;
#endif
}

// Products by torch, only for x in float32. x: [R, K], out: [R, all outputs].
void many_rows_linear(const Tensor& x, const std::vector<Tensor>& matrices, const std::vector<Tensor>& biases, Tensor& out) {
    int64_t rows = x.size(0), outputs = out.size(1), first = 0;
    for (size_t m = 0; m < matrices.size(); m++) {
        int64_t own = matrices[m].size(0);
        Tensor wide = matrices[m].scalar_type() == FLOAT ? matrices[m] : torch::stable::to(matrices[m], FLOAT);
        Tensor weights = torch::stable::transpose(wide, 0, 1), part = torch::stable::narrow(out, 1, first, own);
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

}  // namespace

// x: [..., K]; biases: [O] for each matrix, or none; matrices: up to three [O, K], all stored by rows or all by columns. Matrices have the
// type of x; if x is float32, they may also all have one 16-bit type. exact: whether torch multiplies no rows, however many there are.
template <class Tensor>
Tensor DECODERS_NAMESPACE::few_rows_linear(Tensor x, List<Tensor> matrices, List<Tensor> biases, bool exact) {
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
    if constexpr (std::is_same_v<Tensor, TorchTensor>) {
        if (!exact && number >= MANY_ROWS && x.scalar_type() == FLOAT && torch_is_faster()) {
            Tensor flat = torch::stable::view(out, {number, outputs});
            many_rows_linear(torch::stable::view(rows, {number, inputs}), matrices, biases, flat);
            return out;
        }
    }
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

template Lent DECODERS_NAMESPACE::few_rows_linear(Lent x, List<Lent> matrices, List<Lent> biases, bool exact);

DECODERS_FRAGMENT(DECODERS_NAMESPACE, m) {
    m.def("few_rows_linear(Tensor x, Tensor[] matrices, Tensor[] biases, bool exact=False) -> Tensor");
}
DECODERS_IMPL(DECODERS_NAMESPACE, m) {
    m.impl("few_rows_linear", TORCH_BOX(&few_rows_linear<Tensor>));
}
