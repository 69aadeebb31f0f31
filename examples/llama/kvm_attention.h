// SPDX-License-Identifier: Apache-2.0
/* Attention by kvm: keys and values live with the service, one kvm_step a layer and chunk. */
#ifndef KVM_EXAMPLES_LLAMA_KVM_ATTENTION_H_
#define KVM_EXAMPLES_LLAMA_KVM_ATTENTION_H_

#include "examples/llama/llama.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvm_attention_params {
  int embedded;            /* 1: an engine in this process instead of the daemon */
  const char* socket_path; /* of the daemon; NULL: where kvm_connect looks by itself */
  llama_dtype dtype;       /* of stored K and V */
  int exact_values;        /* 1: KVM_STEP_F32_VALUES */
} kvm_attention_params;

/* Connects, registers the model's space and makes one empty sequence. NULL with a sentence in
 * error[ST_ERROR_BYTES]. The model is read during the call only. */
llama_attention* kvm_attention_create(const llama_model* model, const kvm_attention_params* params,
                                      char* error);

#ifdef __cplusplus
}
#endif

#endif /* KVM_EXAMPLES_LLAMA_KVM_ATTENTION_H_ */
