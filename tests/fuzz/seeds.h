// SPDX-License-Identifier: Apache-2.0
// Valid inputs of the fuzz targets; fuzz_seeds writes them to tests/fuzz/corpus.
#ifndef KVM_TESTS_FUZZ_SEEDS_H_
#define KVM_TESTS_FUZZ_SEEDS_H_

#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/targets.h"

namespace kvm::testing {

using Seeds = std::vector<std::pair<std::string, Bytes>>;

Seeds hello_seeds();
Seeds control_seeds();
Seeds request_seeds();
Seeds items_seeds();
Seeds config_seeds();
Seeds stats_text_seeds();
Seeds policy_seeds();
Seeds image_seeds();
Seeds object_file_seeds();
Seeds disk_files_seeds();

}  // namespace kvm::testing

#endif  // KVM_TESTS_FUZZ_SEEDS_H_
