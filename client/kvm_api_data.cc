// SPDX-License-Identifier: Apache-2.0
// The C functions of kvm.h, parts 4 and 7 to 9: queues, and what goes through them.
#include <algorithm>
#include <bit>
#include <iterator>
#include <string>
#include <utility>

#include "base/limits.h"
#include "client/checks.h"
#include "client/handles.h"
#include "client/head_probe.h"
#include "client/merge.h"
#include "ipc/struct_size.h"
#include "ipc/wire.h"
#include "kvm.h"

namespace {

using kvm::Status;
using kvm::client::check_flags;
using kvm::client::check_handle;
using kvm::client::check_not_null;
using kvm::client::check_reserved;
using kvm::client::guarded;

constexpr uint64_t kDefaultSpinNs = 50'000;

enum Verbs : uint32_t { kAppend = 1, kAttend = 2 };

Status check_queue(const kvm_queue* queue) { return check_handle(queue, "queue"); }

// Reads and checks the parameters of a step, and hands them to `stage`.
Status stage_step(kvm_queue* queue, const kvm_step_params* params, uint32_t verbs,
                  uint64_t user_data) {
  KVM_TRY(check_queue(queue));
  KVM_TRY(check_not_null(params, "params"));
  kvm_step_params p;
  const kvm_step_params* known = params;
  // The caller's structure is used as it is when it has this library's form.
  if (params->struct_size != sizeof(p)) [[unlikely]] {
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_step_params"));
    known = &p;
  }
  kvm::client::StepCall call;
  KVM_TRY(kvm::client::check_step(*known, (verbs & kAppend) != 0, (verbs & kAttend) != 0,
                                  queue->client->arenas(), &call));
  return queue->queue->stage_step(call, user_data);
}

Status stage_read(kvm_queue* queue, const kvm_read_params* params, uint64_t user_data) {
  KVM_TRY(check_queue(queue));
  KVM_TRY(check_not_null(params, "params"));
  kvm_read_params p;
  KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_read_params"));
  kvm::client::ReadCall call;
  KVM_TRY(kvm::client::check_read(p, queue->client->arenas(), &call));
  return queue->queue->stage_read(call, user_data);
}

Status stage_observe(kvm_queue* queue, const kvm_observe_params* params, uint64_t user_data) {
  KVM_TRY(check_queue(queue));
  KVM_TRY(check_not_null(params, "params"));
  kvm_observe_params p;
  KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_observe_params"));
  kvm::client::ObserveCall call;
  KVM_TRY(kvm::client::check_observe(p, queue->client->arenas(), &call));
  return queue->queue->stage_observe(call, user_data);
}

kvm_status stage_seq(kvm_queue* queue, const kvm::SeqRequest& call, uint64_t user_data) {
  return guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    return queue->queue->stage_seq(call, user_data);
  });
}

kvm_status stage_snapshot(kvm_queue* queue, kvm::SnapshotRequest&& call, const char* name,
                          uint32_t flags, uint64_t user_data) {
  return guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    KVM_TRY(check_not_null(name, "name"));
    KVM_TRY(kvm::client::check_snapshot(name, flags, &call));
    return queue->queue->stage_snapshot(call, user_data);
  });
}

// REQUIRES: check_queue.
Status check_idle(const kvm_queue* queue) {
  if (const uint32_t n = queue->queue->n_outstanding(); n != 0) [[unlikely]] {
    KVM_TRY(queue->queue->check_open());
    return Status(KVM_ERR_BUSY, std::to_string(n) +
                                    " asynchronous requests are outstanding on "
                                    "this queue: take their completions first");
  }
  return Status::ok();
}

// Submits the one staged request, and waits for it.
Status run(kvm_queue* queue, kvm_completion* completion) {
  // A failed submit completes the request with its status: take gives it.
  (void)queue->queue->submit();
  KVM_TRY_ASSIGN(const uint32_t n, queue->queue->take(completion, 1, 1, UINT64_MAX, {}));
  if (n != 1) {
    return Status(KVM_ERR_INTERNAL, "a request was not answered");
  }
  if (completion->status != KVM_OK) [[unlikely]] {
    return Status(completion->status, completion->message);
  }
  return Status::ok();
}

void write_stats(const kvm_completion& completion, kvm_step_stats* out) {
  kvm_step_stats stats{};
  stats.mode = completion.mode;
  stats.keys_present = completion.keys_present;
  stats.keys_read = completion.keys_read;
  stats.bytes_read = completion.bytes_read;
  stats.service_ns = completion.service_ns;
  stats.compute_ns = completion.compute_ns;
  stats.err_max = completion.err_max;
  stats.n_exact = completion.n_exact;
  stats.n_not_finite = completion.n_not_finite;
  kvm::ipc::write_struct(out, out->struct_size, stats);
}

kvm_status step_and_wait(kvm_queue* queue, const kvm_step_params* params, uint32_t verbs,
                         kvm_step_stats* stats) {
  return guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    KVM_TRY(check_idle(queue));
    if (stats != nullptr) {
      KVM_TRY(kvm::ipc::check_output(stats, "kvm_step_stats"));
    }
    KVM_TRY(stage_step(queue, params, verbs, 0));
    kvm_completion completion;
    Status status = run(queue, &completion);
    // ACCURACY comes with the best estimate in place, and with what it cost.
    const bool answered = status.is_ok() || status.code() == KVM_ERR_ACCURACY;
    if (stats != nullptr && answered) {
      write_stats(completion, stats);
    }
    return status;
  });
}

// Takes completions; the count, or the negative status.
int32_t take(kvm_queue* queue, kvm_completion* out, uint32_t n_max, uint32_t n_min,
             uint64_t timeout_ns) {
  int32_t n = 0;
  const kvm_status status = guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    if (n_max == 0 || n_min > n_max) {
      return Status(KVM_ERR_INVALID, "n_max is " + std::to_string(n_max) + " and n_min " +
                                         std::to_string(n_min) +
                                         "; n_max must be at least 1 and n_min at most that");
    }
    KVM_TRY(check_not_null(out, "out"));
    // LIMIT: the count is returned as an int32_t.
    const uint32_t most = std::min<uint32_t>(n_max, INT32_MAX);
    KVM_TRY_ASSIGN(const uint32_t taken, queue->queue->take(out, most, std::min(n_min, most),
                                                            timeout_ns, queue->interrupt));
    n = static_cast<int32_t>(taken);
    const auto last_failed =
        std::find_if(std::reverse_iterator(out + taken), std::reverse_iterator(out),
                     [](const kvm_completion& completion) { return completion.status != KVM_OK; });
    if (last_failed != std::reverse_iterator(out)) [[unlikely]] {
      kvm::client::set_last_error(last_failed->message);
    }
    return Status::ok();
  });
  return status == KVM_OK ? n : status;
}

}  // namespace

extern "C" {

// --- 4. Queues ----------------------------------------------------------------------------------

kvm_status kvm_queue_create(kvm_client* client, const kvm_queue_params* params, kvm_queue** out) {
  return guarded([&]() -> Status {
    KVM_TRY(check_handle(client, "client"));
    KVM_TRY(check_not_null(out, "out"));
    kvm_queue_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_queue_params"));
    KVM_TRY(check_flags(p.flags | p.reserved0, 0, "kvm_queue_params"));
    KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_queue_params"));
    if (p.n_entries > kvm::kMaxOutstanding) {
      return Status(KVM_ERR_INVALID, "n_entries is " + std::to_string(p.n_entries) + "; at most " +
                                         std::to_string(kvm::kMaxOutstanding));
    }
    const uint32_t n_entries = p.n_entries == 0 ? kvm::kMaxOutstanding : std::bit_ceil(p.n_entries);
    auto queue = std::make_unique<kvm_queue>();
    queue->token = kvm::client::process_token();
    queue->client = client->client;
    queue->interrupt = {p.is_interrupted, p.interrupt_user};
    KVM_TRY_ASSIGN(queue->queue, client->client->create_queue(
                                     n_entries, p.spin_ns == 0 ? kDefaultSpinNs : p.spin_ns));
    ++client->client->n_handles;
    *out = queue.release();
    return Status::ok();
  });
}

void kvm_queue_destroy(kvm_queue* queue) {
  if (queue == nullptr) {
    return;
  }
  guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    queue->queue.reset();
    --queue->client->n_handles;
    delete queue;
    return Status::ok();
  });
}

int kvm_queue_fd(kvm_queue* queue) {
  int fd = -1;
  guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    fd = queue->queue->fd();
    return Status::ok();
  });
  return fd;
}

// --- 7. The data path ---------------------------------------------------------------------------

kvm_status kvm_append(kvm_queue* queue, const kvm_step_params* params) {
  return step_and_wait(queue, params, kAppend, nullptr);
}

kvm_status kvm_attend(kvm_queue* queue, const kvm_step_params* params, kvm_step_stats* stats) {
  return step_and_wait(queue, params, kAttend, stats);
}

kvm_status kvm_step(kvm_queue* queue, const kvm_step_params* params, kvm_step_stats* stats) {
  return step_and_wait(queue, params, kAppend | kAttend, stats);
}

// --- 8. Observe, read, merge --------------------------------------------------------------------

kvm_status kvm_observe(kvm_queue* queue, const kvm_observe_params* params) {
  return guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    KVM_TRY(check_idle(queue));
    KVM_TRY(stage_observe(queue, params, 0));
    kvm_completion completion;
    return run(queue, &completion);
  });
}

kvm_status kvm_read(kvm_queue* queue, const kvm_read_params* params) {
  return guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    KVM_TRY(check_idle(queue));
    KVM_TRY(stage_read(queue, params, 0));
    kvm_completion completion;
    return run(queue, &completion);
  });
}

kvm_status kvm_merge(const kvm_merge_params* params) {
  return guarded([&]() -> Status {
    KVM_TRY(check_not_null(params, "params"));
    kvm_merge_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_merge_params"));
    return kvm::client::merge_states(p);
  });
}

kvm_status kvm_probe_heads(const kvm_probe_params* params, float* out_echo, float* out_induction) {
  return guarded([&]() -> Status {
    KVM_TRY(check_not_null(params, "params"));
    kvm_probe_params p;
    KVM_TRY(kvm::ipc::read_params(params, &p, "kvm_probe_params"));
    return kvm::client::probe_heads(p, out_echo, out_induction);
  });
}

// --- 9. The asynchronous data path --------------------------------------------------------------

kvm_status kvm_append_async(kvm_queue* queue, const kvm_step_params* params, uint64_t user_data) {
  return guarded([&] { return stage_step(queue, params, kAppend, user_data); });
}

kvm_status kvm_attend_async(kvm_queue* queue, const kvm_step_params* params, uint64_t user_data) {
  return guarded([&] { return stage_step(queue, params, kAttend, user_data); });
}

kvm_status kvm_step_async(kvm_queue* queue, const kvm_step_params* params, uint64_t user_data) {
  return guarded([&] { return stage_step(queue, params, kAppend | kAttend, user_data); });
}

kvm_status kvm_read_async(kvm_queue* queue, const kvm_read_params* params, uint64_t user_data) {
  return guarded([&] { return stage_read(queue, params, user_data); });
}

kvm_status kvm_observe_async(kvm_queue* queue, const kvm_observe_params* params,
                             uint64_t user_data) {
  return guarded([&] { return stage_observe(queue, params, user_data); });
}

kvm_status kvm_seq_create_async(kvm_queue* queue, kvm_space_id space, const kvm_seq_params* params,
                                uint64_t user_data) {
  kvm::SeqRequest call;
  const kvm_status status =
      guarded([&] { return kvm::client::check_create(space, params, &call); });
  return status != KVM_OK ? status : stage_seq(queue, call, user_data);
}

kvm_status kvm_seq_fork_async(kvm_queue* queue, kvm_seq_id parent, uint64_t n_tokens,
                              uint64_t user_data) {
  return stage_seq(queue, {kvm::SeqVerb::kFork, 0, 0, parent, n_tokens}, user_data);
}

kvm_status kvm_seq_truncate_async(kvm_queue* queue, kvm_seq_id seq, uint64_t n_tokens,
                                  uint64_t user_data) {
  return stage_seq(queue, {kvm::SeqVerb::kTruncate, 0, 0, seq, n_tokens}, user_data);
}

kvm_status kvm_seq_commit_async(kvm_queue* queue, kvm_seq_id seq, uint64_t n_tokens,
                                uint64_t user_data) {
  return stage_seq(queue, {kvm::SeqVerb::kCommit, 0, 0, seq, n_tokens}, user_data);
}

kvm_status kvm_seq_free_async(kvm_queue* queue, kvm_seq_id seq, uint64_t user_data) {
  return stage_seq(queue, {kvm::SeqVerb::kFree, 0, 0, seq, 0}, user_data);
}

kvm_status kvm_seq_publish_async(kvm_queue* queue, kvm_seq_id seq, uint64_t user_data) {
  return stage_seq(queue, {kvm::SeqVerb::kPublish, 0, 0, seq, 0}, user_data);
}

kvm_status kvm_prefix_publish_async(kvm_queue* queue, kvm_seq_id seq, const kvm_prefix_hash* hashes,
                                    uint32_t n_hashes, uint64_t keep_ns, uint64_t user_data) {
  return guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    KVM_TRY(check_not_null(hashes, "hashes"));
    kvm::SeqRequest call;
    KVM_TRY(kvm::client::check_prefix(seq, hashes, n_hashes, keep_ns, &call));
    return queue->queue->stage_seq(call, user_data);
  });
}

kvm_status kvm_seq_take_async(kvm_queue* queue, kvm_seq_id seq, uint64_t user_data) {
  return stage_seq(queue, {kvm::SeqVerb::kTake, 0, 0, seq, 0}, user_data);
}

kvm_status kvm_seq_prefetch_async(kvm_queue* queue, kvm_seq_id seq, uint64_t user_data) {
  return stage_seq(queue, {kvm::SeqVerb::kPrefetch, 0, 0, seq, 0}, user_data);
}

kvm_status kvm_seq_drop_async(kvm_queue* queue, kvm_seq_id seq, uint64_t begin, uint64_t end,
                              uint64_t user_data) {
  return stage_seq(queue,
                   {.verb = kvm::SeqVerb::kDrop, .seq = seq, .range = {.begin = begin, .end = end}},
                   user_data);
}

kvm_status kvm_seq_set_priority_async(kvm_queue* queue, const kvm_priority_params* params,
                                      uint64_t user_data) {
  kvm::SeqRequest call;
  const kvm_status status = guarded([&] { return kvm::client::read_priority(params, &call); });
  return status != KVM_OK ? status : stage_seq(queue, call, user_data);
}

kvm_status kvm_seq_save_async(kvm_queue* queue, kvm_seq_id seq, const char* name, uint32_t flags,
                              uint64_t user_data) {
  return stage_snapshot(queue, {.verb = kvm::SnapshotVerb::kSave, .seq = seq}, name, flags,
                        user_data);
}

kvm_status kvm_seq_load_async(kvm_queue* queue, kvm_space_id space, const char* name,
                              uint64_t user_data) {
  return stage_snapshot(queue, {.verb = kvm::SnapshotVerb::kLoad, .space = space}, name, 0,
                        user_data);
}

kvm_status kvm_snapshot_delete_async(kvm_queue* queue, const char* name, uint64_t user_data) {
  return stage_snapshot(queue, {.verb = kvm::SnapshotVerb::kRemove}, name, 0, user_data);
}

kvm_status kvm_nop_async(kvm_queue* queue, uint64_t user_data) {
  return guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    return queue->queue->stage_nop(user_data);
  });
}

kvm_status kvm_submit(kvm_queue* queue) {
  return guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    return queue->queue->submit();
  });
}

int32_t kvm_poll(kvm_queue* queue, kvm_completion* out, uint32_t n_max) {
  return take(queue, out, n_max, 0, 0);
}

int32_t kvm_wait(kvm_queue* queue, kvm_completion* out, uint32_t n_max, uint32_t n_min,
                 uint64_t timeout_ns) {
  return take(queue, out, n_max, n_min, timeout_ns);
}

kvm_status kvm_cancel(kvm_queue* queue, uint64_t user_data) {
  return guarded([&]() -> Status {
    KVM_TRY(check_queue(queue));
    return queue->queue->cancel(user_data);
  });
}

}  // extern "C"
