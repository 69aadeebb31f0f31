// SPDX-License-Identifier: Apache-2.0
// Rows of host memory gathered by a kernel, by their size and by the blocks that gather (U5): what
// a sparse attention can fetch of keys and values that lie beside the CPU.
#include <algorithm>
#include <string>
#include <vector>

#include "base/splitmix.h"
#include "bench/gpu/device.h"
#include "bench/gpu/gather_kernel.h"
#include "bench/gpu/workload.h"

namespace kvm::bench::gpu {
namespace {

__global__ void __launch_bounds__(kGatherThreads)
    load_gather_kernel(const __grid_constant__ GatherParams params) {
  gather_thread(params);
}

// Rows go through shared memory by the bulk copy engine of an SM: one thread starts them all, and
// no register waits for them. A row is in the ring from its load to the end of its store. The ring
// fits into the shared memory of sm_120.
constexpr uint32_t kRingBytes = 64 << 10;
constexpr uint32_t kLeastRowBytes = 256;
constexpr uint32_t kBulkSharedBytes = kRingBytes + kRingBytes / kLeastRowBytes * 8;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr uint32_t kStores = 8;  // that may still read their slots

struct BulkRing {
  uint32_t data, barriers;  // addresses in the shared window
  uint32_t row_bytes, n_slots;

  __device__ uint32_t slot(uint32_t i) const { return data + i % n_slots * row_bytes; }
  __device__ uint32_t barrier(uint32_t i) const { return barriers + i % n_slots * 8; }
  __device__ void start() const {
    for (uint32_t i = 0; i < n_slots; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(barrier(i)) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  }
  __device__ void load(uint32_t i, const uint8_t* from) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier(i)),
                 "r"(row_bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];\n" ::"r"(slot(i)),
        "l"(__cvta_generic_to_global(from)), "r"(row_bytes), "r"(barrier(i))
        : "memory");
  }
  // A barrier's phases alternate with the rounds of the ring.
  __device__ void wait(uint32_t i) const {
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}\n"
          : "=r"(done)
          : "r"(barrier(i)), "r"(i / n_slots % 2)
          : "memory");
    }
  }
  // Returns when all but the newest kStores stores have read their slots.
  __device__ void store(uint32_t i, uint8_t* to) const {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(slot(i)), "r"(row_bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kStores) : "memory");
  }
};
#endif

__global__ void __launch_bounds__(32) bulk_gather_kernel(const __grid_constant__ GatherParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char ring_memory[];
  if (blockIdx.x >= p.n_rows) {
    return;
  }
  const auto data = static_cast<uint32_t>(__cvta_generic_to_shared(ring_memory));
  const BulkRing ring{data, data + kRingBytes, p.row_bytes, kRingBytes / p.row_bytes};
  const uint32_t lane = threadIdx.x;
  if (lane == 0) {
    ring.start();
  }
  // Row i of this block is row block + i * blocks of the list. Lanes fetch 32 places of the table
  // at a time, two rounds ahead; the first lane does the rest.
  const uint32_t n = (p.n_rows - blockIdx.x + p.n_blocks - 1) / p.n_blocks;
  const auto listed = [&](uint32_t i) { return uint64_t{blockIdx.x} + uint64_t{i} * p.n_blocks; };
  const auto place = [&](uint32_t i) { return i < n ? p.rows[listed(i)] : 0; };
  uint32_t now = 0, next = place(lane), after = place(32 + lane);
  // Loads run so far ahead of stores that the row whose slot is taken was stored kStores ago.
  const uint32_t ahead = ring.n_slots - kStores;
  for (uint32_t i = 0; i < n + ahead; ++i) {
    if (i % 32 == 0) {
      now = next;
      next = after;
      after = place(i + 64 + lane);
    }
    const uint32_t at = __shfl_sync(~0u, now, i % 32);
    if (lane == 0) {
      if (i >= ahead) {
        ring.wait(i - ahead);
        ring.store(i - ahead, p.out + listed(i - ahead) * p.row_bytes);
      }
      if (i < n) {
        ring.load(i, p.table + uint64_t{at} * p.row_bytes);
      }
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
#else
  (void)p;
#endif
}

void launch_gather(bool bulk, const GatherParams& params, cudaStream_t stream) {
  if (bulk) {
    bulk_gather_kernel<<<params.n_blocks, 32, kBulkSharedBytes, stream>>>(params);
  } else {
    load_gather_kernel<<<params.n_blocks, kGatherThreads, 0, stream>>>(params);
  }
  check(cudaGetLastError(), "gather kernel");
}

// Page-locked host memory that the device reads in place.
class HostTable {
 public:
  explicit HostTable(size_t size) : size_(size) {
    check(cudaHostAlloc(&data_, size, cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc");
    auto* words = static_cast<uint64_t*>(data_);
    for (size_t i = 0; i < size / 8; ++i) {
      words[i] = splitmix64(i);
    }
  }
  HostTable(const HostTable&) = delete;
  HostTable& operator=(const HostTable&) = delete;
  ~HostTable() { cudaFreeHost(data_); }
  const uint8_t* data() const { return static_cast<const uint8_t*>(data_); }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_;
};

struct Gather {
  const HostTable* table;
  DeviceBuffer rows, out;
  std::vector<uint32_t> list;
  uint32_t row_bytes;

  Gather(const HostTable& of, size_t total, uint32_t bytes)
      : table(&of), out(total), list(total / bytes), row_bytes(bytes) {
    const size_t n_table = of.size() / bytes;
    for (size_t i = 0; i < list.size(); ++i) {
      list[i] = static_cast<uint32_t>(splitmix64(~i) % n_table);
    }
    rows = upload(std::span<const uint32_t>(list));
  }
  GatherParams params(uint32_t n_blocks) const {
    return {table->data(), reinterpret_cast<const uint32_t*>(rows.data()),
            out.data(),    static_cast<uint32_t>(list.size()),
            row_bytes,     n_blocks};
  }
  uint64_t wrong_rows() const {
    std::vector<uint8_t> host(out.size());
    check(cudaMemcpy(host.data(), out.data(), out.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    uint64_t wrong = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      wrong += std::equal(host.begin() + i * row_bytes, host.begin() + (i + 1) * row_bytes,
                          table->data() + size_t{list[i]} * row_bytes)
                   ? 0
                   : 1;
    }
    return wrong;
  }
};

double link_gbs(const HostTable& table, const DeviceBuffer& device, const Args& args) {
  const size_t size = std::min(table.size(), device.size());
  const double us = time_us(
      [&](uint32_t, cudaStream_t stream) {
        check(cudaMemcpyAsync(device.data(), table.data(), size, cudaMemcpyHostToDevice, stream),
              "cudaMemcpyAsync");
      },
      2, args.quick ? 3 : 7);
  return static_cast<double>(size) / us / 1e3;
}

}  // namespace

int run_gather(const Args& args) {
  check(attention::gpu::attend_init(), "attend_init");
  check(cudaFuncSetAttribute(bulk_gather_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kBulkSharedBytes),
        "cudaFuncSetAttribute");
  const size_t total = args.quick ? 16 << 20 : 64 << 20;
  const HostTable table(args.quick ? size_t{256} << 20 : size_t{1} << 30);
  const bool has_bulk = device_facts().major >= 9;
  const int missed = bars_missed();
  double ceiling = 0;
  for (const uint32_t row_bytes : {kLeastRowBytes, 512u, 1024u, 4096u}) {
    Gather gather(table, total, row_bytes);
    if (ceiling == 0) {
      ceiling = link_gbs(table, gather.out, args);
      print_figure("U5", "link: one copy of " + std::to_string(total >> 20) + " MiB to the device",
                   "GB/s", ceiling);
    }
    for (const bool bulk : {false, true}) {
      if (bulk && !has_bulk) {
        continue;
      }
      double best_of_four = 0;
      for (const uint32_t n_blocks : {1u, 2u, 4u, 8u, 16u, 64u}) {
        const GatherParams params = gather.params(n_blocks);
        check(cudaMemset(gather.out.data(), 0, gather.out.size()), "cudaMemset");
        const double us =
            time_us([&](uint32_t, cudaStream_t stream) { launch_gather(bulk, params, stream); }, 2,
                    args.quick ? 3 : 7);
        const double gbs = static_cast<double>(total) / us / 1e3;
        const std::string name = std::to_string(row_bytes) + " B rows, " +
                                 (bulk ? "bulk copies, " : "loads, ") + std::to_string(n_blocks) +
                                 " blocks";
        print_figure("U5", "gather of " + name, "GB/s", gbs);
        print_bar(
            {"gather", name, "wrong rows", static_cast<double>(gather.wrong_rows()), 0, 0, false});
        best_of_four = n_blocks <= 4 ? std::max(best_of_four, gbs) : best_of_four;
      }
      if (bulk == has_bulk && (row_bytes == 512 || row_bytes == 4096)) {
        const double share = row_bytes == 512 ? 0.75 : 0.90;
        print_bar({"gather by at most 4 blocks", std::to_string(row_bytes) + " B rows", "GB/s",
                   best_of_four, ceiling, share * ceiling, true});
      }
    }
  }

  // Attention while rows are gathered.
  const DeviceBuffer memory(std::min<size_t>(size_t{3} << 30, device_facts().free_bytes / 2));
  fill_random(memory.data(), memory.size(), nullptr);
  WorkloadSpec spec;
  spec.lengths = {131072};
  const Workload workload(spec, memory);
  const double alone = workload.measure_us(args, 200);
  Gather gather(table, total, 512);
  const Stream beside;
  check(cudaDeviceSynchronize(), "synchronize");
  for (int i = 0; i < 200; ++i) {
    launch_gather(has_bulk, gather.params(4), beside.get());
  }
  const double together =
      time_us([&](uint32_t i, cudaStream_t stream) { workload.launch(i, stream); }, 20, 10);
  const bool ended = cudaStreamQuery(beside.get()) == cudaSuccess;
  beside.wait();
  print_figure("U5",
               "decode, 4 blocks gathering beside it" + std::string(ended ? " (ended early)" : ""),
               "times the time alone", together / alone);
  return bars_missed() == missed ? 0 : 1;
}

}  // namespace kvm::bench::gpu
