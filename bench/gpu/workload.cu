// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/workload.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "base/dtype.h"
#include "base/round.h"
#include "codecs/codec.h"

namespace kvm::bench::gpu {

using attention::gpu::DecodeKernel;
using attention::gpu::DecodeParams;
using attention::gpu::kEntrySlotBits;
using attention::gpu::Merge;
using attention::gpu::PageClass;
using attention::gpu::PlanOptions;
using attention::gpu::Request;
using attention::gpu::Residency;
using attention::gpu::Tail;
using attention::gpu::Work;

namespace {

// Results go to one place; keys and values of this many bytes lie between two reads of the same.
constexpr uint64_t kRotateBytes = 1ull << 30;

}  // namespace

uint64_t WorkloadSpec::kv_bytes() const {
  uint64_t tokens = 0;
  for (const uint32_t length : lengths) {
    tokens += length;
  }
  return tokens * (q_heads / group) * n_planes() * codecs::codec_of(codec).token_bytes(dim);
}

double WorkloadSpec::flops() const {
  double pairs = 0;  // of query and token
  for (const uint32_t length : lengths) {
    pairs += (static_cast<double>(length) - (n_query - 1) / 2.0) * n_query;
  }
  return pairs * q_heads * dim * 4;
}

std::string WorkloadSpec::name() const {
  const bool same = std::all_of(lengths.begin(), lengths.end(),
                                [this](uint32_t length) { return length == lengths[0]; });
  return std::string(codecs::codec_of(codec).name) + " d" + std::to_string(dim) + " g" +
         std::to_string(group) + " kv" + std::to_string(q_heads / group) + " n" +
         std::to_string(lengths[0]) + (same ? "" : "+") + " b" + std::to_string(lengths.size()) +
         (n_query == 1 ? "" : " nq" + std::to_string(n_query)) + (tree ? " tree" : "") +
         (prefill ? " prefill" : "") + (softcap == 0 ? "" : " capped") +
         (ordered ? " contiguous" : " page" + std::to_string(page_tokens)) +
         (layers_per_page == 0 ? "" : " of " + std::to_string(layers_per_page) + " layers");
}

Workload::Workload(const WorkloadSpec& spec, const DeviceBuffer& memory) : spec_(spec) {
  const uint32_t n_heads = spec.q_heads / spec.group;
  const codecs::Codec& codec = codecs::codec_of(spec.codec);
  PageClass of;
  of.n_heads = n_heads;
  of.head_stride_bytes = static_cast<uint32_t>(spec.page_tokens * codec.row_bytes(spec.dim));
  const uint64_t plane_bytes = uint64_t{n_heads} * of.head_stride_bytes;
  of.v_offset_bytes = spec.is_latent() ? 0 : plane_bytes;
  of.scales_offset_bytes = static_cast<uint32_t>(2 * plane_bytes);
  of.v_scales_offset_bytes =
      n_heads * spec.page_tokens * attention::gpu::row_params_bytes(spec.codec, spec.dim);
  const uint64_t part_bytes =
      round_up(spec.n_planes() * (plane_bytes + of.v_scales_offset_bytes), 16);
  of.page_bytes = part_bytes * std::max(1u, spec.layers_per_page);
  classes_ = {of};
  heads_.resize(n_heads);
  std::iota(heads_.begin(), heads_.end(), uint16_t{0});

  uint64_t n_pages = 0;
  std::vector<uint32_t> table;
  for (uint32_t i = 0; i < spec.lengths.size(); ++i) {
    Request request;
    request.table = n_pages;
    request.n_first = request.n_tokens = spec.lengths[i];
    request.q_token = i * spec.n_query;
    request.n_query = spec.n_query;
    if (spec.tree) {
      request.tree_first = request.tree_list = spec.lengths[i] - spec.n_query;
    }
    requests_.push_back(request);
    n_pages += div_up(spec.lengths[i], spec.page_tokens);
  }
  table.resize(n_pages);
  std::iota(table.begin(), table.end(), 0u);
  if (!spec.ordered) {
    std::mt19937_64 random(7);
    std::shuffle(table.begin(), table.end(), random);
  }
  page_table_ = upload(std::span<const uint32_t>(table));
  device_heads_ = upload(std::span<const uint16_t>(heads_));

  if (spec.tree) {
    // Rows of two branches, in turns: a row sees its own branch up to itself.
    std::vector<uint64_t> words;
    for (uint32_t i = 0; i < spec.lengths.size() * spec.n_query; ++i) {
      const uint32_t row = i % spec.n_query;
      words.push_back((row % 2 == 0 ? 0x5555555555555555u : 0xaaaaaaaaaaaaaaaau) &
                      ((uint64_t{2} << row) - 1));
    }
    tree_mask_ = upload(std::span<const uint64_t>(words));
  }
  const uint64_t rows = spec.lengths.size() * spec.n_query * spec.q_heads;
  q_ = DeviceBuffer(rows * spec.dim * 2);
  o_ = DeviceBuffer(rows * spec.dim_v() * 2);
  lse_ = DeviceBuffer(rows * 4);
  fill_random(q_.data(), q_.size(), nullptr);

  const uint64_t layer_bytes = n_pages * part_bytes;
  const uint64_t n_layers =
      spec.layers_per_page != 0
          ? spec.layers_per_page
          : std::clamp<uint64_t>(div_up(kRotateBytes, layer_bytes), 1,
                                 std::max<uint64_t>(1, memory.size() / layer_bytes));
  for (uint64_t layer = 0; layer < n_layers; ++layer) {
    DecodeParams params;
    for (uint32_t i = 0; i < attention::gpu::kMaxSegments; ++i) {
      params.pool.segments[i] = memory.data() +
                                (spec.layers_per_page != 0 ? 0 : layer * layer_bytes) +
                                (uint64_t{i} << kEntrySlotBits) * of.page_bytes;
    }
    if (spec.layers_per_page != 0) {
      of.layer_offset_bytes = static_cast<uint32_t>(layer * part_bytes);
    }
    params.pool.classes[0] = of;
    params.pool.heads = reinterpret_cast<const uint16_t*>(device_heads_.data());
    params.pool.page_tokens = attention::gpu::make_divider(spec.page_tokens);
    params.tensors.q = q_.data();
    params.tensors.o = o_.data();
    params.tensors.q_stride_token = static_cast<int64_t>(spec.q_heads) * spec.dim;
    params.tensors.q_stride_head = spec.dim;
    params.tensors.o_stride_token = static_cast<int64_t>(spec.q_heads) * spec.dim_v();
    params.tensors.o_stride_head = spec.dim_v();
    params.tensors.lse = reinterpret_cast<float*>(lse_.data());
    params.tensors.lse_stride_token = spec.q_heads;
    params.tensors.lse_stride_head = 1;
    params.tensors.dtype_q = params.tensors.dtype_o =
        spec.codec == CodecId::kF16 ? Dtype::kF16 : Dtype::kBf16;
    params.tensors.group = spec.group;
    params.page_table = reinterpret_cast<const uint32_t*>(page_table_.data());
    params.tree_mask = reinterpret_cast<const uint64_t*>(tree_mask_.data());
    attention::gpu::set_scale(&params, 1.0f / std::sqrt(static_cast<float>(spec.dim)),
                              spec.softcap);
    decode_.push_back(params);
  }
  plan(resident_blocks());
}

DecodeKernel Workload::kernel() const {
  return {spec_.codec, spec_.dim,
          spec_.prefill ? attention::gpu::kPrefillRows
                        : attention::gpu::block_rows_for(spec_.codec, spec_.dim,
                                                         spec_.n_query * spec_.group)};
}

uint32_t Workload::resident_blocks() const {
  Residency residency;
  check(decode_residency(kernel(), &residency), "occupancy");
  return static_cast<uint32_t>(residency.blocks_per_sm * device_facts().sms);
}

void Workload::plan(uint32_t blocks, uint32_t tail_part, uint32_t tail_load_tokens) {
  PlanOptions options;
  options.tail_part = spec_.is_latent() ? 0 : tail_part;
  options.tail_load_tokens = tail_load_tokens;
  options.blocks = std::min(blocks, attention::gpu::kMaxMergeSlots);
  options.block_rows = kernel().block_rows;
  options.group = spec_.group;
  const attention::gpu::Sight sight;
  if (spec_.prefill) {
    options.sights = {&sight, 1};
    options.least_tokens = attention::gpu::kLeastPrefillTokens;
  }
  plan_ = plan_decode(requests_, classes_, heads_, options);
  work_ = upload(std::span<const Work>(plan_.work));
  const Tail tail = plan_.tail();
  tail_ = upload(std::span(&tail, 1));
  merges_ = upload(std::span<const Merge>(plan_.merges));
  partial_o_ = DeviceBuffer(uint64_t{plan_.n_slots} * options.block_rows * spec_.dim_v() * 4);
  partial_lse_ = DeviceBuffer(uint64_t{plan_.n_slots} * options.block_rows * 4);
  for (DecodeParams& params : decode_) {
    params.work = reinterpret_cast<const Work*>(work_.data());
    params.partial_o = reinterpret_cast<float*>(partial_o_.data());
    params.partial_lse = reinterpret_cast<float*>(partial_lse_.data());
    params.tail = plan_.n_tail != 0 ? reinterpret_cast<Tail*>(tail_.data()) : nullptr;
    params.merge_follows = !plan_.merges.empty();
  }
  merge_.tensors = decode_[0].tensors;
  merge_.merges = reinterpret_cast<const Merge*>(merges_.data());
  merge_.partial_o = decode_[0].partial_o;
  merge_.partial_lse = decode_[0].partial_lse;
  merge_.rows = plan_.max_rows;
  merge_.block_rows = options.block_rows;
}

void Workload::launch_merge(cudaStream_t stream) const {
  check(attention::gpu::launch_merge(spec_.dim_v(), merge_,
                                     static_cast<uint32_t>(plan_.merges.size()), stream),
        "merge kernel");
}

void Workload::launch(uint32_t i, cudaStream_t stream) const {
  check(launch_decode(kernel(), decode_params(i), plan_.n_blocks, stream), "decode kernel");
  launch_merge(stream);
}

double Workload::measure_us(const Args& args, double expected_us) const {
  const Effort effort = effort_for(expected_us, args);
  return time_us([this](uint32_t i, cudaStream_t stream) { launch(i, stream); }, effort.calls,
                 effort.repeats);
}

}  // namespace kvm::bench::gpu
