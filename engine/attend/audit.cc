// SPDX-License-Identifier: Apache-2.0
#include "engine/attend/audit.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <system_error>
#include <utility>

#include "base/dtype.h"
#include "base/round.h"
#include "base/splitmix.h"
#include "codecs/convert.h"
#include "codecs/rows.h"

namespace kvm::engine {
namespace {

using attention::Problem;

// Looked at whether to stop after so many chunks.
constexpr uint32_t kChunksPerCheck = 4;
constexpr size_t kRowAlign = 16;
constexpr size_t kKeepBytes = 8 << 20;
// A relative error counts as at most this: the sums stay numbers.
constexpr double kMostError = 10;

float element(const void* data, Dtype dtype, size_t index) {
  switch (dtype) {
    case Dtype::kF32: {
      float value = 0;
      std::memcpy(&value, static_cast<const std::byte*>(data) + index * sizeof(value),
                  sizeof(value));
      return value;
    }
    case Dtype::kF16:
      return f16_to_f32(static_cast<const uint16_t*>(data)[index]);
    default:
      return bf16_to_f32(static_cast<const uint16_t*>(data)[index]);
  }
}

// Copies the rows of a run of one plane, and their scales, and makes them the plane of a page with
// one head. Where `to` is null, only its size is told, in *size_bytes.
KvPlane copy_plane(const KvPlane& from, uint32_t dim, uint32_t head, const KvRun& run,
                   std::byte* to, size_t* size_bytes) {
  const codecs::Codec& codec = codecs::codec_of(from.codec);
  const uint64_t rows_bytes = round_up(codec.head_rows_bytes(dim), kRowAlign);
  *size_bytes = rows_bytes + round_up(codec.head_params_bytes(dim), kRowAlign);
  if (to == nullptr) {
    return {};
  }
  const KvPlane own = {to, codec.is_scaled() ? to + rows_bytes : nullptr, from.codec};
  codecs::SourceRows rows = codecs::rows_of(from, dim, run.slot);
  const auto place = static_cast<uint16_t>(head);
  rows.heads = &place;
  codecs::convert_rows(rows, codecs::writable_rows(own, dim, 0), run.n_tokens, 1, dim);
  return own;
}

// A head of a plane as the one that a page has.
KvPlane head_of(const KvPlane& plane, uint32_t dim, uint32_t head) {
  return {codecs::row_at(plane, dim, head, 0), codecs::params_at(plane, dim, head), plane.codec};
}

}  // namespace

// --- A job --------------------------------------------------------------------------------------

bool AuditJob::take(const Problem& from, const attention::ApproxReport& report) {
  const auto has_weights = [](const KvRun& run) { return run.log_weight != nullptr; };
  if (std::any_of(from.runs.begin(), from.runs.end(), has_weights)) {
    return false;
  }
  is_done = false;
  problem = from;
  rows = from.n_query * from.group;
  const uint64_t q_row = from.dim_k * dtype_size_bytes(from.dtype_q);
  q.resize(rows * q_row);
  answer.resize(size_t{rows} * from.dim_v);
  for (uint32_t r = 0; r < rows; ++r) {
    const uint64_t i = r / from.group;
    const uint64_t g = r % from.group;
    const uint64_t at = i * from.q_stride_query + g * from.q_stride_head;
    std::memcpy(q.data() + r * q_row,
                static_cast<const std::byte*>(from.q) + at * dtype_size_bytes(from.dtype_q), q_row);
    for (uint32_t d = 0; d < from.dim_v; ++d) {
      answer[size_t{r} * from.dim_v + d] =
          element(from.o, from.dtype_o, i * from.o_stride_query + g * from.o_stride_head + d);
    }
  }
  problem.q = q.data();
  problem.q_stride_query = uint64_t{from.group} * from.dim_k;
  problem.q_stride_head = from.dim_k;
  estimated.assign(report.err_o, report.err_o + rows);
  sink_logits.clear();
  if (from.sink_logits != nullptr) {
    sink_logits.assign(from.sink_logits, from.sink_logits + from.group);
    problem.sink_logits = sink_logits.data();
  }
  const attention::Visibility& seen = from.visible;
  if (seen.tree != nullptr) {
    tree.assign(seen.tree, seen.tree + size_t{from.n_query} * seen.tree_stride_words);
    problem.visible.tree = tree.data();
  }
  include.assign(seen.include.begin(), seen.include.end());
  exclude.assign(seen.exclude.begin(), seen.exclude.end());
  problem.visible.include = include;
  problem.visible.exclude = exclude;
  take_runs(from);
  // What the answer may not have had: weights in fp32.
  problem.fp32_weights = true;
  problem.lse = nullptr;
  problem.column_sums = nullptr;
  return true;
}

// Runs that begin at the problem's head; those of pages that are not full lie in `tail`.
void AuditJob::take_runs(const Problem& from) {
  const auto copy = [&](const KvRun& run, std::byte* to, KvRun* own) {
    size_t k_bytes = 0;
    size_t v_bytes = 0;
    own->k = copy_plane(run.k, from.dim_k, from.head, run, to, &k_bytes);
    own->v =
        copy_plane(run.v, from.dim_v, from.head, run, to == nullptr ? to : to + k_bytes, &v_bytes);
    own->slot = 0;
    return k_bytes + v_bytes;
  };
  size_t tail_bytes = 0;
  for (const KvRun& run : from.runs) {
    KvRun none;
    tail_bytes += run.n_tokens < kPageTokens ? copy(run, nullptr, &none) : 0;
  }
  tail.resize(tail_bytes);
  runs.assign(from.runs.begin(), from.runs.end());
  std::byte* to = tail.data();
  for (KvRun& run : runs) {
    if (run.n_tokens < kPageTokens) {
      to += copy(KvRun(run), to, &run);
    } else {
      run.k = head_of(run.k, from.dim_k, from.head);
      run.v = head_of(run.v, from.dim_v, from.head);
    }
  }
  problem.runs = runs;
  problem.head = 0;
}

// --- The driver's side --------------------------------------------------------------------------

Auditor::Auditor(uint64_t every) : every_(every) { stats_.every = every; }

Auditor::~Auditor() {
  for (Slot& slot : slots_) {
    slot.is_cancelled.store(true, std::memory_order_relaxed);
  }
  // SYNC: release: the thread that sees the epoch sees this.
  stop_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

bool Auditor::is_due() {
  if (every_ == 0) {
    return false;
  }
  // Not each every-th: that would always be the same layer and head of a model.
  return splitmix64(++n_answers_ * kSplitMixStep) <= UINT64_MAX / every_;
}

AuditJob* Auditor::next_job() {
  filling_ = nullptr;
  for (Slot& slot : slots_) {
    if (slot.state.load(std::memory_order_relaxed) == kFree) {
      filling_ = &slot;
    }
  }
  if (filling_ != nullptr && !thread_.joinable()) {
    try {
      thread_ = std::thread([this] { work(); });
    } catch (const std::system_error&) {
      filling_ = nullptr;
    } catch (const std::bad_alloc&) {
      filling_ = nullptr;
    }
  }
  if (filling_ == nullptr) {
    ++stats_.n_busy;
    return nullptr;
  }
  return &filling_->job;
}

void Auditor::offer() {
  Slot* slot = std::exchange(filling_, nullptr);
  slot->is_cancelled.store(false, std::memory_order_relaxed);
  slot->number.store(++n_offers_, std::memory_order_relaxed);
  slot->state.store(kReady, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_one();
}

void Auditor::collect(Store& store) {
  if (n_done_.load(std::memory_order_relaxed) == 0) {
    return;
  }
  for (Slot& slot : slots_) {
    if (slot.state.load(std::memory_order_acquire) == kDone) {
      n_done_.fetch_sub(1, std::memory_order_relaxed);
      finish(store, &slot);
    }
  }
}

void Auditor::finish(Store& store, Slot* slot) {
  store.unpin_pages(&slot->job.pins);
  if (slot->job.is_done) {
    count(slot->job);
  } else {
    ++stats_.n_given_up;
  }
  slot->state.store(kFree, std::memory_order_relaxed);
}

void Auditor::count(const AuditJob& job) {
  AuditedMode& mode = stats_.modes[static_cast<size_t>(job.mode)];
  ++mode.n_answers;
  for (uint32_t r = 0; r < job.rows; ++r) {
    const double error = job.true_error[r];
    const double bar = double{job.estimated[r]};
    if (std::isnan(error)) {
      continue;  // stored keys or values are no numbers
    }
    mode.true_error.add(std::min(error, kMostError));
    if (!std::isnan(bar)) {
      ++mode.n_barred;
      mode.n_over += error > bar ? 1 : 0;
      mode.allowed_over += double{job.delta};
      mode.estimated_error.add(std::min(bar, kMostError));
    }
  }
}

bool Auditor::cancel_ready(Store& store, Slot* slot) {
  uint32_t expected = kReady;
  if (!slot->state.compare_exchange_strong(expected, kFree, std::memory_order_acquire)) {
    return false;
  }
  finish(store, slot);
  return true;
}

void Auditor::cancel(Store& store, ClientId client) {
  for (Slot& slot : slots_) {
    if (slot.state.load(std::memory_order_relaxed) != kFree && slot.job.pins.client == client &&
        !cancel_ready(store, &slot)) {
      slot.is_cancelled.store(true, std::memory_order_relaxed);
    }
  }
}

bool Auditor::holds(ClientId client) const {
  return std::any_of(slots_.begin(), slots_.end(), [client](const Slot& slot) {
    return slot.state.load(std::memory_order_relaxed) != kFree && slot.job.pins.client == client;
  });
}

bool Auditor::give_up(Store& store) {
  bool any = false;
  for (Slot& slot : slots_) {
    if (slot.state.load(std::memory_order_relaxed) == kFree) {
      continue;
    }
    any = true;
    if (!cancel_ready(store, &slot)) {
      slot.is_cancelled.store(true, std::memory_order_relaxed);
      slot.state.wait(kRunning, std::memory_order_acquire);
      n_done_.fetch_sub(1, std::memory_order_relaxed);
      finish(store, &slot);
    }
  }
  return any;
}

void Auditor::set_wake(std::function<void()> wake) {
  const std::lock_guard lock(wake_mutex_);
  wake_ = std::move(wake);
}

// --- The thread ---------------------------------------------------------------------------------

void Auditor::work() {
  ::pthread_setname_np(::pthread_self(), "kvm-audit");
  const sched_param parameter{};
  ::pthread_setschedparam(::pthread_self(), SCHED_IDLE, &parameter);
  for (;;) {
    const uint32_t epoch = epoch_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) {
      return;
    }
    Slot* slot = take_oldest();
    if (slot == nullptr) {
      epoch_.wait(epoch, std::memory_order_acquire);
      continue;
    }
    try {
      slot->job.is_done = compute(slot);
    } catch (const std::bad_alloc&) {
      slot->job.is_done = false;
    }
    n_done_.fetch_add(1, std::memory_order_relaxed);
    slot->state.store(kDone, std::memory_order_release);
    slot->state.notify_one();
    const std::lock_guard lock(wake_mutex_);
    if (wake_) {
      wake_();
    }
  }
}

Auditor::Slot* Auditor::take_oldest() {
  for (;;) {
    Slot* oldest = nullptr;
    uint64_t least = UINT64_MAX;
    for (Slot& slot : slots_) {
      const uint64_t number = slot.number.load(std::memory_order_relaxed);
      if (slot.state.load(std::memory_order_relaxed) == kReady && number < least) {
        oldest = &slot;
        least = number;
      }
    }
    uint32_t expected = kReady;
    // It may have been cancelled meanwhile: then another look.
    if (oldest == nullptr ||
        oldest->state.compare_exchange_strong(expected, kRunning, std::memory_order_acquire)) {
      return oldest;
    }
  }
}

bool Auditor::compute(Slot* slot) {
  AuditJob& job = slot->job;
  Problem problem = job.problem;
  std::vector<float> exact(size_t{job.rows} * problem.dim_v);
  problem.o = exact.data();
  problem.dtype_o = Dtype::kF32;
  problem.o_stride_query = uint64_t{problem.group} * problem.dim_v;
  problem.o_stride_head = problem.dim_v;
  const attention::Plan plan = attention::make_plan(problem);
  const size_t state_bytes = attention::state_bytes(problem, job.rows);
  std::byte* prepared = prepared_.reserve(plan.prepared_bytes);
  std::byte* scratch = scratch_.reserve(plan.scratch_bytes);
  std::byte* states = states_.reserve(plan.n_chunks * state_bytes);
  if (prepared == nullptr || scratch == nullptr || states == nullptr) {
    return false;
  }
  const attention::RowRange rows = {0, job.rows};
  attention::prepare_queries(problem, plan, prepared);
  for (uint32_t c = 0; c < plan.n_chunks; c += kChunksPerCheck) {
    if (slot->is_cancelled.load(std::memory_order_relaxed)) {
      return false;
    }
    attention::eval_chunks(problem, plan, prepared, rows, plan.first_chunk + c,
                           std::min(kChunksPerCheck, plan.n_chunks - c), scratch,
                           states + c * state_bytes);
  }
  attention::merge_chunks(problem, plan, rows, states);
  states_.shrink(kKeepBytes);
  scratch_.shrink(kKeepBytes);
  job.true_error.resize(job.rows);
  for (uint32_t r = 0; r < job.rows; ++r) {
    double difference = 0;
    double norm = 0;
    for (size_t i = size_t{r} * problem.dim_v; i < size_t{r + 1} * problem.dim_v; ++i) {
      const double away = double{job.answer[i]} - double{exact[i]};
      difference += away * away;
      norm += double{exact[i]} * double{exact[i]};
    }
    // o of nothing but zeros: an error at all is a whole one.
    job.true_error[r] = norm > 0 ? std::sqrt(difference / norm) : (difference > 0 ? kMostError : 0);
    if (std::isnan(difference)) {
      // Where the true answer is a number, one that is none is as wrong as any.
      job.true_error[r] = std::isfinite(norm) ? kMostError : std::nan("");
    }
  }
  return true;
}

}  // namespace kvm::engine
