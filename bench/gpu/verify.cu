// SPDX-License-Identifier: Apache-2.0
// The configurations of the emulator suite, on the device.
#include <span>
#include <string>
#include <vector>

#include "attention/cuda/launch.h"
#include "bench/gpu/device.h"
#include "tests/gpu/cases.h"
#include "tests/gpu/row_cases.h"

namespace kvm::bench::gpu {
namespace {

using attention::gpu::AppendParams;
using attention::gpu::DecodeKernel;
using attention::gpu::DecodeParams;
using attention::gpu::DecodePlan;
using attention::gpu::LengthsKind;
using attention::gpu::LengthsParams;
using attention::gpu::MergeParams;
using attention::gpu::ReadParams;
using attention::gpu::testing::AppendCase;
using attention::gpu::testing::AppendSpec;
using attention::gpu::testing::Case;
using attention::gpu::testing::CaseSpec;
using attention::gpu::testing::ReadCase;
using attention::gpu::testing::ReadSpec;
using attention::gpu::testing::StatesCase;
using attention::gpu::testing::StatesSpec;

// An Uploaded holds on the device what a case points to.
struct Uploaded {
  std::vector<DeviceBuffer> buffers;

  template <class T>
  T* add(const T* data, size_t n) {
    buffers.push_back(upload(std::span<const T>(data, n)));
    return reinterpret_cast<T*>(buffers.back().data());
  }
  template <class T>
  T* add(const std::vector<T>& of) {
    return add(of.data(), of.size());
  }
};

template <class T>
void download(T* to, const T* from, size_t n) {
  if (n != 0) {
    check(cudaMemcpy(to, from, n * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
  }
}

// Brings the plan of a late case to the lengths that there are; it is on the device then.
void bring_plan(Case* one, const DecodePlan& plan, Uploaded* on, DecodeParams* decode,
                MergeParams* merge) {
  DecodePlan brought;
  LengthsParams lengths = one->lengths_params(plan, &brought);
  LengthsKind& kind = lengths.kinds[0];
  kind.planned_work = on->add(plan.work);
  kind.planned_merges = on->add(plan.merges);
  decode->work = kind.work = on->add(brought.work);
  merge->merges = kind.merges = on->add(brought.merges);
  const uint32_t* const counts = on->add(one->counts);
  kind.n_work = counts;
  kind.n_merges = counts + 1;
  lengths.items = on->add(one->items);
  lengths.lengths = on->add(one->told);
  check(launch_lengths(lengths, static_cast<uint32_t>(plan.work.size()), nullptr),
        "lengths kernel");
}

bool verify_case(const CaseSpec& spec, uint64_t seed) {
  Case one(spec, seed);
  const DecodePlan plan = one.plan();
  DecodeParams decode = one.decode_params(plan);
  MergeParams merge = one.merge_params(plan);
  one.clear_results();

  Uploaded on;
  for (size_t i = 0; i < one.segments.size(); ++i) {
    decode.pool.segments[i] = on.add(one.segments[i].data(), one.segments[i].size());
  }
  decode.pool.heads = on.add(one.heads);
  decode.page_table = on.add(one.page_table);
  decode.log_weights = on.add(one.log_weights);
  decode.tree_mask = on.add(one.tree_mask);
  decode.tensors.sink_logits = spec.sinks ? on.add(one.sink_logits) : nullptr;
  decode.partial_o = on.add(one.partial_o);
  decode.partial_lse = on.add(one.partial_lse);
  decode.tensors.q = on.add(one.q.data(), one.q.size());
  uint8_t* o = on.add(one.o.data(), one.o.size());
  float* lse = on.add(one.lse);
  decode.tensors.o = o;
  decode.tensors.lse = spec.reads_lse ? lse : nullptr;
  merge.tensors = decode.tensors;
  if (spec.is_late()) {
    bring_plan(&one, plan, &on, &decode, &merge);
  } else {
    decode.work = on.add(plan.work);
    merge.merges = on.add(plan.merges);
  }
  attention::gpu::Tail* const tail = on.add(&one.tail, 1);
  decode.tail = spec.takes_tails() ? tail : nullptr;
  merge.partial_o = decode.partial_o;
  merge.partial_lse = decode.partial_lse;

  // Twice where there is a tail: the first launch has to leave its count for the second one.
  for (uint32_t i = 0; i < (plan.n_tail != 0 ? 2u : 1u); ++i) {
    check(launch_decode(DecodeKernel{spec.codec, spec.dim, one.block_rows()}, decode, plan.n_blocks,
                        nullptr),
          "decode kernel");
  }
  check(launch_merge(spec.dim_v(), merge, static_cast<uint32_t>(plan.merges.size()), nullptr),
        "merge kernel");
  check(cudaDeviceSynchronize(), spec.name.c_str());
  download(one.o.data(), o, one.o.size());
  download(one.lse.data(), lse, one.lse.size());
  download(&one.tail, tail, 1);
  const Case::Errors errors = one.errors();
  print_bar({"verify o", spec.name, "relative", errors.o, 0, errors.bound_o, false});
  print_bar({"verify lse", spec.name, "absolute", errors.lse, 0, errors.bound_lse, false});
  return errors.ok() &&
         (plan.n_tail == 0 || print_bar({"verify tail", spec.name, "count that is left",
                                         static_cast<double>(one.tail.n_asked), 0, 0, false}));
}

bool verify_append(const AppendSpec& spec, uint64_t seed) {
  AppendCase one(spec, seed);
  AppendParams params = one.params();
  Uploaded on;
  uint8_t* const pages = on.add(one.pages.data(), one.pages.size());
  params.pool.segments[attention::gpu::testing::kAppendSegment] = pages;
  params.pool.heads = on.add(one.heads);
  params.page_table = on.add(one.page_table);
  params.k = on.add(one.k.data(), one.k.size());
  params.v = on.add(one.v.data(), one.v.size());
  params.tokens = on.add(one.tokens);
  check(launch_append(spec.to, params, static_cast<uint32_t>(one.tokens.size()), nullptr),
        "append kernel");
  check(cudaDeviceSynchronize(), "append kernel");
  download(one.pages.data(), pages, one.pages.size());
  return print_bar({"verify append", one.name(), "wrong", one.right() ? 0.0 : 1.0, 0, 0, false});
}

bool verify_read(const ReadSpec& spec, uint64_t seed) {
  ReadCase one(spec, seed);
  ReadParams params = one.params();
  Uploaded on;
  params.pool.segments[attention::gpu::testing::kAppendSegment] =
      on.add(one.pages.pages.data(), one.pages.pages.size());
  params.pool.heads = on.add(one.pages.heads);
  params.page_table = on.add(one.page_table);
  uint8_t* const k = on.add(one.k.data(), one.k.size());
  uint8_t* const v = on.add(one.v.data(), one.v.size());
  params.k.data = params.k.data == nullptr ? nullptr : k;
  params.v.data = params.v.data == nullptr ? nullptr : v;
  check(launch_read(spec.from, params, params.n_tokens / 2 + 1, nullptr), "read kernel");
  check(cudaDeviceSynchronize(), "read kernel");
  download(one.k.data(), k, one.k.size());
  download(one.v.data(), v, one.v.size());
  return print_bar({"verify read", one.name(), "wrong", one.right() ? 0.0 : 1.0, 0, 0, false});
}

bool verify_states(const StatesSpec& spec, uint64_t seed) {
  StatesCase one(spec, seed);
  Uploaded on;
  uint8_t* const arena = on.add(one.arena.data(), one.arena.size());
  check(launch_merge_states(one.params(arena), spec.n_rows * spec.n_heads / 8 + 1, nullptr),
        "merge_states kernel");
  check(cudaDeviceSynchronize(), "merge_states kernel");
  download(one.arena.data(), arena, one.arena.size());
  const StatesCase::Errors errors = one.errors();
  print_bar({"verify states", one.name(), "o", errors.o, 0, errors.bound_o, false});
  return print_bar({"verify states", one.name(), "lse", errors.lse, 0, 1e-5, false}) && errors.ok();
}

}  // namespace

int run_verify(const Args& args) {
  check(attention::gpu::attend_init(), "attend_init");
  bool right = true;
  const uint64_t n_seeds = args.quick || args.small ? 1 : 5;
  for (uint64_t seed = 1; seed <= n_seeds; ++seed) {
    for (const CaseSpec& spec : attention::gpu::testing::all_cases()) {
      right = verify_case(spec, seed) && right;
    }
    for (const AppendSpec& spec : attention::gpu::testing::all_appends()) {
      right = verify_append(spec, seed) && right;
    }
    for (const ReadSpec& spec : attention::gpu::testing::all_reads()) {
      right = verify_read(spec, seed) && right;
    }
    for (const StatesSpec& spec : attention::gpu::testing::all_states()) {
      right = verify_states(spec, seed) && right;
    }
  }
  print_fact("verify", "all", right ? "right" : "WRONG");
  return right ? 0 : 1;
}

}  // namespace kvm::bench::gpu
