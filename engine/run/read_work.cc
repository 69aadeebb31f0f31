// SPDX-License-Identifier: Apache-2.0
#include "engine/run/read_work.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/assert.h"
#include "base/counted.h"
#include "codecs/convert.h"
#include "engine/store/stored_runs.h"

namespace kvm::engine {
namespace {

constexpr uint64_t kTaskBytes = 256 << 10;
// Of a task, at most, and of a window, until when tasks join it: so it has fewer than one of
// attention may have, for which rings are made.
constexpr uint32_t kWindowPages = 64;

// Rows of heads to packed fp32.
std::vector<float> to_f32(const Tensor& tensor, uint64_t first_row, uint64_t n_rows,
                          uint32_t n_heads, uint32_t dim) {
  std::vector<float> out(n_rows * n_heads * dim);
  if (n_rows != 0) {
    const uint64_t head_bytes = sizeof(float) * dim;
    codecs::convert_rows({tensor.at(0, first_row, 0), codecs::codec_of_tensor(tensor.dtype),
                          tensor.row_stride_bytes(), tensor.head_stride_bytes()},
                         {out.data(), CodecId::kF32, head_bytes * n_heads, head_bytes}, n_rows,
                         n_heads, dim);
  }
  return out;
}

}  // namespace

Status ReadWork::begin(const Store& store, const Sequence* seq, const ReadRequest& request,
                       const ReadTensors& tensors, uint32_t n_threads) {
  runs_.clear();
  pieces_.clear();
  task_ends_.clear();
  windows_.clear();
  tensors_ = &tensors;
  KVM_TRY(store.check_read(seq, request.layer, request.position, request.n_tokens));
  const Space& space = store.seq_space(seq);
  const uint64_t end = request.position + request.n_tokens;
  uint64_t bytes = 0;
  uint64_t task_bytes = 0;
  uint32_t n_away = 0;  // pages of the task
  for (uint32_t c = 0; c < space.storage(request.layer).classes.size(); ++c) {
    const HeadClass& cls = space.head_class(request.layer, c);
    runs_.clear();
    away_.clear();
    store.collect_runs(seq, request.layer, c, &runs_, false, &away_);
    auto away = away_.begin();
    for (KvRun run : runs_) {
      AwayPage page;
      if (away != away_.end() && away->block == run.position / kPageTokens) {
        page = *away++;
      }
      const uint64_t begin = std::max(run.position, request.position);
      const uint64_t run_end = std::min(run.position + run.n_tokens, end);
      if (begin >= run_end) {
        continue;
      }
      skip_tokens(&run, begin - run.position);
      run.n_tokens = static_cast<uint16_t>(run_end - begin);
      KVM_ASSERT(begin - request.position + run.n_tokens <= request.n_tokens);
      pieces_.push_back({run, begin - request.position, &cls, page});
      task_bytes += run.n_tokens * cls.slab_class.n_heads * cls.slab_class.token_bytes();
      n_away += page.slab_class != nullptr ? 1 : 0;
      if (task_bytes >= kTaskBytes || n_away == kWindowPages) {
        task_ends_.push_back(static_cast<uint32_t>(pieces_.size()));
        bytes += task_bytes;
        task_bytes = 0;
        n_away = 0;
      }
    }
  }
  if (task_bytes != 0) {
    task_ends_.push_back(static_cast<uint32_t>(pieces_.size()));
    bytes += task_bytes;
  }
  plan_ = {.n_first = 0,
           .n_tasks = static_cast<uint32_t>(task_ends_.size()),
           .n_wake = static_cast<uint32_t>(std::min<uint64_t>(n_threads - 1, bytes >> 19)),
           .cost = bytes};
  cut_windows();
  is_small_ = bytes < kTaskBytes && windows_.empty();
  return Status::ok();
}

// Whole tasks, until what they read is worth a window.
void ReadWork::cut_windows() {
  shape_ = {};
  Window window;
  uint32_t piece = 0;
  for (uint32_t task = 0; task < task_ends_.size(); ++task) {
    for (; piece < task_ends_[task]; ++piece) {
      const AwayPage& away = pieces_[piece].away;
      window.n_pages += away.slab_class != nullptr ? 1 : 0;
      window.size_bytes += away.size_bytes;
    }
    window.tasks_end = task + 1;
    if (window.n_pages >= kWindowPages || window.tasks_end == task_ends_.size()) {
      windows_.push_back(window);
      shape_.add_window(window.n_pages, window.size_bytes);
      window = {};
    }
  }
  if (shape_.max_pages == 0) {
    windows_.clear();
  }
}

uint32_t ReadWork::window_of(uint32_t task) const {
  if (windows_.empty()) {
    return kNoWindow;
  }
  const auto found = std::ranges::upper_bound(windows_, task, {}, &Window::tasks_end);
  return static_cast<uint32_t>(found - windows_.begin());
}

uint32_t ReadWork::place_window(uint32_t window, std::byte* slot, StreamRead* reads) {
  const uint32_t first_task = window == 0 ? 0 : windows_[window - 1].tasks_end;
  const uint32_t begin = first_task == 0 ? 0 : task_ends_[first_task - 1];
  uint32_t n = 0;
  for (uint32_t i = begin; i < task_ends_[windows_[window].tasks_end - 1]; ++i) {
    const AwayPage& away = pieces_[i].away;
    if (away.slab_class != nullptr) {
      reads[n++] = {away.place, slot, away.size_bytes};
      point_to_page(*away.slab_class, slot, &pieces_[i].run);
      slot += away.size_bytes;
    }
  }
  return n;
}

void ReadWork::run(uint32_t task) const {
  KVM_ASSERT(task < task_ends_.size() && task_ends_[task] <= pieces_.size());
  const uint32_t begin = task == 0 ? 0 : task_ends_[task - 1];
  for (uint32_t i = begin; i < task_ends_[task]; ++i) {
    copy_piece(pieces_[i]);
  }
}

void ReadWork::copy_piece(const Piece& piece) const {
  const KvRun& run = piece.run;
  const tiers::SlabClass& slab = piece.cls->slab_class;
  const std::vector<uint16_t>& kv_heads = piece.cls->kv_heads;
  const auto n_heads = static_cast<uint32_t>(kv_heads.size());
  const auto copy = [&](const Tensor& tensor, const KvPlane& plane, uint32_t row_dim,
                        uint32_t dim) {
    if (tensor.is_present()) {
      codecs::convert_rows(codecs::rows_of(plane, row_dim, run.slot),
                           {tensor.at(0, piece.row, 0), codecs::codec_of_tensor(tensor.dtype),
                            tensor.row_stride_bytes(), tensor.head_stride_bytes(), kv_heads.data()},
                           run.n_tokens, n_heads, dim);
    }
  };
  copy(tensors_->k, run.k, slab.dim_k, slab.dim_k);
  copy(tensors_->v, run.v, slab.v_row_dim(), slab.dim_v);
}

Status observe(Store& store, Sequence* seq, const ObserveRequest& request,
               const ObserveTensors& tensors) {
  const Space& space = store.seq_space(seq);
  const Layer& layer = space.layers[request.layer];
  const uint64_t length = store.length(seq, request.layer);
  // The store checks this as well; here it bounds what is converted.
  if (request.n_columns != 0 && request.column_begin + request.n_columns > length) {
    return {KVM_ERR_INVALID, fmt::format("columns end at {}; layer {} has {}",
                                         request.column_begin + request.n_columns, request.layer,
                                         counted(length, "token"))};
  }
  // Older rows would be dropped at once.
  const uint32_t n_rows = std::min(request.n_rows, kMaxObservedRows);
  const uint32_t skipped = request.n_rows - n_rows;
  const std::vector<float> q = to_f32(tensors.q, skipped, n_rows, layer.n_q_heads, layer.dim_k);
  const std::vector<float> sums =
      to_f32(tensors.column_sums, 0, request.n_columns, layer.n_kv_heads, 1);
  ObserveInput input;
  input.layer = request.layer;
  input.query_position = request.query_position + skipped;
  input.n_rows = n_rows;
  input.q = q.empty() ? nullptr : q.data();
  input.column_begin = request.column_begin;
  input.n_columns = request.n_columns;
  input.column_sums = sums.empty() ? nullptr : sums.data();
  return store.observe(seq, input);
}

}  // namespace kvm::engine
