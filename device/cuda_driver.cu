// SPDX-License-Identifier: Apache-2.0
// The driver seam over the CUDA runtime: memory as in cuda_memory.h, and the kernels.
#include <memory>
#include <string>
#include <utility>

#include "attention/cuda/launch.h"
#include "device/cuda_memory.h"
#include "device/driver.h"

namespace kvm::device {
namespace {

using namespace attention::gpu;  // NOLINT: parameters and launches of the kernels
using namespace cuda;            // NOLINT: what it is made with

// For launches, which say what is wrong by the thread's last error: what somebody before them has
// left there is not theirs.
class Launching : public Current {
 public:
  explicit Launching(const Context& context) : Current(context) { (void)cudaGetLastError(); }
};

class CudaDriver final : public CudaMemory<Driver> {
 public:
  Status open(int device) {
    KVM_TRY(CudaMemory<Driver>::open(device));
    const Uncaptured current(context_);
    return check("attend_init", attend_init());
  }

  Result<uint32_t> decode_blocks(const DecodeKernel& kernel) override {
    const Uncaptured current(context_);
    Residency residency;
    KVM_TRY(check("decode_residency", decode_residency(kernel, &residency)));
    const int blocks = residency.blocks_per_sm > 0 ? residency.blocks_per_sm : 1;
    return facts_.n_sms * static_cast<uint32_t>(blocks);
  }
  Status decode(const DecodeKernel& kernel, const DecodeParams& params, uint32_t n_blocks,
                Stream stream) override {
    const Launching current(context_);
    return check("decode kernel", launch_decode(kernel, params, n_blocks, runtime(stream)));
  }
  Status merge(uint32_t dim, const MergeParams& params, uint32_t n_merges, Stream stream) override {
    const Launching current(context_);
    return check("merge kernel", launch_merge(dim, params, n_merges, runtime(stream)));
  }
  Status append(CodecId stored, const AppendParams& params, uint32_t n_tokens,
                Stream stream) override {
    const Launching current(context_);
    return check("append kernel", launch_append(stored, params, n_tokens, runtime(stream)));
  }
  Status read(CodecId stored, const ReadParams& params, uint32_t n_blocks, Stream stream) override {
    const Launching current(context_);
    return check("read kernel", launch_read(stored, params, n_blocks, runtime(stream)));
  }
  Status merge_states(const StatesParams& params, uint32_t n_blocks, Stream stream) override {
    const Launching current(context_);
    return check("merge_states kernel", launch_merge_states(params, n_blocks, runtime(stream)));
  }
  Status lengths(const LengthsParams& params, uint32_t n_threads, Stream stream) override {
    const Launching current(context_);
    return check("lengths kernel", launch_lengths(params, n_threads, runtime(stream)));
  }
  Status scatter(const ScatterParams& params, Stream stream) override {
    const Launching current(context_);
    return check("scatter kernel", launch_scatter(params, runtime(stream)));
  }
  Status move(const MoveParams& params, Stream stream) override {
    const Launching current(context_);
    return check("move kernel", launch_move(params, runtime(stream)));
  }
};

}  // namespace

Result<std::unique_ptr<Driver>> open_driver(uint32_t ordinal) {
  auto driver = std::make_unique<CudaDriver>();
  KVM_TRY(driver->open(static_cast<int>(ordinal)));
  return std::unique_ptr<Driver>(std::move(driver));
}

}  // namespace kvm::device
