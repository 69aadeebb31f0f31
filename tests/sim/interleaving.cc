// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/interleaving.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/fiber.h"

namespace kvm::sim {

namespace {

constexpr size_t kMaxStoreBytes = 64;
constexpr uint32_t kSides = 2;
constexpr uint32_t kNobody = kSides;  // the caller of explore()

struct Held {
  std::byte* to = nullptr;
  size_t size = 0;
  std::array<std::byte, kMaxStoreBytes> bytes{};
};

enum class Waiting : uint8_t { kNo, kForWake, kForRing, kForStore, kEnded };

struct Side {
  Fiber fiber;
  std::deque<Held> held;
  Waiting waiting = Waiting::kNo;
  const void* waits_on = nullptr;
  uint64_t n_landed_seen = 0;
};

struct Access {
  uint32_t side;
  const char* what;
  const void* where;
  uint64_t value;
};

// One of the things that may happen next.
struct Choice {
  uint32_t runs = 0;      // the side whose turn it is
  uint32_t lands_of = 0;  // whose oldest stores reach the memory before
  uint32_t n_land = 0;    // so many of them
  bool preempts = false;
};

// Unwinds a side whose schedule has failed.
struct Abandoned {};

class Explorer {
 public:
  Explorer(const std::function<std::unique_ptr<Program>()>& make, const Limits& limits)
      : make_(make), limits_(limits) {}

  Outcome run();

  uint32_t load(const uint32_t* word);
  void store(void* to, const void* from, size_t size, Order order);
  void read(void* to, const void* from, size_t size);
  void wait_while_equal(const uint32_t* word, uint32_t value);
  void wake_waiters(const uint32_t* word);
  void relax();
  void ring(bool* has_rung);
  void wait_ring(bool* has_rung);
  [[noreturn]] void fail(const std::string& why);
  void run_side();
  // While a program is made, nobody's turn has come yet.
  bool is_running() const { return running_ != kNobody; }

 private:
  struct Decision {
    uint32_t chosen;
    uint32_t n_choices;
  };

  Side& me() { return sides_[running_]; }
  bool can_run(uint32_t side) const { return sides_[side].waiting == Waiting::kNo; }
  void note(const char* what, const void* where, uint64_t value);
  // The moment before an access: whoever's turn it is goes on.
  void decide();
  void list_choices();
  void land(uint32_t side, size_t n);
  void drain() { land(running_, me().held.size()); }
  void pause(Waiting waiting, const void* on);
  void wake(Waiting waiting, const void* on);
  void switch_to(uint32_t to);
  Fiber& fiber_of(uint32_t side) { return side == kNobody ? home_ : sides_[side].fiber; }
  void run_schedule();
  bool next_schedule();

  const std::function<std::unique_ptr<Program>()>& make_;
  const Limits limits_;
  std::unique_ptr<Program> program_;
  std::array<Side, kSides> sides_;
  Fiber home_;
  uint32_t running_ = kNobody;
  uint64_t n_landed_ = 0;
  uint32_t n_preemptions_ = 0;
  std::vector<Decision> decisions_;
  size_t n_decided_ = 0;
  std::vector<Choice> choices_;
  std::vector<Access> accesses_;
  std::string failure_;
};

Explorer* g_explorer = nullptr;

void enter_side() { g_explorer->run_side(); }

void Explorer::switch_to(uint32_t to) {
  Fiber& from = fiber_of(running_);
  running_ = to;
  from.switch_to(&fiber_of(to));
}

void Explorer::run_side() {
  me().fiber.arrive();
  try {
    if (failure_.empty()) {
      program_->run(running_);
      note("ends", nullptr, 0);
      me().waiting = Waiting::kEnded;
      decide();
    }
  } catch (const Abandoned&) {
    me().waiting = Waiting::kEnded;
  }
  const uint32_t side = running_;
  running_ = kNobody;
  sides_[side].fiber.finish_to(&home_);
}

void Explorer::note(const char* what, const void* where, uint64_t value) {
  accesses_.push_back({running_, what, where, value});
  if (accesses_.size() > limits_.n_steps) {
    fail("goes on for ever");
  }
}

void Explorer::land(uint32_t side, size_t n) {
  std::deque<Held>& held = sides_[side].held;
  for (; n > 0; --n) {
    std::memcpy(held.front().to, held.front().bytes.data(), held.front().size);
    held.pop_front();
    ++n_landed_;
  }
  for (Side& other : sides_) {
    if (other.waiting == Waiting::kForStore && other.n_landed_seen < n_landed_) {
      other.waiting = Waiting::kNo;
    }
  }
}

// The first choice is to go on. What the running side holds back matters to the other alone, so it
// lands where that gets its turn; what the other holds back may land at any step, and not one by
// one. Who spins gets a turn with something that lands.
void Explorer::list_choices() {
  choices_.clear();
  const bool goes_on = can_run(running_);
  const uint32_t other = 1 - running_;
  const auto add = [&](uint32_t side, uint32_t lands_of, bool preempts) {
    const uint32_t n_least = can_run(side) ? 0 : 1;
    const auto n_held = static_cast<uint32_t>(sides_[lands_of].held.size());
    for (uint32_t n = n_least; n <= n_held; ++n) {
      choices_.push_back({.runs = side, .lands_of = lands_of, .n_land = n, .preempts = preempts});
    }
  };
  if (goes_on || sides_[running_].waiting == Waiting::kForStore) {
    add(running_, other, false);
  }
  if ((can_run(other) || sides_[other].waiting == Waiting::kForStore) &&
      (!goes_on || n_preemptions_ < limits_.n_preemptions)) {
    add(other, running_, goes_on);
  }
  if (!choices_.empty()) {
    return;
  }
  // Nobody can go on unless what is held back lands.
  for (uint32_t side = 0; side < kSides; ++side) {
    if (!sides_[side].held.empty()) {
      choices_.push_back({.runs = kNobody, .lands_of = side, .n_land = 1});
    }
  }
}

void Explorer::decide() {
  for (;;) {
    list_choices();
    if (choices_.empty()) {
      const bool has_ended =
          sides_[0].waiting == Waiting::kEnded && sides_[1].waiting == Waiting::kEnded;
      if (!has_ended) {
        fail("nobody can go on");
      }
      switch_to(kNobody);
    }
    if (n_decided_ == decisions_.size()) {
      decisions_.push_back({0, static_cast<uint32_t>(choices_.size())});
    }
    const Decision& decision = decisions_[n_decided_++];
    KVM_ASSERT(decision.n_choices == choices_.size());
    const Choice choice = choices_[decision.chosen];
    n_preemptions_ += choice.preempts ? 1 : 0;
    land(choice.lands_of, choice.n_land);
    if (choice.runs == running_) {
      return;
    }
    if (choice.runs != kNobody) {
      switch_to(choice.runs);
      if (!failure_.empty()) {
        throw Abandoned();
      }
      return;
    }
  }
}

void Explorer::pause(Waiting waiting, const void* on) {
  me().waiting = waiting;
  me().waits_on = on;
  decide();
}

void Explorer::wake(Waiting waiting, const void* on) {
  for (Side& side : sides_) {
    if (side.waiting == waiting && side.waits_on == on) {
      side.waiting = Waiting::kNo;
    }
  }
}

uint32_t Explorer::load(const uint32_t* word) {
  decide();
  uint32_t value = *word;
  for (const Held& held : me().held) {
    if (held.to == reinterpret_cast<const std::byte*>(word)) {
      std::memcpy(&value, held.bytes.data(), sizeof(value));
    }
  }
  note("loads", word, value);
  return value;
}

void Explorer::store(void* to, const void* from, size_t size, Order order) {
  KVM_ASSERT(size <= kMaxStoreBytes);
  decide();
  Held& held = me().held.emplace_back();
  held.to = static_cast<std::byte*>(to);
  held.size = size;
  std::memcpy(held.bytes.data(), from, size);
  uint64_t value = 0;
  std::memcpy(&value, from, size < sizeof(value) ? size : sizeof(value));
  note(order == Order::kSeqCst ? "stores, in full order," : "stores", to, value);
  if (order == Order::kSeqCst && !limits_.weakens_stores) {
    drain();
  }
}

void Explorer::read(void* to, const void* from, size_t size) {
  decide();
  std::memcpy(to, from, size);
  note("copies", from, size);
}

void Explorer::wait_while_equal(const uint32_t* word, uint32_t value) {
  decide();
  drain();
  note(*word == value ? "sleeps on" : "does not sleep on", word, value);
  if (*word == value) {
    pause(Waiting::kForWake, word);
  }
}

void Explorer::wake_waiters(const uint32_t* word) {
  decide();
  drain();
  note("wakes", word, 0);
  wake(Waiting::kForWake, word);
}

void Explorer::relax() {
  note("spins", nullptr, 0);
  me().n_landed_seen = n_landed_;
  pause(Waiting::kForStore, nullptr);
}

void Explorer::ring(bool* has_rung) {
  decide();
  drain();
  note("rings", has_rung, 0);
  *has_rung = true;
  wake(Waiting::kForRing, has_rung);
}

void Explorer::wait_ring(bool* has_rung) {
  decide();
  drain();
  note("waits for", has_rung, *has_rung ? 1 : 0);
  if (!*has_rung) {
    pause(Waiting::kForRing, has_rung);
  }
  *has_rung = false;
}

void Explorer::fail(const std::string& why) {
  failure_ = why + "\n";
  for (const Access& access : accesses_) {
    failure_ += "  side " + std::to_string(access.side) + " " + access.what + " " +
                std::to_string(reinterpret_cast<uintptr_t>(access.where) & 0xffff) + ": " +
                std::to_string(access.value) + "\n";
  }
  throw Abandoned();
}

void Explorer::run_schedule() {
  program_ = make_();
  n_landed_ = 0;
  n_preemptions_ = 0;
  n_decided_ = 0;
  accesses_.clear();
  for (Side& side : sides_) {
    side.held.clear();
    side.waiting = Waiting::kNo;
    side.fiber.reset(enter_side);
  }
  switch_to(0);
  if (failure_.empty()) {
    failure_ = program_->judge();
    return;
  }
  for (uint32_t side = 0; side < kSides; ++side) {
    if (sides_[side].waiting != Waiting::kEnded) {
      switch_to(side);
    }
  }
}

// The last decision that has a choice left takes the next one.
bool Explorer::next_schedule() {
  while (!decisions_.empty()) {
    Decision& last = decisions_.back();
    if (++last.chosen < last.n_choices) {
      return true;
    }
    decisions_.pop_back();
  }
  return false;
}

Outcome Explorer::run() {
  Outcome outcome;
  g_explorer = this;
  do {
    run_schedule();
    ++outcome.n_schedules;
    if (!failure_.empty()) {
      outcome.failure = "schedule " + std::to_string(outcome.n_schedules) + ": " + failure_;
      break;
    }
    outcome.is_complete = !next_schedule();
  } while (!outcome.is_complete && outcome.n_schedules < limits_.n_schedules);
  g_explorer = nullptr;
  return outcome;
}

bool is_exploring() { return g_explorer != nullptr && g_explorer->is_running(); }

}  // namespace

Outcome explore(const std::function<std::unique_ptr<Program>()>& make, const Limits& limits) {
  return Explorer(make, limits).run();
}

uint32_t load(const uint32_t* word) { return is_exploring() ? g_explorer->load(word) : *word; }

void store(void* to, const void* from, size_t size, Order order) {
  if (is_exploring()) {
    g_explorer->store(to, from, size, order);
  } else {
    std::memcpy(to, from, size);
  }
}

void read(void* to, const void* from, size_t size) {
  if (is_exploring()) {
    g_explorer->read(to, from, size);
  } else {
    std::memcpy(to, from, size);
  }
}

void wait_while_equal(const uint32_t* word, uint32_t value) {
  KVM_ASSERT(is_exploring());
  g_explorer->wait_while_equal(word, value);
}

void wake_waiters(const uint32_t* word) {
  if (is_exploring()) {
    g_explorer->wake_waiters(word);
  }
}

void relax() { g_explorer->relax(); }

void fail(const std::string& why) { g_explorer->fail(why); }

void Doorbell::ring() { g_explorer->ring(&has_rung_); }
void Doorbell::wait() { g_explorer->wait_ring(&has_rung_); }

}  // namespace kvm::sim
