// SPDX-License-Identifier: Apache-2.0
/* Picks the next token from logits. */
#ifndef KVM_EXAMPLES_LLAMA_SAMPLER_H_
#define KVM_EXAMPLES_LLAMA_SAMPLER_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sampler {
  float temperature; /* 0: the most likely token */
  int top_k;         /* among this many most likely tokens; 0: among all */
  uint64_t state;    /* of the random numbers: the seed, then whatever follows from it */
} sampler;

/* The most likely token; the lowest-numbered of equals. */
int32_t sampler_argmax(const float* logits, int vocabulary);

/* logits [vocabulary] are overwritten. */
int32_t sampler_next(sampler* self, float* logits, int vocabulary);

#ifdef __cplusplus
}
#endif

#endif /* KVM_EXAMPLES_LLAMA_SAMPLER_H_ */
