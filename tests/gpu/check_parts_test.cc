// SPDX-License-Identifier: Apache-2.0
// What of kvm_gpu_check runs without a device: the lines that it prints, its options, its link to a
// second process, and the kernel that gathers rows, in the emulator.
#include "bench/gpu/child.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <vector>

#include "attention/cuda/emulator.h"
#include "bench/gpu/args.h"
#include "bench/gpu/gather_kernel.h"

namespace kvm::bench::gpu {
namespace {

TEST(Args, Options) {
  std::array<const char*, 6> words = {"kvm_gpu_check", "bench", "--quick", "--max-gib", "7", "x"};
  Args args;
  ASSERT_TRUE(parse_args(6, const_cast<char**>(words.data()), &args));
  EXPECT_EQ(args.command, "bench");
  EXPECT_TRUE(args.quick);
  EXPECT_EQ(args.max_bytes, 7ull << 30);
  EXPECT_EQ(args.rest, std::vector<std::string>{"x"});
  words[2] = "--fast";
  EXPECT_FALSE(parse_args(6, const_cast<char**>(words.data()), &args));
  words[2] = "--quick";
  words[4] = "none";
  EXPECT_FALSE(parse_args(6, const_cast<char**>(words.data()), &args));
  EXPECT_FALSE(args.help);
  words[2] = "--help";
  EXPECT_TRUE(parse_args(3, const_cast<char**>(words.data()), &args));
  EXPECT_TRUE(args.help);
  words[1] = "-h";
  Args alone;
  EXPECT_TRUE(parse_args(2, const_cast<char**>(words.data()), &alone));
  EXPECT_TRUE(alone.help);
  EXPECT_FALSE(parse_args(1, const_cast<char**>(words.data()), &args));
}

TEST(Args, BarsAreLinesOfJson) {
  testing::internal::CaptureStdout();
  EXPECT_TRUE(print_bar({"time", "a \"case\"", "us", 3, 2, 4, false}));
  EXPECT_FALSE(print_bar({"share", "b", "fraction", 0.5, 0, 0.85, true}));
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            "{\"bar\":\"time\",\"case\":\"a \\\"case\\\"\",\"unit\":\"us\",\"measured\":3,"
            "\"ceiling\":2,\"limit\":4,\"pass\":true}\n"
            "{\"bar\":\"share\",\"case\":\"b\",\"unit\":\"fraction\",\"measured\":0.5,"
            "\"ceiling\":null,\"limit\":0.85,\"pass\":false}\n");
  EXPECT_EQ(bars_missed(), 1);
}

TEST(Args, Quantiles) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(quantile({5, 1, 2, 3, 4}, 1.0), 5);
  EXPECT_EQ(median({}), 0);
}

TEST(Link, NumbersAndFileDescriptors) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
  const Link here(ends[0]);
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  {
    const Link there(ends[1]);
    EXPECT_FALSE(there.ready());
    EXPECT_TRUE(here.send(2.5, pipe_ends[1]));
    EXPECT_TRUE(there.ready());
    const auto message = there.receive();
    ASSERT_TRUE(message.has_value());
    EXPECT_EQ(message->value, 2.5);
    ASSERT_GE(message->fd, 0);
    EXPECT_EQ(::write(message->fd, "x", 1), 1);
    char byte = 0;
    EXPECT_EQ(::read(pipe_ends[0], &byte, 1), 1);
    ::close(message->fd);
    EXPECT_TRUE(there.send(1));
    EXPECT_EQ(here.receive()->fd, -1);
  }
  EXPECT_FALSE(here.receive().has_value());  // the other side has gone
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
}

// Every row of the list, however it falls on blocks, and nothing behind the last.
TEST(Gather, RowsOfTheList) {
  for (const uint32_t row_bytes : {16u, 256u, 1040u}) {
    for (const uint32_t n_blocks : {1u, 3u}) {
      constexpr uint32_t kTableRows = 97, kRows = 501;
      std::vector<uint32_t> table(kTableRows * row_bytes / 4), rows(kRows);
      std::vector<uint32_t> out((kRows + 1) * row_bytes / 4, UINT32_MAX);
      for (uint32_t i = 0; i < table.size(); ++i) {
        table[i] = i;
      }
      for (uint32_t i = 0; i < kRows; ++i) {
        rows[i] = i * 41 % kTableRows;
      }
      const GatherParams params{reinterpret_cast<const uint8_t*>(table.data()),
                                rows.data(),
                                reinterpret_cast<uint8_t*>(out.data()),
                                kRows,
                                row_bytes,
                                n_blocks};
      namespace emulator = attention::gpu::emulator;
      const std::vector<emulator::Range> memory = {
          {reinterpret_cast<uint8_t*>(table.data()), table.size() * 4},
          {reinterpret_cast<uint8_t*>(rows.data()), rows.size() * 4},
          {reinterpret_cast<uint8_t*>(out.data()), out.size() * 4}};
      const emulator::Report report =
          emulator::run({n_blocks, kGatherThreads, 0, memory}, [&] { gather_thread(params); });
      EXPECT_EQ(report.n_faults, 0u) << report.first_fault;
      const uint32_t words = row_bytes / 4;
      for (uint32_t i = 0; i < out.size(); ++i) {
        const uint32_t row = i / words;
        ASSERT_EQ(out[i], row < kRows ? rows[row] * words + i % words : UINT32_MAX)
            << row_bytes << " bytes a row, " << n_blocks << " blocks, word " << i;
      }
    }
  }
}

}  // namespace
}  // namespace kvm::bench::gpu
