// SPDX-License-Identifier: Apache-2.0
#include "engine/run/append_work.h"

#include <algorithm>

#include "base/assert.h"
#include "codecs/convert.h"

namespace kvm::engine {
namespace {

uint64_t piece_bytes(const AppendPiece& piece) {
  const tiers::SlabClass slab = piece.cls->slab_class.tail();
  return uint64_t{piece.n_tokens} * slab.n_heads * slab.token_bytes();
}

}  // namespace

void AppendWork::clear() {
  items_.clear();
  request_items_.clear();
  pieces_.clear();
  tasks_.clear();
  n_bytes_ = 0;
}

Status AppendWork::reserve(Store& store, const StepRequest& request,
                           std::span<Sequence* const> seqs, const StepTensors& tensors) {
  KVM_ASSERT(seqs.size() == request.items.size() && items_.empty() && pieces_.empty());
  request_ = &request;
  tensors_ = &tensors;
  const uint32_t n_layers = std::max(1u, request.n_layers);
  for (uint32_t i = 0; i < request.items.size(); ++i) {
    const kvm_item& item = request.items[i];
    if (item.n_append == 0) {
      continue;
    }
    for (uint32_t layer = 0; layer < n_layers; ++layer) {
      items_.push_back(append_item_of(seqs[i], request, item, layer));
      request_items_.push_back(i);
    }
  }
  if (items_.empty()) {
    return Status::ok();
  }
  Status status = store.reserve_append(items_, &pieces_);
  if (!status.is_ok()) {
    clear();
    return status;
  }
  for (const AppendPiece& piece : pieces_) {
    n_bytes_ += piece_bytes(piece);
  }
  return Status::ok();
}

void AppendWork::cut(uint64_t task_bytes) {
  KVM_ASSERT(tasks_.empty());
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < pieces_.size(); ++i) {
    if (tasks_.empty() || bytes >= task_bytes) {
      tasks_.push_back({i, i});
      bytes = 0;
    }
    tasks_.back().piece_end = i + 1;
    bytes += piece_bytes(pieces_[i]);
  }
}

void AppendWork::copy(uint32_t task) const {
  KVM_ASSERT(task < tasks_.size() && tasks_[task].piece_end <= pieces_.size());
  for (uint32_t i = tasks_[task].piece_begin; i < tasks_[task].piece_end; ++i) {
    copy_piece(pieces_[i]);
  }
}

void AppendWork::copy_piece(const AppendPiece& piece) const {
  const AppendItem& target = items_[piece.item];
  const kvm_item& item = request_->items[request_items_[piece.item]];
  // The tensors were found to have rows for all that items append.
  KVM_ASSERT(piece.n_tokens != 0 && piece.token < item.n_append &&
             piece.n_tokens <= item.n_append - piece.token);
  const uint64_t layer = target.layer - request_->layer_begin;
  const uint64_t row = uint64_t{item.append_row} + piece.token;
  const tiers::SlabClass& slab = piece.cls->slab_class;
  const std::vector<uint16_t>& kv_heads = piece.cls->kv_heads;
  const auto n_heads = static_cast<uint32_t>(kv_heads.size());
  const auto source = [&](const Tensor& tensor) {
    return codecs::SourceRows{tensor.at(layer, row, 0), codecs::codec_of_tensor(tensor.dtype),
                              tensor.row_stride_bytes(), tensor.head_stride_bytes(),
                              kv_heads.data()};
  };
  codecs::convert_rows(source(tensors_->k), codecs::writable_rows(piece.k, slab.dim_k, piece.slot),
                       piece.n_tokens, n_heads, slab.dim_k);
  if (!slab.v_in_k) {
    codecs::convert_rows(source(tensors_->v),
                         codecs::writable_rows(piece.v, slab.dim_v, piece.slot), piece.n_tokens,
                         n_heads, slab.dim_v);
  }
}

void AppendWork::close(Store& store, bool publish) {
  for (const AppendItem& item : items_) {
    if (publish) {
      store.publish(item);
    } else {
      store.rollback(item.seq, item.layer);
    }
  }
  clear();
}

}  // namespace kvm::engine
