// SPDX-License-Identifier: Apache-2.0
#include "examples/llama/kernels.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "examples/llama/half.h"

/* clang 14 has no such versions of C functions. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SIMD_VERSIONS \
  __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define SIMD_VERSIONS
#endif

/* A row of w is widened once and then used for every row of x. */
SIMD_VERSIONS void kernel_multiply(float* out, const float* x, const uint16_t* w, int n, int rows,
                                   int columns, bool add) {
  float widened[KERNEL_MAX_WIDTH];
  for (int row = 0; row < rows; ++row) {
    const uint16_t* source = w + (size_t)row * (size_t)columns;
    for (int i = 0; i < columns; ++i) {
      widened[i] = bf16_to_float(source[i]);
    }
    for (int token = 0; token < n; ++token) {
      const float* in = x + (size_t)token * (size_t)columns;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int i = 0; i < columns; ++i) {
        sum += widened[i] * in[i];
      }
      float* to = &out[(size_t)token * (size_t)rows + (size_t)row];
      *to = add ? *to + sum : sum;
    }
  }
}

SIMD_VERSIONS void kernel_rms_norm(float* out, const float* x, const uint16_t* weight, int n,
                                   int width, float eps) {
  for (int token = 0; token < n; ++token) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < width; ++i) {
      sum += x[i] * x[i];
    }
    const float scale = 1.0f / sqrtf(sum / (float)width + eps);
    for (int i = 0; i < width; ++i) {
      out[i] = x[i] * scale * bf16_to_float(weight[i]);
    }
    x += width;
    out += width;
  }
}

SIMD_VERSIONS void kernel_rotate(float* x, int n, int heads, int half, const float* cosine,
                                 const float* sine) {
  for (int token = 0; token < n; ++token) {
    for (int head = 0; head < heads; ++head) {
      for (int i = 0; i < half; ++i) {
        const float a = x[i];
        const float b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
      }
      x += 2 * half;
    }
    cosine += half;
    sine += half;
  }
}

void kernel_silu_times(float* gate, const float* up, int count) {
  for (int i = 0; i < count; ++i) {
    gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
  }
}

void kernel_store(void* out, llama_dtype dtype, const float* from, int count) {
  if (dtype == LLAMA_F32) {
    memcpy(out, from, (size_t)count * sizeof *from);
    return;
  }
  uint16_t* to = out;
  for (int i = 0; i < count; ++i) {
    to[i] = dtype == LLAMA_F16 ? f16_from_float(from[i]) : bf16_from_float(from[i]);
  }
}

/* Row `token` of a plane, widened. `row` is scratch for it. */
HALF_INLINE const float* fetch(const void* plane, llama_dtype dtype, int dim, int token,
                               float* row) {
  const size_t at = (size_t)token * (size_t)dim;
  if (dtype == LLAMA_F32) {
    return (const float*)plane + at;
  }
  const uint16_t* from = (const uint16_t*)plane + at;
  if (dtype == LLAMA_F16) {
    for (int i = 0; i < dim; ++i) {
      row[i] = f16_to_float(from[i]);
    }
  } else {
    for (int i = 0; i < dim; ++i) {
      row[i] = bf16_to_float(from[i]);
    }
  }
  return row;
}

SIMD_VERSIONS void kernel_attend(float* o, const float* q, const void* k, const void* v,
                                 llama_dtype dtype, int dim, int n_tokens, float* weights) {
  const float scale = 1.0f / sqrtf((float)dim);
  float scratch[KERNEL_MAX_HEAD_DIM];
  float highest = -INFINITY;
  for (int token = 0; token < n_tokens; ++token) {
    const float* row = fetch(k, dtype, dim, token, scratch);
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int i = 0; i < dim; ++i) {
      dot += q[i] * row[i];
    }
    weights[token] = dot * scale;
    highest = fmaxf(highest, weights[token]);
  }
  float sum = 0;
  memset(o, 0, (size_t)dim * sizeof *o);
  for (int token = 0; token < n_tokens; ++token) {
    const float* row = fetch(v, dtype, dim, token, scratch);
    const float weight = expf(weights[token] - highest);
    sum += weight;
    for (int i = 0; i < dim; ++i) {
      o[i] += weight * row[i];
    }
  }
  for (int i = 0; i < dim; ++i) {
    o[i] /= sum;
  }
}
