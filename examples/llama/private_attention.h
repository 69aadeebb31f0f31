// SPDX-License-Identifier: Apache-2.0
/* Dense attention with a KV cache of its own: what kvm's results are compared with. */
#ifndef KVM_EXAMPLES_LLAMA_PRIVATE_ATTENTION_H_
#define KVM_EXAMPLES_LLAMA_PRIVATE_ATTENTION_H_

#include "examples/llama/llama.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A cache for one sequence of at most `capacity` tokens, K and V stored as `dtype`. NULL: out of
 * memory. Its step fails when a token is beyond the capacity. */
llama_attention* private_attention_create(const llama_config* config, llama_dtype dtype,
                                          int capacity);

#ifdef __cplusplus
}
#endif

#endif /* KVM_EXAMPLES_LLAMA_PRIVATE_ATTENTION_H_ */
