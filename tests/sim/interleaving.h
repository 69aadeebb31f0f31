// SPDX-License-Identifier: Apache-2.0
// Runs two sides that share memory in every order there is, within a bound.
//
// Each side is a fiber of this thread. Before each access to what they share it may be the other
// side's turn; explore() goes through the choices depth first, each time from the start of the
// program, as CHESS does (Musuvathi et al., OSDI 2008): a switch away from a side that could go on
// counts, and at most n_preemptions of them are made in a schedule. A lost wake-up needs few.
//
// The memory is that of x86 (x86-TSO: Owens, Sarkar, Sewell, TPHOLs 2009). A store waits in a
// buffer of its side, which alone sees it there, and reaches the memory, in order, at any later
// moment; a sequentially consistent store and what is a system call in earnest empty the buffer
// first.
//
// A schedule fails where a side says so, where neither side can go on, or where both go on for
// ever.
//
// Threads: one.
#ifndef KVM_TESTS_SIM_INTERLEAVING_H_
#define KVM_TESTS_SIM_INTERLEAVING_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace kvm::sim {

enum class Order : uint8_t { kRelease, kSeqCst };

// What a program does to shared memory. Outside explore() each acts at once.
uint32_t load(const uint32_t* word);
// size <= 64.
void store(void* to, const void* from, size_t size, Order order);
void read(void* to, const void* from, size_t size);
void wait_while_equal(const uint32_t* word, uint32_t value);
void wake_waiters(const uint32_t* word);
// Lets the other side go on until something has reached the memory: what a spin loop does.
void relax();
// Ends the schedule: it has failed.
[[noreturn]] void fail(const std::string& why);

// An eventfd that is watched by its edges.
class Doorbell {
 public:
  void ring();
  void wait();

 private:
  bool has_rung_ = false;
};

// Made anew for each schedule.
class Program {
 public:
  virtual ~Program() = default;
  virtual void run(uint32_t side) = 0;  // 0 and 1
  // After both have ended, and all they stored has landed: what is wrong; empty: nothing.
  virtual std::string judge() { return ""; }
};

struct Limits {
  uint32_t n_preemptions = 3;
  uint64_t n_schedules = 20'000'000;
  uint32_t n_steps = 4000;  // of one schedule
  // Takes every sequentially consistent store for a release one: what the checker must notice.
  bool weakens_stores = false;
};

struct Outcome {
  uint64_t n_schedules = 0;
  bool is_complete = false;  // all schedules within the bound were run
  std::string failure;       // of the last one, with its accesses in their order; empty: none
};

Outcome explore(const std::function<std::unique_ptr<Program>()>& make, const Limits& limits);

}  // namespace kvm::sim

#endif  // KVM_TESTS_SIM_INTERLEAVING_H_
