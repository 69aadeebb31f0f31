// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/src/host.h"

#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include "bindings/python/src/records.h"
#include "bindings/python/src/tensor.h"

namespace nb = nanobind;

namespace kvm::python {
namespace {

// heads, dim: of every state.
void merge(const nb::list& o, const nb::list& lse, nb::handle out_o, nb::handle out_lse,
           uint32_t n_heads, uint32_t dim) {
  if (nb::len(o) != nb::len(lse)) {
    refuse("there are " + std::to_string(nb::len(o)) + " outputs and " +
           std::to_string(nb::len(lse)) + " lse");
  }
  const Shape of_o = {.name = "o", .n_heads = n_heads, .dim = dim};
  const Shape of_lse = {.name = "lse", .n_heads = n_heads, .dim = 1, .is_f32 = true};
  std::vector<Tensor> owners;
  std::vector<kvm_tensor> outputs;
  std::vector<kvm_tensor> sums;
  uint64_t n_rows = 0;
  const auto add = [&](nb::handle array, Shape shape, bool is_written) {
    shape.is_written = is_written;
    owners.push_back(read_tensor(nullptr, array, Layout::kRows, shape));
    if (owners.size() == 1) {
      n_rows = owners[0].n_rows;
    } else if (!array.is_none() && owners.back().n_rows != n_rows) {
      refuse(std::string(shape.name) + " has " + std::to_string(owners.back().n_rows) +
             " rows; the first o has " + std::to_string(n_rows));
    }
    return owners.back().tensor;
  };
  for (const nb::handle array : o) {
    outputs.push_back(add(array, of_o, false));
  }
  for (const nb::handle array : lse) {
    sums.push_back(add(array, of_lse, false));
  }
  auto params = sized<kvm_merge_params>();
  params.out_o = add(out_o, of_o, true);
  params.out_lse = add(out_lse, of_lse, true);
  params.n_states = static_cast<uint32_t>(outputs.size());
  params.n_rows = static_cast<uint32_t>(n_rows);
  params.n_heads = n_heads;
  params.dim = dim;
  params.o = outputs.data();
  params.lse = sums.data();
  const Unlocked unlocked;
  check(kvm_merge(&params));
}

std::pair<std::vector<float>, std::vector<float>> probe_heads(nb::handle q, nb::handle k,
                                                              uint32_t n_q_heads,
                                                              uint32_t n_kv_heads, uint32_t dim,
                                                              uint32_t n_prefix, uint32_t period,
                                                              uint32_t n_rows, float scale) {
  const Tensor queries =
      read_tensor(nullptr, q, Layout::kRows, {.name = "q", .n_heads = n_q_heads, .dim = dim});
  const Tensor keys =
      read_tensor(nullptr, k, Layout::kRows, {.name = "k", .n_heads = n_kv_heads, .dim = dim});
  if (queries.n_rows != keys.n_rows) {
    refuse("q has " + std::to_string(queries.n_rows) + " tokens and k " +
           std::to_string(keys.n_rows));
  }
  auto params = sized<kvm_probe_params>();
  params.n_tokens = static_cast<uint32_t>(queries.n_rows);
  params.n_prefix = n_prefix;
  params.period = period;
  params.n_rows = n_rows;
  params.n_q_heads = n_q_heads;
  params.n_kv_heads = n_kv_heads;
  params.head_dim = dim;
  params.scale = scale;
  params.q = queries.tensor;
  params.k = keys.tensor;
  std::vector<float> echo(n_kv_heads);
  std::vector<float> induction(n_kv_heads);
  {
    const Unlocked unlocked;
    check(kvm_probe_heads(&params, echo.data(), induction.data()));
  }
  return {std::move(echo), std::move(induction)};
}

}  // namespace

void register_host(nb::module_& module) {
  module.def("merge", merge, nb::arg("o"), nb::arg("lse"), nb::arg("out_o"),
             nb::arg("out_lse").none(), nb::arg("n_heads"), nb::arg("dim"));
  module.def("probe_heads", probe_heads, nb::arg("q"), nb::arg("k"), nb::arg("n_q_heads"),
             nb::arg("n_kv_heads"), nb::arg("dim"), nb::arg("n_prefix"), nb::arg("period"),
             nb::arg("n_rows"), nb::arg("scale"));
}

}  // namespace kvm::python
