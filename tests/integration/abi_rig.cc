// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/abi_rig.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "base/clock.h"

namespace kvm::testing {

bool is_embedded() { return KVM_TEST_EMBEDDED != 0; }

int wait_for_end(pid_t child) {
  const uint64_t deadline = now_ns() + kPatienceNs;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (now_ns() > deadline) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
      return -1;
    }
    ::usleep(200);
  }
  return status;
}

Daemon::Daemon(std::vector<std::string> arguments, std::string program)
    : arguments_(std::move(arguments)), program_(std::move(program)) {
  char name[] = "/tmp/kvm-abi-test-XXXXXX";
  if (::mkdtemp(name) != nullptr) {
    folder_ = name;
    socket_path_ = folder_ + "/kvmd.sock";
    start();
  }
}

void Daemon::start() {
  const char* bin = std::getenv("KVM_BIN_DIR");
  const std::string program = std::string(bin != nullptr ? bin : ".") + "/" + program_;
  ASSERT_EQ(::access(program.c_str(), X_OK), 0)
      << program << " is missing: build the target, and set KVM_BIN_DIR (ctest does)";
  std::filesystem::remove(socket_path_);
  std::vector<std::string> command = {"kvmd", "--socket", socket_path_};
  const bool says_capacity =
      std::find(arguments_.begin(), arguments_.end(), "--host-capacity") != arguments_.end();
  if (!says_capacity) {
    command.insert(command.end(), {"--host-capacity", "256MiB"});
  }
  command.insert(command.end(), arguments_.begin(), arguments_.end());
  (void)std::fflush(nullptr);  // what is buffered is not the child's to write
  pid_ = ::fork();
  if (pid_ == 0) {
    // The daemon must not outlive a test that crashes.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const std::string log = folder_ + "/log";
    if (std::freopen(log.c_str(), "a", stderr) == nullptr ||
        std::freopen(log.c_str(), "a", stdout) == nullptr) {
      ::_exit(126);
    }
    std::vector<char*> argv;
    for (std::string& argument : command) {
      argv.push_back(argument.data());
    }
    argv.push_back(nullptr);
    ::execv(program.c_str(), argv.data());
    ::_exit(127);
  }
  for (int i = 0; i < 2000; ++i) {
    struct stat facts {};
    if (::stat(socket_path_.c_str(), &facts) == 0) {
      return;
    }
    if (::waitpid(pid_, nullptr, WNOHANG) != 0) {
      std::ifstream log(folder_ + "/log");
      FAIL() << "kvmd ended: " << std::string(std::istreambuf_iterator<char>(log), {});
    }
    ::usleep(10'000);
  }
  FAIL() << "kvmd made no socket within 20 s";
}

void Daemon::kill_hard() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
}

int Daemon::stop(std::string* log) {
  int status = -1;
  if (pid_ > 0) {
    ::kill(pid_, SIGTERM);
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
  }
  std::ifstream file(folder_ + "/log");
  *log = std::string(std::istreambuf_iterator<char>(file), {});
  return status;
}

Daemon::~Daemon() {
  kill_hard();
  std::filesystem::remove_all(folder_);
}

kvm_client* connect_to_daemon(const Daemon& daemon, const char* name) {
  kvm_connect_params params{};
  params.struct_size = sizeof(params);
  params.socket_path = daemon.socket_path().c_str();
  params.client_name = name;
  kvm_client* client = nullptr;
  const kvm_status status = kvm_connect(&params, &client);
  EXPECT_EQ(status, KVM_OK) << kvm_last_error();
  return client;
}

void ServiceTest::open(const char* name) {
  if (is_embedded()) {
    kvm_embedded_params params{};
    params.struct_size = sizeof(params);
    params.n_threads = 2;
    params.host_capacity_bytes = 256 << 20;
    ASSERT_EQ(kvm_open_embedded(&params, &client_), KVM_OK) << kvm_last_error();
  } else {
    daemon_ = std::make_unique<Daemon>();
    ASSERT_FALSE(HasFatalFailure());
    client_ = connect_to_daemon(*daemon_, name);
    ASSERT_NE(client_, nullptr);
  }
  ASSERT_EQ(kvm_queue_create(client_, nullptr, &queue_), KVM_OK) << kvm_last_error();
}

void ServiceTest::TearDown() {
  kvm_queue_destroy(queue_);
  kvm_client_close(client_);
}

kvm_space_id register_space(kvm_client* client, const char* name, const Geometry& geometry) {
  kvm_space_params params{};
  params.struct_size = sizeof(params);
  params.name = name;
  params.n_layers = geometry.n_layers;
  params.n_q_heads = geometry.n_q_heads;
  params.n_kv_heads = geometry.n_kv_heads;
  params.head_dim_k = geometry.dim;
  params.codec = geometry.codec;
  kvm_space_id space = 0;
  EXPECT_EQ(kvm_space_register(client, &params, &space), KVM_OK) << kvm_last_error();
  return space;
}

void NaiveLayer::append(const std::vector<float>& k, const std::vector<float>& v) {
  k_.insert(k_.end(), k.begin(), k.end());
  v_.insert(v_.end(), v.begin(), v.end());
}

void NaiveLayer::truncate(uint64_t n_tokens) {
  k_.resize(std::min(k_.size(), n_tokens * row()));
  v_.resize(k_.size());
}

void NaiveLayer::attend(const float* q, const std::function<bool(uint64_t)>& sees,
                        std::vector<double>* o, std::vector<double>* lse) const {
  const uint32_t dim = geometry_.dim;
  const uint32_t group = geometry_.n_q_heads / geometry_.n_kv_heads;
  o->assign(size_t{geometry_.n_q_heads} * dim, 0.0);
  lse->assign(geometry_.n_q_heads, -std::numeric_limits<double>::infinity());
  for (uint32_t head = 0; head < geometry_.n_q_heads; ++head) {
    std::vector<double> logits(n_tokens(), -std::numeric_limits<double>::infinity());
    double largest = -std::numeric_limits<double>::infinity();
    for (uint64_t t = 0; t < n_tokens(); ++t) {
      if (sees(t)) {
        const float* key = &k_[t * row() + head / group * dim];
        double dot = 0;
        for (uint32_t d = 0; d < dim; ++d) {
          dot += static_cast<double>(q[head * dim + d]) * static_cast<double>(key[d]);
        }
        logits[t] = dot / std::sqrt(static_cast<double>(dim));
        largest = std::max(largest, logits[t]);
      }
    }
    double sum = 0;
    for (uint64_t t = 0; t < n_tokens(); ++t) {
      const double weight = std::isinf(logits[t]) ? 0.0 : std::exp(logits[t] - largest);
      sum += weight;
      const float* value = &v_[t * row() + head / group * dim];
      for (uint32_t d = 0; d < dim; ++d) {
        (*o)[head * dim + d] += weight * static_cast<double>(value[d]);
      }
    }
    if (sum > 0) {
      for (uint32_t d = 0; d < dim; ++d) {
        (*o)[head * dim + d] /= sum;
      }
      (*lse)[head] = largest + std::log(sum);
    }
  }
}

std::vector<float> random_floats(std::mt19937* random, size_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> out(n);
  for (float& x : out) {
    x = normal(*random);
  }
  return out;
}

kvm_tensor tensor_of(const std::vector<float>& values) {
  return kvm_host_tensor(values.data(), values.size() * sizeof(float), KVM_DTYPE_F32);
}

double difference(const float* got, const std::vector<double>& expected) {
  double largest = 1e-6;
  double off = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double x = static_cast<double>(got[i]);
    if (std::isinf(expected[i])) {
      off = x == expected[i] ? off : std::numeric_limits<double>::infinity();
      continue;
    }
    largest = std::max(largest, std::abs(expected[i]));
    off = std::isnan(x) ? std::numeric_limits<double>::infinity()
                        : std::max(off, std::abs(x - expected[i]));
  }
  return off / largest;
}

}  // namespace kvm::testing
