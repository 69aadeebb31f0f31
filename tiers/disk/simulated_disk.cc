// SPDX-License-Identifier: Apache-2.0
#include "tiers/disk/simulated_disk.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "base/splitmix.h"

namespace kvm::tiers {
namespace {

constexpr uint64_t kMillion = 1'000'000;
constexpr uint32_t kBlock = 512;
constexpr uint32_t kLargeBlock = 4096;

bool is_overwritten(const DiskOp& a, const DiskOp& b) {
  return a.kind == DiskOp::Kind::kWrite && a.file == b.file && a.offset < b.offset + b.size_bytes &&
         b.offset < a.offset + a.size_bytes;
}

}  // namespace

SimulatedDisk::SimulatedDisk(const SimulatedDiskOptions& options)
    : options_(options),
      memory_(options.io.buffer_bytes),
      random_(splitmix64(options.seed + kSplitMixStep)),
      files_(options.io.n_files) {
  KVM_ASSERT(memory_.bytes().size() == options.io.buffer_bytes);
  pending_.reserve(options.io.queue_depth);
}

SimulatedDisk::~SimulatedDisk() { KVM_ASSERT(pending_.empty()); }

uint64_t SimulatedDisk::random() {
  random_ += kSplitMixStep;
  return splitmix64(random_);
}

bool SimulatedDisk::happens(DiskFault fault) {
  const uint32_t rate = options_.per_million[static_cast<size_t>(fault)];
  if (rate == 0 || random() % kMillion >= rate) {
    return false;
  }
  ++n_faults_[static_cast<size_t>(fault)];
  return true;
}

Status SimulatedDisk::create(uint32_t file, const std::string& path, uint64_t size_bytes) {
  KVM_ASSERT(file < files_.size() && files_[file].bytes.empty() && size_bytes != 0 &&
             size_bytes % kMaxDiskBlockBytes == 0);
  if (n_files_ == options_.max_files) {
    return Status(KVM_ERR_NO_SPACE, path + ": the simulated disk is full");
  }
  if (options_.refuse) {
    KVM_TRY(options_.refuse(path));
  }
  files_[file].bytes.resize(size_bytes);
  ++n_files_;
  return Status::ok();
}

Result<uint64_t> SimulatedDisk::attach(uint32_t file, const std::string& path) {
  if (file >= files_.size() || files_[file].bytes.empty()) {
    return Status(KVM_ERR_NOT_FOUND, path + ": the simulated disk has no such file");
  }
  return uint64_t{files_[file].bytes.size()};
}

Status SimulatedDisk::sync_entry(uint32_t file) {
  KVM_ASSERT(!files_[file].bytes.empty());
  return Status::ok();
}

void SimulatedDisk::remove(uint32_t file) noexcept {
  KVM_ASSERT(!files_[file].bytes.empty());
  std::erase_if(replaced_, [&](const Replaced& old) { return old.file == file; });
  files_[file] = File();
  --n_files_;
}

void SimulatedDisk::submit(std::span<DiskOp* const> ops) noexcept {
  for (DiskOp* op : ops) {
    KVM_ASSERT(pending_.size() < options_.io.queue_depth);
    KVM_ASSERT(op->file < files_.size() && !files_[op->file].bytes.empty());
    KVM_ASSERT(op->kind == DiskOp::Kind::kSync ||
               (op->size_bytes != 0 && op->size_bytes % kBlock == 0 && op->offset % kBlock == 0 &&
                reinterpret_cast<uintptr_t>(op->data) % kBlock == 0 &&
                op->offset + op->size_bytes <= files_[op->file].bytes.size()));
    // Which of two writes comes last nobody could tell.
    KVM_ASSERT(op->kind != DiskOp::Kind::kWrite ||
               std::none_of(pending_.begin(), pending_.end(),
                            [&](const Pending& other) { return is_overwritten(*other.op, *op); }));
    op->begin();
    const uint64_t latency = options_.max_latency == 0 ? 0 : random() % (options_.max_latency + 1);
    pending_.push_back({op, n_reaps_ + latency});
  }
}

size_t SimulatedDisk::reap(std::span<DiskOp*> ended, uint64_t timeout_ns) noexcept {
  {
    std::unique_lock lock(mutex_);
    if (pending_.empty()) {
      const auto is_woken = [&] { return is_woken_; };
      if (timeout_ns == UINT64_MAX) {
        woken_.wait(lock, is_woken);
      } else if (timeout_ns != 0) {
        woken_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), is_woken);
      }
    }
    is_woken_ = false;
  }
  size_t n = 0;
  do {
    ++n_reaps_;
    for (size_t n_left = pending_.size(); n_left != 0 && n < ended.size(); --n_left) {
      // Of those not looked at yet, any.
      const size_t index = random() % n_left;
      std::swap(pending_[index], pending_[n_left - 1]);
      Pending& next = pending_[n_left - 1];
      if (next.due >= n_reaps_) {
        continue;
      }
      const int64_t result = perform(*next.op);
      if (next.op->take(options_.io.rewrite ? options_.io.rewrite(*next.op, result) : result,
                        kBlock)) {
        ended[n++] = next.op;
        std::swap(next, pending_.back());
        pending_.pop_back();
      }
    }
    // Who waits lets time pass.
  } while (n == 0 && timeout_ns != 0 && !pending_.empty());
  return n;
}

void SimulatedDisk::wake() noexcept {
  const std::lock_guard lock(mutex_);
  is_woken_ = true;
  woken_.notify_one();
}

// --- What an op does -----------------------------------------------------------------------------

int64_t SimulatedDisk::perform(const DiskOp& op) {
  if (happens(DiskFault::kAgain)) {
    return -EAGAIN;
  }
  std::vector<std::byte>& bytes = files_[op.file].bytes;
  if (op.kind == DiskOp::Kind::kSync) {
    if (!happens(DiskFault::kLostSync)) {
      sync(op.file);
    }
    return 0;
  }
  const std::span<std::byte> at = std::span(bytes).subspan(op.offset + op.n_done_bytes);
  return op.kind == DiskOp::Kind::kRead ? read(op, at) : write(op, at);
}

int64_t SimulatedDisk::read(const DiskOp& op, std::span<std::byte> at) {
  if (happens(DiskFault::kReadError)) {
    return -EIO;
  }
  uint64_t size = op.size_bytes - op.n_done_bytes;
  if (size > kBlock && happens(DiskFault::kShort)) {
    size = kBlock * (1 + random() % (size / kBlock - 1));
  }
  if (happens(DiskFault::kBitRot)) {
    const uint64_t bit = random() % (8 * size);
    at[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }
  std::memcpy(op.data + op.n_done_bytes, at.data(), size);
  return static_cast<int64_t>(size);
}

int64_t SimulatedDisk::write(const DiskOp& op, std::span<std::byte> at) {
  if (happens(DiskFault::kWriteError)) {
    return -EIO;
  }
  if (happens(DiskFault::kNoSpace)) {
    return -ENOSPC;
  }
  const uint64_t left = op.size_bytes - op.n_done_bytes;
  uint64_t size = left;
  if (size > kBlock && happens(DiskFault::kShort)) {
    size = kBlock * (1 + random() % (size / kBlock - 1));
  }
  const std::span<const std::byte> from(op.data + op.n_done_bytes, size);
  const uint64_t offset = op.offset + op.n_done_bytes;
  const bool tears_small = happens(DiskFault::kTear512);
  if (tears_small || happens(DiskFault::kTear4096)) {
    const uint64_t unit = tears_small ? kBlock : kLargeBlock;
    for (uint64_t i = 0; i < size; i += unit) {
      if (random() % 2 == 0) {
        put(op, offset + i, from.subspan(i, std::min(unit, size - i)));
      }
    }
  } else if (happens(DiskFault::kMisdirected)) {
    const uint64_t n_places = (at.size() + offset - size) / kBlock + 1;
    put(op, kBlock * (random() % n_places), from);
  } else if (!happens(DiskFault::kLostWrite)) {
    put(op, offset, from);
  }
  return static_cast<int64_t>(size);
}

void SimulatedDisk::put(const DiskOp& op, uint64_t offset, std::span<const std::byte> from) {
  std::byte* const at = files_[op.file].bytes.data() + offset;
  if (options_.can_crash) {
    replaced_.push_back({op.file, offset, {at, at + from.size()}});
  }
  std::memcpy(at, from.data(), from.size());
}

void SimulatedDisk::sync(uint32_t file) {
  std::erase_if(replaced_, [&](const Replaced& old) { return old.file == file; });
}

void SimulatedDisk::forget_in_flight() {
  for (const Pending& pending : pending_) {
    const DiskOp& op = *pending.op;
    for (uint32_t at = 0; op.kind == DiskOp::Kind::kWrite && at < op.size_bytes; at += kBlock) {
      if (random() % 2 == 0) {
        put(op, op.offset + at, {op.data + at, kBlock});
      }
    }
  }
  pending_.clear();
}

void SimulatedDisk::crash() {
  KVM_ASSERT(options_.can_crash && pending_.empty());
  const uint64_t unit = random() % 2 == 0 ? kBlock : kLargeBlock;
  // The last first, so that what is left of two is what was there before both, or one of them.
  while (!replaced_.empty()) {
    const Replaced& old = replaced_.back();
    for (uint64_t i = 0; i < old.bytes.size(); i += unit) {
      if (random() % 2 == 0) {
        std::memcpy(files_[old.file].bytes.data() + old.offset + i, old.bytes.data() + i,
                    std::min<uint64_t>(unit, old.bytes.size() - i));
      }
    }
    replaced_.pop_back();
  }
}

}  // namespace kvm::tiers
