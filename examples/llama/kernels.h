// SPDX-License-Identifier: Apache-2.0
/*
 * The loops where the time goes. Plain C that the compiler vectorises; on x86-64 it makes a version
 * of each function for several machines, and the loader picks one. The file is compiled without
 * sanitizers: the callers have checked every bound.
 */
#ifndef KVM_EXAMPLES_LLAMA_KERNELS_H_
#define KVM_EXAMPLES_LLAMA_KERNELS_H_

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { KERNEL_MAX_WIDTH = 8192, KERNEL_MAX_HEAD_DIM = 256 };

/* Storage of K and V in either attention. */
typedef enum llama_dtype { LLAMA_F32, LLAMA_F16, LLAMA_BF16 } llama_dtype;

/* out [n][rows] = x [n][columns] times the transpose of w [rows][columns] (BF16); with `add` the
 * product is added to out. Each sum runs in the same order whatever n is.
 * REQUIRES: columns <= KERNEL_MAX_WIDTH. */
void kernel_multiply(float* out, const float* x, const uint16_t* w, int n, int rows, int columns,
                     bool add);

/* out [n][width] = x / sqrt(mean of x^2 + eps) * weight [width] (BF16), row by row. */
void kernel_rms_norm(float* out, const float* x, const uint16_t* weight, int n, int width,
                     float eps);

/* Rotates the pairs (i, i + half) of each head of x [n][heads][2 * half] by the angles whose
 * cosines and sines are given, [n][half] each. */
void kernel_rotate(float* x, int n, int heads, int half, const float* cosine, const float* sine);

/* gate = silu(gate) * up. */
void kernel_silu_times(float* gate, const float* up, int count);

/* Writes count floats as `dtype` to `out`. */
void kernel_store(void* out, llama_dtype dtype, const float* from, int count);

/* o [dim] = softmax(q [dim] . k [n_tokens][dim] / sqrt(dim)) v [n_tokens][dim], k and v of `dtype`.
 * weights [n_tokens] is scratch. REQUIRES: 1 <= dim <= KERNEL_MAX_HEAD_DIM, n_tokens >= 1. */
void kernel_attend(float* o, const float* q, const void* k, const void* v, llama_dtype dtype,
                   int dim, int n_tokens, float* weights);

#ifdef __cplusplus
}
#endif

#endif /* KVM_EXAMPLES_LLAMA_KERNELS_H_ */
