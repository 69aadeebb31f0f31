// SPDX-License-Identifier: Apache-2.0
// Reads the file that models/house/tests/kvrec_test.py describes and Python wrote, and damaged
// variants of it, which must be refused with a reason.
#include "bench/recorded/record_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

namespace kvm::bench {
namespace {

using Json = nlohmann::json;

std::string tiny_path() {
  const char* source = std::getenv("KVM_SOURCE_DIR");
  return std::string(source != nullptr ? source : ".") + "/models/house/tests/tiny.kvrec";
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename T>
T get(const std::string& data, size_t offset) {
  T value;
  std::memcpy(&value, data.data() + offset, sizeof value);
  return value;
}

template <typename T>
void put(std::string& data, size_t offset, T value) {
  std::memcpy(data.data() + offset, &value, sizeof value);
}

// CRC-32 bit by bit, written apart from the reader's.
uint32_t slow_crc32(const std::string& data) {
  uint32_t value = ~0u;
  for (const char c : data) {
    value ^= static_cast<uint8_t>(c);
    for (int i = 0; i < 8; ++i) {
      value = (value & 1) != 0 ? value >> 1 ^ 0xedb88320u : value >> 1;
    }
  }
  return ~value;
}

class RecordFileTest : public testing::Test {
 protected:
  void SetUp() override {
    data_ = read_file(tiny_path());
    ASSERT_GT(data_.size(), 64u) << tiny_path();
    path_ = "record_file_test." + std::to_string(::getpid()) + ".kvrec";
  }
  void TearDown() override { ::unlink(path_.c_str()); }

  Result<RecordFile> open(const std::string& data) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << data;
    return RecordFile::open(path_);
  }

  void expect_refused(const std::string& data, const std::string& reason) {
    const Result<RecordFile> result = open(data);
    ASSERT_FALSE(result.is_ok()) << reason;
    EXPECT_EQ(result.status().code(), KVM_ERR_CORRUPT);
    const std::string message(result.status().message());
    EXPECT_NE(message.find(reason), std::string::npos) << message << "\nwanted: " << reason;
    EXPECT_EQ(message.find(path_), 0u) << message;
  }

  // The file with its metadata changed, lengths and checksum made to fit.
  std::string edited(const std::function<void(Json&)>& change) const {
    const auto json_bytes = get<uint64_t>(data_, 16);
    const auto data_offset = get<uint64_t>(data_, 24);
    Json json = Json::parse(data_.substr(64, json_bytes));
    change(json);
    std::string text = json.dump();
    EXPECT_LE(64 + text.size(), data_offset);
    std::string out = data_;
    put<uint64_t>(out, 16, text.size());
    put<uint32_t>(out, 40, slow_crc32(text));
    text.resize(data_offset - 64, '\0');
    return out.replace(64, text.size(), text);
  }

  std::string data_;
  std::string path_;
};

TEST_F(RecordFileTest, ReadsWhatPythonWrote) {
  Result<RecordFile> result = RecordFile::open(tiny_path());
  ASSERT_TRUE(result.is_ok()) << result.status().message();
  const RecordFile file = std::move(result).value();
  EXPECT_TRUE(file.verify().is_ok());
  EXPECT_EQ(file.n_tokens(), 8u);
  EXPECT_EQ(file.n_queries(), 3u);
  EXPECT_EQ(file.head_dim(), 4u);
  EXPECT_EQ(file.softmax_scale(), 0.5);
  EXPECT_EQ(Json::parse(file.metadata())["prompt"]["name"], "counting");
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(file.positions()[static_cast<size_t>(i)], 10 * i);
    EXPECT_EQ(file.tokens()[static_cast<size_t>(i)], 100 + i);
  }
  const std::vector<int32_t> steps(file.query_steps().begin(), file.query_steps().end());
  EXPECT_EQ(steps, (std::vector<int32_t>{3, 5, 7}));

  ASSERT_EQ(file.groups().size(), 2u);
  const RecordedGroup& first = file.groups()[0];
  const RecordedGroup& second = file.groups()[1];
  EXPECT_EQ(second.layer, 1u);
  EXPECT_EQ(second.kv_head, 1u);
  EXPECT_EQ(second.q_heads, (std::vector<uint32_t>{2, 3}));
  EXPECT_EQ(first.k.dtype, Dtype::kBf16);
  EXPECT_EQ(second.k.dtype, Dtype::kF16);
  EXPECT_EQ(second.k_pre.data, nullptr);
  EXPECT_EQ(first.q.n_rows, 6u);

  std::array<float, 4> row{};
  for (uint64_t token = 0; token < 8; ++token) {
    for (uint32_t i = 0; i < 4; ++i) {
      const float at = static_cast<float>(token * 4 + i);
      first.k.read_row(token, row.data());
      EXPECT_EQ(row[i], at / 4);
      first.k_pre.read_row(token, row.data());
      EXPECT_EQ(row[i], -at / 4);
      first.v.read_row(token, row.data());
      EXPECT_EQ(row[i], 1 - at / 16);
      second.k.read_row(token, row.data());
      EXPECT_EQ(row[i], at / 32 - 0.5f);
    }
  }
  second.q.read_row(5, row.data());  // query 2 of q head 3
  EXPECT_EQ(row[3], 23.0f / 32);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first.v.data) % 64, 0u);
}

TEST_F(RecordFileTest, MissingFile) {
  const Result<RecordFile> result = RecordFile::open("no/such/file.kvrec");
  ASSERT_FALSE(result.is_ok());
  EXPECT_EQ(result.status().code(), KVM_ERR_IO);
}

TEST_F(RecordFileTest, DamagedHeader) {
  std::string bad = data_;
  bad[0] = 'P';
  expect_refused(bad, "magic");
  bad = data_;
  put<uint32_t>(bad, 8, 2);
  expect_refused(bad, "version 2");
  expect_refused("", "too few");
  expect_refused(data_ + '\0', "cut or has a tail");
  bad = data_;
  put<uint64_t>(bad, 16, UINT64_MAX - 32);
  expect_refused(bad, "does not fit");
  bad = data_;
  put<uint64_t>(bad, 24, 0);
  expect_refused(bad, "does not fit");
  bad = data_;
  bad[70] ^= 1;
  expect_refused(bad, "checksum of the metadata");
}

TEST_F(RecordFileTest, EveryCutIsNoticed) {
  for (size_t size = 0; size < data_.size(); size += 31) {
    expect_refused(data_.substr(0, size), size < 64 ? "too few" : "cut");
  }
}

TEST_F(RecordFileTest, MetadataThatContradictsItself) {
  const auto refuse = [this](const char* reason, const std::function<void(Json&)>& change) {
    expect_refused(edited(change), reason);
  };
  EXPECT_TRUE(open(edited([](Json&) {})).is_ok());
  refuse("'n_tokens'", [](Json& j) { j["n_tokens"] = 0; });
  refuse("'n_tokens'", [](Json& j) { j["n_tokens"] = -8; });
  refuse("'head_dim'", [](Json& j) { j["head_dim"] = "4"; });
  refuse("'softmax_scale'", [](Json& j) { j.erase("softmax_scale"); });
  refuse("'arrays'", [](Json& j) { j["arrays"] = 1; });
  refuse("'groups'", [](Json& j) { j["groups"] = Json::array(); });
  refuse("group is no object", [](Json& j) { j["groups"][0] = 3; });
  refuse("q_heads", [](Json& j) { j["groups"][0]["q_heads"] = Json::array(); });
  refuse("'zz' is missing", [](Json& j) { j["groups"][0]["k"] = "zz"; });
  refuse("does not name its 'v'", [](Json& j) { j["groups"][0]["v"] = 7; });
  refuse("twice", [](Json& j) {
    j["groups"][1]["layer"] = 0;
    j["groups"][1]["kv_head"] = 0;
  });
  refuse("wanted [8, 4]", [](Json& j) { j["groups"][0]["k"] = "q0"; });
  refuse("dtype i32", [](Json& j) { j["groups"][0]["k"] = "tokens"; });
  refuse("shape needs", [](Json& j) { j["arrays"]["tokens"]["dtype"] = "bf16"; });
  refuse("known are", [](Json& j) { j["arrays"]["k0"]["dtype"] = "i8"; });
  refuse("no multiple of 64", [](Json& j) { j["arrays"]["k0"]["offset"] = 1; });
  refuse("no multiple of 64", [](Json& j) { j["arrays"]["k0"]["offset"] = 0; });
  refuse("shape needs", [](Json& j) { j["arrays"]["k0"]["bytes"] = 2; });
  refuse("no crc32", [](Json& j) { j["arrays"]["k0"].erase("crc32"); });
  refuse("a size is not", [](Json& j) { j["arrays"]["k0"]["shape"] = {1u << 31, 4}; });
  refuse("beyond any file", [](Json& j) {
    j["arrays"]["k0"]["shape"] = {1u << 30, 1u << 30, 1u << 30};
  });
  const uint64_t end = data_.size() / 64 * 64;
  refuse("ends beyond", [end](Json& j) { j["arrays"]["k0"]["offset"] = end; });
}

TEST_F(RecordFileTest, StepsMustAscend) {
  const Json json = Json::parse(data_.substr(64, get<uint64_t>(data_, 16)));
  const auto offset = json["arrays"]["query_steps"]["offset"].get<size_t>();
  for (const int32_t step : {3, 8, -1}) {
    std::string bad = data_;
    put<int32_t>(bad, offset + 4, step);
    expect_refused(bad, "does not ascend");
  }
}

TEST_F(RecordFileTest, VerifyFindsAFlippedBit) {
  const Json json = Json::parse(data_.substr(64, get<uint64_t>(data_, 16)));
  std::string bad = data_;
  bad[json["arrays"]["v1"]["offset"].get<size_t>()] ^= 4;
  const Result<RecordFile> result = open(bad);
  ASSERT_TRUE(result.is_ok());
  const Status status = result.value().verify();
  EXPECT_EQ(status.code(), KVM_ERR_CORRUPT);
  EXPECT_NE(status.message().find("'v1'"), std::string_view::npos);
}

// Whatever the metadata becomes, the reader refuses it or hands out what lies inside the file.
TEST_F(RecordFileTest, RandomDamageOfTheMetadata) {
  std::mt19937 random(7);  // the same damage every time
  const auto json_bytes = get<uint64_t>(data_, 16);
  for (int round = 0; round < 3000; ++round) {
    std::string bad = data_;
    for (uint64_t n = 1 + random() % 3; n > 0; --n) {
      static constexpr std::string_view kBytes = "0123456789-[]{},:\"e.\\x";
      bad[64 + random() % json_bytes] = kBytes[random() % kBytes.size()];
    }
    put<uint32_t>(bad, 40, slow_crc32(bad.substr(64, json_bytes)));
    const Result<RecordFile> result = open(bad);
    if (result.is_ok()) {
      (void)result.value().verify();
      std::vector<float> row(result.value().head_dim());
      for (const RecordedGroup& group : result.value().groups()) {
        group.k.read_row(group.k.n_rows - 1, row.data());
        group.q.read_row(group.q.n_rows - 1, row.data());
      }
    }
  }
}

}  // namespace
}  // namespace kvm::bench
