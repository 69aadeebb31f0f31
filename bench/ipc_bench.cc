// SPDX-License-Identifier: Apache-2.0
// ipc: what a request costs that does nothing.
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "bench/daemon_child.h"
#include "bench/harness.h"
#include "bench/service_client.h"
#include "kvm.h"

namespace kvm::bench {

namespace {

// Posts n null requests at once and waits for all.
void null_batch(kvm_queue* queue, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    require_ok(kvm_nop_async(queue, i), "nop");
  }
  require_ok(kvm_submit(queue), "submit");
  kvm_completion completions[16];
  for (uint32_t got = 0; got < n;) {
    const int32_t more = kvm_wait(queue, completions, 16, n - got, UINT64_MAX);
    require_ok(more < 0 ? more : KVM_OK, "wait");
    got += static_cast<uint32_t>(more);
  }
}

void add_ipc_case(Report& report, kvm_queue* queue, const char* name, uint32_t batch,
                  uint32_t trips, uint32_t gap_us) {
  std::vector<double> seconds;
  for (uint32_t i = 0; i < trips + trips / 10; ++i) {
    if (gap_us != 0) {
      usleep(gap_us);
    }
    const double begin = now_s();
    null_batch(queue, batch);
    if (i >= trips / 10) {
      seconds.push_back(now_s() - begin);
    }
  }
  report.add({{"case", name},
              {"p50_us", median(seconds) * 1e6},
              {"p99_us", percentile(seconds, 0.99) * 1e6}});
}

}  // namespace

int run_ipc(const Options& options) {
  Report report("ipc", options);
  DaemonChild daemon(1, 256ull << 20);
  kvm_client* client = connect(daemon.socket_path());
  kvm_queue* spinning = make_queue(client, UINT64_MAX);
  add_ipc_case(report, spinning, "null", 1, 100000, 0);
  add_ipc_case(report, spinning, "batch16", 16, 20000, 0);
  kvm_queue_destroy(spinning);
  kvm_queue* sleeping = make_queue(client, 0);
  add_ipc_case(report, sleeping, "idle", 1, 500, 5000);
  kvm_queue_destroy(sleeping);
  kvm_client_close(client);
  return report.finish();
}

}  // namespace kvm::bench
