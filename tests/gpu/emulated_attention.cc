// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/emulated_attention.h"

#include "attention/cuda/shapes.h"

namespace kvm::attention::gpu::testing {
namespace {

template <class Shape>
constexpr bool is_compiled() {
  if (Shape::kIsMla) {
    return is_in_suite(8);
  }
  if (KVM_SUITE_DIM != 0 && Shape::kDim != KVM_SUITE_DIM) {
    return false;
  }
  if (kIsPrefill<Shape>) {
    return is_in_suite(4);
  }
  return is_in_suite(kIsNarrow<Shape::kElement> ? 2 : 1);
}

template <class Shape>
EmulatedKernel kernel_of() {
  if constexpr (is_compiled<Shape>()) {
    return {Shape::kThreads, Shape::kSharedBytes, attend_thread<Shape>};
  } else {
    return {};
  }
}

}  // namespace

std::optional<EmulatedKernel> attention_kernel(CodecId codec, uint32_t dim, uint32_t block_rows,
                                               ShapeFor what) {
  std::optional<EmulatedKernel> kernel;
  visit_shape(codec, dim, block_rows, [&]<class Shape>(Shape) {
    kernel = what == ShapeFor::kSm90a  ? kernel_of<Shape>()
             : what == ShapeFor::kSm80 ? kernel_of<Sm80Shape<Shape>>()
                                       : kernel_of<SmallShape<Shape>>();
  });
  return kernel;
}

void visit_other_kernels(
    const std::function<void(const EmulatedKernel& kernel, const char* shape)>& visit) {
  visit(kernel_of<DecodeShape<Element::kBf16, 128, 16, 2, 4, 1>>(), "tile 16, 2 stages");
  visit(kernel_of<DecodeShape<Element::kBf16, 128, 32, 2, 4, 1>>(), "tile 32, 2 stages");
  visit(kernel_of<DecodeShape<Element::kBf16, 128, 16, 4, 8, 1>>(), "4 stages, 8 warps");
}

}  // namespace kvm::attention::gpu::testing
