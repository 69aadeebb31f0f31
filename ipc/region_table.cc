// SPDX-License-Identifier: Apache-2.0
#include "ipc/region_table.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace kvm::ipc {

RegionPins::RegionPins(RegionPins&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)),
      ids_(other.ids_),
      n_(std::exchange(other.n_, 0)) {}

RegionPins& RegionPins::operator=(RegionPins&& other) noexcept {
  if (this != &other) {
    release();
    table_ = std::exchange(other.table_, nullptr);
    ids_ = other.ids_;
    n_ = std::exchange(other.n_, 0);
  }
  return *this;
}

void RegionPins::release() {
  for (uint32_t i = 0; i < n_; ++i) {
    table_->unpin(ids_[i]);
  }
  n_ = 0;
}

uint32_t RegionTable::add(Mapping&& mapping) {
  regions_.emplace_back();
  total_bytes_ += mapping.size_bytes();
  regions_.back().id = ++last_id_;
  regions_.back().mapping = std::move(mapping);
  return last_id_;
}

bool RegionTable::remove(uint32_t id) {
  Region* region = find(id);
  if (region == nullptr || region->removed) {
    return false;
  }
  region->removed = true;
  if (region->n_pins == 0) {
    erase(region);
  }
  return true;
}

void RegionTable::discard_contents() {
  for (Region& region : regions_) {
    KVM_ASSERT(region.n_pins == 0);
    region.mapping.discard_contents();
  }
}

RegionView RegionTable::pin(uint32_t id, RegionPins* pins) {
  Region* region = find(id);
  if (region == nullptr || region->removed) {
    return {};
  }
  const auto end = pins->ids_.begin() + pins->n_;
  if (std::find(pins->ids_.begin(), end, id) == end) {
    KVM_ASSERT(pins->n_ < kMaxRegionsPerRequest);
    pins->table_ = this;
    pins->ids_[pins->n_++] = id;
    ++region->n_pins;
  }
  return {region->mapping.data(), region->mapping.size_bytes()};
}

RegionTable::Region* RegionTable::find(uint32_t id) {
  for (Region& region : regions_) {
    if (region.id == id) {
      return &region;
    }
  }
  return nullptr;
}

void RegionTable::unpin(uint32_t id) {
  Region* region = find(id);
  KVM_ASSERT(region != nullptr && region->n_pins > 0);
  if (--region->n_pins == 0 && region->removed) {
    erase(region);
  }
}

void RegionTable::erase(Region* region) {
  total_bytes_ -= region->mapping.size_bytes();
  if (discard_) {
    discard_(std::move(region->mapping));
  }
  regions_.erase(regions_.begin() + (region - regions_.data()));
}

}  // namespace kvm::ipc
