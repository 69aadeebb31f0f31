// SPDX-License-Identifier: Apache-2.0
// What the tests of kvm.h stand on: a service (an engine in this process, or a kvmd of its own in a
// fresh folder), and attention computed naively in double precision.
#ifndef KVM_TESTS_INTEGRATION_ABI_RIG_H_
#define KVM_TESTS_INTEGRATION_ABI_RIG_H_

#include <gtest/gtest.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvm.h"

namespace kvm::testing {

// The test binary is linked with libkvm_embedded (true) or libkvm (false).
bool is_embedded();

// Far beyond what tests of processes take, for machines with other work.
inline constexpr uint64_t kPatienceNs = 60'000'000'000;
// The end of a child within the patience, as waitpid has it; -1 when there is none, and then it is
// killed.
int wait_for_end(pid_t child);

// A kvmd in a child process.
class Daemon {
 public:
  // arguments: options of kvmd beside --socket and --host-capacity 256MiB, which they may name
  // in its place. program: another kvmd, that is built for tests.
  explicit Daemon(std::vector<std::string> arguments = {}, std::string program = "kvmd");
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  const std::string& socket_path() const { return socket_path_; }
  pid_t pid() const { return pid_; }
  void start();      // waits until it listens
  void kill_hard();  // SIGKILL, and waits for its end
  // SIGTERM, and waits for its end. What waitpid says of it, and its log.
  int stop(std::string* log);
  // The process becomes the caller's to wait for.
  pid_t give_up_pid() { return std::exchange(pid_, -1); }

 private:
  std::vector<std::string> arguments_;
  std::string program_;
  std::string folder_;
  std::string socket_path_;
  pid_t pid_ = -1;
};

// Connects, failing the test if that fails.
kvm_client* connect_to_daemon(const Daemon& daemon, const char* name);

// A client of a service of the test's own, and a queue.
class ServiceTest : public ::testing::Test {
 protected:
  // Opens the service and makes the queue. name: of the client, to a daemon.
  void open(const char* name);
  void TearDown() override;

  std::unique_ptr<Daemon> daemon_;  // null where the engine is embedded
  kvm_client* client_ = nullptr;
  kvm_queue* queue_ = nullptr;
};

struct Geometry {
  uint32_t n_layers = 2;
  uint32_t n_q_heads = 4;
  uint32_t n_kv_heads = 2;
  uint32_t dim = 16;
  uint32_t codec = KVM_CODEC_F32;
};

kvm_space_id register_space(kvm_client* client, const char* name, const Geometry& geometry);

// K and V of one layer of one sequence, and attention over them.
class NaiveLayer {
 public:
  explicit NaiveLayer(const Geometry& geometry) : geometry_(geometry) {}

  // k and v: [n][n_kv_heads][dim].
  void append(const std::vector<float>& k, const std::vector<float>& v);
  void truncate(uint64_t n_tokens);
  uint64_t n_tokens() const { return k_.size() / row(); }
  const std::vector<float>& k() const { return k_; }
  const std::vector<float>& v() const { return v_; }

  // q: [n_q_heads][dim] of one row; `sees` tells which positions it sees. o: [n_q_heads][dim].
  void attend(const float* q, const std::function<bool(uint64_t)>& sees, std::vector<double>* o,
              std::vector<double>* lse) const;

 private:
  size_t row() const { return size_t{geometry_.n_kv_heads} * geometry_.dim; }

  Geometry geometry_;
  std::vector<float> k_, v_;
};

// Normally distributed numbers.
std::vector<float> random_floats(std::mt19937* random, size_t n);

kvm_tensor tensor_of(const std::vector<float>& values);

// Largest difference, relative to the largest magnitude.
double difference(const float* got, const std::vector<double>& expected);

}  // namespace kvm::testing

#endif  // KVM_TESTS_INTEGRATION_ABI_RIG_H_
