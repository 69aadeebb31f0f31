// SPDX-License-Identifier: Apache-2.0
// The engine in C without kvm: its readers, its tokenizer, and its forward pass against PyTorch.
#include "examples/llama/llama.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "examples/llama/check.h"
#include "examples/llama/half.h"
#include "examples/llama/private_attention.h"
#include "examples/llama/sampler.h"

namespace {

const std::string kFolder = KVM_LLAMA_DIR;

std::vector<char> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

struct CloseAttention {
  void operator()(llama_attention* attention) const { attention->close(attention); }
};
using Attention = std::unique_ptr<llama_attention, CloseAttention>;

class LlamaTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    char error[ST_ERROR_BYTES] = "";
    model_ = new llama_model;
    ASSERT_EQ(llama_model_load((kFolder + "/model.safetensors").c_str(), model_, error), 0)
        << error;
    ASSERT_EQ(st_open((kFolder + "/tests/golden.safetensors").c_str(), &golden_, error), 0)
        << error;
  }

  static void TearDownTestSuite() {
    st_close(&golden_);
    llama_model_free(model_);
    delete model_;
  }

  static std::vector<int32_t> golden_tokens(const char* name) {
    const st_tensor* tensor = st_find(&golden_, name);
    const auto* data = static_cast<const int32_t*>(tensor->data);
    return {data, data + tensor->shape[0]};
  }

  // Logits of all tokens, given to the model in chunks of the given sizes, the last one repeated.
  static std::vector<float> run(llama_attention* attention, const std::vector<int32_t>& tokens,
                                const std::vector<int>& chunks) {
    const size_t vocabulary = static_cast<size_t>(model_->config.vocabulary);
    std::vector<float> logits(tokens.size() * vocabulary);
    llama_scratch* scratch = llama_scratch_create(&model_->config);
    size_t at = 0;
    for (size_t chunk = 0; at < tokens.size(); ++chunk) {
      const size_t wanted = static_cast<size_t>(chunks[std::min(chunk, chunks.size() - 1)]);
      const int n = static_cast<int>(std::min(wanted, tokens.size() - at));
      EXPECT_EQ(llama_forward(model_, scratch, attention, tokens.data() + at, n,
                              static_cast<int>(at), logits.data() + at * vocabulary, n),
                0)
          << attention->error;
      at += static_cast<size_t>(n);
    }
    llama_scratch_free(scratch);
    return logits;
  }

  static Attention make_private(llama_dtype dtype, int capacity = 512) {
    return Attention(private_attention_create(&model_->config, dtype, capacity));
  }

  inline static llama_model* model_ = nullptr;
  inline static st_file golden_ = {};
};

TEST_F(LlamaTest, LogitsAreThoseOfPyTorch) {
  const std::vector<int32_t> tokens = golden_tokens("tokens");
  const st_tensor* expected = st_find(&golden_, "logits");
  ASSERT_EQ(expected->shape[1], model_->config.vocabulary);
  const auto* data = static_cast<const float*>(expected->data);
  const std::vector<float> logits = run(make_private(LLAMA_F32).get(), tokens, {7, 1});
  float worst = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    worst = std::max(worst, std::fabs(logits[i] - data[i]));
  }
  EXPECT_LE(worst, 2e-4f);
}

TEST_F(LlamaTest, ChunksDoNotChangeLogits) {
  const std::vector<int32_t> tokens = golden_tokens("encoded");
  const Attention one_by_one = make_private(LLAMA_BF16);
  const Attention at_once = make_private(LLAMA_BF16);
  EXPECT_EQ(run(one_by_one.get(), tokens, {1}), run(at_once.get(), tokens, {5, LLAMA_MAX_CHUNK}));
}

TEST_F(LlamaTest, PrivateCacheRefusesWhatItCannotHold) {
  const Attention attention = make_private(LLAMA_BF16, 3);
  EXPECT_EQ(attention->step(attention.get(), 0, 0, 3), 0);
  EXPECT_EQ(attention->step(attention.get(), 0, 2, 2), -1);
  EXPECT_NE(std::string(attention->error).find("3"), std::string::npos);
}

// The check itself must see a difference: storage in another dtype is one.
TEST_F(LlamaTest, CheckSeesOtherStorage) {
  const Attention reference = make_private(LLAMA_F32);
  const Attention same = make_private(LLAMA_F32);
  const Attention other = make_private(LLAMA_BF16);
  std::string prompt = "And he said unto them";
  char* prompts[] = {prompt.data()};
  check_result result;
  char error[ST_ERROR_BYTES] = "";
  ASSERT_EQ(
      check_attention(model_, reference.get(), same.get(), prompts, 1, 100, 1e-2f, &result, error),
      0)
      << error;
  EXPECT_EQ(result.worst, 0.0f);
  EXPECT_EQ(result.n_wrong_argmax, 0);
  ASSERT_EQ(
      check_attention(model_, reference.get(), other.get(), prompts, 1, 100, 1e-2f, &result, error),
      0)
      << error;
  EXPECT_GT(result.worst, 1e-3f);
}

TEST_F(LlamaTest, TokenizerEncodesAsTheTrainingDoes) {
  const std::string text = st_metadata(&golden_, "text");
  std::vector<int32_t> tokens(text.size());
  tokens.resize(static_cast<size_t>(tokenizer_encode(
      model_->tokens, text.data(), text.size(), tokens.data(), static_cast<int>(text.size()))));
  EXPECT_EQ(tokens, golden_tokens("encoded"));
}

TEST_F(LlamaTest, TokenizerGivesAnyBytesBack) {
  std::mt19937 random(7);
  for (size_t size = 0; size < 300; ++size) {
    std::string text(size, '\0');
    for (char& c : text) {  // words, spaces, and every other byte
      const uint32_t kind = random() % 8;
      c = static_cast<char>(kind < 5 ? 'a' + random() % 26 : kind == 5 ? ' ' : random() % 256);
    }
    std::vector<int32_t> tokens(size);
    const int count =
        tokenizer_encode(model_->tokens, text.data(), size, tokens.data(), static_cast<int>(size));
    ASSERT_GE(count, 0);
    std::string back;
    for (int i = 0; i < count; ++i) {
      size_t length = 0;
      const char* bytes = tokenizer_decode(model_->tokens, tokens[static_cast<size_t>(i)], &length);
      back.append(bytes, length);
    }
    EXPECT_EQ(back, text);
    if (count > 0) {
      EXPECT_EQ(tokenizer_encode(model_->tokens, text.data(), size, tokens.data(), count - 1), -1);
    }
  }
}

TEST(Tokenizer, RefusesMergesOfLaterTokens) {
  const int32_t merges[] = {'a', 'b', 257, 'c'};
  EXPECT_EQ(tokenizer_create(merges, 2), nullptr);
  tokenizer* one = tokenizer_create(merges, 1);
  ASSERT_NE(one, nullptr);
  tokenizer_free(one);
}

TEST(Sampler, KeepsToTheMostLikely) {
  const std::vector<float> logits = {0.5f, 3.0f, -1.0f, 2.5f, 2.0f};
  sampler greedy = {0, 0, 1};
  std::vector<float> copy = logits;
  EXPECT_EQ(sampler_next(&greedy, copy.data(), 5), 1);
  sampler top_two = {1.0f, 2, 42};
  std::vector<int> count(5);
  for (int draw = 0; draw < 4000; ++draw) {
    copy = logits;
    ++count[static_cast<size_t>(sampler_next(&top_two, copy.data(), 5))];
  }
  EXPECT_EQ(count[0] + count[2] + count[4], 0);
  // e^0 against e^-0.5: 62 % and 38 %; four standard deviations are 3 %.
  EXPECT_NEAR(count[1] / 4000.0, 0.622, 0.031);
}

// Against the definition: value = (-1)^s * m * 2^e with 10 bits of m, found without the bit tricks.
TEST(Half, F16IsExactAndRoundsToTheNearest) {
  std::vector<float> values;
  for (uint32_t code = 0; code < 0x7c00; ++code) {
    const int exponent = static_cast<int>(code >> 10);
    const double mantissa = (exponent == 0 ? 0 : 1024) + static_cast<double>(code & 1023);
    values.push_back(static_cast<float>(std::ldexp(mantissa, std::max(exponent, 1) - 25)));
    EXPECT_EQ(f16_to_float(static_cast<uint16_t>(code)), values.back());
    EXPECT_EQ(f16_to_float(static_cast<uint16_t>(code | 0x8000)), -values.back());
    EXPECT_EQ(f16_from_float(-values.back()), code | 0x8000);
  }
  for (uint32_t code = 0; code + 1 < values.size(); ++code) {
    const float half_way = (values[code] + values[code + 1]) / 2;  // exact: a float has the bits
    EXPECT_EQ(f16_from_float(half_way), code % 2 == 0 ? code : code + 1);
    EXPECT_EQ(f16_from_float(std::nextafter(half_way, 0.0f)), code);
    EXPECT_EQ(f16_from_float(std::nextafter(half_way, 1e9f)), code + 1);
  }
  EXPECT_EQ(f16_from_float(65519.0f), 0x7bff);
  EXPECT_EQ(f16_from_float(65520.0f), 0x7c00);
}

TEST(Half, Bf16RoundsToNearestEven) {
  EXPECT_EQ(bf16_from_float(1.0f), 0x3f80);
  EXPECT_EQ(bf16_from_float(1.00390625f), 0x3f80);  // half way: to the even one
  EXPECT_EQ(bf16_from_float(1.01171875f), 0x3f82);  // half way: to the even one
  EXPECT_EQ(bf16_to_float(bf16_from_float(-2.5f)), -2.5f);
}

// Every cut of a good file, and every change of a byte of its header, is either refused or read
// without touching what is not there (which the sanitizers would see).
TEST(Safetensors, SurvivesDamage) {
  const std::vector<char> good = read_file(kFolder + "/tests/golden.safetensors");
  uint64_t header_size = 0;
  std::memcpy(&header_size, good.data(), sizeof header_size);
  const std::string path = ::testing::TempDir() + "llama_damaged.safetensors";
  std::mt19937 random(11);
  for (int round = 0; round < 400; ++round) {
    std::vector<char> bad = good;
    if (round % 2 == 0) {
      bad.resize(random() % (8 + header_size + 64));
    } else {
      bad[random() % (8 + header_size)] = static_cast<char>(random());
      bad.resize(8 + header_size + (round % 4 == 1 ? 64 : 180000));
    }
    std::ofstream(path, std::ios::binary)
        .write(bad.data(), static_cast<std::streamsize>(bad.size()));
    st_file file;
    char error[ST_ERROR_BYTES] = "";
    if (st_open(path.c_str(), &file, error) == 0) {
      for (size_t i = 0; i < file.n_tensors; ++i) {
        const auto* data = static_cast<const char*>(file.tensors[i].data);
        EXPECT_LE(data + file.tensors[i].size, reinterpret_cast<char*>(file.bytes) + file.size);
      }
      st_close(&file);
    } else {
      EXPECT_STRNE(error, "");
    }
  }
  std::remove(path.c_str());
}

TEST(Model, NamesWhatIsWrong) {
  llama_model model;
  char error[ST_ERROR_BYTES] = "";
  EXPECT_EQ(llama_model_load("/nonexistent/model", &model, error), -1);
  EXPECT_NE(std::string(error).find("/nonexistent/model"), std::string::npos);
  EXPECT_EQ(llama_model_load((kFolder + "/tests/golden.safetensors").c_str(), &model, error), -1);
  EXPECT_NE(std::string(error).find("vocabulary"), std::string::npos);
}

}  // namespace
