// torch's tensors and the registration of operators by torch's stable ABI, so that one object works with every version from 2.11 on.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <functional>
#include <memory>
#include <numeric>

#include "vectors.h"

// The variant's name is part of the namespace, so that a process can load several variants.
#define DECODERS_FRAGMENT(name, m) STABLE_TORCH_LIBRARY_FRAGMENT(name, m)
#define DECODERS_IMPL(name, m) STABLE_TORCH_LIBRARY_IMPL(name, CPU, m)

namespace {

using torch::stable::Tensor;
using TorchTensor = Tensor;  // where `Tensor` may also be `Lent`

// A new contiguous tensor. torch's own wrapper takes twice as long, because it calls the dispatcher.
inline Tensor empty(const std::vector<int64_t>& sizes, torch::headeronly::ScalarType type) {
    std::vector<int64_t> strides(sizes.size());
    int64_t elements = 1;
    for (size_t i = sizes.size(); i--; elements *= sizes[i]) strides[i] = elements;
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), int32_t(type), aoti_torch_device_type_cpu(), 0, &made));
    return Tensor(made);
}
inline Tensor empty(const std::vector<int64_t>& sizes, const Tensor& x) { return empty(sizes, x.scalar_type()); }

}  // namespace

namespace DECODERS_NAMESPACE {

// Memory for the results within a layer, which the calling thread keeps for its next layers. Memory stays valid until `turn` was called twice.
// The class is outside of the unnamed namespace, so that all files of a variant share it: `turn` in one file frees what others took.
class Scratch {
    struct Block {
        std::unique_ptr<char[]> memory;
        size_t size;
    };
    static constexpr size_t LEAST = 1 << 18, LINE = 64;
    std::vector<Block> blocks[2];
    size_t block = 0, used = 0;
    int half = 0;

  public:
    void turn() { half = 1 - half, block = used = 0; }
    void* take(size_t bytes) {
        std::vector<Block>& own = blocks[half];
        for (; block < own.size() && used + bytes + LINE > own[block].size; block++) used = 0;
        if (block == own.size()) own.push_back({std::unique_ptr<char[]>(new char[std::max(bytes + LINE, LEAST)]), std::max(bytes + LINE, LEAST)}), used = 0;
        uintptr_t begin = uintptr_t(own[block].memory.get()), free = (begin + used + LINE - 1) / LINE * LINE;
        used = free + bytes - begin;
        return (void*)free;
    }
    static Scratch& own() {
        thread_local Scratch scratch;
        return scratch;
    }
};

// A tensor over memory that it does not own, with the methods of torch's tensors that operators call. Making it allocates nothing. Torch
// allocates several times per tensor, which would take a third of the time of a small model's layers.
class Lent {
    static constexpr int MOST = 4;
    char* memory = nullptr;
    torch::headeronly::ScalarType type = {};
    int64_t bytes = 0, dims = 0, sizes[MOST] = {}, strides[MOST] = {};

  public:
    Lent() = default;
    explicit Lent(const Tensor& x) : memory((char*)x.data_ptr()), type(x.scalar_type()), bytes(x.element_size()), dims(x.dim()) {
        STD_TORCH_CHECK(dims <= MOST, "four dimensions or fewer are needed");
        for (int64_t i = 0; i < dims; i++) sizes[i] = x.size(i), strides[i] = x.stride(i);
    }
    // A view of `x` from its element `from` on.
    Lent(const Lent& x, const std::vector<int64_t>& size, const std::vector<int64_t>& stride, int64_t from) : Lent(x) {
        dims = size.size(), memory += from * bytes;
        std::copy(size.begin(), size.end(), sizes), std::copy(stride.begin(), stride.end(), strides);
    }
    // A contiguous tensor in `to`, with the type of `x`.
    Lent(const Lent& x, const std::vector<int64_t>& size, Scratch& to) : Lent(x) {
        dims = size.size();
        int64_t elements = 1;
        for (int64_t i = dims; i--; elements *= size[i]) sizes[i] = size[i], strides[i] = elements;
        memory = (char*)to.take(elements * bytes);
    }
    int64_t dim() const { return dims; }
    int64_t size(int64_t i) const { return sizes[i]; }
    int64_t stride(int64_t i) const { return strides[i]; }
    int64_t element_size() const { return bytes; }
    int64_t numel() const { return std::accumulate(sizes, sizes + dims, int64_t(1), std::multiplies()); }
    bool is_contiguous() const {
        int64_t elements = 1;
        for (int64_t i = dims; i--; elements *= sizes[i])
            if (sizes[i] != 1 && strides[i] != elements) return false;
        return true;
    }
    torch::headeronly::ScalarType scalar_type() const { return type; }
    void* data_ptr() const { return memory; }
};

}  // namespace DECODERS_NAMESPACE

using namespace DECODERS_NAMESPACE;

namespace {

inline Lent empty(const std::vector<int64_t>& sizes, const Lent& x) { return Lent(x, sizes, Scratch::own()); }
inline Lent viewed(const Lent& x, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t from = 0) {
    return Lent(x, sizes, strides, from);
}
inline const Lent& without_gaps(const Lent& x) {
    STD_TORCH_CHECK(x.is_contiguous(), "a tensor without gaps is needed");
    return x;
}
inline std::vector<Lent> lent(const std::vector<Tensor>& all) { return {all.begin(), all.end()}; }

// `x` as torch's tensor, which owns its memory.
inline const Tensor& owned(const Tensor& x) { return x; }
inline Tensor owned(const Lent& x) {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < x.dim(); i++) sizes.push_back(x.size(i));
    Tensor copy = empty(sizes, x.scalar_type());
    memcpy(copy.data_ptr(), x.data_ptr(), x.numel() * x.element_size());
    return copy;
}

// A view of `x` from its element `from` on, with other sizes and strides.
inline Tensor viewed(const Tensor& x, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t from = 0) {
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), sizes.size(), sizes.data(), strides.data(), from, &made));
    return Tensor(made);
}

// A new contiguous tensor with the sizes of `x`, except that the last size is `last`.
template <class Tensor>
Tensor with_last_size(const Tensor& x, int64_t last) {
    STD_TORCH_CHECK(x.dim() > 0, "a tensor of one dimension or more is needed");
    std::vector<int64_t> sizes(x.dim());
    for (size_t i = 0; i < sizes.size(); i++) sizes[i] = x.size(i);
    sizes.back() = last;
    return empty(sizes, x);
}

inline Tensor without_gaps(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

template <class T, class Tensor>
T* data(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

// Calls `kernel` with a value of the tensor's element type.
template <class Tensor, class Kernel>
void with_type(const Tensor& x, Kernel kernel) {
    switch (x.scalar_type()) {
        case torch::headeronly::ScalarType::Float: return kernel(float());
        case torch::headeronly::ScalarType::BFloat16: return kernel(bfloat16());
        case torch::headeronly::ScalarType::Half: return kernel(float16());
        default: STD_TORCH_CHECK(false, "float32, bfloat16 or float16 are needed");
    }
}

inline int threads() { return torch::stable::get_num_threads(); }

template <class Tensor>
const void* bias_of(const Tensor& bias, const Tensor& matrix, const Tensor& x) {
    STD_TORCH_CHECK(bias.numel() == matrix.size(0) && bias.is_contiguous() && bias.scalar_type() == x.scalar_type(),
                    "biases have the type of x and as many outputs as their matrices");
    return bias.data_ptr();
}

template <class Tensor>
Tensor like(const Tensor& x) { return with_last_size(x, x.size(x.dim() - 1)); }

template <class Tensor>
void check_types(const Tensor& x, std::initializer_list<const Tensor*> others) {
    for (const Tensor* other : others) STD_TORCH_CHECK(other->scalar_type() == x.scalar_type(), "tensors of one type are needed");
}

}  // namespace

// The operators that other files call, with torch's tensors or `Lent`. Each variant has its own namespace, because a process may load several.
namespace DECODERS_NAMESPACE {

template <class Tensor>
using List = std::vector<Tensor>;
template <class Tensor>
Tensor few_rows_linear(Tensor x, List<Tensor> matrices, List<Tensor> biases, bool exact = false);
template <class Tensor>
Tensor quantized_linear(Tensor x, List<Tensor> levels, List<Tensor> scales, List<Tensor> biases, int64_t digits);
template <class Tensor>
Tensor slot_attention(Tensor query, Tensor key, Tensor value, Tensor mask, std::optional<Tensor> sinks, std::optional<Tensor> key_scales,
                      std::optional<Tensor> value_scales, int64_t window, int64_t chunk, double scale, double softcap);

}  // namespace DECODERS_NAMESPACE
