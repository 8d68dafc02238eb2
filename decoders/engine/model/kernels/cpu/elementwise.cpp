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

// x: [..., 2 I], gates and their factors side by side. Returns [..., I].
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

// keys, values: [B, h, L, d], written in place; slots: [B, N] int64, negative slots count from the end; new states: [B, h, N, d].
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

}  // namespace

DECODERS_FRAGMENT(DECODERS_NAMESPACE, m) {
    m.def("rms_norm(Tensor x, Tensor weight, float epsilon, bool one_added, bool rounded_first) -> Tensor");
    m.def("gated_activation(Tensor x, int kind, bool gate_first) -> Tensor");
    m.def("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor");
    m.def("write_to_cache(Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor new_keys, Tensor new_values) -> ()");
}
DECODERS_IMPL(DECODERS_NAMESPACE, m) {
    m.impl("rms_norm", TORCH_BOX(&norm));
    m.impl("gated_activation", TORCH_BOX(&gated_activation));
    m.impl("rotary", TORCH_BOX(&rotary));
    m.impl("write_to_cache", TORCH_BOX(&write_to_cache));
}
