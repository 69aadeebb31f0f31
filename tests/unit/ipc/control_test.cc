// SPDX-License-Identifier: Apache-2.0
// Control messages: round trips, damaged bytes, the struct_size rule, spaces as messages.
#include "ipc/control.h"

#include <gtest/gtest.h>

#include <random>

#include "ipc/space_message.h"
#include "ipc/struct_size.h"
#include "ipc/wire.h"

namespace kvm::ipc {
namespace {

std::vector<uint8_t> hello() {
  ControlWriter writer;
  const auto name = writer.fbb().CreateString("engine");
  const auto bytes = writer.finish(
      7, wire::CreateHello(writer.fbb(), kHelloMagic, kProtocolMajor, kProtocolMajor, name));
  return {bytes.begin(), bytes.end()};
}

TEST(Control, RoundTrip) {
  const std::vector<uint8_t> bytes = hello();
  auto message = read_message(bytes);
  ASSERT_TRUE(message.is_ok());
  EXPECT_EQ(message.value()->id(), 7u);
  ASSERT_NE(message.value()->body_as_Hello(), nullptr);
  EXPECT_EQ(message.value()->body_as_Hello()->client_name()->str(), "engine");
  EXPECT_EQ(message.value()->body_as_Welcome(), nullptr);
}

TEST(Control, ErrorReply) {
  ControlWriter writer;
  const auto bytes = writer.finish_error(9, Status(KVM_ERR_QUOTA, "too much"));
  auto message = read_message(bytes);
  ASSERT_TRUE(message.is_ok());
  const Status status = reply_status(*message.value());
  EXPECT_EQ(status.code(), KVM_ERR_QUOTA);
  EXPECT_EQ(status.message(), "too much");
}

// The last bytes may be padding, without which a message is complete.
TEST(Control, TruncatedMessagesDoNotVerify) {
  const std::vector<uint8_t> bytes = hello();
  for (size_t n = 0; n + 8 < bytes.size(); ++n) {
    EXPECT_EQ(read_message({bytes.data(), n}).status().code(), KVM_ERR_PROTOCOL) << n;
  }
}

// What still verifies after damage must be safe to walk (AddressSanitizer watches).
TEST(Control, DamagedMessagesAreSafe) {
  const std::vector<uint8_t> bytes = hello();
  std::mt19937 random(1);
  uint32_t n_rejected = 0;
  for (int i = 0; i < 20000; ++i) {
    std::vector<uint8_t> damaged = bytes;
    for (uint32_t j = 0; j <= random() % 3; ++j) {
      damaged[random() % damaged.size()] = static_cast<uint8_t>(random());
    }
    auto message = read_message(damaged);
    if (!message.is_ok()) {
      ++n_rejected;
    } else if (const auto* body = message.value()->body_as_Hello(); body != nullptr) {
      const size_t n = body->client_name() == nullptr ? 0 : body->client_name()->str().size();
      EXPECT_LT(n, bytes.size());
    }
  }
  EXPECT_GT(n_rejected, 1000u);
}

struct Example {
  uint32_t struct_size;
  uint32_t flags;
  uint64_t value;
};

TEST(StructSize, SmallerIsExtendedLargerMustBeZero) {
  Example out;
  struct {
    Example known;
    uint64_t later;
  } newer{{24, 1, 2}, 0};
  ASSERT_TRUE(read_struct(&newer, sizeof(newer), &out, "example").is_ok());
  EXPECT_EQ(out.struct_size, sizeof(Example));
  EXPECT_EQ(out.value, 2u);
  newer.later = 1;
  EXPECT_EQ(read_struct(&newer, sizeof(newer), &out, "example").code(), KVM_ERR_INVALID);
  const Example older{8, 5, 99};
  ASSERT_TRUE(read_params(&older, &out, "example").is_ok());
  EXPECT_EQ(out.flags, 5u);
  EXPECT_EQ(out.value, 0u);
  const Example wrong{0, 5, 99};
  EXPECT_EQ(read_params(&wrong, &out, "example").code(), KVM_ERR_INVALID);
}

TEST(StructSize, OutputsStayWithinTheCallersSize) {
  uint64_t memory[4] = {1, 2, 3, 4};
  write_struct(memory, 8, Example{0, 6, 7});
  EXPECT_EQ(memory[0], 8u | uint64_t{6} << 32);
  EXPECT_EQ(memory[1], 2u);
  write_struct(memory, 24, Example{0, 6, 7});
  EXPECT_EQ(memory[1], 7u);
  EXPECT_EQ(memory[2], 0u) << "what the library does not know is zero";
  EXPECT_EQ(memory[3], 4u);
}

kvm_space_params space_params() {
  kvm_space_params params{};
  params.struct_size = sizeof(params);
  params.name = "model";
  params.n_layers = 2;
  params.n_q_heads = 4;
  params.head_dim_k = 64;
  return params;
}

TEST(SpaceSpec, RoundTrip) {
  const float rope[] = {1, 0.5f};
  const float sinks[] = {1, 2, 3, 4, 5, 6, 7, 8};
  const kvm_layer_params layers[] = {{.layer_begin = 1, .n_layers = 1, .window = 7}};
  kvm_space_params params = space_params();
  params.rope_inv_freq = rope;
  params.n_rope_pairs = 2;
  params.sink_logits = sinks;
  params.layers = layers;
  params.n_layer_params = 1;
  const kvm_index_params indexes[] = {{.kind = KVM_INDEX_SKETCH, .min_tokens = 512, .seed = 9}};
  params.indexes = indexes;
  params.n_indexes = 1;
  params.default_mode = KVM_MODE_SAMPLED;
  params.default_proposal = KVM_PROPOSAL_SKETCH;
  params.default_eps = 0.25f;
  params.default_delta = 0.5f;
  params.default_budget = 77;
  auto space = copy_space(params);
  ASSERT_TRUE(space.is_ok());
  ControlWriter writer;
  const auto bytes = writer.finish(1, encode_space(&writer, space.value()));
  auto message = read_message(bytes);
  ASSERT_TRUE(message.is_ok());
  auto decoded = decode_space(*message.value()->body_as_SpaceRegister());
  ASSERT_TRUE(decoded.is_ok()) << decoded.status().message();
  EXPECT_EQ(decoded.value().name, "model");
  EXPECT_EQ(decoded.value().params.name, nullptr);
  EXPECT_EQ(decoded.value().params.head_dim_k, 64u);
  EXPECT_EQ(decoded.value().rope_inv_freq, std::vector<float>({1, 0.5f}));
  EXPECT_EQ(decoded.value().sink_logits.size(), 8u);
  ASSERT_EQ(decoded.value().layers.size(), 1u);
  EXPECT_EQ(decoded.value().layers[0].window, 7u);
  EXPECT_EQ(decoded.value().params.indexes, nullptr);
  ASSERT_EQ(decoded.value().indexes.size(), 1u);
  EXPECT_EQ(decoded.value().indexes[0].min_tokens, 512u);
  EXPECT_EQ(decoded.value().params.default_mode, uint32_t{KVM_MODE_SAMPLED});
  EXPECT_EQ(decoded.value().params.default_proposal, uint32_t{KVM_PROPOSAL_SKETCH});
  EXPECT_EQ(decoded.value().params.default_eps, 0.25f);
  EXPECT_EQ(decoded.value().params.default_delta, 0.5f);
  EXPECT_EQ(decoded.value().params.default_budget, 77u);
}

TEST(SpaceSpec, CountsAreChecked) {
  kvm_space_params params = space_params();
  params.n_layer_params = 1;
  EXPECT_EQ(copy_space(params).status().code(), KVM_ERR_INVALID);
  params.n_layer_params = 1u << 30;
  EXPECT_EQ(copy_space(params).status().code(), KVM_ERR_INVALID);
  // Counts that contradict the arrays on the wire.
  SpaceSpec space = copy_space(space_params()).value();
  space.params.n_codecs = 3;
  const auto decoded_status = [](const SpaceSpec& sent) {
    ControlWriter writer;
    const auto bytes = writer.finish(1, encode_space(&writer, sent));
    const auto* body = read_message(bytes).value()->body_as_SpaceRegister();
    return decode_space(*body).status().code();
  };
  EXPECT_EQ(decoded_status(space), KVM_ERR_INVALID);
  space.params.n_codecs = 0;
  EXPECT_EQ(decoded_status(space), KVM_OK);
  space.params.n_indexes = 1;
  EXPECT_EQ(decoded_status(space), KVM_ERR_INVALID);
}

}  // namespace
}  // namespace kvm::ipc
