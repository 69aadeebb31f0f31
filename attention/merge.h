// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_ATTENTION_MERGE_H_
#define KVM_ATTENTION_MERGE_H_

#include "base/merge.h"

#endif  // KVM_ATTENTION_MERGE_H_
