// SPDX-License-Identifier: Apache-2.0
// docs/gpu.md says which codecs and presets a device takes; what it says is what the library
// answers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "codecs/codec.h"
#include "kvm_cuda.h"
#include "tests/gpu/device_rig.h"

namespace kvm::device::testing {
namespace {

constexpr uint32_t kLayers = 16;

// The sentence of a refusal without its beginning, which all have; "runs" where there is none.
std::string answer(kvm_client* client, kvm_space_params* space) {
  kvm_space_id id = 0;
  const kvm_status status = kvm_space_register(client, space, &id);
  if (status == KVM_OK) {
    EXPECT_EQ(kvm_space_drop(client, id), KVM_OK) << kvm_last_error();
    return "runs";
  }
  EXPECT_EQ(status, KVM_ERR_UNSUPPORTED) << kvm_last_error();
  const std::string sentence = kvm_last_error(), begin = "in device memory: ";
  EXPECT_EQ(sentence.find(begin), 0u) << sentence;
  return sentence.substr(std::min(begin.size(), sentence.size()));
}

kvm_space_params space_of(const char* name) {
  kvm_space_params space{};
  space.struct_size = sizeof space;
  space.name = name;
  space.n_layers = kLayers;
  space.n_q_heads = 8;
  space.n_kv_heads = 4;
  space.head_dim_k = 128;
  static const float kNoTurn = 0;
  space.rope_layout = KVM_ROPE_HALF;
  space.n_rope_pairs = 1;
  space.rope_inv_freq = &kNoTurn;
  return space;
}

std::string codec_answer(kvm_client* client, const codecs::Codec& codec) {
  kvm_space_params space = space_of(codec.name);
  // Codecs of blocks are those of policies, not of a whole space.
  kvm_codec_params entry{};
  space.codec = KVM_CODEC_BF16;
  if (codec.rows_are_own()) {
    space.codec = static_cast<uint32_t>(codec.id);
  } else {
    entry.codec_k = entry.codec_v = static_cast<uint32_t>(codec.id);
    space.codecs = &entry;
    space.n_codecs = 1;
  }
  return answer(client, &space);
}

std::string preset_answer(kvm_client* client, const char* name) {
  // Head 1 and 2 of even layers do not retrieve.
  std::vector<uint64_t> masks;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    masks.insert(masks.end(), {layer % 2 == 0 ? 6u : 0u, 0u});
  }
  kvm_preset_params system{};
  system.struct_size = sizeof system;
  system.name = name;
  system.n_layers = kLayers;
  if (std::string(name) == "duo_attention" || std::string(name) == "razor_attention") {
    system.kv_head_masks = masks.data();
  }
  std::vector<kvm_layer_params> layers(kLayers);
  std::vector<kvm_policy_params> policies(kLayers);
  std::vector<kvm_codec_params> codecs(kLayers);
  std::vector<kvm_index_params> indexes(kLayers);
  kvm_preset preset{};
  preset.struct_size = sizeof preset;
  preset.n_layer_params = preset.n_policies = preset.n_codecs = preset.n_indexes = kLayers;
  preset.layers = layers.data();
  preset.policies = policies.data();
  preset.codecs = codecs.data();
  preset.indexes = indexes.data();
  EXPECT_EQ(kvm_policy_preset(&system, &preset), KVM_OK) << kvm_last_error();
  kvm_space_params space = space_of(name);
  space.layers = preset.layers;
  space.n_layer_params = preset.n_layer_params;
  space.policies = preset.policies;
  space.n_policies = preset.n_policies;
  space.codecs = preset.codecs;
  space.n_codecs = preset.n_codecs;
  space.indexes = preset.indexes;
  space.n_indexes = preset.n_indexes;
  space.default_mode = preset.default_mode;
  space.default_budget = preset.default_budget;
  return answer(client, &space);
}

std::string row(const std::string& name, const std::string& says) {
  return "| `" + name + "` | " + says + " |\n";
}

TEST(DeviceTableTest, ThePageSaysWhatRuns) {
  Rig rig({}, {});
  // Codecs of one answer in a row, which has a dash where theirs has their name.
  std::vector<std::pair<std::string, std::string>> codecs;  // names, answer
  for (const codecs::Codec& codec : codecs::kCodecs) {
    std::string says = codec_answer(rig.client(), codec);
    const std::string name = std::string(" ") + codec.name + " ";
    if (const size_t at = says.find(name); at != std::string::npos) {
      says.replace(at, name.size(), " this codec ");
    }
    const auto same = std::ranges::find(codecs, says, &std::pair<std::string, std::string>::second);
    if (same == codecs.end()) {
      codecs.emplace_back(codec.name, says);
    } else {
      same->first += std::string("`, `") + codec.name;
    }
  }
  EXPECT_EQ(codecs.size(), 2u);
  std::string table = "\n| codec | on a device |\n|---|---|\n";
  for (const auto& [names, says] : codecs) {
    table += row(names, says);
  }
  table += "\n| preset | on a device |\n|---|---|\n";
  for (uint32_t i = 0; kvm_preset_name(i) != nullptr; ++i) {
    table += row(kvm_preset_name(i), preset_answer(rig.client(), kvm_preset_name(i)));
  }
  table += "\n";
  const char* const source = std::getenv("KVM_SOURCE_DIR");
  ASSERT_NE(source, nullptr) << "ctest says where the source is";
  const std::string path = std::string(source) + "/docs/gpu.md";
  std::ifstream file(path);
  std::string page(std::istreambuf_iterator<char>(file), {});
  const std::string begin = "<!-- what runs: generated -->\n", end = "<!-- what runs: end -->\n";
  const size_t from = page.find(begin), to = page.find(end);
  ASSERT_TRUE(from != std::string::npos && to != std::string::npos && from < to)
      << path << " lacks the marks of this table";
  const size_t first = from + begin.size();
  if (std::getenv("KVM_UPDATE") != nullptr) {
    page.replace(first, to - first, table);
    std::ofstream out(path);
    out << page;
    ASSERT_TRUE(out.flush()) << path;
    return;
  }
  EXPECT_EQ(page.substr(first, to - first), table)
      << "KVM_UPDATE=1 ./dev test -R gpu_device_table writes it anew";
}

}  // namespace
}  // namespace kvm::device::testing
