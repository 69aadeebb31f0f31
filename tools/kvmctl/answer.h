// SPDX-License-Identifier: Apache-2.0
// The answer of a command is what it has printed; it is sent on its way here.
#ifndef KVM_TOOLS_KVMCTL_ANSWER_H_
#define KVM_TOOLS_KVMCTL_ANSWER_H_

namespace kvm::tools {

// Ends the program with a sentence, as an error of the service does, where it does not arrive.
void flush_answer();

}  // namespace kvm::tools

#endif  // KVM_TOOLS_KVMCTL_ANSWER_H_
