// torch's tensors and the registration of operators by torch's stable ABI, so that one object works with every version from 2.11 on.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "vectors.h"

// The variant's name is part of the namespace, so that a process can load several variants.
#define DECODERS_FRAGMENT(name, m) STABLE_TORCH_LIBRARY_FRAGMENT(name, m)
#define DECODERS_IMPL(name, m) STABLE_TORCH_LIBRARY_IMPL(name, CPU, m)

namespace {

using torch::stable::Tensor;

// A new contiguous tensor with the dtype of `x`. torch's own wrapper takes twice as long, because it calls the dispatcher.
inline Tensor empty(const std::vector<int64_t>& sizes, const Tensor& x) {
    std::vector<int64_t> strides(sizes.size());
    int64_t elements = 1;
    for (size_t i = sizes.size(); i--; elements *= sizes[i]) strides[i] = elements;
    int32_t type;
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), type, aoti_torch_device_type_cpu(), 0, &made));
    return Tensor(made);
}

// A view of `x` from its element `from` on, with other sizes and strides.
inline Tensor viewed(const Tensor& x, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t from = 0) {
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), sizes.size(), sizes.data(), strides.data(), from, &made));
    return Tensor(made);
}

// A new contiguous tensor with the sizes of `x`, except that the last size is `last`.
inline Tensor with_last_size(const Tensor& x, int64_t last) {
    STD_TORCH_CHECK(x.dim() > 0, "a tensor of one dimension or more is needed");
    std::vector<int64_t> sizes(x.dim());
    for (size_t i = 0; i < sizes.size(); i++) sizes[i] = x.size(i);
    sizes.back() = last;
    return empty(sizes, x);
}

inline Tensor without_gaps(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

template <class T>
T* data(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

// Calls `kernel` with a value of the tensor's element type.
template <class Kernel>
void with_type(const Tensor& x, Kernel kernel) {
    switch (x.scalar_type()) {
        case torch::headeronly::ScalarType::Float: return kernel(float());
        case torch::headeronly::ScalarType::BFloat16: return kernel(bfloat16());
        case torch::headeronly::ScalarType::Half: return kernel(float16());
        default: STD_TORCH_CHECK(false, "float32, bfloat16 or float16 are needed");
    }
}

inline int threads() { return torch::stable::get_num_threads(); }

inline const void* bias_of(const Tensor& bias, const Tensor& matrix, const Tensor& x) {
    STD_TORCH_CHECK(bias.numel() == matrix.size(0) && bias.is_contiguous() && bias.scalar_type() == x.scalar_type(),
                    "biases have the type of x and as many outputs as their matrices");
    return bias.data_ptr();
}

inline Tensor like(const Tensor& x) { return with_last_size(x, x.size(x.dim() - 1)); }

inline void check_types(const Tensor& x, std::initializer_list<const Tensor*> others) {
    for (const Tensor* other : others) STD_TORCH_CHECK(other->scalar_type() == x.scalar_type(), "tensors of one type are needed");
}

}  // namespace

// The operators that other files call. Each variant has its own namespace, because a process may load several variants.
namespace DECODERS_NAMESPACE {

using Tensors = std::vector<Tensor>;
Tensor few_rows_linear(Tensor x, Tensors matrices, Tensors biases);
Tensor quantized_linear(Tensor x, Tensors levels, Tensors scales, Tensors biases, int64_t digits);
Tensor slot_attention(Tensor query, Tensor key, Tensor value, Tensor mask, std::optional<Tensor> sinks, std::optional<Tensor> key_scales,
                      std::optional<Tensor> value_scales, int64_t window, int64_t chunk, double scale, double softcap);

}  // namespace DECODERS_NAMESPACE

using namespace DECODERS_NAMESPACE;
