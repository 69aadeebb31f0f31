// SPDX-License-Identifier: Apache-2.0
#include "device/device_store.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <unordered_map>
#include <utility>

#include "base/assert.h"
#include "base/reserve.h"
#include "base/round.h"
#include "base/undo.h"

namespace kvm::device {

using tiers::kNoPage;
using tiers::PageRef;

namespace {

constexpr uint32_t kNoChunk = UINT32_MAX;

std::string number(uint64_t n) { return std::to_string(n); }

// Bytes that one part of a sequence takes on the host, whose first page has so many: a chunk, or,
// of pages that are longer, so many that at most an eighth of their chunks stays empty.
uint64_t room_of_part(uint64_t page_bytes) {
  return page_bytes <= kChunkBytes ? kChunkBytes : div_up(8 * kChunkBytes, page_bytes) * page_bytes;
}

HeldSequence* held(DeviceSequence* seq) { return static_cast<HeldSequence*>(seq); }
const HeldSequence& held(const DeviceSequence& seq) {
  return static_cast<const HeldSequence&>(seq);
}

}  // namespace

Result<std::unique_ptr<DeviceStore>> DeviceStore::open(std::unique_ptr<Driver> driver,
                                                       const DeviceStoreOptions& options) {
  Driver* const kernels = driver.get();
  return open_over(std::move(driver), kernels, options);
}

Result<std::unique_ptr<DeviceStore>> DeviceStore::open_without_kernels(
    std::shared_ptr<MemoryDriver> driver, const DeviceStoreOptions& options) {
  return open_over(std::move(driver), nullptr, options);
}

Result<std::unique_ptr<DeviceStore>> DeviceStore::open_over(std::shared_ptr<MemoryDriver> driver,
                                                            Driver* kernels,
                                                            const DeviceStoreOptions& options) {
  std::unique_ptr<DeviceStore> store(new DeviceStore(std::move(driver), kernels, options));
  KVM_TRY(store->init(options));
  return store;
}

DeviceStore::DeviceStore(std::shared_ptr<MemoryDriver> driver, Driver* kernels,
                         const DeviceStoreOptions& options)
    : driver_(std::move(driver)),
      kernels_(kernels),
      events_(std::make_unique<EventPool>(driver_.get())),
      pool_(std::make_shared<PagePool>(driver_.get(), options.pool_bytes)) {}

Status DeviceStore::init(const DeviceStoreOptions& options) {
  KVM_TRY_ASSIGN(host_, HostChunks::create(driver_.get(), options.host_bytes));
  if (host_->n_chunks() == 0) {
    return Status::ok();
  }
  KVM_TRY_ASSIGN(mover_, Mover::create(driver_.get(), kernels_, events_.get()));
  return Status::ok();
}

DeviceStore::~DeviceStore() {
  mover_.reset();
  // Where the device has faulted there is nothing left to wait for.
  (void)driver_->synchronize_device();
}

Result<SequenceStore::Figures> DeviceStore::figures() {
  Figures figures;
  figures.pool_bytes = pool_->capacity_bytes();
  figures.pool_used_bytes = pool_->used_bytes();
  figures.pool_page_bytes = pool_->page_bytes_in_use();
  figures.pool_peak_bytes = pool_->peak_bytes();
  figures.n_pages = pool_->n_pages();
  figures.n_pages_copied = counters_.n_pages_copied;
  figures.host_bytes = host_->n_chunks() * kChunkBytes;
  figures.host_used_bytes = (host_->n_chunks() - host_->n_free()) * kChunkBytes;
  figures.n_spilled = counters_.n_spilled;
  figures.spilled_bytes = counters_.spilled_bytes;
  figures.fetched_bytes = counters_.fetched_bytes;
  figures.n_copies = mover_ == nullptr ? 0 : mover_->n_copies();
  return figures;
}

Result<std::shared_ptr<const SpaceLayout>> DeviceStore::prepare(SpaceLayout layout) {
  const std::shared_ptr<SpaceLayout> space(
      new SpaceLayout(std::move(layout)),
      [pool = std::weak_ptr<PagePool>(pool_)](const SpaceLayout* gone) {
        const std::shared_ptr<PagePool> of = pool.lock();
        for (const ListLayout& list : gone->lists) {
          if (of != nullptr && list.slab != ListLayout::kNoSlab) {
            of->close_slab(list.slab);
          }
        }
        delete gone;
      });
  KVM_TRY(make_lists(space.get()));
  for (ListLayout& list : space->lists) {
    KVM_TRY_ASSIGN(list.slab, pool_->open_slab(space->slab_class(list.n_heads), list.n_layers));
  }
  return std::shared_ptr<const SpaceLayout>(space);
}

// --- Sequences ----------------------------------------------------------------------------------

Result<SequencePtr> DeviceStore::create(std::shared_ptr<const SpaceLayout> space) {
  return SequencePtr(std::make_shared<HeldSequence>(std::move(space)));
}

Result<SequencePtr> DeviceStore::fork(DeviceSequence& parent, uint64_t n_tokens) {
  KVM_TRY(settle_for_use(&parent));
  if (n_tokens > parent.n_tokens) {
    return Status(KVM_ERR_INVALID, "n_tokens is " + number(n_tokens) + "; the sequence has " +
                                       number(parent.n_tokens));
  }
  if (n_tokens < parent.n_tokens) {
    KVM_TRY(parent.check_visible(n_tokens, n_tokens));
  }
  auto child = std::make_shared<HeldSequence>(held(parent));
  child->version = 0;
  child->noted_by = nullptr;
  child->cut(n_tokens, [](PageRef) {});
  for (const DevicePageList& list : child->lists) {
    for (const PageRef page : list.pages) {
      if (page != kNoPage) {
        pool_->add_ref(page);
      }
    }
  }
  return SequencePtr(std::move(child));
}

Status DeviceStore::truncate(DeviceSequence* seq, uint64_t n_tokens) {
  KVM_TRY(settle_for_use(seq));
  if (n_tokens >= seq->n_tokens) {
    return Status::ok();
  }
  KVM_TRY(seq->check_visible(n_tokens, n_tokens));
  seq->cut(n_tokens, [&](PageRef page) { release(*held(seq), page); });
  mark_changed(seq);
  return Status::ok();
}

void DeviceStore::clear(DeviceSequence* of) {
  HeldSequence* const seq = held(of);
  if (seq->moving != nullptr) {
    seq->moving->is_cancelled.store(true, std::memory_order_relaxed);
    seq->moving.reset();
  }
  for (Booked& booked : booked_) {
    booked.seq = booked.seq == seq ? nullptr : booked.seq;
  }
  seq->cut(0, [&](PageRef page) { release(*seq, page); });
  for (const HeldSequence::Part& part : seq->parts) {
    // A fetch that still reads it fills pages of this sequence only.
    for (const uint32_t chunk : part.chunks) {
      keep_until(kToHost, part.written, kNoPage, chunk);
    }
  }
  seq->parts.clear();
  set_on_host(seq, false);
  seq->failure = Status::ok();
  mark_changed(seq);
}

void DeviceStore::release(const HeldSequence& seq, PageRef page) {
  if (seq.ready == 0 || pool_->n_refs(page) > 1) {
    pool_->release(page);
  } else {
    keep_until(kToDevice, seq.ready, page, kNoChunk);
  }
}

void DeviceStore::keep_until(Lane lane, uint64_t ticket, PageRef page, uint32_t chunk) {
  std::deque<Fence>& fences = fences_[lane];
  bool is_done = false;
  try {
    if (fences.empty() || fences.back().ticket != ticket) {
      is_done = mover_->is_done(lane, ticket);
      if (!is_done) {
        fences.push_back({ticket, {}, {}});
      }
    }
    if (!is_done) {
      page != kNoPage ? fences.back().pages.push_back(page) : fences.back().chunks.push_back(chunk);
      return;
    }
  } catch (const std::bad_alloc&) {
    // Waiting needs no memory. Where the driver fails, what is given back is lost with it.
    if (!mover_->drain(lane, ticket).is_ok()) {
      return;
    }
  }
  page != kNoPage ? static_cast<void>(pool_->release(page)) : host_->release(chunk);
}

void DeviceStore::set_on_host(HeldSequence* seq, bool on_host) {
  counters_.n_spilled += on_host ? 1 : 0;
  counters_.n_spilled -= seq->on_host ? 1 : 0;
  seq->on_host = on_host;
}

Result<SequenceStore::Usage> DeviceStore::usage(const DeviceSequence& seq) {
  Usage usage;
  for (const DevicePageList& list : seq.lists) {
    for (const PageRef page : list.pages) {
      if (page != kNoPage) {
        ++usage.n_pages;
        usage.bytes += pool_->page_bytes(page);
        usage.bytes_shared += pool_->n_refs(page) > 1 ? pool_->page_bytes(page) : 0;
      }
    }
  }
  for (const HeldSequence::Part& part : held(seq).parts) {
    for (const HeldSequence::HostPage& place : part.places) {
      ++usage.n_pages;
      usage.host_bytes += pool_->slab_page_bytes(place.slab);
    }
  }
  usage.bytes += usage.host_bytes;
  return usage;
}

// --- Growth -------------------------------------------------------------------------------------

Status DeviceStore::begin_growth(std::span<const Growth> growths, Stream stream) {
  KVM_ASSERT(grown_.empty() && changes_.empty());
  for (const Growth& growth : growths) {
    KVM_TRY(settle_for_use(growth.seq));
  }
  for (const Growth& growth : growths) {
    KVM_TRY(growth.check());
  }
  collect_fences();
  // Also where there is no memory for the lists.
  Undo undoing([this] { undo_growth(); });
  for (const Growth& growth : growths) {
    HeldSequence* const seq = held(growth.seq);
    KVM_TRY(await_pages(seq, stream));
    grown_.push_back({growth, seq->n_tokens});
    KVM_TRY(reserve_pages(growth, stream));
    seq->n_tokens += growth.n_append;
  }
  undoing.dismiss();
  return Status::ok();
}

Status DeviceStore::reserve_pages(const Growth& growth, Stream stream) {
  if (growth.n_append == 0) {
    return Status::ok();
  }
  for (uint32_t list = 0; list < growth.seq->lists.size(); ++list) {
    KVM_TRY(pages_of_list(growth, list, stream));
  }
  return Status::ok();
}

Status DeviceStore::pages_of_list(const Growth& growth, uint32_t list, Stream stream) {
  DeviceSequence* const seq = growth.seq;
  const uint32_t slab = seq->space->lists[list].slab;
  std::vector<PageRef>& pages = seq->lists[list].pages;
  const uint64_t n = seq->n_tokens;
  const uint64_t n_blocks = div_up(n + growth.n_append, kPageTokens);
  const uint64_t first_written = growth.first_written_block(n);
  // Memory for the lists first: a page that is in none of them would be lost.
  reserve_growing(pages, n_blocks);
  reserve_growing(changes_, changes_.size() + n_blocks - first_written);
  for (uint64_t block = first_written; block < pages.size(); ++block) {
    PageRef& page = pages[block];
    if (page == kNoPage || pool_->n_refs(page) == 1) {
      continue;
    }
    // A fork ends in the same page, or behind it.
    seq->changed_from = std::min(seq->changed_from, block);
    KVM_TRY_ASSIGN(const PageRef copy, allocate(slab, stream));
    changes_.push_back({seq, list, static_cast<uint32_t>(block), std::exchange(page, copy)});
    // At once, so that the last of those who share it need not copy. Not the last reference.
    pool_->release(changes_.back().before);
    KVM_TRY(driver_->copy(pool_->data(copy), pool_->data(changes_.back().before),
                          pool_->page_bytes(copy), stream));
    ++counters_.n_pages_copied;
  }
  if (pages.size() < n_blocks) {
    seq->changed_from = std::min<uint64_t>(seq->changed_from, pages.size());
  }
  while (pages.size() < n_blocks) {
    KVM_TRY_ASSIGN(const PageRef page, allocate(slab, stream));
    changes_.push_back({seq, list, static_cast<uint32_t>(pages.size()), kNoPage});
    pages.push_back(page);
  }
  return Status::ok();
}

Status DeviceStore::extend(DeviceSequence* seq, uint64_t n_tokens) {
  KVM_TRY(settle_for_use(seq));
  if (n_tokens < seq->n_tokens || n_tokens > round_up(seq->n_tokens, kPageTokens)) {
    return Status(KVM_ERR_INVALID, "the sequence has " + number(seq->n_tokens) +
                                       " tokens; its last pages have no room for " +
                                       number(n_tokens));
  }
  for (const DevicePageList& list : seq->lists) {
    // Where the last page is full it may have been dropped.
    if (!list.pages.empty() && list.pages.back() != kNoPage &&
        pool_->n_refs(list.pages.back()) > 1) {
      return Status(KVM_ERR_INVALID, "the sequence shares its last page");
    }
  }
  seq->n_tokens = n_tokens;
  mark_changed(seq);
  return Status::ok();
}

void DeviceStore::finish_growth() {
  for (const Grown& grown : grown_) {
    grown.growth.finish(grown.n_before,
                        [&](PageRef page) { release(*held(grown.growth.seq), page); });
    mark_changed(grown.growth.seq);
  }
  changes_.clear();
  grown_.clear();
}

void DeviceStore::undo_growth() {
  for (auto change = changes_.rbegin(); change != changes_.rend(); ++change) {
    std::vector<PageRef>& pages = change->seq->lists[change->list].pages;
    pool_->release(pages[change->block]);
    if (change->before != kNoPage) {
      pages[change->block] = change->before;
      pool_->add_ref(change->before);
    } else {
      pages.pop_back();
    }
  }
  for (const Grown& grown : grown_) {
    grown.growth.seq->n_tokens = grown.n_before;
  }
  changes_.clear();
  grown_.clear();
}

// --- Between device and host --------------------------------------------------------------------

Status DeviceStore::not_captured(Stream stream) {
  if (host_->n_chunks() == 0) {
    return Status(KVM_ERR_UNSUPPORTED, "the client was opened without host_bytes");
  }
  KVM_TRY_ASSIGN(const bool captured, driver_->is_capturing(stream));
  return captured ? Status(KVM_ERR_UNSUPPORTED,
                           "the stream is being captured; a graph cannot move sequences")
                  : Status::ok();
}

Result<EventPtr> DeviceStore::record_now(Stream stream) {
  KVM_TRY_ASSIGN(EventPtr event, events_->take());
  KVM_TRY(driver_->record(event.get(), stream));
  return event;
}

Result<PageRef> DeviceStore::allocate(uint32_t slab, Stream stream) {
  Result<PageRef> page = pool_->allocate(slab);
  while (!page.is_ok() && page.status().code() == KVM_ERR_NO_SPACE &&
         (!fences_[kToHost].empty() || !fences_[kToDevice].empty())) {
    const Lane lane = fences_[kToHost].empty() ? kToDevice : kToHost;
    const Status waited = mover_->wait(stream, lane, fences_[lane].front().ticket);
    if (waited.is_ok()) {
      open_fence(fences_[lane].front());
      fences_[lane].pop_front();
    } else if (mover_->is_failed()) {
      collect_fences();
    } else {
      return waited;
    }
    page = pool_->allocate(slab);
  }
  return page;
}

void DeviceStore::open_fence(const Fence& fence) {
  for (const PageRef page : fence.pages) {
    pool_->release(page);
  }
  for (const uint32_t chunk : fence.chunks) {
    host_->release(chunk);
  }
}

void DeviceStore::collect_fences() {
  if (mover_ == nullptr || (booked_.empty() && fences_[kToHost].empty() &&
                            fences_[kToDevice].empty() && !mover_->is_failed())) {
    return;
  }
  if (mover_->is_failed()) {
    take_back_failed();
  }
  std::erase_if(booked_, [this](const Booked& booked) {
    if (!mover_->is_enqueued(*booked.move)) {
      return false;
    }
    HeldSequence* const seq = booked.seq;
    if (seq != nullptr && seq->moving == booked.move) {
      for (HeldSequence::Part& part : seq->parts) {
        part.pages = {};
      }
      seq->moving.reset();
    }
    return true;
  });
  for (const Lane lane : kLanes) {
    std::deque<Fence>& fences = fences_[lane];
    while (!fences.empty() && mover_->is_done(lane, fences.front().ticket)) {
      open_fence(fences.front());
      fences.pop_front();
    }
  }
}

// In the order of the calls: a page that one move has had from the one before goes back to that
// with a reference of its own, and then loses the other one's. Likewise chunks.
void DeviceStore::take_back_failed() {
  Tickets good{};
  const Status why = mover_->acknowledge(&good);
  for (Booked& booked : booked_) {
    if (booked.seq != nullptr && booked.move->last > good[booked.move->lane]) {
      take_back(&booked, good[booked.move->lane], why);
    }
  }
  ++n_taken_back_;
}

void DeviceStore::take_back(Booked* booked, uint64_t good, const Status& why) {
  HeldSequence* const seq = booked->seq;
  if (booked->move->lane == kToHost) {
    std::erase_if(seq->parts, [&](const HeldSequence::Part& part) {
      if (part.written <= good) {
        return false;
      }
      for (size_t i = 0; i < part.places.size(); ++i) {
        const HeldSequence::HostPage& place = part.places[i];
        seq->lists[place.list].pages[place.block] = part.pages[i];
        pool_->add_ref(part.pages[i]);  // the fence, or who took the page from it, has another
        counters_.spilled_bytes -= pool_->slab_page_bytes(place.slab);
      }
      for (const uint32_t chunk : part.chunks) {
        host_->release(chunk);
      }
      return true;
    });
    set_on_host(seq, !seq->parts.empty());
  } else {
    for (size_t i = 0; i < booked->parts.size(); ++i) {
      HeldSequence::Part& part = booked->parts[i];
      if (booked->ticket_of_part(i) <= good) {
        continue;
      }
      for (const HeldSequence::HostPage& place : part.places) {
        pool_->release(std::exchange(seq->lists[place.list].pages[place.block], kNoPage));
        counters_.fetched_bytes -= pool_->slab_page_bytes(place.slab);
      }
      for (const uint32_t chunk : part.chunks) {
        host_->add_ref(chunk);  // the fence has another, or the rest of the part
      }
      seq->parts.push_back(std::move(part));  // fetch has seen to the room
    }
    set_on_host(seq, true);
  }
  seq->failure = why;
  mark_changed(seq);
}

Status DeviceStore::settle(HeldSequence* seq) {
  if (seq->moving != nullptr) {
    mover_->finish(*seq->moving);
    collect_fences();
  }
  return std::exchange(seq->failure, Status::ok());
}

Status DeviceStore::settle_for_use(DeviceSequence* of) {
  HeldSequence* const seq = held(of);
  const bool leaves =
      seq->moving != nullptr && seq->moving->lane == kToHost && !mover_->is_failed();
  if (!leaves) {
    KVM_TRY(settle(seq));
  }
  return seq->on_host ? Status(KVM_ERR_BUSY, "the sequence is on the host: kvm_cuda_fetch it first")
                      : Status::ok();
}

Status DeviceStore::await_pages(HeldSequence* seq, Stream stream) {
  if (seq->ready != 0 && !mover_->is_done(kToDevice, seq->ready)) {
    KVM_TRY(mover_->wait(stream, kToDevice, seq->ready));
  }
  seq->ready = 0;
  return Status::ok();
}

bool DeviceStore::is_moving(const DeviceSequence& seq, bool also_spills) const {
  const MovePtr& move = held(seq).moving;
  return move != nullptr && (also_spills || move->lane == kToDevice) && !mover_->is_failed() &&
         !mover_->is_enqueued(*move);
}

SequenceStore::Wait DeviceStore::moves_of(std::span<DeviceSequence* const> seqs, bool also_spills) {
  std::vector<MovePtr> moves;
  for (size_t i = 0; !booked_.empty() && i < seqs.size(); ++i) {
    if (is_moving(*seqs[i], also_spills)) {
      moves.push_back(held(seqs[i])->moving);
    }
  }
  if (moves.empty()) {
    return nullptr;
  }
  return [mover = mover_.get(), moves = std::move(moves)] {
    for (const MovePtr& move : moves) {
      mover->finish(*move);
    }
  };
}

Result<SequenceStore::Residence> DeviceStore::residence(DeviceSequence* of) {
  HeldSequence* const seq = held(of);
  collect_fences();
  Residence is;
  is.on_host = seq->on_host;
  is.failure = seq->failure.code();
  for (const DevicePageList& list : seq->lists) {
    for (const PageRef page : list.pages) {
      is.n_pages += page != kNoPage ? 1 : 0;
    }
  }
  for (const HeldSequence::Part& part : seq->parts) {
    is.n_host_pages += part.places.size();
  }
  for (const Booked& booked : booked_) {
    if (booked.seq != seq) {
      continue;
    }
    const Lane lane = booked.move->lane;
    is.leaves = lane == kToHost;
    const uint64_t n_enqueued = mover_->n_enqueued(lane);
    for (const HeldSequence::Part& part : seq->parts) {
      is.n_waiting_pages += is.leaves && part.written > n_enqueued ? part.places.size() : 0;
    }
    for (size_t i = 0; i < booked.parts.size(); ++i) {
      is.n_waiting_pages +=
          booked.ticket_of_part(i) > n_enqueued ? booked.parts[i].places.size() : 0;
    }
  }
  return is;
}

void DeviceStore::finish_moves() {
  if (mover_ != nullptr) {
    mover_->finish_all();
    collect_fences();
  }
}

uint64_t DeviceStore::n_chunks_to_take() const {
  uint64_t n = host_->n_free();
  for (const std::deque<Fence>& fences : fences_) {
    for (const Fence& fence : fences) {
      for (const uint32_t chunk : fence.chunks) {
        n += host_->n_refs(chunk) == 1 ? 1 : 0;
      }
    }
  }
  return n;
}

uint32_t DeviceStore::take_chunk(Tickets* after) {
  if (host_->n_free() != 0) {
    return host_->take();
  }
  for (const Lane lane : kLanes) {
    for (Fence& fence : fences_[lane]) {
      for (uint32_t& chunk : fence.chunks) {
        if (host_->n_refs(chunk) == 1) {
          (*after)[lane] = std::max((*after)[lane], fence.ticket);
          const uint32_t taken = std::exchange(chunk, fence.chunks.back());
          fence.chunks.pop_back();
          return taken;
        }
      }
    }
  }
  KVM_ASSERT(false);
  return 0;
}

Status DeviceStore::spill(DeviceSequence* of_seq, uint64_t begin, uint64_t end, Stream stream) {
  HeldSequence* const seq = held(of_seq);
  KVM_TRY(not_captured(stream));
  KVM_TRY(settle(seq));
  collect_fences();
  const bool to_the_end = end >= seq->n_tokens;
  const uint64_t first = div_up(std::min(begin, seq->n_tokens), kPageTokens);
  const uint64_t last = to_the_end ? div_up(seq->n_tokens, kPageTokens) : end / kPageTokens;
  // Packed one behind the other; what forks share stays.
  std::vector<HeldSequence::Part> parts;
  std::list<Mover::Job> job(1);
  std::vector<Mover::Piece>& pieces = job.front().pieces;
  uint64_t filled = 0, room = 0, n_bytes = 0, n_chunks = 0;
  for (uint32_t list = 0; list < seq->lists.size(); ++list) {
    const std::vector<PageRef>& of = seq->lists[list].pages;
    for (uint64_t block = first; block < std::min<uint64_t>(last, of.size()); ++block) {
      const PageRef page = of[block];
      if (page == kNoPage || pool_->n_refs(page) > 1) {
        continue;
      }
      const uint64_t size = pool_->page_bytes(page);
      if (filled + size > room) {
        parts.emplace_back();
        pieces.emplace_back();
        filled = 0;
        room = room_of_part(size);
        // As long as they get: growing them step by step takes longer than all the rest.
        const size_t n_at_most = std::min<uint64_t>(room / size, of.size() - block);
        parts.back().places.reserve(n_at_most);
        parts.back().pages.reserve(n_at_most);
        pieces.back().pages.reserve(n_at_most);
      }
      Mover::Piece& piece = pieces.back();
      if (piece.runs.empty() || piece.runs.back().page_bytes != size) {
        piece.runs.push_back({static_cast<uint32_t>(filled), 0, size});
      }
      ++piece.runs.back().n_pages;
      piece.pages.push_back(pool_->data(page));
      parts.back().places.push_back({list, static_cast<uint32_t>(block),
                                     static_cast<uint32_t>(filled), tiers::page_slab(page)});
      parts.back().pages.push_back(page);
      filled += size;
      n_bytes += size;
    }
  }
  if (parts.empty()) {
    if (begin == 0 && to_the_end && !seq->on_host) {
      set_on_host(seq, true);
      mark_changed(seq);
    }
    return Status::ok();
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const HeldSequence::HostPage& end_page = parts[i].places.back();
    parts[i].chunks.resize(
        div_up(end_page.offset + pool_->slab_page_bytes(end_page.slab), kChunkBytes));
    pieces[i].chunks.resize(parts[i].chunks.size());
    n_chunks += parts[i].chunks.size();
  }
  if (const uint64_t n_free = n_chunks_to_take(); n_chunks > n_free) {
    return Status(KVM_ERR_NO_SPACE, "the sequence takes " + number(n_chunks * kChunkBytes) +
                                        " bytes of host memory; free are " +
                                        number(n_free * kChunkBytes) + " of " +
                                        number(host_->n_chunks() * kChunkBytes));
  }
  // Memory first, so that nothing fails behind the first change.
  const MovePtr move = std::make_shared<Move>();
  KVM_TRY_ASSIGN(move->before, record_now(stream));
  job.front().move = move;
  seq->parts.reserve(seq->parts.size() + parts.size());
  reserve_growing(booked_, booked_.size() + 1);
  std::deque<Fence>& fences = fences_[kToHost];
  Undo unfencing([&fences, n = fences.size()] { fences.resize(n); });
  const uint64_t first_ticket = mover_->next_ticket(kToHost);
  for (size_t i = 0; i < parts.size(); ++i) {
    fences.push_back({first_ticket + i, parts[i].pages, {}});
  }
  unfencing.dismiss();
  for (size_t i = 0; i < parts.size(); ++i) {
    HeldSequence::Part& part = parts[i];
    pieces[i].after[kToDevice] = seq->ready;
    for (size_t c = 0; c < part.chunks.size(); ++c) {
      part.chunks[c] = take_chunk(&pieces[i].after);
      pieces[i].chunks[c] = host_->data(part.chunks[c]);
    }
    part.written = first_ticket + i;
    for (const HeldSequence::HostPage& place : part.places) {
      seq->lists[place.list].pages[place.block] = kNoPage;
    }
    seq->parts.push_back(std::move(part));
  }
  booked_.push_back({move, seq, {}});
  seq->moving = move;
  mover_->submit(std::move(job));
  counters_.spilled_bytes += n_bytes;
  set_on_host(seq, true);
  mark_changed(seq);
  return Status::ok();
}

Status DeviceStore::take_pages(std::span<const HeldSequence::Part> parts, Stream stream,
                               std::vector<Taken>* taken) {
  // Places in `taken` that the pool had nothing for, by slab, the first one last.
  std::vector<std::vector<size_t>> lacking(pool_->n_slabs());
  std::vector<uint32_t> slabs;
  for (const HeldSequence::Part& part : parts) {
    for (const HeldSequence::HostPage& place : part.places) {
      slabs.push_back(place.slab);
    }
  }
  taken->resize(slabs.size());
  bool lacks = false;
  for (size_t i = 0; i < slabs.size(); ++i) {
    if (lacking[slabs[i]].empty()) {
      const Result<PageRef> page = pool_->allocate(slabs[i]);
      if (page.is_ok()) {
        (*taken)[i].page = page.value();
        continue;
      }
      if (page.status().code() != KVM_ERR_NO_SPACE) {
        return page.status();
      }
    }
    lacking[slabs[i]].push_back(i);
    lacks = true;
  }
  if (!lacks) {
    return Status::ok();
  }
  for (std::vector<size_t>& places : lacking) {
    std::reverse(places.begin(), places.end());
  }
  for (const Lane lane : kLanes) {
    for (Fence& fence : fences_[lane]) {
      std::erase_if(fence.pages, [&](PageRef page) {
        std::vector<size_t>& places = lacking[tiers::page_slab(page)];
        if (places.empty()) {
          return false;
        }
        (*taken)[places.back()] = {page, lane, fence.ticket};
        places.pop_back();
        return true;
      });
    }
  }
  // The rest is for other pages still. Whoever fails meanwhile takes back what it has in `taken`.
  const uint64_t n_taken_back = n_taken_back_;
  for (uint32_t slab = 0; slab < lacking.size(); ++slab) {
    for (const size_t place : lacking[slab]) {
      KVM_TRY_ASSIGN((*taken)[place].page, allocate(slab, stream));
    }
  }
  return n_taken_back == n_taken_back_
             ? Status::ok()
             : Status(KVM_ERR_DEVICE, "moves that the pages depend on have failed");
}

void DeviceStore::give_back(std::span<const Taken> taken) {
  for (const Taken& one : taken) {
    if (one.page != kNoPage && one.ticket != 0) {
      keep_until(one.lane, one.ticket, one.page, kNoChunk);
    } else if (one.page != kNoPage) {
      pool_->release(one.page);
    }
  }
}

Status DeviceStore::fetch(DeviceSequence* of_seq, uint64_t begin, uint64_t end, Stream stream) {
  HeldSequence* const seq = held(of_seq);
  KVM_TRY(not_captured(stream));
  KVM_TRY(settle(seq));
  collect_fences();
  const auto comes = [first = begin / kPageTokens,
                      last = div_up(std::min(end, seq->n_tokens), kPageTokens)](
                         const HeldSequence::HostPage& place) {
    return place.block >= first && place.block < last;
  };
  std::vector<HeldSequence::Part> parts;
  std::vector<size_t> from;  // of seq->parts
  for (size_t i = 0; i < seq->parts.size(); ++i) {
    const HeldSequence::Part& part = seq->parts[i];
    HeldSequence::Part coming{part.chunks, part.written, {}, {}};
    std::copy_if(part.places.begin(), part.places.end(), std::back_inserter(coming.places), comes);
    if (!coming.places.empty()) {
      parts.push_back(std::move(coming));
      from.push_back(i);
    }
  }
  if (parts.empty()) {
    if (seq->on_host && seq->parts.empty()) {
      set_on_host(seq, false);
      mark_changed(seq);
    }
    return Status::ok();
  }
  std::vector<Taken> taken;
  Undo giving_back([&] { give_back(taken); });
  KVM_TRY(take_pages(parts, stream, &taken));
  const MovePtr move = std::make_shared<Move>();
  move->lane = kToDevice;
  KVM_TRY_ASSIGN(move->before, record_now(stream));
  std::list<Mover::Job> job(1);
  job.front().move = move;
  size_t next = 0;
  for (const HeldSequence::Part& part : parts) {
    Mover::Piece piece;
    for (const uint32_t chunk : part.chunks) {
      piece.chunks.push_back(host_->data(chunk));
    }
    piece.after[kToHost] = part.written;
    uint64_t end_of_run = 0;
    for (const HeldSequence::HostPage& place : part.places) {
      const Taken& page = taken[next++];
      const uint64_t size = pool_->slab_page_bytes(place.slab);
      if (piece.runs.empty() || piece.runs.back().page_bytes != size ||
          end_of_run != place.offset) {
        piece.runs.push_back({place.offset, 0, size});
      }
      ++piece.runs.back().n_pages;
      end_of_run = place.offset + size;
      piece.pages.push_back(pool_->data(page.page));
      piece.after[page.lane] = std::max(piece.after[page.lane], page.ticket);
    }
    job.front().pieces.push_back(std::move(piece));
  }
  seq->parts.reserve(seq->parts.size() + parts.size());  // for taking it back, too
  reserve_growing(booked_, booked_.size() + 1);
  std::deque<Fence>& fences = fences_[kToDevice];
  Undo unfencing([&fences, n = fences.size()] { fences.resize(n); });
  const uint64_t first_ticket = mover_->next_ticket(kToDevice);
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool is_all = parts[i].places.size() == seq->parts[from[i]].places.size();
    fences.push_back({first_ticket + i, {}, {}});
    if (is_all) {
      fences.back().chunks = parts[i].chunks;
    }
  }
  unfencing.dismiss();
  giving_back.dismiss();
  next = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    HeldSequence::Part& rest = seq->parts[from[i]];
    for (const HeldSequence::HostPage& place : parts[i].places) {
      seq->lists[place.list].pages[place.block] = taken[next++].page;
      seq->changed_from = std::min<uint64_t>(seq->changed_from, place.block);
      counters_.fetched_bytes += pool_->slab_page_bytes(place.slab);
    }
    std::erase_if(rest.places, comes);
  }
  std::erase_if(seq->parts, [](const HeldSequence::Part& part) { return part.places.empty(); });
  booked_.push_back({move, seq, std::move(parts)});
  seq->moving = move;
  mover_->submit(std::move(job));
  // Pages that stayed may still be on their way from an earlier fetch: its tickets are lower.
  seq->ready = move->last;
  set_on_host(seq, !seq->parts.empty());
  mark_changed(seq);
  return Status::ok();
}

void DeviceStore::check_accounts(std::span<const DeviceSequence* const> all) const {
  KVM_ASSERT(grown_.empty() && changes_.empty());
  pool_->check_accounts();
  std::unordered_map<PageRef, uint32_t> n_refs;
  std::unordered_map<uint32_t, uint32_t> n_chunk_refs;
  uint64_t n_on_host = 0;
  for (const DeviceSequence* const seq : all) {
    for (const DevicePageList& list : seq->lists) {
      KVM_ASSERT(list.pages.size() == div_up(seq->n_tokens, kPageTokens));
      for (const PageRef page : list.pages) {
        n_refs[page] += page == kNoPage ? 0 : 1;
      }
    }
    for (const HeldSequence::Part& part : held(*seq).parts) {
      KVM_ASSERT(held(*seq).on_host && !part.places.empty());
      for (const uint32_t chunk : part.chunks) {
        ++n_chunk_refs[chunk];
      }
    }
    n_on_host += held(*seq).on_host ? 1 : 0;
  }
  for (const std::deque<Fence>& fences : fences_) {
    for (const Fence& fence : fences) {
      for (const PageRef page : fence.pages) {
        ++n_refs[page];
      }
      for (const uint32_t chunk : fence.chunks) {
        ++n_chunk_refs[chunk];
      }
    }
  }
  KVM_ASSERT(n_on_host == counters_.n_spilled);
  n_refs.erase(kNoPage);
  KVM_ASSERT(n_refs.size() == pool_->n_pages());
  for (const auto& [page, n] : n_refs) {
    KVM_ASSERT(pool_->n_refs(page) == n);
  }
  KVM_ASSERT(n_chunk_refs.size() + host_->n_free() == host_->n_chunks());
  for (const auto& [chunk, n] : n_chunk_refs) {
    KVM_ASSERT(host_->n_refs(chunk) == n);
  }
}

}  // namespace kvm::device
