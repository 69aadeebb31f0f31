// SPDX-License-Identifier: Apache-2.0
// A device of plain memory, for tests of device/ where there is no GPU.
//
// It is worse than a GPU on purpose. Enqueued work happens as late as somebody's wait demands, or,
// where `eagerness` says so, earlier at random, any stream first. Memory has no meaningful contents
// until it is written, and none after it is unmapped. What work touches is checked when it happens:
// device memory must be mapped, host memory registered. Kernels run in the emulator; with
// emulate = false, decode and merge kernels as plain loops in fp64 and moves as copies, for sizes
// that the emulator would take too long for.
//
// Misuse (memory that is not there, a wait without end, faults of the emulator) does not fail calls
// but is kept in complaints(), which a test asks for at its end.
//
// Memory that is shared and words that are awaited work between several fake devices, in one
// process or in several: together they are one device. What a stream waits for may then come from
// outside; a device whose work others wait for has to do it without being asked (runs_by_itself).
//
// The default stream (null) is a stream like others.  Threads: any; one after the other.
#ifndef KVM_TESTS_GPU_FAKE_DRIVER_H_
#define KVM_TESTS_GPU_FAKE_DRIVER_H_

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/codec_id.h"
#include "device/driver.h"

namespace kvm::device::testing {

// What can be made to fail.
enum class Operation : uint8_t {
  kReserve,
  kMap,
  kAllocate,
  kRegister,
  kStream,
  kEvent,
  kRecord,
  kWait,
  kSynchronize,
  kCopy,
  kLaunch,
  kQuery,
  kWord,
  kCount
};

class FakeDriver;

struct FakeOptions {
  uint64_t seed = 1;
  uint8_t number = 0;  // the device: what its uuid ends with
  uint64_t memory_bytes = uint64_t{1} << 30;
  uint64_t granularity_bytes = uint64_t{64} << 10;
  uint32_t blocks = 4;     // of a decode kernel, at once
  uint32_t eagerness = 0;  // one of so many calls lets some work happen; 0: none does
  bool emulate = true;
  bool runs_by_itself = false;    // a thread lets work happen, some at a time
  bool moves_in_a_thread = true;  // as in DriverFacts
  std::vector<std::pair<Operation, uint64_t>> fail_first;  // as by fail(), from the start
  std::function<void(const FakeDriver&)> at_end;           // called by the destructor
};

class FakeDriver final : public Driver {
 public:
  explicit FakeDriver(const FakeOptions& options = {});
  ~FakeDriver() override;
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  // The nth call of this operation from now on (1: the next) fails; 0: none.
  void fail(Operation operation, uint64_t nth) {
    const std::lock_guard lock(mutex_);
    fail_at_[static_cast<size_t>(operation)] = nth == 0 ? 0 : counts(operation) + nth;
  }
  uint64_t counts(Operation operation) const {
    const std::lock_guard lock(mutex_);
    return counts_[static_cast<size_t>(operation)];
  }
  // Of calls that this thread has made, whatever the operation.
  static uint64_t calls_of_this_thread();
  uint64_t copied_bytes() const { return copied_bytes_; }
  // Of copies between host and device.
  uint64_t shortest_transfer() const { return shortest_transfer_; }
  // Of tails of decode launches that have happened, all together.
  uint64_t n_tail_pieces() const { return n_tail_pieces_; }
  // The most that was ever enqueued and not done on a stream that there is, but on this one.
  uint64_t deepest_but(Stream stream) const;

  // Until end_capture, work that is enqueued on the stream goes into a graph.
  using Graph = std::vector<std::function<void()>>;
  void begin_capture(Stream stream);
  Graph end_capture(Stream stream);
  void replay(const Graph& graph, Stream stream);

  std::string complaints() const { return complaints_; }
  // What has been made and not been given back, as a sentence; "" when nothing.
  std::string leftovers() const;
  uint64_t mapped_bytes() const { return mapped_bytes_; }
  // Lets everything happen that is enqueued.
  void settle();

  const DriverFacts& facts() const override { return facts_; }
  Result<uint8_t*> reserve(uint64_t size_bytes) override;
  void release(uint8_t* range, uint64_t size_bytes) override;
  Status map(uint8_t* at, uint64_t size_bytes) override;
  Result<ipc::Fd> map_shared(uint8_t* at, uint64_t size_bytes) override;
  Status map_from(uint8_t* at, uint64_t size_bytes, const ipc::Fd& memory) override;
  void unmap(uint8_t* at, uint64_t size_bytes) override;
  Result<uint8_t*> allocate(uint64_t size_bytes) override;
  void free(uint8_t* memory) override;
  Status register_host(void* memory, uint64_t size_bytes) override;
  void unregister_host(void* memory) override;
  Result<Stream> create_stream() override;
  void destroy_stream(Stream stream) override;
  Result<Event> create_event() override;
  void destroy_event(Event event) override;
  Status record(Event event, Stream stream) override;
  Status wait(Stream stream, Event event) override;
  Result<bool> is_done(Event event) override;
  Status synchronize(Event event) override;
  Status synchronize_stream(Stream stream) override;
  Status synchronize_device() override;
  Result<bool> is_capturing(Stream stream) override;
  Status copy(void* to, const void* from, uint64_t size_bytes, Stream stream) override;
  Status write_word(uint64_t* word, uint64_t value, Stream stream) override;
  Status wait_word(const uint64_t* word, uint64_t value, Stream stream) override;
  Result<uint32_t> decode_blocks(const attention::gpu::DecodeKernel& kernel) override;
  Status decode(const attention::gpu::DecodeKernel& kernel,
                const attention::gpu::DecodeParams& params, uint32_t n_blocks,
                Stream stream) override;
  Status merge(uint32_t dim, const attention::gpu::MergeParams& params, uint32_t n_merges,
               Stream stream) override;
  Status append(CodecId stored, const attention::gpu::AppendParams& params, uint32_t n_tokens,
                Stream stream) override;
  Status read(CodecId stored, const attention::gpu::ReadParams& params, uint32_t n_blocks,
              Stream stream) override;
  Status merge_states(const attention::gpu::StatesParams& params, uint32_t n_blocks,
                      Stream stream) override;
  Status lengths(const attention::gpu::LengthsParams& params, uint32_t n_threads,
                 Stream stream) override;
  Status scatter(const attention::gpu::ScatterParams& params, Stream stream) override;
  Status move(const attention::gpu::MoveParams& params, Stream stream) override;

 private:
  struct Marker {  // an event, as recorded once
    bool happened = true;
  };
  struct Work {
    std::function<void()> run;
    std::shared_ptr<Marker> waits_for;
    const uint64_t* word = nullptr;  // or this one
    uint64_t value = 0;
  };
  struct Queue {
    std::deque<Work> work;
    size_t deepest = 0;
    bool captured = false;
    Graph graph;
  };

  // Counts a call, and fails it where a test has asked for that.
  Status begin(Operation operation, const char* name);
  void enqueue(Stream stream, std::function<void()> run);
  Queue& queue(Stream stream);
  bool is_ready(const Queue& queue) const;
  // Does the first work of some stream that can go on, chosen at random. False: none can.
  bool progress();
  // Progress, or time for others to write a word that a stream waits for. False: nothing waits but
  // for what never comes. REQUIRES: `lock` is the only one on mutex_.
  bool advance(std::unique_lock<std::recursive_mutex>* lock);
  Status check_free_range(const char* name, uint8_t* at, uint64_t size_bytes);
  // Puts a file's memory there. Fails: DEVICE.
  Status map_file(const char* name, uint8_t* at, uint64_t size_bytes, int fd);
  void run_by_itself();
  void complain(const std::string& what);
  bool is_device(const void* at, uint64_t size_bytes) const;
  bool is_host(const void* at, uint64_t size_bytes) const;
  // What kernels may touch.
  enum class Reach { kDevice, kDeviceAndHost };
  // begins_early: it may, and has to wait for the kernel before.
  void run_kernel(const char* name, uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
                  const std::function<void()>& kernel, bool begins_early = false,
                  Reach reach = Reach::kDevice);
  void plain_decode(const attention::gpu::DecodeKernel& kernel,
                    const attention::gpu::DecodeParams& p, uint32_t n_blocks);
  // Counts the sink of a row, whose sums are relative to e^*top.
  void add_sink(const attention::gpu::AttendTensors& tensors, int64_t q_head, double* top,
                double* sum, std::vector<double>* o);
  void plain_move(const attention::gpu::MoveParams& p);
  void plain_merge(uint32_t dim, const attention::gpu::MergeParams& p, uint32_t n_merges);
  uint64_t random();

  mutable std::recursive_mutex mutex_;  // held while work happens, too
  FakeOptions options_;
  DriverFacts facts_;
  uint64_t state_;
  uint64_t counts_[static_cast<size_t>(Operation::kCount)] = {};
  uint64_t fail_at_[static_cast<size_t>(Operation::kCount)] = {};
  std::map<uint8_t*, uint64_t> reserved_;
  std::map<uint8_t*, uint64_t> live_;  // device memory: mapped ranges and allocations
  std::map<uint8_t*, uint64_t> allocated_;
  std::map<uint8_t*, uint64_t> registered_;
  std::map<Stream, std::unique_ptr<Queue>> queues_;
  std::map<Event, std::shared_ptr<Marker>> events_;
  uint64_t mapped_bytes_ = 0;
  uint64_t copied_bytes_ = 0;
  uint64_t shortest_transfer_ = UINT64_MAX;
  uint64_t n_tail_pieces_ = 0;
  uint64_t last_handle_ = 0;
  std::string complaints_;
  std::atomic<bool> is_ending_{false};
  std::thread thread_;
};

}  // namespace kvm::device::testing

#endif  // KVM_TESTS_GPU_FAKE_DRIVER_H_
