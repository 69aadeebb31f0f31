// SPDX-License-Identifier: Apache-2.0
// A directory of a test's own, below its working directory: on a real file system, where temporary
// ones may lie in memory. All of it goes with the object.
#ifndef KVM_TESTS_COMMON_TEMPORARY_DIRECTORY_H_
#define KVM_TESTS_COMMON_TEMPORARY_DIRECTORY_H_

#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace kvm::testing {

class TemporaryDirectory {
 public:
  TemporaryDirectory() : path_(std::filesystem::current_path() / "disk-XXXXXX") {
    if (::mkdtemp(path_.data()) == nullptr) {
      std::abort();
    }
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_COMMON_TEMPORARY_DIRECTORY_H_
