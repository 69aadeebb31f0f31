// SPDX-License-Identifier: Apache-2.0
// The fuzz targets: functions that take any bytes, and abort (or trip a sanitizer) where the code
// under test does not cope with them.
//
//   hello        the first control message of a connection
//   control      control messages of a welcomed client, one after the other
//   request      a ring entry and the arena that it refers to
//   items        items, ranges and tree words of a step, run by an engine
//   config       kvmd.toml
//   stats_text   statistics as kvmctl reads them
//   policy       the parameters of a space with all their arrays
//   image        a sequence that was saved, and then used
//   object_file  a snapshot in a file of its own
//   disk_files   what a kvmd that was killed has left on its disks: the list of snapshots, segments
//
// A target may keep state between inputs as long as an input alone still shows what it showed.
#ifndef KVM_TESTS_FUZZ_TARGETS_H_
#define KVM_TESTS_FUZZ_TARGETS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvm::testing {

using Bytes = std::vector<uint8_t>;

struct FuzzTarget {
  const char* name;
  void (*run)(std::span<const uint8_t> input);
  // Valid inputs, with a name each: where fuzzing begins.
  std::vector<std::pair<std::string, Bytes>> (*seeds)();
  // Of those that the test of each build tries: fewer where one takes milliseconds.
  uint32_t n_damaged = 1500;
};

const std::vector<FuzzTarget>& fuzz_targets();
// Null: there is none.
const FuzzTarget* find_fuzz_target(std::string_view name);

void run_hello(std::span<const uint8_t> input);
void run_control(std::span<const uint8_t> input);
void run_request(std::span<const uint8_t> input);
void run_items(std::span<const uint8_t> input);
void run_config(std::span<const uint8_t> input);
void run_stats_text(std::span<const uint8_t> input);
void run_policy(std::span<const uint8_t> input);
void run_image(std::span<const uint8_t> input);
void run_object_file(std::span<const uint8_t> input);
void run_disk_files(std::span<const uint8_t> input);

// --- Forms of the inputs -------------------------------------------------------------------------

// Takes values off the front; zeros when the input is used up.
class InputReader {
 public:
  explicit InputReader(std::span<const uint8_t> input) : input_(input) {}

  template <typename T>
  T take() {
    T value{};
    const size_t n = input_.size() < sizeof(T) ? input_.size() : sizeof(T);
    if (n != 0) {
      std::memcpy(&value, input_.data(), n);
      input_ = input_.subspan(n);
    }
    return value;
  }
  template <typename T>
  std::vector<T> take_many(size_t n) {
    std::vector<T> out;
    for (size_t i = 0; i < n && !input_.empty(); ++i) {
      out.push_back(take<T>());
    }
    return out;
  }
  std::span<const uint8_t> take_bytes(size_t n) {
    const auto out = input_.first(n < input_.size() ? n : input_.size());
    input_ = input_.subspan(out.size());
    return out;
  }
  bool is_empty() const { return input_.empty(); }

 private:
  std::span<const uint8_t> input_;
};

template <typename T>
void put(Bytes* out, const T& value) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
  out->insert(out->end(), bytes, bytes + sizeof(T));
}

// control: u16 length and bytes of each message.
// request: a RequestEntry, and the arena's bytes from the front (region 1, kFuzzArenaBytes).
inline constexpr uint64_t kFuzzArenaBytes = 4096;
// items: this, then kvm_item[n_items], kvm_range[n_ranges], uint64_t[n_tree_words].
struct ItemsHead {
  uint8_t verbs;  // of StepBlock
  uint8_t mode;
  uint8_t proposal;
  uint8_t layer_begin;
  uint8_t n_layers;
  uint8_t n_items;
  uint8_t n_ranges;
  uint8_t n_tree_words;
  float scale;
  float eps;
  float delta;
  uint32_t flags;
  uint64_t budget;
};
// policy: a kvm_space_params, and as many of each array as its counts say, in the order layers,
// policies, codecs, indexes, rope_inv_freq; then sink logits, as far as bytes are left.
// object_file: the file.
// disk_files: whether checksums are made to match (8 bits), then patches, each with its bytes.
struct DiskPatch {
  uint8_t file;
  uint32_t offset;
  uint8_t n_bytes;
} __attribute__((packed));
// image: how many pages (16 bits), the bytes of each (32 bits), and the body of the object.

}  // namespace kvm::testing

#endif  // KVM_TESTS_FUZZ_TARGETS_H_
