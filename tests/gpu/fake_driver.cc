// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/fake_driver.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "attention/cuda/emulator.h"
#include "attention/cuda/lengths_kernel.h"
#include "attention/cuda/read_kernel.h"
#include "attention/cuda/shapes.h"
#include "attention/cuda/states_kernel.h"
#include "attention/cuda/table_kernel.h"
#include "base/dtype.h"
#include "base/round.h"
#include "base/splitmix.h"
#include "codecs/codec.h"
#include "tests/gpu/emulated_attention.h"

namespace kvm::device::testing {
namespace {

using namespace attention::gpu;  // NOLINT: parameters and kernels

constexpr size_t kMaxComplaints = 2000;  // characters

thread_local uint64_t n_calls = 0;

// Channel i of a row; params: where it has some, its parameters.
double stored_value(const uint8_t* row, uint32_t i, CodecId codec, const uint8_t* params) {
  uint16_t bits = 0;
  if (codec == codecs::kI4) {
    uint16_t steps[2];  // scale and zero
    std::memcpy(steps, params + i / codecs::Codec::kGroupChannels * sizeof steps, sizeof steps);
    const int code = row[i / 2] >> (i % 2 * 4) & 15;
    return code * static_cast<double>(bf16_to_f32(steps[0])) + bf16_to_f32(steps[1]);
  }
  std::memcpy(&bits, codecs::codec_of(codec).is_scaled() ? params : row + 2 * i, 2);
  switch (codec) {
    case CodecId::kI8:
      return static_cast<double>(static_cast<int8_t>(row[i])) * bf16_to_f32(bits);
    case CodecId::kF8:
      return static_cast<double>(e4m3_to_f32(row[i])) * bf16_to_f32(bits);
    default:
      return codec == CodecId::kBf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  }
}

void store_element(const AttendTensors& tensors, int64_t element, double value) {
  const auto narrow = static_cast<float>(value);
  if (tensors.dtype_o == Dtype::kF32) {
    static_cast<float*>(tensors.o)[element] = narrow;
  } else {
    static_cast<uint16_t*>(tensors.o)[element] =
        tensors.dtype_o == Dtype::kBf16 ? f32_to_bf16(narrow) : f32_to_f16(narrow);
  }
}

// Writes a result row, or does nothing with lse where it is not wanted.
void store_row(const AttendTensors& tensors, RowPlace at, const std::vector<double>& o,
               double lse) {
  for (size_t i = 0; i < o.size(); ++i) {
    store_element(tensors,
                  at.token * tensors.o_stride_token + at.q_head * tensors.o_stride_head +
                      static_cast<int64_t>(i),
                  o[i]);
  }
  if (tensors.lse != nullptr) {
    tensors.lse[at.token * tensors.lse_stride_token + at.q_head * tensors.lse_stride_head] =
        static_cast<float>(lse);
  }
}

bool covers(const std::map<uint8_t*, uint64_t>& ranges, const void* at, uint64_t size_bytes) {
  const auto* begin = static_cast<const uint8_t*>(at);
  const auto* const end = begin + size_bytes;
  auto above = ranges.upper_bound(const_cast<uint8_t*>(begin));
  if (above == ranges.begin()) {
    return false;
  }
  // Neighbouring ranges may carry it together.
  for (--above; above != ranges.end() && above->first <= begin; ++above) {
    if (begin >= above->first + above->second) {
      return false;
    }
    begin = above->first + above->second;
    if (begin >= end) {
      return true;
    }
  }
  return false;
}

}  // namespace

FakeDriver::FakeDriver(const FakeOptions& options) : options_(options), state_(options.seed) {
  facts_.name = "memory of this process";
  facts_.uuid.back() = options.number;
  facts_.free_bytes = options.memory_bytes;
  facts_.granularity_bytes = options.granularity_bytes;
  facts_.n_sms = options.blocks;
  facts_.moves_in_a_thread = options.moves_in_a_thread;
  queues_.emplace(nullptr, std::make_unique<Queue>());
  for (const auto& [operation, nth] : options.fail_first) {
    fail(operation, nth);
  }
  if (options.runs_by_itself) {
    thread_ = std::thread([this] { run_by_itself(); });
  }
}

FakeDriver::~FakeDriver() {
  is_ending_ = true;
  if (thread_.joinable()) {
    thread_.join();
  }
  if (options_.at_end) {
    options_.at_end(*this);
  }
  for (const auto& [range, size] : reserved_) {
    ::munmap(range, size);
  }
  for (const auto& [range, size] : allocated_) {
    ::munmap(range, size);
  }
}

uint64_t FakeDriver::random() {
  state_ += kSplitMixStep;
  return splitmix64(state_);
}

void FakeDriver::complain(const std::string& what) {
  if (complaints_.size() < kMaxComplaints) {
    complaints_ += what + "\n";
  }
}

std::string FakeDriver::leftovers() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  const auto add = [&text](size_t n, const char* what) {
    if (n != 0) {
      text += std::to_string(n) + " " + what + ", ";
    }
  };
  add(reserved_.size(), "reserved ranges");
  add(mapped_bytes_, "mapped bytes");
  add(allocated_.size(), "allocations");
  add(registered_.size(), "registered ranges");
  add(queues_.size() - 1, "streams");
  add(events_.size(), "events");
  return text;
}

uint64_t FakeDriver::calls_of_this_thread() { return n_calls; }

Status FakeDriver::begin(Operation operation, const char* name) {
  ++n_calls;
  if (options_.eagerness != 0) {
    while (random() % options_.eagerness == 0 && progress()) {
    }
  }
  const auto index = static_cast<size_t>(operation);
  if (++counts_[index] == fail_at_[index]) {
    const bool memory = operation == Operation::kMap || operation == Operation::kAllocate;
    return Status(memory ? KVM_ERR_NO_SPACE : KVM_ERR_DEVICE, std::string(name) + ": made to fail");
  }
  return Status::ok();
}

// --- Memory -------------------------------------------------------------------------------------

Result<uint8_t*> FakeDriver::reserve(uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kReserve, "reserve"));
  if (size_bytes == 0 || size_bytes % options_.granularity_bytes != 0) {
    complain("reserve: " + std::to_string(size_bytes) + " bytes");
  }
  void* range =
      ::mmap(nullptr, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    return Status(KVM_ERR_DEVICE, "reserve: no addresses");
  }
  reserved_[static_cast<uint8_t*>(range)] = size_bytes;
  return static_cast<uint8_t*>(range);
}

void FakeDriver::release(uint8_t* range, uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = reserved_.find(range);
  if (found == reserved_.end() || found->second != size_bytes) {
    complain("release: not a reserved range");
    return;
  }
  const auto live = live_.lower_bound(range);
  if (live != live_.end() && live->first < range + size_bytes) {
    complain("release: memory is mapped there");
  }
  ::munmap(range, size_bytes);
  reserved_.erase(found);
}

Status FakeDriver::map(uint8_t* at, uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kMap, "map"));
  if (mapped_bytes_ + size_bytes > options_.memory_bytes) {
    return Status(KVM_ERR_NO_SPACE, "map: the device is full");
  }
  KVM_TRY(check_free_range("map", at, size_bytes));
  if (::mprotect(at, size_bytes, PROT_READ | PROT_WRITE) != 0) {
    return Status(KVM_ERR_DEVICE, "map: mprotect");
  }
  std::memset(at, 0xff, size_bytes);  // NaNs
  live_[at] = size_bytes;
  mapped_bytes_ += size_bytes;
  return Status::ok();
}

Status FakeDriver::check_free_range(const char* name, uint8_t* at, uint64_t size_bytes) {
  if (size_bytes % options_.granularity_bytes != 0 || !covers(reserved_, at, size_bytes) ||
      is_device(at, 1)) {
    complain(std::string(name) + ": not a free part of a reserved range");
    return Status(KVM_ERR_DEVICE, std::string(name) + ": misuse");
  }
  return Status::ok();
}

Status FakeDriver::map_file(const char* name, uint8_t* at, uint64_t size_bytes, int fd) {
  if (::mmap(at, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    return Status(KVM_ERR_DEVICE, std::string(name) + ": mmap");
  }
  live_[at] = size_bytes;
  mapped_bytes_ += size_bytes;
  return Status::ok();
}

Result<ipc::Fd> FakeDriver::map_shared(uint8_t* at, uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kMap, "map_shared"));
  if (mapped_bytes_ + size_bytes > options_.memory_bytes) {
    return Status(KVM_ERR_NO_SPACE, "map_shared: the device is full");
  }
  KVM_TRY(check_free_range("map_shared", at, size_bytes));
  ipc::Fd fd(::memfd_create("fake-device", MFD_CLOEXEC));
  if (!fd.is_open() || ::ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0) {
    return Status(KVM_ERR_DEVICE, "map_shared: no file");
  }
  KVM_TRY(map_file("map_shared", at, size_bytes, fd.get()));
  return fd;
}

Status FakeDriver::map_from(uint8_t* at, uint64_t size_bytes, const ipc::Fd& memory) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kMap, "map_from"));
  KVM_TRY(check_free_range("map_from", at, size_bytes));
  struct stat file {};
  if (::fstat(memory.get(), &file) != 0 || static_cast<uint64_t>(file.st_size) != size_bytes) {
    return Status(KVM_ERR_DEVICE, "map_from: not memory of a device of that size");
  }
  return map_file("map_from", at, size_bytes, memory.get());
}

void FakeDriver::unmap(uint8_t* at, uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(at);
  if (found == live_.end() || found->second != size_bytes || allocated_.contains(at)) {
    complain("unmap: not what was mapped");
    return;
  }
  ::mmap(at, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  live_.erase(found);
  mapped_bytes_ -= size_bytes;
}

Result<uint8_t*> FakeDriver::allocate(uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kAllocate, "allocate"));
  if (size_bytes > options_.memory_bytes) {
    return Status(KVM_ERR_NO_SPACE, "allocate: the device has less");
  }
  void* memory =
      ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return Status(KVM_ERR_NO_SPACE, "allocate: no memory");
  }
  std::memset(memory, 0xff, size_bytes);
  allocated_[static_cast<uint8_t*>(memory)] = size_bytes;
  live_[static_cast<uint8_t*>(memory)] = size_bytes;
  return static_cast<uint8_t*>(memory);
}

void FakeDriver::free(uint8_t* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = allocated_.find(memory);
  if (found == allocated_.end()) {
    complain("free: not allocated");
    return;
  }
  ::munmap(memory, found->second);
  live_.erase(memory);
  allocated_.erase(found);
}

Status FakeDriver::register_host(void* memory, uint64_t size_bytes) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kRegister, "register"));
  if (reinterpret_cast<uintptr_t>(memory) % 4096 != 0 || covers(registered_, memory, 1)) {
    complain("register: misaligned, or registered already");
  }
  registered_[static_cast<uint8_t*>(memory)] = size_bytes;
  return Status::ok();
}

void FakeDriver::unregister_host(void* memory) {
  const std::lock_guard lock(mutex_);
  if (registered_.erase(static_cast<uint8_t*>(memory)) == 0) {
    complain("unregister: not registered");
  }
}

bool FakeDriver::is_device(const void* at, uint64_t size_bytes) const {
  return covers(live_, at, size_bytes);
}

bool FakeDriver::is_host(const void* at, uint64_t size_bytes) const {
  return covers(registered_, at, size_bytes);
}

// --- Streams ------------------------------------------------------------------------------------

Result<Stream> FakeDriver::create_stream() {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kStream, "create_stream"));
  auto* const stream = reinterpret_cast<Stream>(uintptr_t{0x1000} + ++last_handle_);
  queues_.emplace(stream, std::make_unique<Queue>());
  return stream;
}

void FakeDriver::destroy_stream(Stream stream) {
  std::unique_lock lock(mutex_);
  while (!queue(stream).work.empty()) {
    if (!advance(&lock)) {
      complain("destroy_stream: its work waits for ever");
      break;
    }
  }
  if (stream == nullptr || queues_.erase(stream) == 0) {
    complain("destroy_stream: no such stream");
  }
}

Result<Event> FakeDriver::create_event() {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kEvent, "create_event"));
  auto* const event = reinterpret_cast<Event>(uintptr_t{0x1000} + ++last_handle_);
  events_.emplace(event, std::make_shared<Marker>());
  return event;
}

void FakeDriver::destroy_event(Event event) {
  const std::lock_guard lock(mutex_);
  if (events_.erase(event) == 0) {
    complain("destroy_event: no such event");
  }
}

FakeDriver::Queue& FakeDriver::queue(Stream stream) {
  const auto found = queues_.find(stream);
  if (found == queues_.end()) {
    complain("no such stream");
    return *queues_[nullptr];
  }
  return *found->second;
}

void FakeDriver::enqueue(Stream stream, std::function<void()> run) {
  Queue& to = queue(stream);
  if (to.captured) {
    to.graph.push_back(std::move(run));
  } else {
    to.work.push_back({std::move(run), nullptr, nullptr, 0});
    to.deepest = std::max(to.deepest, to.work.size());
  }
}

Status FakeDriver::record(Event event, Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kRecord, "record"));
  const auto found = events_.find(event);
  if (found == events_.end() || queue(stream).captured) {
    complain("record: no such event, or the stream is captured");
    return Status(KVM_ERR_DEVICE, "record: misuse");
  }
  // Whoever waits for an earlier record goes on doing so.
  auto marker = std::make_shared<Marker>(Marker{false});
  found->second = marker;
  enqueue(stream, [marker] { marker->happened = true; });
  return Status::ok();
}

Status FakeDriver::wait(Stream stream, Event event) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kWait, "wait"));
  const auto found = events_.find(event);
  if (found == events_.end() || queue(stream).captured) {
    complain("wait: no such event, or the stream is captured");
    return Status(KVM_ERR_DEVICE, "wait: misuse");
  }
  queue(stream).work.push_back({[] {}, found->second, nullptr, 0});
  return Status::ok();
}

namespace {

// SYNC: acquire, with the release of write_word and of whoever else writes it: what was done before
// the word was written can be seen once it is.
bool has_reached(const uint64_t* word, uint64_t value) {
  const uint64_t is =
      std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
  return static_cast<int64_t>(is - value) >= 0;
}

}  // namespace

bool FakeDriver::is_ready(const Queue& of) const {
  if (of.work.empty()) {
    return false;
  }
  const Work& next = of.work.front();
  return next.word != nullptr ? has_reached(next.word, next.value)
                              : next.waits_for == nullptr || next.waits_for->happened;
}

bool FakeDriver::advance(std::unique_lock<std::recursive_mutex>* lock) {
  constexpr auto kLongest = std::chrono::seconds(60);
  const auto awaits_word = [](const auto& one) {
    return !one.second->work.empty() && one.second->work.front().word != nullptr;
  };
  const auto begin = std::chrono::steady_clock::now();
  bool gave_time = false;  // in which others may have done everything
  while (!progress()) {
    if (std::none_of(queues_.begin(), queues_.end(), awaits_word)) {
      return gave_time;
    }
    if (std::chrono::steady_clock::now() - begin > kLongest) {
      return false;
    }
    gave_time = true;
    lock->unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    lock->lock();
  }
  return true;
}

void FakeDriver::run_by_itself() {
  while (!is_ending_) {
    {
      const std::lock_guard lock(mutex_);
      for (uint64_t n = random() % 4; n != 0 && progress(); --n) {
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

bool FakeDriver::progress() {
  std::vector<Queue*> ready;
  for (const auto& [stream, of] : queues_) {
    if (is_ready(*of)) {
      ready.push_back(of.get());
    }
  }
  if (ready.empty()) {
    return false;
  }
  Queue& chosen = *ready[random() % ready.size()];
  const Work work = std::move(chosen.work.front());
  chosen.work.pop_front();
  work.run();
  return true;
}

void FakeDriver::settle() {
  std::unique_lock lock(mutex_);
  while (advance(&lock)) {
  }
  for (const auto& [stream, of] : queues_) {
    if (!of->work.empty()) {
      complain("a stream waits for ever");
      of->work.clear();
    }
  }
}

Result<bool> FakeDriver::is_done(Event event) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kQuery, "is_done"));
  const auto found = events_.find(event);
  if (found == events_.end()) {
    complain("is_done: no such event");
    return true;
  }
  return found->second->happened;
}

Status FakeDriver::synchronize(Event event) {
  std::unique_lock lock(mutex_);
  KVM_TRY(begin(Operation::kSynchronize, "synchronize"));
  const auto found = events_.find(event);
  if (found == events_.end()) {
    complain("synchronize: no such event");
    return Status(KVM_ERR_DEVICE, "synchronize: misuse");
  }
  // A marker of its own: while others get their time the event may be recorded again.
  const std::shared_ptr<Marker> marker = found->second;
  while (!marker->happened) {
    if (!advance(&lock)) {
      complain("synchronize: waits for ever");
      return Status(KVM_ERR_DEVICE, "synchronize: waits for ever");
    }
  }
  return Status::ok();
}

Status FakeDriver::synchronize_stream(Stream stream) {
  std::unique_lock lock(mutex_);
  KVM_TRY(begin(Operation::kSynchronize, "synchronize_stream"));
  while (!queue(stream).work.empty()) {
    if (!advance(&lock)) {
      complain("synchronize_stream: waits for ever");
      return Status(KVM_ERR_DEVICE, "synchronize_stream: waits for ever");
    }
  }
  return Status::ok();
}

Status FakeDriver::synchronize_device() {
  {
    const std::lock_guard lock(mutex_);
    KVM_TRY(begin(Operation::kSynchronize, "synchronize_device"));
  }
  settle();
  return Status::ok();
}

Result<bool> FakeDriver::is_capturing(Stream stream) {
  const std::lock_guard lock(mutex_);
  return queue(stream).captured;
}

void FakeDriver::begin_capture(Stream stream) {
  const std::lock_guard lock(mutex_);
  queue(stream).captured = true;
}

FakeDriver::Graph FakeDriver::end_capture(Stream stream) {
  const std::lock_guard lock(mutex_);
  queue(stream).captured = false;
  return std::exchange(queue(stream).graph, {});
}

void FakeDriver::replay(const Graph& graph, Stream stream) {
  const std::lock_guard lock(mutex_);
  for (const std::function<void()>& node : graph) {
    enqueue(stream, node);
  }
}

uint64_t FakeDriver::deepest_but(Stream stream) const {
  const std::lock_guard lock(mutex_);
  uint64_t deepest = 0;
  for (const auto& [one, of] : queues_) {
    deepest = std::max<uint64_t>(deepest, one == stream ? 0 : of->deepest);
  }
  return deepest;
}

// --- Copies and kernels -------------------------------------------------------------------------

Status FakeDriver::copy(void* to, const void* from, uint64_t size_bytes, Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kCopy, "copy"));
  enqueue(stream, [this, to, from, size_bytes] {
    const bool to_device = is_device(to, size_bytes), from_device = is_device(from, size_bytes);
    if ((!to_device && !is_host(to, size_bytes)) || (!from_device && !is_host(from, size_bytes))) {
      complain("copy: memory that is neither mapped nor registered");
      return;
    }
    if (to_device != from_device) {
      shortest_transfer_ = std::min(shortest_transfer_, size_bytes);
    }
    copied_bytes_ += size_bytes;
    std::memmove(to, from, size_bytes);
  });
  return Status::ok();
}

Status FakeDriver::write_word(uint64_t* word, uint64_t value, Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kWord, "write_word"));
  enqueue(stream, [this, word, value] {
    if (!is_host(word, sizeof *word)) {
      complain("write_word: memory that is not registered");
      return;
    }
    // SYNC: release; has_reached acquires.
    std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_release);
  });
  return Status::ok();
}

Status FakeDriver::wait_word(const uint64_t* word, uint64_t value, Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kWord, "wait_word"));
  if (!is_host(word, sizeof *word) || queue(stream).captured) {
    complain("wait_word: memory that is not registered, or the stream is captured");
    return Status(KVM_ERR_DEVICE, "wait_word: misuse");
  }
  queue(stream).work.push_back({[] {}, nullptr, word, value});
  return Status::ok();
}

void FakeDriver::run_kernel(const char* name, uint32_t blocks, uint32_t threads,
                            uint32_t shared_bytes, const std::function<void()>& kernel,
                            bool begins_early, Reach reach) {
  std::vector<emulator::Range> ranges;
  for (const auto& [at, size] : live_) {
    if (!ranges.empty() &&
        static_cast<const uint8_t*>(ranges.back().data) + ranges.back().size_bytes == at) {
      ranges.back().size_bytes += size;
    } else {
      ranges.push_back({at, size});
    }
  }
  if (reach == Reach::kDeviceAndHost) {
    for (const auto& [at, size] : registered_) {
      ranges.push_back({at, size});
    }
  }
  // Blocks that count together do it in any order.
  const emulator::Report report =
      emulator::run({blocks, threads, shared_bytes, ranges, begins_early, emulator::Order::kAny,
                     options_.seed + counts(Operation::kLaunch)},
                    kernel);
  if (report.n_faults != 0) {
    complain(std::string(name) + ": " + std::to_string(report.n_faults) +
             " faults, first: " + report.first_fault);
  }
}

Result<uint32_t> FakeDriver::decode_blocks(const DecodeKernel& kernel) {
  if (!attention::gpu::testing::attention_kernel(kernel.codec, kernel.dim, kernel.block_rows)) {
    return Status(KVM_ERR_DEVICE, "no such decode kernel");
  }
  return options_.blocks;
}

Status FakeDriver::decode(const DecodeKernel& kernel, const DecodeParams& params, uint32_t n_blocks,
                          Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kLaunch, "decode"));
  enqueue(stream, [this, kernel, params, n_blocks] {
    n_tail_pieces_ += params.tail != nullptr ? params.tail->n : 0;
    if (!options_.emulate) {
      plain_decode(kernel, params, n_blocks);
      return;
    }
    const auto emulated =
        *attention::gpu::testing::attention_kernel(kernel.codec, kernel.dim, kernel.block_rows);
    run_kernel("decode", n_blocks, emulated.threads, emulated.shared_bytes,
               [&] { emulated.thread(params); });
  });
  return Status::ok();
}

Status FakeDriver::merge(uint32_t dim, const MergeParams& params, uint32_t n_merges,
                         Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kLaunch, "merge"));
  enqueue(stream, [this, dim, params, n_merges] {
    if (!options_.emulate) {
      plain_merge(dim, params, n_merges);
      return;
    }
    run_kernel(
        "merge", n_merges * params.rows, kMergeThreads, kMergeSharedBytes,
        [&params, dim] {
          visit_value_dim(dim, [&params]<class Tag>(Tag) { merge_thread<Tag::kDim>(params); });
        },
        true);
  });
  return Status::ok();
}

Status FakeDriver::append(CodecId stored, const AppendParams& params, uint32_t n_tokens,
                          Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kLaunch, "append"));
  enqueue(stream, [this, stored, params, n_tokens] {
    run_kernel("append", n_tokens, kAppendThreads, 0, [&params, stored] {
      visit_element(stored, [&params]<class Tag>(Tag) { append_thread<Tag::kElement>(params); });
    });
  });
  return Status::ok();
}

Status FakeDriver::read(CodecId stored, const ReadParams& params, uint32_t n_blocks,
                        Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kLaunch, "read"));
  enqueue(stream, [this, stored, params, n_blocks] {
    run_kernel(
        "read", n_blocks, kReadThreads, 0,
        [&params, stored] {
          visit_element(stored, [&params]<class Tag>(Tag) { read_thread<Tag::kElement>(params); });
        },
        false, Reach::kDeviceAndHost);
  });
  return Status::ok();
}

Status FakeDriver::merge_states(const StatesParams& params, uint32_t n_blocks, Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kLaunch, "merge_states"));
  enqueue(stream, [this, params, n_blocks] {
    run_kernel(
        "merge_states", n_blocks, kStatesThreads, 0, [&params] { merge_states_thread(params); },
        false, Reach::kDeviceAndHost);
  });
  return Status::ok();
}

Status FakeDriver::lengths(const LengthsParams& params, uint32_t n_threads, Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kLaunch, "lengths"));
  enqueue(stream, [this, params, n_threads] {
    run_kernel("lengths", static_cast<uint32_t>(div_up(n_threads, kLengthsThreads)),
               kLengthsThreads, 0, [&params] { lengths_thread(params); });
  });
  return Status::ok();
}

Status FakeDriver::scatter(const ScatterParams& params, Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kLaunch, "scatter"));
  enqueue(stream, [this, params] {
    run_kernel("scatter", params.n_runs, kScatterThreads, 0, [&params] { scatter_thread(params); });
  });
  return Status::ok();
}

Status FakeDriver::move(const MoveParams& params, Stream stream) {
  const std::lock_guard lock(mutex_);
  KVM_TRY(begin(Operation::kLaunch, "move"));
  enqueue(stream, [this, params] {
    if (!options_.emulate) {
      plain_move(params);
      return;
    }
    run_kernel("move", params.n_pages * kMoveBlocks, kMoveThreads, 0,
               [&params] { move_thread(params); });
  });
  return Status::ok();
}

// One piece of work of the decode kernel, row by row in fp64.
void FakeDriver::plain_decode(const DecodeKernel& kernel, const DecodeParams& p,
                              uint32_t n_blocks) {
  const uint32_t row_bytes =
      static_cast<uint32_t>(codecs::codec_of(kernel.codec).row_bytes(kernel.dim));
  const uint32_t dim_v = value_dim(kernel.dim);
  std::vector<double> o(dim_v), query(kernel.dim);
  for (uint32_t block = 0; block < n_blocks; ++block) {
    uint32_t piece = block;
    do {
      const attention::gpu::Work& work = p.work[piece];
      const Request& request = work.request;
      const PageClass& of = p.pool.classes[request.page_class];
      const uint32_t n_rows = request.n_query * p.tensors.group;
      for (uint32_t r = work.row_first; r < std::min(n_rows, work.row_first + kernel.block_rows);
           ++r) {
        const bool tree = request.tree_first != attention::gpu::kNoTree;
        const uint32_t visible =
            tree ? request.n_tokens : request.n_tokens - request.n_query + 1 + r / p.tensors.group;
        const uint32_t end = std::min(work.end, visible);
        const RowPlace at = row_place(request.q_token, work.kv_head, p.tensors.group, r);
        const uint8_t* q =
            static_cast<const uint8_t*>(p.tensors.q) +
            (at.token * p.tensors.q_stride_token + at.q_head * p.tensors.q_stride_head) * 2;
        for (uint32_t i = 0; i < kernel.dim; ++i) {
          query[i] = stored_value(q, i, codecs::codec_of_tensor(p.tensors.dtype_q), nullptr);
        }
        std::fill(o.begin(), o.end(), 0.0);
        double top = -INFINITY, sum = 0;
        const uint32_t own = query_list_token(request, r / p.tensors.group);
        for (uint32_t token = work.begin; token < end; ++token) {
          const uint32_t list = list_token(request, token);
          if (kernel.block_rows == attention::gpu::kPrefillRows &&
              !sees(p.sights[request.page_class], own, list)) {
            continue;
          }
          if (tree && token >= request.tree_first &&
              (p.tree_mask[at.token] >> (list - request.tree_list) & 1) == 0) {
            continue;
          }
          const uint32_t page = divide(p.pool.page_tokens, list);
          const uint32_t entry = p.page_table[request.table + page];
          const uint32_t in_page = list - page * p.pool.page_tokens.divisor;
          const uint8_t* k = page_row(p.pool, of, entry, in_page, row_bytes) +
                             uint64_t{work.head} * of.head_stride_bytes;
          const uint8_t* k_params = page_row(p.pool, of, entry, 0, 0) + of.scales_offset_bytes +
                                    (work.head * p.pool.page_tokens.divisor + in_page) *
                                        row_params_bytes(kernel.codec, kernel.dim);
          if (!is_device(k, row_bytes) || !is_device(k + of.v_offset_bytes, row_bytes)) {
            complain("decode: a page that is not mapped");
            return;
          }
          double logit = 0;
          for (uint32_t i = 0; i < kernel.dim; ++i) {
            logit += query[i] * stored_value(k, i, kernel.codec, k_params);
          }
          logit *= static_cast<double>(p.scale_log2) / static_cast<double>(kLog2E);
          if (p.softcap_log2 != 0) {
            const double cap = static_cast<double>(p.softcap_log2) / static_cast<double>(kLog2E);
            logit = cap * std::tanh(logit / cap);
          }
          if (request.log_weights >= 0) {
            logit += p.log_weights[request.log_weights +
                                   int64_t{work.kv_head} * request.log_weight_stride + list];
          }
          const double new_top = std::max(top, logit);
          const double factor = top == -INFINITY ? 0 : std::exp(top - new_top);
          const double weight = new_top == -INFINITY ? 0 : std::exp(logit - new_top);
          sum = sum * factor + weight;
          for (uint32_t i = 0; i < dim_v; ++i) {
            o[i] = o[i] * factor + weight * stored_value(k + of.v_offset_bytes, i, kernel.codec,
                                                         k_params + of.v_scales_offset_bytes);
          }
          top = new_top;
        }
        if (work.slot < 0) {
          add_sink(p.tensors, at.q_head, &top, &sum, &o);
        }
        for (double& channel : o) {
          channel = sum > 0 ? channel / sum : 0;
        }
        const double lse = sum > 0 ? top + std::log(sum) : -INFINITY;
        if (work.slot < 0) {
          store_row(p.tensors, at, o, lse);
        } else {
          const uint64_t slot_row =
              static_cast<uint64_t>(work.slot) * kernel.block_rows + (r - work.row_first);
          std::copy(o.begin(), o.end(), p.partial_o + slot_row * dim_v);
          p.partial_lse[slot_row] = static_cast<float>(lse);
        }
      }
      piece = work.next;
      if (piece == 0 && p.tail != nullptr && p.tail->n != 0) {
        // As the kernel counts.
        const uint32_t count = p.tail->n_asked++;
        piece = count < p.tail->n ? p.tail->first + count : 0;
        p.tail->n_asked %= p.tail->n + n_blocks;
      }
    } while (piece != 0);
  }
}

void FakeDriver::add_sink(const AttendTensors& tensors, int64_t q_head, double* top, double* sum,
                          std::vector<double>* o) {
  if (tensors.sink_logits == nullptr) {
    return;
  }
  const float* const logit = tensors.sink_logits + q_head;
  if (!is_device(logit, sizeof *logit)) {
    complain("a sink that is not in device memory");
    return;
  }
  if (*logit == -INFINITY) {
    return;
  }
  const double new_top = std::max<double>(*top, *logit);
  const double factor = std::exp(*top - new_top);
  *sum = *sum * factor + std::exp(*logit - new_top);
  for (double& channel : *o) {
    channel *= factor;
  }
  *top = new_top;
}

void FakeDriver::plain_move(const MoveParams& p) {
  for (uint32_t i = 0; i < p.n_pages; ++i) {
    uint8_t* const packed = p.packed + i * p.page_bytes;
    if (!is_device(packed, p.page_bytes) || !is_device(p.pages[i], p.page_bytes)) {
      complain("move: a page or a buffer that is not mapped");
      return;
    }
    std::memcpy(p.pack ? packed : p.pages[i], p.pack ? p.pages[i] : packed, p.page_bytes);
  }
}

void FakeDriver::plain_merge(uint32_t dim, const MergeParams& p, uint32_t n_merges) {
  std::vector<double> o(dim);
  for (uint32_t m = 0; m < (p.n_merges != nullptr ? *p.n_merges : n_merges); ++m) {
    const Merge& merge = p.merges[m];
    const uint32_t n_rows = merge.n_query * p.tensors.group;
    for (uint32_t row = 0; row < p.rows && merge.row_first + row < n_rows && row < p.block_rows;
         ++row) {
      std::fill(o.begin(), o.end(), 0.0);
      double top = -INFINITY, sum = 0;
      for (uint32_t pass = 0; pass < 2; ++pass) {
        for (uint32_t slot = 0; slot < merge.n_slots; ++slot) {
          const uint64_t at = uint64_t{merge.slot_first + slot} * p.block_rows + row;
          const double lse = p.partial_lse[at];
          if (pass == 0) {
            top = std::max(top, lse);
          } else if (lse != -INFINITY) {
            const double weight = std::exp(lse - top);
            sum += weight;
            for (uint32_t i = 0; i < dim; ++i) {
              o[i] += weight * p.partial_o[at * dim + i];
            }
          }
        }
      }
      const RowPlace at =
          row_place(merge.q_token, merge.kv_head, p.tensors.group, merge.row_first + row);
      add_sink(p.tensors, at.q_head, &top, &sum, &o);
      for (double& channel : o) {
        channel = sum > 0 ? channel / sum : 0;
      }
      store_row(p.tensors, at, o, sum > 0 ? top + std::log(sum) : -INFINITY);
    }
  }
}

}  // namespace kvm::device::testing
