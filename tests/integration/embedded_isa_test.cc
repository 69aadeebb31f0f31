// SPDX-License-Identifier: Apache-2.0
// KVM_FORCE_ISA and an engine in this process.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

#include "kvm.h"

namespace {

TEST(EmbeddedIsa, ATableThatIsNotThereIsInvalid) {
  ASSERT_EQ(::setenv("KVM_FORCE_ISA", "bogus", 1), 0);
  kvm_embedded_params params{};
  params.struct_size = sizeof(params);
  params.n_threads = 1;
  params.host_capacity_bytes = 64 << 20;
  kvm_client* client = nullptr;
  EXPECT_EQ(kvm_open_embedded(&params, &client), KVM_ERR_INVALID);
  EXPECT_EQ(client, nullptr);
  const std::string sentence = kvm_last_error();
  EXPECT_NE(sentence.find("'bogus'; this machine can run scalar"), std::string::npos) << sentence;

  ASSERT_EQ(::setenv("KVM_FORCE_ISA", "scalar", 1), 0);
  ASSERT_EQ(kvm_open_embedded(&params, &client), KVM_OK) << kvm_last_error();
  kvm_client_info info{};
  info.struct_size = sizeof(info);
  EXPECT_EQ(kvm_client_get_info(client, &info), KVM_OK);
  EXPECT_STREQ(info.isa, "scalar");
  kvm_client_close(client);
}

}  // namespace
