// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/targets.h"

#include "tests/fuzz/seeds.h"

namespace kvm::testing {

const std::vector<FuzzTarget>& fuzz_targets() {
  static const std::vector<FuzzTarget> kAll = {
      {"hello", run_hello, hello_seeds},
      {"control", run_control, control_seeds},
      {"request", run_request, request_seeds},
      {"items", run_items, items_seeds},
      {"config", run_config, config_seeds},
      {"stats_text", run_stats_text, stats_text_seeds},
      {"policy", run_policy, policy_seeds},
      {"image", run_image, image_seeds},
      {"object_file", run_object_file, object_file_seeds},
      {"disk_files", run_disk_files, disk_files_seeds, 200},
  };
  return kAll;
}

const FuzzTarget* find_fuzz_target(std::string_view name) {
  for (const FuzzTarget& target : fuzz_targets()) {
    if (target.name == name) {
      return &target;
    }
  }
  return nullptr;
}

}  // namespace kvm::testing
