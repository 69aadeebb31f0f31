// SPDX-License-Identifier: Apache-2.0
// A client of kvm_cuda.h over the fake driver, tensors for it, and fp64 arithmetic to compare with.
//
// With $KVM_DEVICE_SERVER set its memory is that of a kvmd in a process of its own
// (kvmd_on_fake.cc), and the same tests are tests of that.
#ifndef KVM_TESTS_GPU_DEVICE_RIG_H_
#define KVM_TESTS_GPU_DEVICE_RIG_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvm_cuda.h"
#include "tests/gpu/fake_driver.h"
#include "tests/integration/abi_rig.h"

namespace kvm::device::testing {

// Whether device memory is a kvmd's.
bool has_server();

// What the next kvm_cuda_open gets, and the driver that the last one got.
extern FakeOptions next_options;
extern FakeDriver* last_driver;

// How keys and values of a test are made: any (sequence's key, layer, kv head, position, channel).
// Forks have their own key from the position on at which they were cut.
float stored_number(uint64_t key, uint32_t layer, uint32_t head, uint64_t position,
                    uint32_t channel, bool is_v);

struct Geometry {
  uint32_t n_layers = 2;
  uint32_t n_q_heads = 4;
  uint32_t n_kv_heads = 2;
  uint32_t dim = 64;    // of keys
  bool v_in_k = false;  // values are the first dim_v channels of keys
  uint32_t dim_v() const { return v_in_k ? 512 : dim; }
  uint32_t codec = KVM_CODEC_BF16;
  // Of queries: where rows are narrow another one.
  uint32_t query_dtype() const { return codec == KVM_CODEC_F16 ? KVM_DTYPE_F16 : KVM_DTYPE_BF16; }
  float softcap = 0;
  std::vector<float> sink_logits;  // [layer][q head], or empty
  std::vector<kvm_layer_params> layers;
  std::vector<kvm_policy_params> policies;
};

// Multi-head latent attention: one key of 576 channels, its value in it.
Geometry latent_geometry(uint32_t n_q_heads);

// Registers a space called "model".
kvm_space_id register_space(kvm_client* client, const Geometry& geometry);

// Which tokens a sequence has: those of `key` up to `n_tokens`, where older parts may have other
// keys.
struct Shadow {
  std::vector<uint64_t> keys;  // [position]
};

// Expects a call to have answered with this status, and a sentence that has these words.
void expect_refused(kvm_status got, kvm_status expected, const std::string& words);

class Rig {
 public:
  Rig(const FakeOptions& options, const Geometry& geometry, uint64_t pool_bytes = 64 << 20,
      uint64_t host_bytes = 16 << 20);
  // Everything must have been given back, and nothing complained of.
  ~Rig();
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  kvm_client* client() const { return client_; }
  FakeDriver& driver() const { return *driver_; }
  kvm_space_id space() const { return space_; }
  const Geometry& geometry() const { return geometry_; }
  Stream stream() const { return stream_; }

  kvm_cuda_batch* batch(const kvm_cuda_batch_params& params);
  kvm_cuda_batch_params batch_params(uint32_t max_items, uint32_t max_append, uint32_t max_query,
                                     uint64_t max_tokens = 1024) const;
  kvm_seq_id create();
  // One update with one item, in place `item` of the batch, and its appends: n tokens of `key`
  // behind those of the shadow, whose first one is at first_position.
  void append(kvm_cuda_batch* batch, uint32_t item, kvm_seq_id seq, uint64_t key, Shadow* shadow,
              uint32_t n, uint32_t n_query = 0, uint64_t first_position = 0);

  // Opens a client whose sequences lie in host memory: of an engine in this process, or of the kvmd
  // that has the device's. The caller's to close.
  kvm_client* open_host(uint64_t capacity_bytes = 16 << 20) const;

  // Device memory with these bytes, until the rig ends or forget_memory.
  uint8_t* upload(const void* data, uint64_t size_bytes);
  uint8_t* allocate(uint64_t size_bytes);
  void forget_memory();
  template <class T>
  kvm_tensor tensor(const std::vector<T>& values, uint32_t dtype) {
    const uint64_t size = values.size() * sizeof(T);
    return kvm_device_tensor(upload(values.data(), size), size, dtype);
  }

  // K or V of rows, [row][kv head][dim] in fp32; nothing for V where it is in K.
  struct Row {
    uint64_t key = 0;
    uint64_t position = 0;
  };
  kvm_tensor keys(const std::vector<Row>& rows, uint32_t layer, bool is_v);
  std::vector<uint16_t> queries(uint64_t seed, uint32_t n_rows) const;

  // Results of one layer's attend, to be looked at when the device has come to them.
  struct Outputs {
    float* o = nullptr;
    float* lse = nullptr;
    kvm_tensor o_tensor{}, lse_tensor{};
  };
  Outputs outputs(uint32_t n_rows);

  // A query row: where it is, and which tokens from tree_begin on it sees if it is of a tree.
  struct Query {
    uint64_t position = 0;
    bool tree = false;
    uint64_t tree_begin = 0;
    uint64_t tree_word = 0;
  };
  // Compares row `row` with fp64 arithmetic over the tokens that the query sees of the shadow.
  // log_weights: [kv head][stride], or null.
  void expect_row(const Outputs& got, uint32_t row, const std::vector<uint16_t>& q, uint32_t layer,
                  const Shadow& shadow, const Query& query, const std::string& where,
                  const float* log_weights = nullptr, uint64_t log_weight_stride = 0) const;

  // What a row reads as once it is in pages. Valid until the next call.
  const std::vector<float>& stored_row(uint64_t key, uint32_t layer, uint32_t head,
                                       uint64_t position, bool is_v) const;

 private:
  bool sees(uint32_t layer, uint32_t head, const Query& query, uint64_t position) const;

  Geometry geometry_;
  // How a client connects to daemon_.
  kvm_connect_params server() const;

  std::unique_ptr<kvm::testing::Daemon> daemon_;  // null: the memory is this process's
  kvm_client* client_ = nullptr;
  FakeDriver* driver_ = nullptr;
  kvm_space_id space_ = 0;
  Stream stream_ = nullptr;
  // Rows that were asked for, by what they are of: each is, for every query head and step that sees
  // it. To make them again took 40 % of the tests' time.
  mutable std::unordered_map<uint64_t, std::vector<float>> stored_rows_;
  std::vector<uint8_t*> memory_;
  std::vector<kvm_cuda_batch*> batches_;
};

}  // namespace kvm::device::testing

#endif  // KVM_TESTS_GPU_DEVICE_RIG_H_
