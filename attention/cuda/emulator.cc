// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/emulator.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <unordered_set>
#include <vector>

#include "base/assert.h"
#include "base/fiber.h"
#include "base/splitmix.h"

namespace kvm::attention::gpu::emulator {
namespace {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kMaxThreads = 1024;

// A Word keeps the last accesses to one 32-bit word of shared memory. Times count barriers: of the
// block, and of a warp (which the block's advance too).
struct Word {
  static constexpr int32_t kNobody = -1;
  static constexpr int32_t kSeveral = -2;  // threads of one warp
  static constexpr int32_t kMany = -3;     // threads of several

  int32_t writer = kNobody;
  int32_t reader = kNobody;
  int32_t reader_warp = kNobody;
  uint32_t write_block_time = 0, write_warp_time = 0;
  uint32_t read_block_time = 0, read_warp_time = 0;
  bool pending = false;  // an asynchronous copy has been asked for
};

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t size_bytes;
  bool valid;
};

struct Thread {
  Fiber fiber;
  const uint64_t* waits_for = nullptr;  // until it is no longer wait_value
  uint64_t wait_value = 0;
  bool done = true;
  bool has_waited = false;  // for the kernel before
  std::vector<Copy> uncommitted;
  std::deque<std::vector<Copy>> groups;

  bool can_run() const { return !done && (waits_for == nullptr || *waits_for != wait_value); }
};

// A Meeting is a rendezvous: everybody leaves something, the last one acts for all.
struct Meeting {
  const char* operation = nullptr;
  uint32_t arrived = 0;
  uint64_t generation = 0;
  void* arguments[kLanes] = {};
};

// A Block is what the threads of one have in common. Several exist where blocks take turns.
struct Block {
  uint32_t id = 0;
  uint32_t thread = 0;  // that runs, or ran last
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Meeting> warps;
  uint32_t arrived = 0;  // at the barrier
  uint64_t generation = 0;
  bool lets_next_begin = false;
  bool has_passed = false;  // its turn
  uint32_t time = 0;
  std::vector<uint32_t> warp_time;
  std::vector<Word> words;
  std::vector<std::byte> shared;

  // Makes a block of it that has not begun.
  void reset(const Launch& launch, uint32_t block_id, void (*entry)());
};

class Machine {
 public:
  Report run(const Launch& launch, const std::function<void()>& kernel);

  template <class Act>
  void meet_warp(const char* operation, void* argument, Act act);
  void meet_block();
  void advance_warp() { ++block_->warp_time[thread() / kLanes]; }

  void read(uint32_t at, uint32_t size_bytes);
  void write(uint32_t at, uint32_t size_bytes, bool pending);
  bool in_shared(uint32_t at, uint32_t size_bytes, uint32_t align);
  bool may_touch(const void* at, uint32_t size_bytes);
  void note_store(const void* to);
  void fault(const char* what);
  void land(const Copy& copy);
  void let_next_begin() { block_->lets_next_begin = true; }
  void pass_turn();

  Report report;
  uint32_t thread() const { return block_->thread; }
  uint32_t block() const { return block_->id; }
  std::byte* shared(uint32_t at) { return &block_->shared[at]; }
  Thread& self() { return *block_->threads[block_->thread]; }
  uint32_t n_blocks() const { return launch_->blocks; }

 private:
  static void entry();
  // Runs the block until it has ended, or passes its turn; says whether it has ended.
  bool run_block(Block* block);
  void wait_for(const uint64_t* counter, uint64_t value);
  // Runs another thread of the block, or the scheduler if none can.
  void yield();
  size_t whose_turn(size_t n_unfinished);

  const Launch* launch_ = nullptr;
  const std::function<void()>* kernel_ = nullptr;
  std::vector<Range> memory_;  // sorted
  std::vector<std::unique_ptr<Block>> unused_;
  Block* block_ = nullptr;  // that runs
  Fiber scheduler_;
  const uint64_t never_ = 0;
  uint64_t n_turns_ = 0;
  std::unordered_set<const void*> stored_;
};

thread_local std::unique_ptr<Machine> owned_machine;
thread_local Machine* machine = nullptr;

void Block::reset(const Launch& launch, uint32_t block_id, void (*entry)()) {
  id = block_id;
  thread = 0;
  shared.assign(launch.shared_bytes, std::byte{0xff});
  words.assign((launch.shared_bytes + 3) / 4, Word{});
  warps.assign(launch.threads / kLanes, Meeting{});
  warp_time.assign(launch.threads / kLanes, 0);
  arrived = 0;
  time = 0;
  lets_next_begin = has_passed = false;
  while (threads.size() < launch.threads) {
    threads.push_back(std::make_unique<Thread>());
  }
  for (uint32_t i = 0; i < launch.threads; ++i) {
    Thread& t = *threads[i];
    t.done = false;
    t.waits_for = nullptr;
    t.has_waited = !launch.begins_early;
    t.uncommitted.clear();
    t.groups.clear();
    t.fiber.reset(entry);
  }
}

void Machine::fault(const char* what) {
  if (report.n_faults++ == 0) {
    report.first_fault = std::string(what) + ", block " + std::to_string(block()) + ", thread " +
                         std::to_string(thread());
  }
}

void Machine::entry() {
  Machine& m = *machine;
  m.self().fiber.arrive();
  (*m.kernel_)();
  Thread& me = m.self();
  me.done = true;
  // Somebody who can still run, or the end of the block.
  Block& block = *m.block_;
  for (uint32_t i = 1; i < m.launch_->threads; ++i) {
    const uint32_t next = (block.thread + i) % m.launch_->threads;
    if (block.threads[next]->can_run()) {
      block.thread = next;
      me.fiber.finish_to(&block.threads[next]->fiber);
    }
  }
  me.fiber.finish_to(&m.scheduler_);
}

void Machine::yield() {
  Block& block = *block_;
  Thread& me = self();
  const uint32_t warp_first = block.thread / kLanes * kLanes;
  for (uint32_t i = 1; i < kLanes; ++i) {
    const uint32_t next = warp_first + (block.thread + i) % kLanes;
    if (block.threads[next]->can_run()) {
      block.thread = next;
      me.fiber.switch_to(&block.threads[next]->fiber);
      return;
    }
  }
  for (uint32_t i = 1; i < launch_->threads; ++i) {
    const uint32_t next = (block.thread + i) % launch_->threads;
    if (block.threads[next]->can_run()) {
      block.thread = next;
      me.fiber.switch_to(&block.threads[next]->fiber);
      return;
    }
  }
  me.fiber.switch_to(&scheduler_);
}

void Machine::pass_turn() {
  block_->has_passed = true;
  self().fiber.switch_to(&scheduler_);
}

void Machine::wait_for(const uint64_t* counter, uint64_t value) {
  Thread& me = self();
  me.waits_for = counter;
  me.wait_value = value;
  while (*counter == value) {
    yield();
  }
  me.waits_for = nullptr;
}

template <class Act>
void Machine::meet_warp(const char* operation, void* argument, Act act) {
  Meeting& meeting = block_->warps[thread() / kLanes];
  if (meeting.arrived == 0) {
    meeting.operation = operation;
  } else if (meeting.operation != operation && std::strcmp(meeting.operation, operation) != 0) {
    fault("threads of a warp meet at different operations");
    wait_for(&never_, 0);  // what the operation would work on is not there
  }
  meeting.arguments[thread() % kLanes] = argument;
  if (++meeting.arrived < kLanes) {
    wait_for(&meeting.generation, meeting.generation);
    return;
  }
  meeting.arrived = 0;
  act(meeting.arguments);
  ++meeting.generation;
}

void Machine::meet_block() {
  Block& block = *block_;
  if (++block.arrived < launch_->threads) {
    wait_for(&block.generation, block.generation);
    return;
  }
  block.arrived = 0;
  ++block.generation;
  ++block.time;
  for (uint32_t& time : block.warp_time) {
    ++time;
  }
}

bool Machine::in_shared(uint32_t at, uint32_t size_bytes, uint32_t align) {
  if (at % align == 0 && uint64_t{at} + size_bytes <= block_->shared.size()) {
    return true;
  }
  fault("shared memory: misaligned, or outside");
  return false;
}

void Machine::read(uint32_t at, uint32_t size_bytes) {
  const auto me = static_cast<int32_t>(thread());
  const int32_t my_warp = me / static_cast<int32_t>(kLanes);
  const uint32_t block_time = block_->time, warp_time = block_->warp_time[thread() / kLanes];
  for (uint32_t i = at / 4; i < (at + size_bytes + 3) / 4; ++i) {
    Word& word = block_->words[i];
    if (word.writer == Word::kNobody) {
      fault("shared memory: read before anything was written");
      continue;
    }
    const bool same_warp = word.writer / static_cast<int32_t>(kLanes) == my_warp;
    if (word.writer != me && word.write_block_time == block_time &&
        !(same_warp && word.write_warp_time < warp_time)) {
      fault("shared memory: read without a barrier after another thread's write");
    } else if (word.pending) {
      fault("shared memory: read before the copy into it was waited for");
    }
    const bool old = word.reader == Word::kNobody || word.read_block_time < block_time ||
                     (word.reader_warp == my_warp && word.read_warp_time < warp_time);
    if (old) {
      word.reader = me;
      word.reader_warp = my_warp;
    } else if (word.reader_warp != my_warp) {
      word.reader = Word::kMany;
      word.reader_warp = Word::kMany;
    } else if (word.reader != me) {
      word.reader = Word::kSeveral;
    }
    word.read_block_time = block_time;
    word.read_warp_time = warp_time;
  }
}

void Machine::write(uint32_t at, uint32_t size_bytes, bool pending) {
  const auto me = static_cast<int32_t>(thread());
  const int32_t my_warp = me / static_cast<int32_t>(kLanes);
  const uint32_t block_time = block_->time, warp_time = block_->warp_time[thread() / kLanes];
  for (uint32_t i = at / 4; i < (at + size_bytes + 3) / 4; ++i) {
    Word& word = block_->words[i];
    const bool writer_in_warp = word.writer / static_cast<int32_t>(kLanes) == my_warp;
    if (word.writer != Word::kNobody && word.writer != me && word.write_block_time == block_time &&
        !(writer_in_warp && word.write_warp_time < warp_time)) {
      fault("shared memory: written without a barrier after another thread's write");
    }
    if (word.reader != Word::kNobody && word.reader != me && word.read_block_time == block_time &&
        !(word.reader_warp == my_warp && word.read_warp_time < warp_time)) {
      fault("shared memory: written without a barrier after another thread's read");
    }
    if (word.pending && pending) {
      fault("shared memory: a copy into it while another one is under way");
    }
    word.writer = me;
    word.write_block_time = block_time;
    word.write_warp_time = warp_time;
    word.reader = Word::kNobody;
    word.pending = pending;
  }
}

bool Machine::may_touch(const void* at, uint32_t size_bytes) {
  if (!self().has_waited) {
    fault("global memory: touched while the kernel before may not have ended");
    return false;
  }
  const auto address = reinterpret_cast<uintptr_t>(at);
  if (address % size_bytes != 0) {
    fault("global memory: misaligned");
    return false;
  }
  const auto above = std::upper_bound(
      memory_.begin(), memory_.end(), address,
      [](uintptr_t a, const Range& range) { return a < reinterpret_cast<uintptr_t>(range.data); });
  if (above != memory_.begin()) {
    const Range& range = *(above - 1);
    if (address + size_bytes <= reinterpret_cast<uintptr_t>(range.data) + range.size_bytes) {
      return true;
    }
  }
  fault("global memory: outside of what the kernel was given");
  return false;
}

void Machine::note_store(const void* to) {
  if (!stored_.insert(to).second) {
    fault("global memory: stored to twice");
  }
}

void Machine::land(const Copy& copy) {
  write(copy.to, copy.size_bytes, false);
  if (copy.valid) {
    std::memcpy(shared(copy.to), copy.from, copy.size_bytes);
  } else {
    std::memset(shared(copy.to), 0, copy.size_bytes);
  }
}

bool Machine::run_block(Block* block) {
  block_ = block;
  block->has_passed = false;
  // A thread that has passed the turn goes on itself: its warp waits for it.
  uint32_t next = block->thread;
  for (;;) {
    uint32_t n_waiting = 0;
    while (n_waiting < launch_->threads && !block->threads[next]->can_run()) {
      next = (next + 1) % launch_->threads;
      ++n_waiting;
    }
    if (n_waiting == launch_->threads) {
      break;
    }
    block->thread = next;
    scheduler_.switch_to(&block->threads[next]->fiber);
    if (block->has_passed) {
      return false;
    }
    next = 0;
  }
  for (uint32_t i = 0; i < launch_->threads; ++i) {
    if (!block->threads[i]->done) {
      block->thread = i;
      fault("a barrier or an operation of a warp that not all threads come to");
      break;
    }
  }
  return true;
}

// Of so many blocks that have not ended.
size_t Machine::whose_turn(size_t n_unfinished) {
  switch (launch_->order) {
    case Order::kBackward:
      return n_unfinished - 1;
    case Order::kAny:
      return splitmix64(launch_->seed + kSplitMixStep * ++n_turns_) % n_unfinished;
    default:
      return 0;
  }
}

Report Machine::run(const Launch& launch, const std::function<void()>& kernel) {
  KVM_ASSERT(launch.threads % kLanes == 0 && launch.threads <= kMaxThreads);
  launch_ = &launch;
  kernel_ = &kernel;
  report = Report{};
  n_turns_ = 0;
  stored_.clear();
  memory_.assign(launch.memory.begin(), launch.memory.end());
  std::sort(memory_.begin(), memory_.end(), [](const Range& a, const Range& b) {
    return reinterpret_cast<uintptr_t>(a.data) < reinterpret_cast<uintptr_t>(b.data);
  });
  // A block takes room when its first turn comes.
  struct Unfinished {
    uint32_t id;
    std::unique_ptr<Block> block;
  };
  std::deque<Unfinished> unfinished;
  for (uint32_t id = 0; id < launch.blocks; ++id) {
    unfinished.push_back({id, nullptr});
  }
  uint32_t n_letting = 0;
  while (!unfinished.empty()) {
    const size_t index = whose_turn(unfinished.size());
    Unfinished& one = unfinished[index];
    if (one.block == nullptr) {
      if (unused_.empty()) {
        unused_.push_back(std::make_unique<Block>());
      }
      one.block = std::move(unused_.back());
      unused_.pop_back();
      one.block->reset(launch, one.id, &Machine::entry);
    }
    if (run_block(one.block.get())) {
      n_letting += one.block->lets_next_begin ? 1 : 0;
      unused_.push_back(std::move(one.block));
      if (launch.order == Order::kAny) {
        std::swap(one, unfinished.back());
        unfinished.pop_back();
      } else {
        unfinished.erase(unfinished.begin() + static_cast<ptrdiff_t>(index));
      }
    } else if (launch.order == Order::kTurns) {
      unfinished.push_back(std::move(one));
      unfinished.pop_front();
    }
  }
  report.lets_next_begin = launch.blocks != 0 && n_letting == launch.blocks;
  return report;
}

// Elements of the packed fragments of mma.m16n8k16, as the PTX manual lays them out.
struct MmaArguments {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
  float (*widen)(uint16_t);
};

float half_of(uint32_t packed, uint32_t half, float (*widen)(uint16_t)) {
  return widen(static_cast<uint16_t>(half == 0 ? packed & 0xffffu : packed >> 16));
}

void multiply_matrices(void** arguments) {
  float a[16][16], b[16][8];
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const auto& of = *static_cast<const MmaArguments*>(arguments[lane]);
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t inner = lane % 4 * 2 + half;
      for (uint32_t i = 0; i < 4; ++i) {
        a[lane / 4 + i % 2 * 8][inner + i / 2 * 8] = half_of(of.a[i], half, of.widen);
      }
      for (uint32_t i = 0; i < 2; ++i) {
        b[inner + i * 8][lane / 4] = half_of(of.b[i], half, of.widen);
      }
    }
  }
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const auto& of = *static_cast<const MmaArguments*>(arguments[lane]);
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float sum = 0.0f;
      for (uint32_t k = 0; k < 16; ++k) {
        sum += a[row][k] * b[k][column];
      }
      of.d[i] += sum;
    }
  }
}

}  // namespace

Report run(const Launch& launch, const std::function<void()>& kernel) {
  if (owned_machine == nullptr) {
    owned_machine = std::make_unique<Machine>();
  }
  machine = owned_machine.get();
  return machine->run(launch, kernel);
}

uint32_t current_thread() { return machine->thread(); }
uint32_t current_block() { return machine->block(); }
uint32_t current_block_count() { return machine->n_blocks(); }

void sync_warp() {
  Machine& m = *machine;
  m.meet_warp("sync_warp", nullptr, [&](void**) { m.advance_warp(); });
}

void sync_block() { machine->meet_block(); }

uint64_t shuffle(uint64_t value, uint32_t lane) {
  struct Arguments {
    uint64_t value;
    uint64_t result;
    uint32_t lane;
  } mine{value, 0, lane};
  machine->meet_warp("shuffle", &mine, [](void** all) {
    for (uint32_t i = 0; i < kLanes; ++i) {
      auto* to = static_cast<Arguments*>(all[i]);
      to->result = static_cast<const Arguments*>(all[to->lane % kLanes])->value;
    }
  });
  return mine.result;
}

bool any_lane(bool value) {
  struct Arguments {
    bool value;
    bool result;
  } mine{value, false};
  machine->meet_warp("any_lane", &mine, [](void** all) {
    const bool any = std::any_of(all, all + kLanes, [](const void* one) {
      return static_cast<const Arguments*>(one)->value;
    });
    std::for_each(all, all + kLanes,
                  [any](void* one) { static_cast<Arguments*>(one)->result = any; });
  });
  return mine.result;
}

void let_next_kernel_begin() { machine->let_next_begin(); }
void wait_for_kernel_before() { machine->self().has_waited = true; }

void copy_async(uint32_t to, const void* from, uint32_t size_bytes, bool valid) {
  Machine& m = *machine;
  if (!m.in_shared(to, size_bytes, size_bytes) || (valid && !m.may_touch(from, size_bytes))) {
    return;
  }
  m.write(to, size_bytes, true);
  std::memset(m.shared(to), 0xff, size_bytes);
  m.self().uncommitted.push_back({to, from, size_bytes, valid});
}

void copy_async_commit() {
  Thread& me = machine->self();
  me.groups.push_back(std::move(me.uncommitted));
  me.uncommitted.clear();
}

void copy_async_wait(uint32_t newest) {
  Machine& m = *machine;
  Thread& me = m.self();
  while (me.groups.size() > newest) {
    for (const Copy& copy : me.groups.front()) {
      m.land(copy);
    }
    me.groups.pop_front();
  }
}

void load_matrix_x4(uint32_t (&to)[4], uint32_t from, bool transposed) {
  struct Arguments {
    uint32_t* to;
    uint32_t from;
    bool valid;
  } mine{to, from, false};
  Machine& m = *machine;
  mine.valid = m.in_shared(from, 16, 16);
  if (mine.valid) {
    m.read(from, 16);
  }
  const auto load = [&m, transposed](void** all) {
    for (uint32_t matrix = 0; matrix < 4; ++matrix) {
      uint16_t values[8][8] = {};
      uint32_t banks = 0;  // of 16 bytes
      for (uint32_t row = 0; row < 8; ++row) {
        const auto& of = *static_cast<const Arguments*>(all[matrix * 8 + row]);
        if (of.valid) {
          std::memcpy(values[row], m.shared(of.from), 16);
          const uint32_t bank = 1u << (of.from / 16 % 8);
          m.report.n_bank_conflicts += (banks & bank) != 0;
          banks |= bank;
        }
      }
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        const uint32_t row = lane / 4, column = lane % 4 * 2;
        const uint16_t low = transposed ? values[column][row] : values[row][column];
        const uint16_t high = transposed ? values[column + 1][row] : values[row][column + 1];
        static_cast<const Arguments*>(all[lane])->to[matrix] =
            static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
      }
    }
  };
  m.meet_warp(transposed ? "load_matrix transposed" : "load_matrix", &mine, load);
}

void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                 float (*widen)(uint16_t)) {
  MmaArguments mine{d, a, {b0, b1}, widen};
  machine->meet_warp("mma", &mine, multiply_matrices);
}

void store_shared(uint32_t at, const void* value, uint32_t size_bytes) {
  Machine& m = *machine;
  if (m.in_shared(at, size_bytes, size_bytes)) {
    m.write(at, size_bytes, false);
    std::memcpy(m.shared(at), value, size_bytes);
  }
}

void load_shared(uint32_t at, void* value, uint32_t size_bytes) {
  Machine& m = *machine;
  std::memset(value, 0xff, size_bytes);
  if (m.in_shared(at, size_bytes, size_bytes)) {
    m.read(at, size_bytes);
    std::memcpy(value, m.shared(at), size_bytes);
  }
}

bool may_touch(const void* at, uint32_t size_bytes) { return machine->may_touch(at, size_bytes); }
void note_store(const void* to) { machine->note_store(to); }
void pass_turn() { machine->pass_turn(); }

}  // namespace kvm::attention::gpu::emulator
