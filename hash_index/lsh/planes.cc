// SPDX-License-Identifier: Apache-2.0
#include "hash_index/lsh/planes.h"

#include <algorithm>
#include <array>

#include "base/assert.h"
#include "base/cpu_features.h"
#include "base/kernel_tables.h"
#include "base/splitmix.h"

namespace kvm::hash_index {
namespace {

// 2^31 P(|z| < (i + 1) / 8) for a normal deviate z.
constexpr std::array<uint32_t, 31> kMagnitudeBounds = {
    213624049,  423940441,  627794368,  822325010,  1005084500, 1174126581, 1328059925, 1466064521,
    1587872958, 1693721325, 1784276636, 1860548903, 1923796256, 1975430879, 2016932268, 2049772575,
    2075356946, 2094979938, 2109797564, 2120813339, 2128875924, 2134685662, 2138807224, 2141685880,
    2143665313, 2145005344, 2145898468, 2146484514, 2146863108, 2147103899, 2147254673};

const KernelTables<LshKernels>& tables() {
#if defined(__x86_64__)
  static const KernelTables<LshKernels> all(&kLshScalar, &kLshAvx2, &kLshAvx512, &kLshAvx512Vnni,
                                            cpu_features().avx512vnni);
#else
  static const KernelTables<LshKernels> all(&kLshScalar);
#endif
  return all;
}

}  // namespace

int8_t plane_weight(uint64_t seed, uint32_t plane, uint32_t channel) {
  const uint64_t index = (static_cast<uint64_t>(plane) << 32) | channel;
  const uint64_t random = splitmix64(splitmix64(seed + kSplitMixStep) + index * kSplitMixStep);
  const uint32_t magnitude = static_cast<uint32_t>(random >> 33);
  const auto bound = std::upper_bound(kMagnitudeBounds.begin(), kMagnitudeBounds.end(), magnitude);
  const int weight = 2 * static_cast<int>(bound - kMagnitudeBounds.begin()) + 1;
  return static_cast<int8_t>((random & 1) != 0 ? -weight : weight);
}

PlanesPtr make_planes(const LshParams& params, uint32_t dim_k) {
  KVM_ASSERT(params.n_bits >= 1 && params.n_bits <= kMaxLshBits);
  KVM_ASSERT(params.n_tables >= kMinLshTables && params.n_tables <= kMaxLshTables);
  KVM_ASSERT(dim_k >= 8 && dim_k <= kMaxLshDim && dim_k % 8 == 0);
  auto planes = std::make_shared<Planes>();
  planes->params = params;
  planes->dim_k = dim_k;
  const uint32_t n_planes = params.n_bits * params.n_tables;
  planes->weights.resize(static_cast<size_t>(n_planes) * dim_k);
  planes->bias.resize(n_planes);
  int8_t* weight = planes->weights.data();
  for (uint32_t plane = 0; plane < n_planes; ++plane) {
    int32_t sum = 0;
    for (uint32_t channel = 0; channel < dim_k; ++channel) {
      *weight = plane_weight(params.seed, plane, channel);
      sum += *weight++;
    }
    planes->bias[plane] = -static_cast<int32_t>(kWeightOffset) * sum;
  }
  return planes;
}

const LshParams& planes_params(const Planes& planes) { return planes.params; }

size_t planes_bytes(const Planes& planes) {
  return sizeof(Planes) + planes.weights.size() + planes.bias.size() * sizeof(int32_t);
}

std::span<const LshKernels* const> available_lsh_kernels() { return tables().available(); }

const LshKernels& active_lsh_kernels() {
  static const LshKernels& kernels = tables().choose();
  return kernels;
}

}  // namespace kvm::hash_index
