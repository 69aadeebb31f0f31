// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/assert.h"
#include "engine/image/image_generated.h"
#include "engine/image/image_head.h"
#include "engine/image/sequence_image.h"
#include "engine/store/observations.h"

namespace kvm::engine {
namespace {

using flatbuffers::FlatBufferBuilder;
using flatbuffers::Offset;

// About: what tables take besides their vectors.
constexpr uint64_t kTableBytes = 256;

template <typename T>
Offset<flatbuffers::Vector<T>> vector_of(FlatBufferBuilder* fbb, const T* data, size_t n) {
  static const T kNone{};
  return fbb->CreateVector(n == 0 ? &kNone : data, n);
}

template <typename T>
Offset<flatbuffers::Vector<T>> vector_of(FlatBufferBuilder* fbb, const std::vector<T>& values) {
  return vector_of(fbb, values.data(), values.size());
}

// All of the rows, of which only so many bytes have been written: zeros behind them.
Offset<flatbuffers::Vector<uint8_t>> bytes_of(FlatBufferBuilder* fbb, const RawBytes& rows,
                                              uint64_t n_written) {
  uint8_t* written = nullptr;
  const auto vector = fbb->CreateUninitializedVector(rows.size(), &written);
  const auto* const from = reinterpret_cast<const uint8_t*>(rows.data());
  std::fill(std::copy_n(from, n_written, written), written + rows.size(), uint8_t{0});
  return vector;
}

Offset<disk::Mean> write_mean(FlatBufferBuilder* fbb, const MeanEntry& mean) {
  const auto k = vector_of(fbb, mean.k);
  const auto v = vector_of(fbb, mean.v);
  return disk::CreateMean(*fbb, mean.end, mean.n_tokens, mean.log_weight, k, v);
}

Offset<disk::Kept> write_kept(FlatBufferBuilder* fbb, const KeptTokens& tokens) {
  const KeptTokens::Parts& kept = tokens.parts();
  const KeptTokens::Rows& rows = tokens.rows();
  const tiers::SlabClass& slab_class = tokens.slab_class();
  const auto n_written = [&](const codecs::Codec& codec, uint32_t dim) {
    return KeptTokens::row_bytes(codec, dim, tokens.n_rows_read());
  };
  std::vector<uint64_t> positions;
  std::vector<uint32_t> slots;
  positions.reserve(kept.tokens.size());
  slots.reserve(kept.tokens.size());
  for (const KeptTokens::Token& token : kept.tokens) {
    positions.push_back(token.position);
    slots.push_back(token.slot);
  }
  const auto written_positions = vector_of(fbb, positions);
  const auto written_slots = vector_of(fbb, slots);
  const auto k = bytes_of(fbb, rows.k, n_written(slab_class.k(), slab_class.dim_k));
  const auto v =
      bytes_of(fbb, rows.v, slab_class.v_in_k ? 0 : n_written(slab_class.v(), slab_class.dim_v));
  const auto k_scales = vector_of(fbb, rows.k_scales);
  const auto v_scales = vector_of(fbb, rows.v_scales);
  const auto counts = vector_of(fbb, kept.counts);
  const auto log_weights = vector_of(fbb, kept.log_weights);
  return disk::CreateKept(*fbb, kept.end, kept.capacity, written_positions, written_slots, k, v,
                          k_scales, v_scales, counts, log_weights, kept.has_threshold,
                          kept.threshold);
}

// As far as they hold.
uint64_t n_recent(const MassesRef& ref) {
  const uint64_t n_held = ref.limit <= ref.data->begin ? 0 : ref.limit - ref.data->begin;
  return std::min<uint64_t>(ref.data->recent.size(), n_held);
}

// A choice that came to nothing may have left room for the masses of more tokens.
Offset<disk::Masses> write_masses(FlatBufferBuilder* fbb, const MassesRef& ref, size_t n_kept) {
  std::vector<float> of_kept = ref.data->kept;
  of_kept.resize(n_kept);
  const auto kept = vector_of(fbb, of_kept);
  const auto recent = vector_of(fbb, ref.data->recent.data(), n_recent(ref));
  return disk::CreateMasses(*fbb, ref.data->begin, kept, recent);
}

// Null: there is none, or none that says anything.
const MeanEntry* mean_of(const Sequence& seq, size_t list) {
  const MeanEntry* mean = seq.mean_entries.empty() ? nullptr : seq.mean_entries[list].get();
  return mean != nullptr && mean->n_tokens != 0 ? mean : nullptr;
}

const KeptTokens* kept_of(const Sequence& seq, size_t list) {
  const KeptTokens* kept = seq.kept_of(list);
  return kept != nullptr && seq.lists[list].n_dropped() != 0 ? kept : nullptr;
}

const MassesRef* masses_of(const Sequence& seq, size_t list) {
  return seq.masses.empty() || seq.masses[list].data == nullptr ? nullptr : &seq.masses[list];
}

Offset<disk::List> write_list(FlatBufferBuilder* fbb, const Sequence& seq, size_t index,
                              const std::vector<ImagePage>& pages) {
  disk::Page* written = nullptr;
  const auto page_vector = fbb->CreateUninitializedVectorOfStructs(pages.size(), &written);
  for (const ImagePage& page : pages) {
    *written++ =
        disk::Page(page.block, page.page, page.first, page.count, static_cast<uint8_t>(page.kind));
  }
  const MeanEntry* mean = mean_of(seq, index);
  const KeptTokens* kept = kept_of(seq, index);
  const MassesRef* masses = masses_of(seq, index);
  const auto mean_table = mean == nullptr ? Offset<disk::Mean>() : write_mean(fbb, *mean);
  const auto kept_table = kept == nullptr ? Offset<disk::Kept>() : write_kept(fbb, *kept);
  const size_t n_kept = kept == nullptr ? 0 : kept->tokens().size();
  const auto masses_table =
      masses == nullptr ? Offset<disk::Masses>() : write_masses(fbb, *masses, n_kept);
  const PageList& list = seq.lists[index];
  const policies::Budget budget = seq.budgets.empty() ? policies::Budget() : seq.budgets[index];
  return disk::CreateList(*fbb, list.length(), list.n_dropped(), list.dropped_end(), page_vector,
                          seq.settled_ends.empty() ? 0 : seq.settled_ends[index], budget.n_recent,
                          budget.n_heavy, mean_table, kept_table, masses_table);
}

Offset<disk::Seen> write_seen(FlatBufferBuilder* fbb, const Sequence& seq, uint32_t layer) {
  if (seq.observed[layer].data == nullptr) {
    return disk::CreateSeen(*fbb);
  }
  const Layer& of = seq.space().layers[layer];
  const ObservedView view = observed_view(&seq, layer);
  const auto queries = vector_of(fbb, view.q, view.n_rows * size_t{of.n_q_heads} * of.dim_k);
  const auto sums = vector_of(fbb, view.column_sums, view.n_columns * of.n_kv_heads);
  return disk::CreateSeen(*fbb, true, view.query_position, view.n_rows, queries, sums);
}

uint64_t about_bytes(const Sequence& seq, std::span<const std::vector<ImagePage>> pages) {
  uint64_t size = kTableBytes;
  for (const std::vector<ImagePage>& list : pages) {
    size += kTableBytes + list.size() * sizeof(disk::Page);
  }
  visit_charged(seq, [&](const auto& charged) {
    size += charged == nullptr ? 0 : kTableBytes + charged->size_bytes();
  });
  return size;
}

}  // namespace

Result<std::vector<std::byte>> encode_image(const Sequence& seq,
                                            std::span<const std::vector<ImagePage>> pages,
                                            const PrefixImage& prefix) {
  KVM_ASSERT(pages.size() == seq.lists.size());
  const std::span<const std::byte> hashes = std::as_bytes(std::span(prefix.hashes));
  const uint64_t expected_bytes = about_bytes(seq, pages) + hashes.size();
  if (expected_bytes > kMaxImageBytes) {
    return Status(KVM_ERR_LIMIT, fmt::format("what the sequence has besides its pages takes {} "
                                             "bytes; at most {} can be saved",
                                             expected_bytes, kMaxImageBytes));
  }
  const Space& space = seq.space();
  FlatBufferBuilder fbb(expected_bytes);
  const auto layout = vector_of(&fbb, space.layout_digest.data(), space.layout_digest.size());
  const auto policy = vector_of(&fbb, space.policy_digest.data(), space.policy_digest.size());
  const auto fingerprint = vector_of(&fbb, space.fingerprint.data(), space.fingerprint.size());
  const auto next_commits = vector_of(&fbb, seq.next_commits);
  std::vector<Offset<disk::List>> lists;
  lists.reserve(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    lists.push_back(write_list(&fbb, seq, i, pages[i]));
  }
  std::vector<Offset<disk::Seen>> seen;
  seen.reserve(seq.observed.size());
  for (uint32_t layer = 0; layer < seq.observed.size(); ++layer) {
    seen.push_back(write_seen(&fbb, seq, layer));
  }
  const auto list_vector = fbb.CreateVector(lists);
  const auto seen_vector = fbb.CreateVector(seen);
  Offset<disk::Prefix> prefix_table;
  if (!hashes.empty()) {
    const auto hash_bytes =
        vector_of(&fbb, reinterpret_cast<const uint8_t*>(hashes.data()), hashes.size());
    prefix_table = disk::CreatePrefix(fbb, hash_bytes, prefix.keep_ns);
  }
  disk::FinishImageBuffer(
      fbb, disk::CreateImage(fbb, layout, policy, fingerprint, seq.flags, seq.n_committed,
                             seq.prompt_end, !seq.budgets.empty(), seq.due_events, next_commits,
                             list_vector, seen_vector, prefix_table));
  const ImageHead head = {.magic = kImageMagic,
                          .version = kImageVersion,
                          .buffer_bytes = static_cast<uint32_t>(fbb.GetSize())};
  std::vector<std::byte> body(sizeof head + fbb.GetSize());
  std::memcpy(body.data(), &head, sizeof head);
  std::memcpy(body.data() + sizeof head, fbb.GetBufferPointer(), fbb.GetSize());
  return body;
}

}  // namespace kvm::engine
