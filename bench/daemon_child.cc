// SPDX-License-Identifier: Apache-2.0
#include "bench/daemon_child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "bench/ceiling.h"
#include "bench/harness.h"
#include "daemon/prefix_memory.h"
#include "daemon/server.h"

namespace kvm::bench {

namespace {

struct Command {
  kvm_seq_id seq;
  uint64_t layer;
};

// The answer: bytes read, and seconds of each kernel.
constexpr size_t kMaxKernels = 31;
struct Answer {
  uint64_t size_bytes;
  double seconds[kMaxKernels];
};

bool read_all(int fd, void* data, size_t size) {
  for (size_t at = 0; at < size;) {
    const ssize_t n = read(fd, static_cast<char*>(data) + at, size - at);
    if (n <= 0) {
      return false;
    }
    at += static_cast<size_t>(n);
  }
  return true;
}

// Serves the parent's commands until it closes its end.
void serve_ceilings(engine::Engine& engine, uint32_t n_threads, int from_parent, int to_parent) {
  Team team(n_threads);
  Command command{};
  while (read_all(from_parent, &command, sizeof(command))) {
    const auto pieces = require(
        engine.layer_memory(command.seq, static_cast<uint32_t>(command.layer)), "layer memory");
    ReadCeiling ceiling(team, pieces);
    const std::vector<double> seconds = ceiling.run_once();
    Answer answer{};
    answer.size_bytes = ceiling.size_bytes();
    std::copy_n(seconds.begin(), std::min(seconds.size(), kMaxKernels), answer.seconds);
    if (write(to_parent, &answer, sizeof(answer)) != sizeof(answer)) {
      return;
    }
  }
}

[[noreturn]] void child_main(const std::string& socket, uint32_t n_threads, uint64_t capacity_bytes,
                             const DaemonSpin& spin, uint64_t prefix_pages, int from_parent,
                             int to_parent) {
  spdlog::set_level(spdlog::level::warn);  // the report owns the terminal
  engine::EngineOptions engine_options;
  engine_options.n_threads = n_threads;
  engine_options.host_capacity_bytes = capacity_bytes;
  engine_options.worker_spin_ns = spin.worker_ns;
  if (prefix_pages != 0) {
    engine_options.prefix_pages = prefix_pages;
  }
  daemon::PrefixMemory prefix_memory;
  engine_options.prefix_memory = [&](uint32_t uid, uint64_t size_bytes) {
    return prefix_memory.make(uid, size_bytes);
  };
  const auto engine = require(engine::Engine::open(engine_options), "engine");
  daemon::ServerOptions server_options;
  server_options.socket_path = socket;
  server_options.spin_max_ns = spin.dispatcher_ns;
  server_options.prefix_memory = &prefix_memory;
  daemon::Server server(engine.get(), server_options);
  require(server.start(), "server");
  const char ready = 1;
  if (write(to_parent, &ready, 1) != 1) {
    _exit(1);
  }
  std::thread ceilings([&] {
    serve_ceilings(*engine, n_threads, from_parent, to_parent);
    server.request_stop();
  });
  server.run();
  ceilings.join();
  _exit(0);
}

}  // namespace

DaemonChild::DaemonChild(uint32_t n_threads, uint64_t capacity_bytes, const DaemonSpin& spin,
                         uint64_t prefix_pages)
    : bytes_per_s_(read_kernels().size()) {
  char name[] = "/tmp/kvm-bench-XXXXXX";
  int down[2];
  int up[2];
  if (mkdtemp(name) == nullptr || pipe2(down, O_CLOEXEC) != 0 || pipe2(up, O_CLOEXEC) != 0) {
    require(Status(KVM_ERR_IO, std::strerror(errno)), "temporary folder and pipes");
  }
  folder_ = name;
  socket_path_ = folder_ + "/kvmd.sock";
  child_ = fork();
  if (child_ == 0) {
    close(down[1]);
    close(up[0]);
    child_main(socket_path_, n_threads, capacity_bytes, spin, prefix_pages, down[0], up[1]);
  }
  close(down[0]);
  close(up[1]);
  to_child_ = down[1];
  from_child_ = up[0];
  char ready = 0;
  if (!read_all(from_child_, &ready, 1)) {
    require(Status(KVM_ERR_INTERNAL, "the daemon ended before it was ready"), "daemon");
  }
}

DaemonChild::~DaemonChild() {
  close(to_child_);
  close(from_child_);
  waitpid(child_, nullptr, 0);
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void DaemonChild::kill() { ::kill(child_, SIGKILL); }

void DaemonChild::run_ceiling(kvm_seq_id seq, uint32_t layer) {
  const Command command{seq, layer};
  Answer answer{};
  if (write(to_child_, &command, sizeof(command)) != sizeof(command) ||
      !read_all(from_child_, &answer, sizeof(answer))) {
    require(Status(KVM_ERR_INTERNAL, "the daemon went away"), "ceiling");
  }
  for (size_t i = 0; i < bytes_per_s_.size(); ++i) {
    bytes_per_s_[i].push_back(static_cast<double>(answer.size_bytes) / answer.seconds[i]);
  }
}

const std::vector<double>& DaemonChild::best_kernel() const {
  return *std::max_element(bytes_per_s_.begin(), bytes_per_s_.end(),
                           [](const std::vector<double>& a, const std::vector<double>& b) {
                             return median(a) < median(b);
                           });
}

double DaemonChild::ceiling_bytes_per_s() const { return median(best_kernel()); }

double DaemonChild::ceiling_p90_ratio() const {
  const std::vector<double>& rates = best_kernel();
  return median(rates) / percentile(rates, 0.1);
}

uint64_t DaemonChild::rss_bytes() const {
  std::ifstream in(fmt::format("/proc/{}/statm", child_));
  uint64_t total = 0;
  uint64_t resident = 0;
  in >> total >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace kvm::bench
