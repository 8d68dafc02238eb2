// The operator of attention over the slot cache.
#include "attention.h"
#include "tensors.h"

namespace {

template <class Tensor>
Slots slots(const Tensor& x) { return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

}  // namespace

// query: [B, heads, N, D], key and value: [B, kv_heads, view, D or Dv], mask: [B, 1, nodes, columns] int64, sinks: [heads],
// scales: [B, kv_heads, view, 1] if keys and values are int8. All are contiguous along the last dimension.
template <class Tensor>
Tensor DECODERS_NAMESPACE::slot_attention(
    Tensor query, Tensor key, Tensor value, Tensor mask, std::optional<Tensor> sinks, std::optional<Tensor> key_scales,
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

template Lent DECODERS_NAMESPACE::slot_attention(
    Lent query, Lent key, Lent value, Lent mask, std::optional<Lent> sinks, std::optional<Lent> key_scales, std::optional<Lent> value_scales,
    int64_t window, int64_t chunk, double scale, double softcap);

DECODERS_FRAGMENT(DECODERS_NAMESPACE, m) {
    m.def("slot_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor? sinks, Tensor? key_scales, Tensor? value_scales, "
          "int window, int chunk, float scale, float softcap) -> Tensor");
}
DECODERS_IMPL(DECODERS_NAMESPACE, m) {
    m.impl("slot_attention", TORCH_BOX(&slot_attention<Tensor>));
}
