// SPDX-License-Identifier: Apache-2.0
// An engine that stores nothing: requests succeed at the next poll(). For testing what stands
// around an engine.
//
//   a step       writes 1.0f to the start of o, if there is one
//   a read       never finishes: it stays in flight until it is cancelled or its client goes;
//                but see begin_job()
//   an observe   takes kObserveNs
//   a sequence   gets a number; free and the others succeed when it is the client's
#ifndef KVM_TESTS_UNIT_DAEMON_FAKE_ENGINE_H_
#define KVM_TESTS_UNIT_DAEMON_FAKE_ENGINE_H_

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"

namespace kvm::testing {

class FakeEngine final : public engine::Engine {
 public:
  using ClientId = engine::ClientId;
  using RequestTag = engine::RequestTag;
  using DoneCallback = engine::DoneCallback;

  static constexpr uint64_t kObserveNs = 30'000'000;

  explicit FakeEngine(const engine::EngineOptions& options)
      : options_(options), quotas_(options.tenant_limits) {}

  ClientId add_client(const engine::ClientSpec& spec) override {
    engine::Amounts limits = engine::no_limits();
    limits[engine::Resource::kSequences] = options_.max_sequences_per_client;
    limits[engine::Resource::kBytes] = options_.host_capacity_bytes;
    quotas_.open(++last_client_, spec, limits);
    return last_client_;
  }
  engine::QuotaBook& quotas() override { return quotas_; }
  Status evict(kvm_seq_id seq) override {
    return sequences_.erase(seq) != 0 ? Status::ok()
                                      : Status(KVM_ERR_NOT_FOUND, "there is no such sequence");
  }
  void remove_client(ClientId client, std::function<void()> on_gone) override {
    std::erase_if(pending_, [=](const Pending& p) { return p.client == client; });
    std::erase_if(sequences_, [=](const auto& entry) { return entry.second == client; });
    quotas_.close(client);
    gone_.push_back(std::move(on_gone));
  }

  Result<kvm_space_id> register_space(const SpaceSpec& spec, uint32_t /*uid*/) override {
    if (spec.params.n_layers == 0) {
      return Status(KVM_ERR_INVALID, "n_layers is 0; it must be 1 to 512");
    }
    spaces_.emplace_back(spec.name);
    return kvm_space_id{spaces_.size()};
  }
  Result<kvm_space_id> find_space(const std::string& name, uint32_t /*uid*/) override {
    for (size_t i = 0; i < spaces_.size(); ++i) {
      if (spaces_[i] == name) {
        return kvm_space_id{i + 1};
      }
    }
    return Status(KVM_ERR_NOT_FOUND, "there is no space '" + name + "'");
  }
  Result<kvm_space_info> space_info(kvm_space_id space) override {
    if (space == 0 || space > spaces_.size()) {
      return Status(KVM_ERR_NOT_FOUND, "there is no space " + std::to_string(space));
    }
    kvm_space_info info{};
    info.space = space;
    spaces_[space - 1].copy(info.name, sizeof(info.name) - 1);
    return info;
  }
  std::vector<kvm_space_info> list_spaces() override {
    std::vector<kvm_space_info> all;
    for (size_t i = 0; i < spaces_.size(); ++i) {
      all.push_back(space_info(i + 1).value());
    }
    return all;
  }
  Status drop_space(kvm_space_id space) override { return space_info(space).status(); }

  void submit(ClientId client, RequestTag tag, StepRequest&& request,
              DoneCallback on_done) override {
    if (request.o.data != nullptr && request.o.size_bytes >= sizeof(float)) {
      *static_cast<float*>(request.o.data) = 1.0f;
    }
    push(client, tag, std::move(on_done), {}, true);
  }
  void submit(ClientId client, RequestTag tag, ReadRequest&&, DoneCallback on_done) override {
    push(client, tag, std::move(on_done), {}, false);
  }
  void submit(ClientId client, RequestTag tag, ObserveRequest&&, DoneCallback on_done) override {
    push(client, tag, std::move(on_done), {}, false);
    pending_.back().ready_ns = now_ns() + kObserveNs;
  }
  void submit(ClientId client, RequestTag tag, SeqRequest&& request,
              DoneCallback on_done) override {
    kvm::RequestResult result;
    if (request.verb == SeqVerb::kCreate || request.verb == SeqVerb::kFork) {
      result.seq = ++last_seq_;
      sequences_[last_seq_] = client;
    } else if (!sequences_.contains(request.seq)) {
      result.status = Status(KVM_ERR_NOT_FOUND, "there is no such sequence");
    } else if (request.verb == SeqVerb::kFree) {
      sequences_.erase(request.seq);
    }
    push(client, tag, std::move(on_done), std::move(result), true);
  }
  bool cancel(ClientId client, RequestTag tag) override {
    bool found = false;
    for (Pending& p : pending_) {
      if (p.client == client && p.tag.queue == tag.queue && p.tag.number == tag.number) {
        found = true;
        p.result.status = Status(KVM_ERR_CANCELLED, "cancelled");
        p.ready = true;
      }
    }
    return found;
  }

  // The reads that are there have a job that runs elsewhere. It has ended at the n_polls-th poll()
  // from now on, or when end_job() says so; then there is something left to do, by work(), and
  // they finish. From any thread.
  void begin_job(uint32_t n_polls) {
    is_found_ = false;
    is_done_ = false;
    polls_left_ = n_polls;
  }
  // Wakes the driver, unless it has seen the end of the job.
  void end_job() {
    if (polls_left_.exchange(1) != 0 && wake_) {
      wake_();
    }
  }
  bool is_job_done() const { return is_done_; }

  bool work() override {
    if (!is_found_.exchange(false)) {
      return false;
    }
    for (Pending& p : pending_) {
      p.ready = true;
    }
    is_done_ = true;
    return true;
  }
  uint32_t poll() override {
    if (polls_left_ != 0 && --polls_left_ == 0) {
      is_found_ = true;
    }
    for (auto& on_gone : std::exchange(gone_, {})) {
      on_gone();
    }
    uint32_t n = 0;
    for (size_t i = 0; i < pending_.size();) {
      if (!pending_[i].ready && now_ns() < pending_[i].ready_ns) {
        ++i;
        continue;
      }
      Pending done = std::move(pending_[i]);
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
      ++n_done_;
      ++n;
      done.on_done(std::move(done.result));
    }
    return n;
  }
  uint32_t n_in_flight() const override { return static_cast<uint32_t>(pending_.size()); }
  void set_wake(std::function<void()> wake) override { wake_ = std::move(wake); }
  void wait(uint64_t) override {}

  Result<kvm_seq_info> seq_info(ClientId client, kvm_seq_id seq) override {
    const auto at = sequences_.find(seq);
    if (at == sequences_.end() || at->second != client) {
      return Status(KVM_ERR_NOT_FOUND, "there is no such sequence");
    }
    kvm_seq_info info{};
    info.seq = seq;
    info.client_id = client;
    return info;
  }
  engine::SeqPage list_seqs(ClientId client, kvm_space_id, bool all_clients, kvm_seq_id begin,
                            size_t n_max) override {
    engine::SeqPage page;
    for (auto it = sequences_.lower_bound(begin); it != sequences_.end(); ++it) {
      if (!all_clients && it->second != client) {
        continue;
      }
      if (page.infos.size() >= n_max) {
        page.has_more = true;
        break;
      }
      page.infos.push_back(seq_info(it->second, it->first).value());
    }
    return page;
  }
  Result<std::vector<engine::MemoryPiece>> layer_memory(kvm_seq_id, uint32_t) override {
    return std::vector<engine::MemoryPiece>();
  }
  kvm_stats stats() const override {
    kvm_stats stats{};
    stats.n_requests = n_done_;
    stats.n_sequences = sequences_.size();
    stats.n_spaces = spaces_.size();
    return stats;
  }
  const char* isa() const override { return "scalar"; }
  uint32_t n_threads() const override { return 1; }
  const engine::EngineOptions& options() const override { return options_; }

 private:
  struct Pending {
    ClientId client = 0;
    RequestTag tag;
    DoneCallback on_done;
    kvm::RequestResult result;
    bool ready = false;
    uint64_t ready_ns = UINT64_MAX;
  };

  void push(ClientId client, RequestTag tag, DoneCallback on_done, kvm::RequestResult result,
            bool ready) {
    pending_.push_back({.client = client,
                        .tag = tag,
                        .on_done = std::move(on_done),
                        .result = std::move(result),
                        .ready = ready});
  }

  std::function<void()> wake_;
  std::atomic<uint32_t> polls_left_{0};  // 0: no job, or its end has been seen
  std::atomic<bool> is_found_{false};
  std::atomic<bool> is_done_{false};
  engine::EngineOptions options_;
  engine::QuotaBook quotas_;
  ClientId last_client_ = 0;
  kvm_seq_id last_seq_ = 0;
  uint64_t n_done_ = 0;
  std::deque<Pending> pending_;
  std::vector<std::function<void()>> gone_;
  std::vector<std::string> spaces_;
  std::map<kvm_seq_id, ClientId> sequences_;
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_UNIT_DAEMON_FAKE_ENGINE_H_
