// SPDX-License-Identifier: Apache-2.0
// What every implementation of device/driver.h has to do: run over the fake one, and over CUDA
// where there is a GPU.
#include "device/driver.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numbers>
#include <string>
#include <vector>

#include "base/round.h"
#include "tests/gpu/fake_driver.h"

namespace kvm::device {
namespace {

using attention::gpu::AppendParams;
using attention::gpu::AppendToken;
using attention::gpu::AttendTensors;
using attention::gpu::DecodeKernel;
using attention::gpu::DecodeParams;
using attention::gpu::kEntrySlotBits;
using attention::gpu::LengthsItem;
using attention::gpu::LengthsParams;
using attention::gpu::make_divider;
using attention::gpu::Merge;
using attention::gpu::MergeParams;
using attention::gpu::MoveParams;
using attention::gpu::ReadParams;
using attention::gpu::ScatterParams;
using attention::gpu::StatesParams;
using attention::gpu::WordRun;
using attention::gpu::Work;

struct Implementation {
  const char* name;
  std::function<std::unique_ptr<Driver>()> open;  // null: not on this machine
};

std::unique_ptr<Driver> fake(bool emulate, uint32_t eagerness) {
  testing::FakeOptions options;
  options.emulate = emulate;
  options.eagerness = eagerness;
  return std::make_unique<testing::FakeDriver>(options);
}

const Implementation kImplementations[] = {
    {"fake_lazy", [] { return fake(true, 0); }},
    {"fake_eager", [] { return fake(false, 1); }},
    {"cuda",
     [] {
       auto opened = open_driver(0);
       return opened.is_ok() ? std::move(opened).value() : nullptr;
     }},
};

// Registered memory of the host.
class HostBuffer {
 public:
  HostBuffer(Driver* driver, uint64_t size_bytes) : driver_(driver), size_(size_bytes) {
    data_ = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(data_, MAP_FAILED);
    EXPECT_TRUE(driver->register_host(data_, size_bytes).is_ok());
  }
  ~HostBuffer() {
    driver_->unregister_host(data_);
    ::munmap(data_, size_);
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  Driver* driver_;
  uint64_t size_;
  void* data_;
};

class DriverTest : public ::testing::TestWithParam<Implementation> {
 protected:
  void SetUp() override {
    driver_ = GetParam().open();
    if (driver_ == nullptr) {
      GTEST_SKIP() << "no such device here";
    }
    stream_ = take(driver_->create_stream());
  }
  void TearDown() override {
    if (driver_ == nullptr) {
      return;
    }
    driver_->destroy_stream(stream_);
    if (auto* fake = dynamic_cast<testing::FakeDriver*>(driver_.get()); fake != nullptr) {
      EXPECT_EQ(fake->complaints(), "");
      EXPECT_EQ(fake->leftovers(), "");
    }
  }

  template <class T>
  static T take(Result<T> result) {
    EXPECT_TRUE(result.is_ok()) << result.status().message();
    return result.is_ok() ? std::move(result).value() : T{};
  }
  static void ok(const Status& status) { EXPECT_TRUE(status.is_ok()) << status.message(); }

  std::unique_ptr<Driver> driver_;
  Stream stream_ = nullptr;
};

TEST_P(DriverTest, MemoryIsMappedIntoReservedRanges) {
  const uint64_t unit = driver_->facts().granularity_bytes;
  ASSERT_GT(unit, 0u);
  uint8_t* const range = take(driver_->reserve(4 * unit));
  // In two parts that a copy goes across.
  ok(driver_->map(range + unit, unit));
  ok(driver_->map(range + 2 * unit, unit));
  const HostBuffer host(driver_.get(), 8192);
  std::memset(host.data(), 0x5a, 4096);
  ok(driver_->copy(range + 2 * unit - 2048, host.data(), 4096, stream_));
  ok(driver_->copy(host.data() + 4096, range + 2 * unit - 2048, 4096, stream_));
  ok(driver_->synchronize_device());
  EXPECT_EQ(std::memcmp(host.data(), host.data() + 4096, 4096), 0);
  driver_->unmap(range + unit, unit);
  driver_->unmap(range + 2 * unit, unit);
  ok(driver_->map(range + unit, 2 * unit));
  driver_->unmap(range + unit, 2 * unit);
  driver_->release(range, 4 * unit);
}

TEST_P(DriverTest, StreamsKeepTheirOrderAndWaitForEvents) {
  constexpr uint64_t kBytes = 4096;
  uint8_t* const memory = take(driver_->allocate(2 * kBytes));
  const HostBuffer host(driver_.get(), 4 * kBytes);
  for (uint32_t i = 0; i < kBytes; ++i) {
    host.data()[i] = static_cast<uint8_t>(i * 7);
  }
  const Stream other = take(driver_->create_stream());
  const Event event = take(driver_->create_event());
  EXPECT_TRUE(take(driver_->is_done(event)));
  ok(driver_->copy(memory, host.data(), kBytes, stream_));
  ok(driver_->copy(memory + kBytes, memory, kBytes, stream_));
  ok(driver_->record(event, stream_));
  ok(driver_->wait(other, event));
  ok(driver_->copy(host.data() + kBytes, memory + kBytes, kBytes, other));
  ok(driver_->record(event, other));
  ok(driver_->synchronize(event));
  EXPECT_TRUE(take(driver_->is_done(event)));
  EXPECT_EQ(std::memcmp(host.data(), host.data() + kBytes, kBytes), 0);
  driver_->destroy_event(event);
  driver_->destroy_stream(other);
  driver_->free(memory);
}

TEST_P(DriverTest, NobodyCapturesUnasked) { EXPECT_FALSE(take(driver_->is_capturing(stream_))); }

TEST_P(DriverTest, ScattersAndMoves) {
  constexpr uint32_t kWords = 1000, kPages = 3;
  constexpr uint64_t kPageBytes = 16384;
  uint8_t* const memory = take(driver_->allocate(2 * kPages * kPageBytes));
  const HostBuffer host(driver_.get(), 4 * kPages * kPageBytes);
  // Runs of 1 to 40 words, in an order that is not theirs, to places aligned and not.
  std::vector<WordRun> runs;
  for (uint32_t word = 0; word < kWords;) {
    const uint32_t n = std::min(1 + word % 40, kWords - word);
    runs.push_back({word, kWords - word - n, n});
    word += n;
  }
  auto* const words = host.as<uint32_t>();
  for (const WordRun& run : runs) {
    for (uint32_t i = 0; i < run.n_words; ++i) {
      words[run.from + i] = static_cast<uint32_t>(run.to) + i;
    }
  }
  const uint64_t run_bytes = runs.size() * sizeof(WordRun);
  std::memcpy(host.data() + kWords * 4, runs.data(), run_bytes);
  uint8_t* const on_device = memory + kPages * kPageBytes;
  ok(driver_->copy(on_device, words, kWords * 4 + run_bytes, stream_));
  ScatterParams scatter;
  scatter.to = reinterpret_cast<uint32_t*>(memory);
  scatter.words = reinterpret_cast<const uint32_t*>(on_device);
  scatter.runs = reinterpret_cast<const WordRun*>(on_device + kWords * 4);
  scatter.n_runs = static_cast<uint32_t>(runs.size());
  ok(driver_->scatter(scatter, stream_));
  ok(driver_->scatter(ScatterParams{}, stream_));
  uint8_t* const read = host.data() + kPages * kPageBytes;
  ok(driver_->copy(read, memory, kWords * 4, stream_));
  ok(driver_->synchronize_device());
  for (uint32_t i = 0; i < kWords; ++i) {
    ASSERT_EQ(reinterpret_cast<uint32_t*>(read)[i], i);
  }
  // Three pages in the order 2, 0, 1 into a buffer, and from it into the places 1, 2, 0.
  for (uint64_t i = 0; i < kPages * kPageBytes; ++i) {
    host.data()[i] = static_cast<uint8_t>(i / kPageBytes * 50 + i % 43);
  }
  ok(driver_->copy(memory, host.data(), kPages * kPageBytes, stream_));
  MoveParams move;
  move.packed = on_device;
  move.page_bytes = kPageBytes;
  move.n_pages = kPages;
  for (uint32_t i = 0; i < kPages; ++i) {
    move.pages[i] = memory + (i + 2) % kPages * kPageBytes;
  }
  move.pack = true;
  ok(driver_->move(move, stream_));
  for (uint32_t i = 0; i < kPages; ++i) {
    move.pages[i] = memory + (i + 1) % kPages * kPageBytes;
  }
  move.pack = false;
  ok(driver_->move(move, stream_));
  ok(driver_->copy(read, memory, kPages * kPageBytes, stream_));
  ok(driver_->synchronize_device());
  for (uint32_t place = 0; place < kPages; ++place) {
    // In place (i + 1) lies what was in place (i + 2).
    EXPECT_EQ(std::memcmp(read + place * kPageBytes,
                          host.data() + (place + 1) % kPages * kPageBytes, kPageBytes),
              0)
        << place;
  }
  driver_->free(memory);
}

// A plan for 70 tokens, of which the device knows 63: a piece ends there, and the token that comes
// next goes to the page before.
TEST_P(DriverTest, BringsPlansToLengths) {
  struct Room {
    Work planned_work, work;
    AppendToken planned_token, token;
    LengthsItem item;
    uint32_t length, n_work, n_merges, n_tokens;
  };
  uint8_t* const memory = take(driver_->allocate(sizeof(Room)));
  const HostBuffer host(driver_.get(), sizeof(Room));
  auto* const room = new (host.data()) Room{};
  room->planned_work.request.n_first = room->planned_work.request.n_tokens = 71;
  room->planned_work.end = 71;
  room->planned_token = {70 / 64, 70 % 64, 0, 0};
  room->item = {70, 10, 1, 1, 0};
  room->length = 63;
  room->n_work = room->n_tokens = 1;
  ok(driver_->copy(memory, host.data(), sizeof(Room), stream_));
  auto* const there = reinterpret_cast<Room*>(memory);
  LengthsParams params;
  params.n_kinds = 1;
  params.kinds[0].planned_work = &there->planned_work;
  params.kinds[0].work = &there->work;
  params.kinds[0].planned_tokens = &there->planned_token;
  params.kinds[0].tokens = &there->token;
  params.kinds[0].n_work = &there->n_work;
  params.kinds[0].n_merges = &there->n_merges;
  params.kinds[0].n_tokens = &there->n_tokens;
  params.items = &there->item;
  params.lengths = &there->length;
  params.max_pages = 2;
  ok(driver_->lengths(params, 1, stream_));
  ok(driver_->lengths(LengthsParams{}, 0, stream_));
  ok(driver_->copy(host.data(), memory, sizeof(Room), stream_));
  ok(driver_->synchronize_device());
  EXPECT_EQ(room->work.end, 64u);
  EXPECT_EQ(room->work.request.n_tokens, 64u);
  EXPECT_EQ(room->token.table, 0u);
  EXPECT_EQ(room->token.row, 63u);
  driver_->free(memory);
}

// Two rows of a page go to registered memory, and are states there beside others on the device.
TEST_P(DriverTest, ReadsIntoTheHostAndMergesWhatLiesThere) {
  constexpr uint32_t kDim = 64, kPageTokens = 64, kFirst = 3, kRows = 2;
  constexpr uint64_t kPlane = kPageTokens * kDim * 2;
  struct Device {
    uint16_t page[2][kPageTokens][kDim];
    alignas(16) float o[kRows][kDim];
    float lse[kRows];
    uint32_t table[4];
    uint16_t heads[8];
  };
  struct Host {
    Device in;
    alignas(16) float k[kRows][kDim];
    alignas(16) uint16_t v[kRows][kDim];
    float lse[kRows];
    alignas(16) float o[kRows][kDim];
    float all_lse[kRows];
  };
  auto* const on = reinterpret_cast<Device*>(take(driver_->allocate(sizeof(Device))));
  const HostBuffer buffer(driver_.get(), round_up(sizeof(Host), 4096));
  auto* const host = new (buffer.data()) Host();
  for (uint32_t t = 0; t < kPageTokens; ++t) {
    for (uint32_t i = 0; i < kDim; ++i) {
      host->in.page[0][t][i] =
          f32_to_bf16(static_cast<float>(t) + 0.5f * static_cast<float>(i % 2));
      host->in.page[1][t][i] = f32_to_bf16(-static_cast<float>(t));
    }
  }
  for (uint32_t row = 0; row < kRows; ++row) {
    host->lse[row] = std::log(3.0f);  // of the other state it is 0, as its o
  }
  ok(driver_->copy(on, &host->in, sizeof(Device), stream_));

  ReadParams read;
  read.pool.segments[0] = reinterpret_cast<uint8_t*>(on->page);
  read.pool.page_tokens = make_divider(kPageTokens);
  read.pool.heads = on->heads;
  read.pool.classes[0] = {2 * kPlane, kPlane, kPlane, 0, 1, 0};
  read.page_table = on->table;
  read.n_classes = 1;
  read.first = kFirst;
  read.n_tokens = kRows;
  read.dim = kDim;
  read.k = {host->k, kDim, kDim, Dtype::kF32, kDim};
  read.v = {host->v, kDim, kDim, Dtype::kBf16, kDim};
  ok(driver_->read(CodecId::kBf16, read, 1, stream_));
  StatesParams states;
  states.n_states = 2;
  states.n_rows = kRows;
  states.n_heads = 1;
  states.dim = kDim;
  states.o[0] = {on->o, kDim, kDim, Dtype::kF32, kDim};
  states.lse[0] = {on->lse, 1, 1, Dtype::kF32, 1};
  states.o[1] = read.k;
  states.lse[1] = {host->lse, 1, 1, Dtype::kF32, 1};
  states.out_o = {host->o, kDim, kDim, Dtype::kF32, kDim};
  states.out_lse = {host->all_lse, 1, 1, Dtype::kF32, 1};
  ok(driver_->merge_states(states, 1, stream_));
  ok(driver_->synchronize_device());
  for (uint32_t row = 0; row < kRows; ++row) {
    EXPECT_NEAR(host->all_lse[row], std::log(4.0), 1e-5);
    for (uint32_t i = 0; i < kDim; ++i) {
      const float k = kFirst + static_cast<float>(row) + 0.5f * static_cast<float>(i % 2);
      EXPECT_EQ(host->k[row][i], k);
      EXPECT_EQ(host->v[row][i], host->in.page[1][kFirst + row][i]);
      EXPECT_NEAR(host->o[row][i], 0.75 * k, 1e-5);
    }
  }
  driver_->free(reinterpret_cast<uint8_t*>(on));
}

// Two tokens, one kv head, a group of 2, in two pieces that are merged; by both kernels.
TEST_P(DriverTest, AppendsAndAttends) {
  constexpr uint32_t kDim = 64, kPageTokens = 64;
  constexpr uint64_t kRoom = 131072;
  constexpr uint64_t kPlane = kPageTokens * kDim * 2;
  const uint64_t unit = driver_->facts().granularity_bytes;
  const uint64_t pool_bytes = round_up(4 * kPlane, unit);
  uint8_t* const pool = take(driver_->reserve(pool_bytes));
  ok(driver_->map(pool, pool_bytes));
  uint8_t* const memory = take(driver_->allocate(kRoom));
  const HostBuffer host(driver_.get(), kRoom);

  // Laid out alike on both sides.
  struct Inputs {
    float k[2][kDim], v[2][kDim];
    uint16_t q[2][kDim];
    AppendToken tokens[3];
    uint32_t n_tokens, n_merges;
    uint32_t table[8];
    Work work[2];
    Merge merges[1];
    alignas(16) float partial_o[2][attention::gpu::kPrefillRows][kDim];
    float partial_lse[2][attention::gpu::kPrefillRows];
    alignas(16) float o[2][kDim];
    float lse[2];
    uint16_t heads[8];
  };
  static_assert(sizeof(Inputs) <= kRoom);
  auto* const in = new (host.data()) Inputs();
  auto* const on = reinterpret_cast<Inputs*>(memory);
  for (uint32_t i = 0; i < kDim; ++i) {
    in->k[0][i] = i == 0 ? 2.0f : 0.0f;
    in->k[1][i] = i == 1 ? 1.0f : 0.0f;
    in->v[0][i] = 1.0f;
    in->v[1][i] = static_cast<float>(i % 4);
    in->q[0][i] = f32_to_bf16(i < 2 ? 1.0f : 0.0f);
    in->q[1][i] = f32_to_bf16(i == 1 ? 3.0f : 0.0f);
  }
  in->tokens[0] = {5, 7, 0, 0};
  in->tokens[1] = {5, 8, 1, 0};
  in->tokens[2] = {5, 8, 0, 0};  // does not count
  in->n_tokens = 2;
  in->n_merges = 1;
  in->table[5] = 1u << kEntrySlotBits | 1;
  for (uint32_t i = 0; i < 2; ++i) {
    Work& work = in->work[i];
    work.request.table = 5;
    work.request.first = 7;
    work.request.n_first = work.request.n_tokens = 2;
    work.begin = i;
    work.end = i + 1;
    work.slot = static_cast<int32_t>(i);
  }
  in->merges[0].n_slots = 2;
  ok(driver_->copy(memory, in, sizeof(Inputs), stream_));

  AppendParams append;
  append.pool.segments[0] = append.pool.segments[1] = pool;
  append.pool.page_tokens = make_divider(kPageTokens);
  append.pool.heads = on->heads;
  append.pool.classes[0] = {2 * kPlane, kPlane, kPlane, 0, 1, 0};
  append.page_table = on->table;
  append.k = on->k;
  append.v = on->v;
  append.stride_token = append.stride_head = kDim;
  append.tokens = on->tokens;
  append.n_tokens = &on->n_tokens;
  append.dtype = Dtype::kF32;
  append.dim = kDim;
  ok(driver_->append(CodecId::kBf16, append, 1, stream_));

  DecodeParams decode;
  decode.pool = append.pool;
  AttendTensors& tensors = decode.tensors;
  tensors.q = on->q;
  tensors.q_stride_token = tensors.o_stride_token = 2 * kDim;
  tensors.q_stride_head = tensors.o_stride_head = kDim;
  tensors.o = on->o;
  tensors.lse = on->lse;
  tensors.lse_stride_token = 2;
  tensors.lse_stride_head = 1;
  tensors.group = 2;
  decode.page_table = on->table;
  decode.work = on->work;
  decode.partial_o = &on->partial_o[0][0][0];
  decode.partial_lse = &on->partial_lse[0][0];
  decode.scale_log2 = std::numbers::log2e_v<float>;
  for (const uint32_t block_rows : {16u, attention::gpu::kPrefillRows}) {
    in->lse[0] = in->lse[1] = -1.0f;  // not the results of the other one
    ok(driver_->copy(memory, in, sizeof(Inputs), stream_));
    const DecodeKernel kernel{CodecId::kBf16, kDim, block_rows};
    EXPECT_GE(take(driver_->decode_blocks(kernel)), 1u);
    ok(driver_->decode(kernel, decode, 2, stream_));
    MergeParams merge;
    merge.tensors = tensors;
    merge.merges = on->merges;
    merge.n_merges = &on->n_merges;
    merge.partial_o = decode.partial_o;
    merge.partial_lse = decode.partial_lse;
    merge.rows = 2;
    merge.block_rows = block_rows;
    ok(driver_->merge(kDim, merge, 1, stream_));
    ok(driver_->copy(in, memory, sizeof(Inputs), stream_));
    ok(driver_->synchronize_device());
    for (uint32_t row = 0; row < 2; ++row) {
      const double a = std::exp(row == 0 ? 2.0 : 0.0), b = std::exp(row == 0 ? 1.0 : 3.0);
      EXPECT_NEAR(in->lse[row], std::log(a + b), 1e-5);
      for (uint32_t i = 0; i < kDim; ++i) {
        EXPECT_NEAR(in->o[row][i], (a + b * (i % 4)) / (a + b), 2e-2) << row << " " << i;
      }
    }
  }
  driver_->unmap(pool, pool_bytes);
  driver_->release(pool, pool_bytes);
  driver_->free(memory);
}

TEST_P(DriverTest, MemoryIsSharedByDescriptor) {
  const uint64_t unit = driver_->facts().granularity_bytes;
  const std::unique_ptr<Driver> other = GetParam().open();
  uint8_t* const here = take(driver_->reserve(2 * unit));
  uint8_t* const there = take(other->reserve(2 * unit));
  {
    const ipc::Fd memory = take(driver_->map_shared(here + unit, unit));
    ok(other->map_from(there, unit, memory));
    EXPECT_FALSE(other->map_from(there + unit, unit, ipc::Fd()).is_ok());
  }
  const Stream their_stream = take(other->create_stream());
  HostBuffer buffer(driver_.get(), 4096);
  HostBuffer their_buffer(other.get(), 4096);
  // It has been made of zeros.
  std::memset(their_buffer.data(), 0xab, 4096);
  ok(other->copy(their_buffer.data(), there + unit - 4096, 4096, their_stream));
  ok(other->synchronize_stream(their_stream));
  EXPECT_TRUE(std::all_of(their_buffer.data(), their_buffer.data() + 4096,
                          [](uint8_t byte) { return byte == 0; }));
  // What one writes the other reads, also when the one has let go of it.
  std::memset(buffer.data(), 0x5c, 4096);
  ok(driver_->copy(here + 2 * unit - 4096, buffer.data(), 4096, stream_));
  ok(driver_->synchronize_stream(stream_));
  driver_->unmap(here + unit, unit);
  ok(other->copy(their_buffer.data(), there + unit - 4096, 4096, their_stream));
  ok(other->synchronize_stream(their_stream));
  EXPECT_TRUE(std::all_of(their_buffer.data(), their_buffer.data() + 4096,
                          [](uint8_t byte) { return byte == 0x5c; }));
  other->unmap(there, unit);
  other->destroy_stream(their_stream);
  driver_->release(here, 2 * unit);
  other->release(there, 2 * unit);
}

TEST_P(DriverTest, StreamsWaitForWords) {
  HostBuffer buffer(driver_.get(), 4096);
  auto* const words = buffer.as<uint64_t>();
  words[0] = words[8] = 0;
  const Stream second = take(driver_->create_stream());
  uint8_t* const memory = take(driver_->allocate(4096));
  // The second stream writes what the first one has waited for: a number that is larger will do.
  ok(driver_->wait_word(&words[0], 3, stream_));
  ok(driver_->copy(memory, buffer.data() + 2048, 64, stream_));
  ok(driver_->write_word(&words[8], 1, stream_));
  std::memset(buffer.data() + 2048, 0x11, 64);
  ok(driver_->write_word(&words[0], 2, second));
  ok(driver_->synchronize_stream(second));
  EXPECT_EQ(std::atomic_ref(words[8]).load(), 0u);
  std::memset(buffer.data() + 2048, 0x22, 64);
  ok(driver_->write_word(&words[0], 5, second));
  ok(driver_->synchronize_stream(stream_));
  EXPECT_EQ(std::atomic_ref(words[8]).load(), 1u);
  ok(driver_->copy(buffer.data() + 1024, memory, 64, stream_));
  ok(driver_->synchronize_stream(stream_));
  EXPECT_EQ(buffer.data()[1024], 0x22);
  // A thread may write it, and numbers compare as of a circle.
  ok(driver_->wait_word(&words[0], uint64_t{1} << 62, stream_));
  ok(driver_->write_word(&words[8], 2, stream_));
  std::atomic_ref(words[0]).store(uint64_t{1} << 62);
  ok(driver_->synchronize_stream(stream_));
  EXPECT_EQ(std::atomic_ref(words[8]).load(), 2u);
  ok(driver_->wait_word(&words[0], UINT64_MAX - 5, stream_));
  ok(driver_->synchronize_stream(stream_));
  driver_->free(memory);
  driver_->destroy_stream(second);
}

INSTANTIATE_TEST_SUITE_P(All, DriverTest, ::testing::ValuesIn(kImplementations),
                         [](const auto& param) { return param.param.name; });

// --- The fake one alone: it has to notice --------------------------------------------------------

TEST(FakeDriverTest, WorkHappensAsLateAsPossible) {
  testing::FakeDriver driver;
  uint8_t* const memory = driver.allocate(4096).value();
  {
    const HostBuffer host(&driver, 8192);
    host.data()[0] = 1;
    ASSERT_TRUE(driver.copy(memory, host.data(), 64, nullptr).is_ok());
    host.data()[0] = 2;  // too early
    ASSERT_TRUE(driver.copy(host.data() + 4096, memory, 64, nullptr).is_ok());
    driver.settle();
    EXPECT_EQ(host.data()[4096], 2);
  }
  driver.free(memory);
  EXPECT_EQ(driver.complaints(), "");
}

TEST(FakeDriverTest, WaitsAreForTheRecordBeforeThem) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    testing::FakeOptions options;
    options.seed = seed;
    testing::FakeDriver driver(options);
    uint8_t* const memory = driver.allocate(4096).value();
    const Stream first = driver.create_stream().value(), second = driver.create_stream().value();
    const Event event = driver.create_event().value();
    {
      const HostBuffer host(&driver, 4096);
      host.data()[0] = 1;
      host.data()[1] = 2;
      ASSERT_TRUE(driver.copy(memory, host.data(), 1, first).is_ok());
      ASSERT_TRUE(driver.record(event, first).is_ok());
      ASSERT_TRUE(driver.wait(second, event).is_ok());
      ASSERT_TRUE(driver.copy(memory, host.data() + 1, 1, second).is_ok());
      // Somebody else's from here on, and done at once.
      ASSERT_TRUE(driver.record(event, nullptr).is_ok());
      driver.settle();
      EXPECT_EQ(memory[0], 2) << seed;
    }
    driver.free(memory);
    EXPECT_EQ(driver.complaints(), "");
  }
}

TEST(FakeDriverTest, MemoryThatIsGoneIsNoticed) {
  testing::FakeDriver driver;
  uint8_t* const memory = driver.allocate(4096).value();
  const HostBuffer host(&driver, 4096);
  ASSERT_TRUE(driver.copy(memory, host.data(), 64, nullptr).is_ok());
  driver.free(memory);
  driver.settle();
  EXPECT_NE(driver.complaints(), "");
}

TEST(FakeDriverTest, CallsFailWhenTold) {
  testing::FakeDriver driver;
  driver.fail(testing::Operation::kAllocate, 2);
  uint8_t* const memory = driver.allocate(4096).value();
  EXPECT_EQ(driver.allocate(4096).status().code(), KVM_ERR_NO_SPACE);
  EXPECT_NE(driver.leftovers(), "");
  driver.free(memory);
  EXPECT_EQ(driver.leftovers(), "");
}

TEST(FakeDriverTest, GraphsAreKeptAndReplayed) {
  testing::FakeDriver driver;
  uint8_t* const memory = driver.allocate(4096).value();
  const HostBuffer host(&driver, 4096);
  driver.begin_capture(nullptr);
  ASSERT_TRUE(driver.is_capturing(nullptr).value());
  ASSERT_TRUE(driver.copy(memory, host.data(), 64, nullptr).is_ok());
  const testing::FakeDriver::Graph graph = driver.end_capture(nullptr);
  driver.settle();
  EXPECT_EQ(driver.copied_bytes(), 0u);
  driver.replay(graph, nullptr);
  driver.replay(graph, nullptr);
  driver.settle();
  EXPECT_EQ(driver.copied_bytes(), 128u);
  driver.free(memory);
}

}  // namespace
}  // namespace kvm::device
