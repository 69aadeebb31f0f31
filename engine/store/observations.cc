// SPDX-License-Identifier: Apache-2.0
#include "engine/store/observations.h"
#include "engine/store/store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/undo.h"
#include "engine/store/observed.h"

namespace kvm::engine {
namespace {

bool all_finite(const float* values, uint64_t n) {
  return std::all_of(values, values + n, [](float value) { return std::isfinite(value); });
}

}  // namespace

Status Store::observe(Sequence* seq, const ObserveInput& input) {
  KVM_TRY(check_layer(seq, input.layer));
  const Layer& layer = seq->space().layers[input.layer];
  const uint32_t row_floats = layer.n_q_heads * layer.dim_k;
  const uint64_t present_tokens = layer_length(seq, input.layer);
  if (input.n_columns > present_tokens || input.column_begin > present_tokens - input.n_columns) {
    return Status(
        KVM_ERR_INVALID,
        fmt::format("{} column sums from position {} are beyond the {} tokens of layer {}",
                    input.n_columns, input.column_begin, present_tokens, input.layer));
  }
  if (input.query_position > kMaxTokens) {
    return Status(KVM_ERR_INVALID, fmt::format("query_position is {}; it must be at most {}",
                                               input.query_position, kMaxTokens));
  }
  if (!all_finite(input.q, uint64_t{input.n_rows} * row_floats) ||
      !all_finite(input.column_sums, input.n_columns * layer.n_kv_heads)) {
    return Status(KVM_ERR_INVALID, "a query or a column sum is not finite");
  }
  if (seq->observed.empty()) {
    seq->observed.resize(seq->space().n_layers);
  }
  ObservedRef& ref = seq->observed[input.layer];
  if (StoreMemory::is_own(seq->account, ref.data) && ref.limit == UINT64_MAX) {
    // In place. It may shrink, when rows are replaced by fewer.
    const uint64_t before = ref.data->size_bytes();
    const uint64_t after =
        observed_bytes_after(ref.data.get(), input, row_floats, layer.n_kv_heads);
    const uint64_t more = after > before ? after - before : 0;
    KVM_TRY(memory_.charge(seq->account, more));
    Undo uncharging([&] { memory_.uncharge(seq->account, more); });
    add_observation(ref.data.get(), input, row_floats, layer.n_kv_heads);
    uncharging.dismiss();
    memory_.uncharge(seq->account, before > after ? before - after : 0);
    return Status::ok();
  }
  KVM_TRY_ASSIGN(std::shared_ptr<Observed> added, memory_.make_charged(seq->account, Observed()));
  Observed own;
  if (ref.data != nullptr) {
    own = *ref.data;
    truncate_observation(&own, ref.limit, row_floats, layer.n_kv_heads);
  }
  const uint64_t own_bytes = observed_bytes_after(&own, input, row_floats, layer.n_kv_heads);
  KVM_TRY(memory_.charge(seq->account, own_bytes));
  Undo uncharging([&] { memory_.uncharge(seq->account, own_bytes); });
  add_observation(&own, input, row_floats, layer.n_kv_heads);
  uncharging.dismiss();
  *added = std::move(own);
  ref = {.data = std::move(added)};
  return Status::ok();
}

ObservedView observed_view(const Sequence* seq, uint32_t layer) {
  ObservedView view;
  if (seq->observed.empty() || seq->observed[layer].data == nullptr) {
    return view;
  }
  const ObservedRef& ref = seq->observed[layer];
  const uint64_t n_columns = ref.data->column_sums.size() / seq->space().layers[layer].n_kv_heads;
  view.query_position = ref.data->query_position;
  view.n_rows = ref.limit <= ref.data->query_position
                    ? 0
                    : static_cast<uint32_t>(std::min<uint64_t>(
                          ref.data->n_rows, ref.limit - ref.data->query_position));
  view.q = view.n_rows > 0 ? ref.data->queries.data() : nullptr;
  view.n_columns = std::min(n_columns, ref.limit);
  view.column_sums = view.n_columns > 0 ? ref.data->column_sums.data() : nullptr;
  return view;
}

std::vector<float> largest_queries(const Sequence* seq, uint32_t layer,
                                   std::span<const uint16_t> kv_heads) {
  const ObservedView seen = observed_view(seq, layer);
  if (seen.n_rows == 0) {
    return {};
  }
  const Layer& of = seq->space().layers[layer];
  std::vector<float> largest(kv_heads.size() * of.dim_k);
  for (uint32_t row = 0; row < seen.n_rows; ++row) {
    for (size_t head = 0; head < kv_heads.size(); ++head) {
      for (uint32_t member = 0; member < of.group(); ++member) {
        const uint64_t q_head = uint64_t{kv_heads[head]} * of.group() + member;
        const float* q = seen.q + (uint64_t{row} * of.n_q_heads + q_head) * of.dim_k;
        float* own = largest.data() + head * of.dim_k;
        for (uint32_t i = 0; i < of.dim_k; ++i) {
          own[i] = std::max(own[i], std::fabs(q[i]));
        }
      }
    }
  }
  return largest;
}

void cut_observed(StoreMemory* memory, Sequence* seq, uint64_t n_tokens) {
  for (uint32_t i = 0; i < seq->observed.size(); ++i) {
    ObservedRef& ref = seq->observed[i];
    if (ref.data == nullptr) {
      continue;
    }
    ref.limit = std::min(ref.limit, n_tokens);
    if (StoreMemory::is_own(seq->account, ref.data)) {
      const Layer& layer = seq->space().layers[i];
      const uint64_t before = ref.data->size_bytes();
      truncate_observation(ref.data.get(), ref.limit, layer.n_q_heads * layer.dim_k,
                           layer.n_kv_heads);
      memory->uncharge(seq->account, before - ref.data->size_bytes());
      ref.limit = UINT64_MAX;
    }
  }
}

}  // namespace kvm::engine
