// SPDX-License-Identifier: Apache-2.0
// An Answer is what a command has printed, on its way out.
#ifndef KVM_TOOLS_KVMCTL_ANSWER_H_
#define KVM_TOOLS_KVMCTL_ANSWER_H_

namespace kvm::tools {

// Ends the program with a sentence, as an error of the service does, where it does not arrive.
void flush_answer();

}  // namespace kvm::tools

#endif  // KVM_TOOLS_KVMCTL_ANSWER_H_
