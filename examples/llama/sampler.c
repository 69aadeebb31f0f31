// SPDX-License-Identifier: Apache-2.0
#include "examples/llama/sampler.h"

#include <math.h>

/* Uniform in [0, 1). SplitMix64 (Steele, Lea and Flood 2014): any seed will do. */
static double uniform(uint64_t* state) {
  uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
  z ^= z >> 31;
  return (double)(z >> 11) * 0x1p-53;
}

int32_t sampler_argmax(const float* logits, int vocabulary) {
  int32_t best = 0;
  for (int32_t token = 1; token < vocabulary; ++token) {
    if (logits[token] > logits[best]) {
      best = token;
    }
  }
  return best;
}

/* The k-th largest logit, by bisection: a few passes, and no copy to sort. */
static float kth_largest(const float* logits, int vocabulary, int k) {
  float low = logits[0];
  float high = logits[0];
  for (int token = 1; token < vocabulary; ++token) {
    low = fminf(low, logits[token]);
    high = fmaxf(high, logits[token]);
  }
  for (int pass = 0; pass < 24; ++pass) { /* as many bits as a float has */
    const float middle = low + (high - low) / 2;
    int above = 0;
    for (int token = 0; token < vocabulary; ++token) {
      above += logits[token] >= middle;
    }
    if (above >= k) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

int32_t sampler_next(sampler* self, float* logits, int vocabulary) {
  const int32_t best = sampler_argmax(logits, vocabulary);
  if (self->temperature <= 0) {
    return best;
  }
  const float highest = logits[best];
  const float threshold = self->top_k > 0 && self->top_k < vocabulary
                              ? kth_largest(logits, vocabulary, self->top_k)
                              : -INFINITY;
  double sum = 0;
  for (int token = 0; token < vocabulary; ++token) {
    logits[token] =
        logits[token] >= threshold ? expf((logits[token] - highest) / self->temperature) : 0.0f;
    sum += logits[token];
  }
  double left = uniform(&self->state) * sum;
  for (int32_t token = 0; token < vocabulary; ++token) {
    left -= logits[token];
    if (left < 0) {
      return token;
    }
  }
  return best; /* rounding used the sum up */
}
