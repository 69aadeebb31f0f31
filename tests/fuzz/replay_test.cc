// SPDX-License-Identifier: Apache-2.0
// Every input of the corpora through its target, and a few thousand damaged ones. Finding the
// inputs is the fuzzers' part; what they found stays here.
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "base/clock.h"
#include "tests/fuzz/targets.h"

namespace kvm::testing {
namespace {

std::vector<Bytes> read_corpus(const std::string& target) {
  std::vector<Bytes> inputs;
  const std::filesystem::path folder = std::getenv("KVM_FUZZ_CORPUS");
  for (const auto& entry : std::filesystem::directory_iterator(folder / target)) {
    std::ifstream file(entry.path(), std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

Bytes damage(Bytes input, std::mt19937_64* random) {
  for (uint64_t n = 1 + (*random)() % 4; n > 0 && !input.empty(); --n) {
    const size_t at = (*random)() % input.size();
    switch ((*random)() % 5) {
      case 0:
        input[at] ^= static_cast<uint8_t>(1u << ((*random)() % 8));
        break;
      case 1:
        input[at] = static_cast<uint8_t>((*random)());
        break;
      case 2:
        input[at] = (*random)() % 2 == 0 ? 0x00 : 0xff;
        break;
      case 3:
        input.resize(at);
        break;
      default:
        input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), input.begin(),
                     input.begin() + static_cast<std::ptrdiff_t>(at / 2));
    }
  }
  return input;
}

class Replay : public ::testing::TestWithParam<FuzzTarget> {};

TEST_P(Replay, Corpus) {
  spdlog::set_level(spdlog::level::off);
  const std::vector<Bytes> corpus = read_corpus(GetParam().name);
  ASSERT_GE(corpus.size(), 2u);
  for (const Bytes& input : corpus) {
    GetParam().run(input);
  }
  GetParam().run({});
}

// The seeds are what the code of today would send: none is in the corpus only.
TEST_P(Replay, SeedsAreInTheCorpus) {
  for (const auto& [name, bytes] : GetParam().seeds()) {
    const std::filesystem::path path =
        std::filesystem::path(std::getenv("KVM_FUZZ_CORPUS")) / GetParam().name / name;
    EXPECT_TRUE(std::filesystem::exists(path)) << path << ": run fuzz_seeds tests/fuzz/corpus";
  }
}

TEST_P(Replay, Damaged) {
  spdlog::set_level(spdlog::level::off);
  const uint64_t seed = now_ns();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  const std::vector<Bytes> corpus = read_corpus(GetParam().name);
  for (uint32_t i = 0; i < GetParam().n_damaged; ++i) {
    GetParam().run(damage(corpus[random() % corpus.size()], &random));
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, Replay, ::testing::ValuesIn(fuzz_targets()),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace kvm::testing
