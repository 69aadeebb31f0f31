// SPDX-License-Identifier: Apache-2.0
/* Compares the logits that two attentions lead to. */
#ifndef KVM_EXAMPLES_LLAMA_CHECK_H_
#define KVM_EXAMPLES_LLAMA_CHECK_H_

#include <stddef.h>

#include "examples/llama/llama.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct check_result {
  long n_tokens;       /* tokens compared */
  float worst;         /* largest absolute difference of two logits; NaN counts as infinite */
  long n_wrong_argmax; /* tokens whose argmax differs though its margin is above the tolerance */
  long n_near_ties;    /* tokens whose margin is within it: argmax not judged */
  size_t worst_prompt; /* where `worst` occurred */
  int worst_position;
  const char* worst_phase; /* "decode" or "prefill" */
} check_result;

/* For each of the prompts: runs it and n_generate further tokens, drawn from the logits of
 * `reference`, through the reference; then gives the same tokens to `tested` twice, once the prompt
 * in chunks and the rest one by one, once all in chunks; and compares the logits at every token.
 * A margin is the distance of the reference's two largest logits. Returns 0, or -1 with a sentence
 * in error[ST_ERROR_BYTES] when something could not be run. */
int check_attention(const llama_model* model, llama_attention* reference, llama_attention* tested,
                    char* const* prompts, size_t n_prompts, int n_generate, float tolerance,
                    check_result* result, char* error);

#ifdef __cplusplus
}
#endif

#endif /* KVM_EXAMPLES_LLAMA_CHECK_H_ */
