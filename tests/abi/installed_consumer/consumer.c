// SPDX-License-Identifier: Apache-2.0
// A stranger's program. argv[1] is the version that the installed package claims to be.
#include <stdio.h>
#include <string.h>

#include "kvm.h"

int main(int argc, char** argv) {
  if (argc != 2 || strcmp(kvm_version_string(), argv[1]) != 0) {
    fprintf(stderr, "library says '%s', package says '%s'\n", kvm_version_string(), argv[1]);
    return 1;
  }
  if (strcmp(kvm_status_name(KVM_ERR_INVALID), "KVM_ERR_INVALID") != 0) {
    return 1;
  }
  printf("kvm %s\n", kvm_version_string());
  return 0;
}
