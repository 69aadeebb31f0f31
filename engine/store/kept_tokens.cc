// SPDX-License-Identifier: Apache-2.0
#include "engine/store/kept_tokens.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/assert.h"
#include "base/round.h"
#include "codecs/convert.h"

namespace kvm::engine {
namespace {

KeptTokens::Rows new_rows(const tiers::SlabClass& slab_class, uint32_t capacity) {
  const codecs::Codec& of_k = slab_class.k();
  const codecs::Codec& of_v = slab_class.v();
  KeptTokens::Rows rows;
  rows.k = RawBytes(KeptTokens::row_bytes(of_k, slab_class.dim_k, capacity));
  rows.k_scales.resize(KeptTokens::n_params(of_k, slab_class.dim_k, capacity));
  if (!slab_class.v_in_k) {
    rows.v = RawBytes(KeptTokens::row_bytes(of_v, slab_class.dim_v, capacity));
    rows.v_scales.resize(KeptTokens::n_params(of_v, slab_class.dim_v, capacity));
  }
  return rows;
}

}  // namespace

KeptTokens::KeptTokens(const tiers::SlabClass& slab_class, uint64_t begin, uint32_t capacity,
                       bool is_counted, bool leads)
    : slab_class_(slab_class), rows_(new_rows(slab_class, capacity)) {
  KVM_ASSERT(slab_class.n_heads == 1);
  parts_.end = begin;
  parts_.lead = leads ? begin : UINT64_MAX;
  parts_.capacity = capacity;
  parts_.tokens.reserve(capacity);
  parts_.counts.resize(is_counted ? capacity : 0, 1);
  parts_.log_weights.resize(is_counted ? capacity : 0);
}

KeptTokens::KeptTokens(const tiers::SlabClass& slab_class, Parts&& parts, Rows&& rows)
    : slab_class_(slab_class), parts_(std::move(parts)), rows_(std::move(rows)) {
  KVM_ASSERT(slab_class.n_heads == 1 && parts_.tokens.size() <= parts_.capacity);
  parts_.tokens.reserve(parts_.capacity);
}

KeptTokens KeptTokens::without_rows() const {
  KeptTokens made(slab_class_, Parts(parts_), new_rows(slab_class_, parts_.capacity));
  made.rows_.k_scales = rows_.k_scales;
  made.rows_.v_scales = rows_.v_scales;
  return made;
}

uint32_t KeptTokens::n_pages() const {
  return static_cast<uint32_t>(div_up(parts_.tokens.size(), uint64_t{kPageTokens}));
}

uint32_t KeptTokens::n_rows_read() const {
  return std::min(parts_.capacity, n_pages() * kPageTokens);
}

void KeptTokens::clone_pages(const KeptTokens& from, uint32_t begin, uint32_t end) {
  const auto clone = [&](const RawBytes& source, RawBytes* own, const codecs::Codec& codec,
                         uint32_t dim) {
    const uint64_t page_bytes = codec.head_rows_bytes(dim);
    const uint64_t last = std::min<uint64_t>(own->size(), end * page_bytes);
    std::memcpy(own->data() + begin * page_bytes, source.data() + begin * page_bytes,
                last - begin * page_bytes);
  };
  KVM_ASSERT(begin < end && end <= n_pages() && from.rows_.k.size() == rows_.k.size());
  clone(from.rows_.k, &rows_.k, slab_class_.k(), slab_class_.dim_k);
  if (!slab_class_.v_in_k) {
    clone(from.rows_.v, &rows_.v, slab_class_.v(), slab_class_.dim_v);
  }
}

PositionRange KeptTokens::unkept_places() const {
  const uint64_t end = parts_.end;
  return leads() ? PositionRange{parts_.lead + round_up(parts_.tokens.size(), kPageTokens), end}
                 : PositionRange{end, end};
}

uint64_t KeptTokens::size_bytes() const {
  const auto plane_bytes = [&](const codecs::Codec& codec, uint32_t dim) {
    return row_bytes(codec, dim, parts_.capacity) +
           n_params(codec, dim, parts_.capacity) * sizeof(uint16_t);
  };
  return parts_.capacity * sizeof(Token) + plane_bytes(slab_class_.k(), slab_class_.dim_k) +
         (slab_class_.v_in_k ? 0 : plane_bytes(slab_class_.v(), slab_class_.dim_v)) +
         parts_.counts.size() * sizeof(uint32_t) + parts_.log_weights.size() * sizeof(float);
}

uint64_t KeptTokens::row_bytes(const codecs::Codec& codec, uint32_t dim, uint32_t capacity) {
  KVM_ASSERT(codec.rows_stand_alone() || capacity % kPageTokens == 0);
  return capacity * codec.row_bytes(dim);
}

uint64_t KeptTokens::n_params(const codecs::Codec& codec, uint32_t dim, uint32_t capacity) {
  return !codec.is_scaled()         ? 0
         : codec.rows_stand_alone() ? capacity
                                    : capacity / kPageTokens * uint64_t{codec.n_scales(dim)};
}

KvPlane KeptTokens::plane_of(const RawBytes& rows, const std::vector<uint16_t>& params,
                             const codecs::Codec& codec, uint32_t dim, uint32_t slot) const {
  const uint64_t page = slot / kPageTokens;
  return {rows.data() + page * codec.head_rows_bytes(dim),
          params.empty() ? nullptr : params.data() + page * codec.n_scales(dim), codec.id};
}

KvPlane KeptTokens::k_plane_of(uint32_t slot) const {
  return plane_of(rows_.k, rows_.k_scales, slab_class_.k(), slab_class_.dim_k, slot);
}

KvPlane KeptTokens::v_plane_of(uint32_t slot) const {
  return slab_class_.v_in_k
             ? k_plane_of(slot)
             : plane_of(rows_.v, rows_.v_scales, slab_class_.v(), slab_class_.dim_v, slot);
}

KvPlane KeptTokens::k_plane() const {
  KVM_ASSERT(slab_class_.k().rows_stand_alone());
  return k_plane_of(0);
}

KvPlane KeptTokens::v_plane() const {
  KVM_ASSERT(slab_class_.v().rows_stand_alone());
  return v_plane_of(0);
}

KvRun KeptTokens::run(uint32_t slot, uint64_t position, uint32_t n_tokens) const {
  KvRun run;
  run.k = k_plane_of(slot);
  run.v = v_plane_of(slot);
  run.log_weight = parts_.log_weights.empty() ? nullptr : parts_.log_weights.data() + slot;
  run.slot = slot % kPageTokens;
  run.position = position;
  run.n_tokens = static_cast<uint16_t>(n_tokens);
  return run;
}

KeptTokens::Choice KeptTokens::plan(std::span<const uint64_t> positions) const {
  KVM_ASSERT(positions.size() <= parts_.capacity && positions.size() >= parts_.tokens.size());
  Choice choice;
  choice.tokens.reserve(parts_.capacity);
  std::vector<uint32_t> free_slots;
  auto old = parts_.tokens.begin();
  for (const uint64_t position : positions) {
    for (; old != parts_.tokens.end() && old->position < position; ++old) {
      free_slots.push_back(old->slot);
    }
    const bool is_old = old != parts_.tokens.end() && old->position == position;
    choice.tokens.push_back({position, is_old ? old->slot : UINT32_MAX});
    old += is_old ? 1 : 0;
  }
  for (; old != parts_.tokens.end(); ++old) {
    free_slots.push_back(old->slot);
  }
  auto next_slot = static_cast<uint32_t>(parts_.tokens.size());
  for (Token& token : choice.tokens) {
    if (token.slot != UINT32_MAX) {
      continue;
    }
    if (free_slots.empty()) {
      token.slot = next_slot++;
    } else {
      token.slot = free_slots.back();
      free_slots.pop_back();
    }
    choice.copies.push_back(token);
  }
  return choice;
}

void KeptTokens::copy(std::span<const Token> copies, KvRuns from) {
  auto source = from.begin();
  for (const Token& token : copies) {
    while (source != from.end() && source->position + source->n_tokens <= token.position) {
      ++source;
    }
    KVM_ASSERT(source != from.end() && source->position <= token.position);
    const auto slot = source->slot + static_cast<uint32_t>(token.position - source->position);
    const auto copy_row = [&](const KvPlane& from_plane, const KvPlane& own, uint32_t dim) {
      codecs::convert_rows(codecs::rows_of(from_plane, dim, slot),
                           codecs::writable_rows(own, dim, token.slot % kPageTokens), 1, 1, dim);
    };
    copy_row(source->k, k_plane_of(token.slot), slab_class_.dim_k);
    if (!slab_class_.v_in_k) {
      copy_row(source->v, v_plane_of(token.slot), slab_class_.dim_v);
    }
  }
}

void KeptTokens::write(uint32_t slot, const float* k, const float* v) {
  const auto write_row = [&](const float* row, const KvPlane& plane, uint32_t dim) {
    codecs::convert_rows({.data = row, .codec = CodecId::kF32},
                         codecs::writable_rows(plane, dim, slot), 1, 1, dim);
  };
  write_row(k, k_plane(), slab_class_.dim_k);
  if (!slab_class_.v_in_k) {
    write_row(v, v_plane(), slab_class_.dim_v);
  }
}

void KeptTokens::set_count(uint32_t slot, uint32_t count) {
  if (!parts_.counts.empty()) {
    parts_.counts[slot] = count;
    parts_.log_weights[slot] = std::log(static_cast<float>(count));
  }
}

void KeptTokens::choose(Choice&& choice, uint64_t new_end) {
  for (const Token& token : choice.copies) {
    set_count(token.slot, 1);
  }
  parts_.tokens = std::move(choice.tokens);
  parts_.end = new_end;
  // Whoever reads the last page in tiles finds numbers there.
  const uint64_t n = parts_.tokens.size();
  const uint64_t n_read = n_rows_read();
  const auto clear = [&](RawBytes* rows, const codecs::Codec& codec, uint32_t dim) {
    const uint64_t row_bytes = codec.row_bytes(dim);
    std::fill_n(rows->data() + n * row_bytes, (n_read - n) * row_bytes, std::byte{0});
  };
  clear(&rows_.k, slab_class_.k(), slab_class_.dim_k);
  if (!slab_class_.v_in_k) {
    clear(&rows_.v, slab_class_.v(), slab_class_.dim_v);
  }
}

uint64_t KeptTokens::first_packed() const {
  return leads() ? parts_.lead : parts_.end - round_up(parts_.tokens.size(), kPageTokens);
}

uint64_t KeptTokens::collected_position(const Token& token, bool is_packed) const {
  return is_packed ? first_packed() + token.slot : token.position;
}

void KeptTokens::collect(bool is_packed, std::vector<KvRun>* runs) const {
  if (!is_packed) {
    for (const Token& token : parts_.tokens) {
      runs->push_back(run(token.slot, token.position, 1));
    }
    return;
  }
  const auto n = static_cast<uint32_t>(parts_.tokens.size());
  const uint64_t first = first_packed();
  for (uint32_t slot = 0; slot < n; slot += kPageTokens) {
    runs->push_back(run(slot, first + slot, std::min(n - slot, kPageTokens)));
  }
}

void add_sums(std::span<const float> sums, uint64_t position, const KeptTokens* kept,
              bool is_packed, Masses* masses) {
  const auto add = [&](uint64_t at, float* mass) {
    if (at >= position && at - position < sums.size()) {
      const float sum = sums[at - position];
      *mass += std::isfinite(sum) && sum > 0 ? sum : 0.0f;
    }
  };
  for (size_t i = 0; kept != nullptr && i < kept->tokens().size(); ++i) {
    add(kept->collected_position(kept->tokens()[i], is_packed), &masses->kept[i]);
  }
  // Neighbours, as far as both reach.
  const uint64_t first = std::max(position, masses->begin);
  const uint64_t end = std::min(position + sums.size(), masses->begin + masses->recent.size());
  if (first < end) {
    const float* __restrict from = sums.data() + (first - position);
    float* __restrict to = masses->recent.data() + (first - masses->begin);
    for (uint64_t i = 0; i < end - first; ++i) {
      to[i] += from[i] > 0 && from[i] <= std::numeric_limits<float>::max() ? from[i] : 0.0f;
    }
  }
}

}  // namespace kvm::engine
