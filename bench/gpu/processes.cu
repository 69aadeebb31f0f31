// SPDX-License-Identifier: Apache-2.0
// Two processes on one GPU: what a service that owns the memory and an engine that computes can
// expect of each other (U6 to U9).
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "bench/gpu/child.h"
#include "bench/gpu/device.h"
#include "bench/gpu/workload.h"
#include "device/cuda_memory.h"

namespace kvm::bench::gpu {
namespace {

constexpr size_t kSegmentBytes = 64 << 20;
constexpr uint8_t kPattern = 0xa5;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The driver's functions, looked up: nothing links libcuda.
template <class Function>
Function driver(const char* name) {
  Function found = nullptr;
  if (const Status status = device::cuda::look_up(name, &found); !status.is_ok()) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    std::exit(2);
  }
  return found;
}
#define KVM_DRIVER(name) driver<decltype(&name)>(#name)

bool ok(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) {
    std::fprintf(stderr, "%s: driver error %d\n", what, static_cast<int>(result));
  }
  return result == CUDA_SUCCESS;
}

bool all_pattern(const std::vector<uint8_t>& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == kPattern; });
}

// Device memory with an address range of its own, shareable by file descriptor.
class Segment {
 public:
  // Creates it. REQUIRES: a context, here and below.
  static Segment create() {
    check(cudaFree(nullptr), "context");
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    Segment segment;
    segment.good_ = ok(KVM_DRIVER(cuMemCreate)(&segment.handle_, kSegmentBytes, &properties, 0),
                       "cuMemCreate") &&
                    segment.map(device);
    return segment;
  }
  static Segment import(int fd) {
    check(cudaFree(nullptr), "context");
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    Segment segment;
    segment.good_ = ok(KVM_DRIVER(cuMemImportFromShareableHandle)(
                           &segment.handle_, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                       "cuMemImportFromShareableHandle") &&
                    segment.map(device);
    return segment;
  }

  bool good() const { return good_; }
  // Left to the driver at the end of the process: what is measured is what that leaves.
  int export_fd() const {
    int fd = -1;
    ok(KVM_DRIVER(cuMemExportToShareableHandle)(&fd, handle_,
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
       "cuMemExportToShareableHandle");
    return fd;
  }
  void fill() const {
    check(cudaMemset(reinterpret_cast<void*>(address_), kPattern, kSegmentBytes), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaMemset");
  }
  bool holds_pattern() const {
    std::vector<uint8_t> host(kSegmentBytes);
    check(cudaMemcpy(host.data(), reinterpret_cast<void*>(address_), kSegmentBytes,
                     cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    return all_pattern(host);
  }

 private:
  bool map(int device) {
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return ok(KVM_DRIVER(cuMemAddressReserve)(&address_, kSegmentBytes, 0, 0, 0),
              "cuMemAddressReserve") &&
           ok(KVM_DRIVER(cuMemMap)(address_, kSegmentBytes, 0, handle_, 0), "cuMemMap") &&
           ok(KVM_DRIVER(cuMemSetAccess)(address_, kSegmentBytes, &access, 1), "cuMemSetAccess");
  }

  CUmemGenericAllocationHandle handle_{};
  CUdeviceptr address_{};
  bool good_ = false;
};

void print_outcome(const std::string& probe, const std::string& name, bool good) {
  print_fact(probe, name, good ? "works" : "FAILS");
}

// U7: memory by file descriptor, and the death of either side.
void shared_segments() {
  const Segment mine = Segment::create();
  print_outcome("U7", "create and map 64 MiB that can be exported", mine.good());
  if (!mine.good()) {
    return;
  }
  mine.fill();
  const int fd = mine.export_fd();
  {
    Child importer("importer");
    importer.link().send(0, fd);
    const auto answer = importer.link().receive();
    print_outcome("U7", "another process imports it and reads what was written",
                  answer && answer->value > 0);
    if (answer) {
      print_figure("U7", "import and map 64 MiB", "us", answer->value * 1e6);
    }
    importer.kill_now();
  }
  mine.fill();
  print_outcome("U7", "importer killed: the owner's memory", mine.holds_pattern());
  ::close(fd);

  Child creator("creator");
  const auto made = creator.link().receive();
  if (!made || made->fd < 0) {
    print_outcome("U7", "memory made by another process", false);
    return;
  }
  const Segment imported = Segment::import(made->fd);
  creator.kill_now();
  print_outcome("U7", "owner killed: memory that was imported before",
                imported.good() && imported.holds_pattern());
  ::close(made->fd);

  Child second("creator");
  const auto kept = second.link().receive();
  second.kill_now();
  if (kept && kept->fd >= 0) {
    const Segment late = Segment::import(kept->fd);
    print_outcome("U7", "owner killed: a file descriptor alone keeps the memory",
                  late.good() && late.holds_pattern());
    ::close(kept->fd);
  }
}

int import_role(const Link& link) {
  check(cudaFree(nullptr), "context");
  const auto message = link.receive();
  if (!message || message->fd < 0) {
    return 2;
  }
  const double begin = seconds_now();
  const Segment segment = Segment::import(message->fd);
  const double seconds = seconds_now() - begin;
  link.send(segment.good() && segment.holds_pattern() ? seconds : -1);
  (void)link.receive();  // until it is killed
  return 0;
}

int create_role(const Link& link) {
  const Segment segment = Segment::create();
  if (segment.good()) {
    segment.fill();
    link.send(0, segment.export_fd());
  }
  (void)link.receive();
  return 0;
}

// Memory by the runtime's handle of 64 bytes, which goes to the other process in a memfd.
int send_handle(const Link& link, const void* memory) {
  cudaIpcMemHandle_t handle{};
  if (cudaIpcGetMemHandle(&handle, const_cast<void*>(memory)) != cudaSuccess) {
    (void)cudaGetLastError();
    return -1;
  }
  const int fd = ::memfd_create("kvm_gpu_check", 0);
  const bool sent =
      fd >= 0 && ::pwrite(fd, &handle, sizeof handle, 0) == static_cast<ssize_t>(sizeof handle) &&
      link.send(0, fd);
  ::close(fd);
  return sent ? 0 : -1;
}

// U7: the same by cudaIpc, the way where descriptors are refused.
void legacy_handles() {
  // Two neighbours: a handle of the second opens whatever allocation they lie in.
  const DeviceBuffer neighbour(64 << 10), small(64 << 10), mine(kSegmentBytes);
  check(cudaMemset(mine.data(), kPattern, mine.size()), "cudaMemset");
  check(cudaMemset(small.data(), kPattern, small.size()), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaMemset");
  {
    Child importer("opener");
    const bool sent = send_handle(importer.link(), mine.data()) == 0;
    const auto seconds = sent ? importer.link().receive() : std::nullopt;
    print_outcome("U7", "cudaIpc: another process opens 64 MiB and reads what was written",
                  seconds && seconds->value > 0);
    if (seconds) {
      print_figure("U7", "cudaIpc: open 64 MiB", "us", seconds->value * 1e6);
      importer.kill_now();
      std::vector<uint8_t> host(mine.size());
      check(cudaMemcpy(host.data(), mine.data(), mine.size(), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
      print_outcome("U7", "cudaIpc: importer killed: the owner's memory", all_pattern(host));
    }
  }
  {
    Child importer("opener");
    const bool sent = send_handle(importer.link(), small.data()) == 0;
    const auto seconds = sent ? importer.link().receive() : std::nullopt;
    const auto exposed = seconds ? importer.link().receive() : std::nullopt;
    if (exposed) {
      print_figure("U7", "cudaIpc: what a handle of 64 KiB lets the other process reach", "KiB",
                   exposed->value / 1024);
    }
  }
  // The documentation does not say what is left when the owner dies. A third process looks, for a
  // fault would be the end of it.
  Child owner("owner"), importer("opener");
  const auto made = owner.link().receive();
  const bool sent = made && made->fd >= 0 && importer.link().send(0, made->fd);
  const auto opened = sent ? importer.link().receive() : std::nullopt;
  const auto exposed = opened ? importer.link().receive() : std::nullopt;
  owner.kill_now();
  const bool asked = exposed && importer.link().send(0);
  const auto left = asked ? importer.link().receive() : std::nullopt;
  print_outcome("U7", "cudaIpc: owner killed: memory that was opened before",
                left && left->value > 0);
  if (made && made->fd >= 0) {
    ::close(made->fd);
  }
}

// Seconds of opening, negative where it or the contents are not right; how many bytes can be
// reached; and, when asked again, whether the contents are still there.
int open_role(const Link& link) {
  check(cudaFree(nullptr), "context");
  const auto message = link.receive();
  cudaIpcMemHandle_t handle{};
  if (!message || message->fd < 0 ||
      ::pread(message->fd, &handle, sizeof handle, 0) != static_cast<ssize_t>(sizeof handle)) {
    return 2;
  }
  void* memory = nullptr;
  const double begin = seconds_now();
  const cudaError_t opened = cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess);
  const double seconds = seconds_now() - begin;
  if (opened != cudaSuccess) {
    std::fprintf(stderr, "cudaIpcOpenMemHandle: %s\n", cudaGetErrorString(opened));
    link.send(-1);
    return 2;
  }
  CUdeviceptr base{};
  size_t reachable = 0;
  ok(KVM_DRIVER(cuMemGetAddressRange)(&base, &reachable, reinterpret_cast<CUdeviceptr>(memory)),
     "cuMemGetAddressRange");
  const auto holds = [&] {
    std::vector<uint8_t> host(std::min<size_t>(64 << 10, reachable));
    check(cudaMemcpy(host.data(), memory, host.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return all_pattern(host);
  };
  link.send(holds() ? seconds : -1);
  link.send(static_cast<double>(reachable));
  if (link.receive()) {
    link.send(holds() ? 1 : -1);
  }
  (void)link.receive();  // until it is killed
  return 0;
}

int own_role(const Link& link) {
  const DeviceBuffer memory(kSegmentBytes);
  check(cudaMemset(memory.data(), kPattern, memory.size()), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaMemset");
  if (send_handle(link, memory.data()) != 0) {
    return 2;
  }
  (void)link.receive();
  return 0;
}

// Registers a memfd and copies from it. Seconds for registering; GB/s through *gbs.
double register_seconds(int fd, size_t size, double* gbs) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    return -1;
  }
  check(cudaFree(nullptr), "context");
  const double begin = seconds_now();
  if (cudaHostRegister(memory, size, cudaHostRegisterDefault) != cudaSuccess) {
    (void)cudaGetLastError();
    return -1;
  }
  const double seconds = seconds_now() - begin;
  const DeviceBuffer device(size);
  const double copy = seconds_now();
  check(cudaMemcpy(device.data(), memory, size, cudaMemcpyHostToDevice), "cudaMemcpy");
  *gbs = static_cast<double>(size) / 1e9 / (seconds_now() - copy);
  return seconds;
}

// U8: shared memory registered by two processes.
void registered_memory() {
  constexpr size_t kSize = size_t{1} << 30;
  for (const bool huge : {false, true}) {
    const std::string kind = huge ? "huge pages" : "4-KiB pages";
    const int fd = ::memfd_create("kvm_gpu_check", huge ? MFD_HUGETLB : 0);
    if (fd < 0 || ::ftruncate(fd, kSize) != 0) {
      print_outcome("U8", "memfd of 1 GiB with " + kind, false);
      continue;
    }
    double gbs = 0;
    const double seconds = register_seconds(fd, kSize, &gbs);
    print_outcome("U8", "registering 1 GiB of a memfd with " + kind, seconds >= 0);
    if (seconds >= 0) {
      print_figure("U8", "first registration, " + kind, "ms per GiB", seconds * 1e3);
      print_figure("U8", "copy to the device, " + kind, "GB/s", gbs);
      Child other("registrar");
      other.link().send(static_cast<double>(kSize), fd);
      const auto answer = other.link().receive();
      print_outcome("U8", "the same memory in a second process, " + kind,
                    answer && answer->value >= 0);
      if (answer && answer->value >= 0) {
        print_figure("U8", "second registration, " + kind, "ms per GiB", answer->value * 1e3);
      }
    }
    ::close(fd);
  }
}

int register_role(const Link& link) {
  const auto message = link.receive();
  if (!message || message->fd < 0) {
    return 2;
  }
  double gbs = 0;
  link.send(register_seconds(message->fd, static_cast<size_t>(message->value), &gbs));
  return 0;
}

// Answers flag values first, first + 1, ... Gives up after five seconds of silence.
__global__ void answer_kernel(volatile uint32_t* asked, volatile uint32_t* answered, uint32_t first,
                              uint32_t n) {
  for (uint32_t i = first; i < first + n; ++i) {
    const long long begin = clock64();
    while (*asked != i) {
      if (clock64() - begin > 10'000'000'000ll) {
        return;
      }
    }
    *answered = i;
    __threadfence_system();
  }
}

// SYNC: the words are the only data; the other side's volatile accesses see them in some order.
bool ask(std::atomic<uint32_t>* asked, std::atomic<uint32_t>* answered, uint32_t value,
         std::vector<double>* us) {
  const double begin = seconds_now();
  asked->store(value, std::memory_order_release);
  while (answered->load(std::memory_order_acquire) != value) {
    if (seconds_now() - begin > 5) {
      return false;
    }
  }
  us->push_back((seconds_now() - begin) * 1e6);
  return true;
}

// U9: how long a flag takes from the CPU to the GPU and back.
void flags() {
  constexpr uint32_t kRounds = 2000;
  void* memory = nullptr;
  check(cudaMallocHost(&memory, 4096), "cudaMallocHost");
  std::fill_n(static_cast<uint8_t*>(memory), 4096, uint8_t{0});
  auto* asked = static_cast<std::atomic<uint32_t>*>(memory);
  auto* answered = reinterpret_cast<std::atomic<uint32_t>*>(static_cast<uint8_t*>(memory) + 128);
  const Stream stream;

  std::vector<double> us;
  answer_kernel<<<1, 1, 0, stream.get()>>>(static_cast<uint32_t*>(memory),
                                           static_cast<uint32_t*>(memory) + 32, 1, kRounds);
  bool good = true;
  for (uint32_t i = 1; i <= kRounds && good; ++i) {
    good = ask(asked, answered, i, &us);
  }
  stream.wait();
  print_outcome("U9", "flags answered by a kernel that spins", good);
  print_figure("U9", "round trip, kernel that spins, p50", "us", quantile(us, 0.5));
  print_figure("U9", "round trip, kernel that spins, p99", "us", quantile(us, 0.99));

  us.clear();
  asked->store(0);
  answered->store(0);
  const auto wait_value = KVM_DRIVER(cuStreamWaitValue32);
  const auto write_value = KVM_DRIVER(cuStreamWriteValue32);
  const auto at = reinterpret_cast<CUdeviceptr>(memory);
  constexpr uint32_t kWaits = 200;
  for (uint32_t i = 1; i <= kWaits && good; ++i) {
    good = ok(wait_value(stream.get(), at, i, CU_STREAM_WAIT_VALUE_EQ), "cuStreamWaitValue32") &&
           ok(write_value(stream.get(), at + 128, i, 0), "cuStreamWriteValue32");
  }
  for (uint32_t i = 1; i <= kWaits && good; ++i) {
    good = ask(asked, answered, i, &us);
  }
  print_outcome("U9", "flags answered by the stream", good);
  if (good) {
    stream.wait();
    print_figure("U9", "round trip, wait and write by the stream, p50", "us", quantile(us, 0.5));
    print_figure("U9", "round trip, wait and write by the stream, p99", "us", quantile(us, 0.99));
    cudaFreeHost(memory);
  }
}

__global__ void tiny_kernel(uint32_t* out) { *out = blockIdx.x; }

// U6: without MPS, what one process's copies and kernels cost the other's kernels.
void time_slices() {
  Child engine("engine");
  const auto ready = engine.link().receive();
  if (!ready) {
    print_outcome("U6", "a second process that decodes", false);
    return;
  }
  const auto measure = [&](const std::function<void()>& beside) {
    engine.link().send(1);
    while (!engine.link().ready()) {
      beside();
    }
    const auto answer = engine.link().receive();
    return answer ? answer->value : 0.0;
  };
  const double alone = measure([] { ::usleep(1000); });
  print_figure("U6", "decode of 128 Ki tokens, other process idle", "us", alone);

  constexpr size_t kTotal = 64 << 20;
  const DeviceBuffer device(kTotal);
  void* host = nullptr;
  check(cudaMallocHost(&host, kTotal), "cudaMallocHost");
  const Stream stream;
  double copied = 0;
  const double begin = seconds_now();
  const double copies = measure([&] {
    check(cudaMemcpyAsync(device.data(), host, kTotal, cudaMemcpyHostToDevice, stream.get()),
          "cudaMemcpyAsync");
    stream.wait();
    copied += kTotal;
  });
  print_figure("U6", "the same while the other process copies to the device", "times alone",
               copies / alone);
  print_figure("U6", "these copies", "GB/s", copied / 1e9 / (seconds_now() - begin));

  std::vector<double> us;
  const double kernels = measure([&] {
    const double launch = seconds_now();
    tiny_kernel<<<1, 32, 0, stream.get()>>>(reinterpret_cast<uint32_t*>(device.data()));
    stream.wait();
    us.push_back((seconds_now() - launch) * 1e6);
  });
  print_figure("U6", "the same while the other process launches small kernels", "times alone",
               kernels / alone);
  print_figure("U6", "these kernels, p50", "us", quantile(us, 0.5));
  print_figure("U6", "these kernels, p99", "us", quantile(us, 0.99));
  cudaFreeHost(host);
}

// Decodes for half a second each time it is asked, and says how long one took.
int engine_role(const Link& link) {
  check(attention::gpu::attend_init(), "attend_init");
  const DeviceBuffer memory(size_t{2} << 30);
  fill_random(memory.data(), memory.size(), nullptr);
  WorkloadSpec spec;
  spec.lengths = {131072};
  const Workload workload(spec, memory);
  link.send(0);
  while (link.receive()) {
    std::vector<double> times;
    const double begin = seconds_now();
    while (seconds_now() - begin < 0.5) {
      times.push_back(
          time_us([&](uint32_t i, cudaStream_t stream) { workload.launch(i, stream); }, 20, 5));
    }
    link.send(median(std::move(times)));
  }
  return 0;
}

}  // namespace

int run_ipc(const Args& args) {
  (void)args;
  time_slices();
  shared_segments();
  legacy_handles();
  registered_memory();
  flags();
  return 0;
}

int run_child(const Args& args) {
  int fd = -1;
  if (args.rest.size() != 1 ||
      std::from_chars(args.rest[0].data(), args.rest[0].data() + args.rest[0].size(), fd).ec !=
          std::errc{} ||
      fd < 0) {
    return 2;
  }
  const Link link(fd);
  return args.role == "engine"      ? engine_role(link)
         : args.role == "importer"  ? import_role(link)
         : args.role == "creator"   ? create_role(link)
         : args.role == "opener"    ? open_role(link)
         : args.role == "owner"     ? own_role(link)
         : args.role == "registrar" ? register_role(link)
         : args.role == "keeper"    ? keep_books(link)
                                    : 2;
}

}  // namespace kvm::bench::gpu
