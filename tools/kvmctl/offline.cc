// SPDX-License-Identifier: Apache-2.0
#include "tools/kvmctl/offline.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/clock.h"
#include "engine/image/image_check.h"
#include "engine/run/snapshot_label.h"
#include "tools/kvmctl/cli.h"

namespace kvm::tools {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
// What is over before is not shown at all.
constexpr uint64_t kFirstShownNs = kSecond / 2;
constexpr uint64_t kShownEveryNs = kSecond;

}  // namespace

void fail_offline(const Status& status) {
  const char* advice = "";
  if (status.code() == KVM_ERR_BUSY) {
    advice =
        "\nStop that kvmd first (the packaged service with `systemctl stop kvmd`): a directory has "
        "one owner at a time.";
  } else if (status.code() == KVM_ERR_PERMISSION) {
    advice = "\nRun kvmctl as root, or as the user that kvmd runs as.";
  }
  fail(fmt::format("{} ({}){}", status.message(), kvm_status_name(status.code()), advice),
       kExitService);
}

engine::SnapshotInfo snapshot_of(const tiers::ObjectInfo& object) {
  if (auto info = engine::snapshot_info(object)) {
    return *std::move(info);
  }
  engine::SnapshotInfo info;
  for (const char c : object.key) {
    info.name.name += c > ' ' && c <= '~' ? c : '?';
  }
  info.bytes = object.page_bytes + object.body_bytes;
  info.is_lost = object.is_lost;
  return info;
}

std::string wrong_with_body(const std::string& key, uint64_t n_pages,
                            std::span<const std::byte> body) {
  if (!engine::parse_snapshot_key(key)) {
    return "";
  }
  return std::string(engine::check_image(body, n_pages).message());
}

Progress::Progress(std::string what, bool is_asked_for)
    : what_(std::move(what)),
      is_terminal_(::isatty(STDERR_FILENO) != 0),
      is_asked_for_(is_asked_for) {
  begin(what_);
}

void Progress::begin(std::string what) {
  clear();
  what_ = std::move(what);
  begin_ns_ = now_ns();
  next_ns_ = begin_ns_ + (is_asked_for_ ? 0 : kFirstShownNs);
}

void Progress::show(uint64_t n_done, uint64_t n_all) {
  const uint64_t now = now_ns();
  if (!(is_terminal_ || is_asked_for_) || now < next_ns_ || n_all == 0) {
    return;
  }
  next_ns_ = now + kShownEveryNs;
  const double share = static_cast<double>(n_done) / static_cast<double>(n_all);
  const double taken_s = static_cast<double>(now - begin_ns_) / static_cast<double>(kSecond);
  const std::string text =
      fmt::format("{}: {:.0f} % of {}, {}, {:.0f} s left", what_, 100 * share, bytes_text(n_all),
                  rate_text(n_done, now - begin_ns_), share > 0 ? taken_s / share - taken_s : 0);
  if (is_terminal_) {
    fmt::print(stderr, "\r{}\x1b[K", text);
  } else {
    fmt::print(stderr, "{}\n", text);
  }
  (void)std::fflush(stderr);
  is_shown_ = is_terminal_;
}

void Progress::clear() {
  if (std::exchange(is_shown_, false)) {
    (void)std::fputs("\r\x1b[K", stderr);
    (void)std::fflush(stderr);
  }
}

std::string rate_text(uint64_t n_bytes, uint64_t duration_ns) {
  // Bytes a nanosecond are GB a second.
  const double rate =
      static_cast<double>(n_bytes) / static_cast<double>(std::max<uint64_t>(duration_ns, 1));
  return rate >= 1 ? fmt::format("{:.1f} GB/s", rate) : fmt::format("{:.0f} MB/s", rate * 1000);
}

}  // namespace kvm::tools
