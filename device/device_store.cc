// SPDX-License-Identifier: Apache-2.0
#include "device/device_store.h"

#include <algorithm>
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

// Copies of at least so many bytes run at the speed of the link; smaller pages are gathered first.
constexpr uint64_t kLongPiece = uint64_t{64} << 10;

std::string number(uint64_t n) { return std::to_string(n); }

// The list for a class of a layer, made if there is none.
uint32_t list_of(const ClassLayout& of, SpaceLayout* space) {
  const auto n_heads = static_cast<uint32_t>(of.kv_heads.size());
  for (uint32_t i = 0; i < space->lists.size(); ++i) {
    const ListLayout& list = space->lists[i];
    if (list.n_heads == n_heads && list.n_sinks == of.n_sinks && list.n_recent == of.n_recent &&
        list.slack == of.slack) {
      return i;
    }
  }
  ListLayout list;
  list.n_heads = n_heads;
  list.n_sinks = of.n_sinks;
  list.n_recent = of.n_recent;
  list.slack = of.slack;
  list.part_bytes = space->slab_class(n_heads).page_bytes();
  space->lists.push_back(list);
  return static_cast<uint32_t>(space->lists.size() - 1);
}

}  // namespace

uint64_t ListLayout::first_droppable() const { return round_up(n_sinks, kPageTokens); }

tiers::SlabClass SpaceLayout::slab_class(uint32_t n_heads) const {
  tiers::SlabClass slab_class;
  slab_class.codec_k = slab_class.codec_v = codec;
  slab_class.dim_k = slab_class.dim_v = static_cast<uint16_t>(dim);
  slab_class.n_heads = static_cast<uint16_t>(n_heads);
  return slab_class;
}

Result<std::unique_ptr<DeviceStore>> DeviceStore::open(std::unique_ptr<Driver> driver,
                                                       const DeviceStoreOptions& options) {
  std::unique_ptr<DeviceStore> store(new DeviceStore(std::move(driver), options));
  KVM_TRY(store->init(options));
  return store;
}

DeviceStore::DeviceStore(std::unique_ptr<Driver> driver, const DeviceStoreOptions& options)
    : driver_(std::move(driver)),
      pool_(std::make_unique<PagePool>(driver_.get(), options.pool_bytes)) {}

Status DeviceStore::init(const DeviceStoreOptions& options) {
  KVM_TRY_ASSIGN(host_, HostChunks::create(driver_.get(), options.host_bytes));
  if (host_->n_chunks() == 0) {
    return Status::ok();
  }
  KVM_TRY_ASSIGN(to_host_, driver_->create_stream());
  KVM_TRY_ASSIGN(to_device_, driver_->create_stream());
  for (uint8_t*& bounce : bounce_) {
    KVM_TRY_ASSIGN(bounce, driver_->allocate(kChunkBytes));
  }
  return Status::ok();
}

DeviceStore::~DeviceStore() {
  // Where the device has faulted there is nothing left to wait for.
  (void)driver_->synchronize_device();
  page_fences_.clear();
  chunk_fences_.clear();
  pool_.reset();
  host_.reset();
  for (uint8_t* const bounce : bounce_) {
    if (bounce != nullptr) {
      driver_->free(bounce);
    }
  }
  for (const Stream stream : {to_host_, to_device_}) {
    if (stream != nullptr) {
      driver_->destroy_stream(stream);
    }
  }
  for (const Event event : free_events_) {
    driver_->destroy_event(event);
  }
}

Result<EventPtr> DeviceStore::new_event() {
  Event event = nullptr;
  if (free_events_.empty()) {
    free_events_.reserve(n_events_ + 1);  // so that giving them back asks for no memory
    KVM_TRY_ASSIGN(event, driver_->create_event());
    ++n_events_;
  } else {
    event = free_events_.back();
    free_events_.pop_back();
  }
  return EventPtr(event, [this](Event unused) { free_events_.push_back(unused); });
}

Result<std::shared_ptr<const SpaceLayout>> DeviceStore::prepare(SpaceLayout layout) {
  auto space = std::make_shared<SpaceLayout>(std::move(layout));
  for (LayerLayout& layer : space->layers) {
    for (ClassLayout& of : layer.classes) {
      of.list = list_of(of, space.get());
      of.part = space->lists[of.list].n_parts++;
    }
  }
  for (ListLayout& list : space->lists) {
    if (list.n_parts * list.part_bytes > UINT32_MAX) {
      return Status(KVM_ERR_UNSUPPORTED, "64 tokens of " + number(list.n_parts) + " layers take " +
                                             number(list.n_parts * list.part_bytes) +
                                             " bytes; allowed are " + number(UINT32_MAX));
    }
    KVM_TRY_ASSIGN(list.slab, pool_->open_slab(space->slab_class(list.n_heads), list.n_parts));
  }
  return std::shared_ptr<const SpaceLayout>(std::move(space));
}

// --- Sequences ----------------------------------------------------------------------------------

std::shared_ptr<DeviceSequence> DeviceStore::create(std::shared_ptr<const SpaceLayout> space) {
  auto seq = std::make_shared<DeviceSequence>();
  seq->lists.resize(space->lists.size());
  for (uint32_t list = 0; list < space->lists.size(); ++list) {
    seq->lists[list].kept_from = space->lists[list].first_droppable();
  }
  seq->space = std::move(space);
  return seq;
}

Status DeviceStore::check_visible(const DeviceSequence& seq, uint64_t n_tokens,
                                  uint64_t n_left) const {
  for (uint32_t list = 0; list < seq.lists.size(); ++list) {
    const ListLayout& of = seq.space->lists[list];
    const uint64_t kept_from = seq.lists[list].kept_from;
    if (n_left <= of.first_droppable()) {
      continue;  // of these none is dropped
    }
    const uint64_t window_begin = n_tokens + 1 > of.n_recent ? n_tokens + 1 - of.n_recent : 0;
    if (of.n_recent != 0 && kept_from > of.first_droppable() &&
        std::max(window_begin, of.n_sinks) < kept_from) {
      return Status(KVM_ERR_PARTIAL, "queries at " + number(n_tokens) + " would see tokens from " +
                                         number(window_begin) + "; a policy has dropped those to " +
                                         number(kept_from));
    }
  }
  return Status::ok();
}

Result<std::shared_ptr<DeviceSequence>> DeviceStore::fork(const DeviceSequence& parent,
                                                          uint64_t n_tokens) {
  if (parent.on_host) {
    return Status(KVM_ERR_BUSY, "the sequence is on the host: kvm_cuda_fetch it first");
  }
  if (n_tokens > parent.n_tokens) {
    return Status(KVM_ERR_INVALID, "n_tokens is " + number(n_tokens) + "; the sequence has " +
                                       number(parent.n_tokens));
  }
  if (n_tokens < parent.n_tokens) {
    KVM_TRY(check_visible(parent, n_tokens, n_tokens));
  }
  auto child = std::make_shared<DeviceSequence>(parent);
  child->n_tokens = n_tokens;
  child->version = 0;
  child->noted_by = nullptr;
  for (DevicePageList& list : child->lists) {
    list.pages.resize(div_up(n_tokens, kPageTokens));
    for (const PageRef page : list.pages) {
      if (page != kNoPage) {
        pool_->add_ref(page);
      }
    }
  }
  forget_dropped(child.get());
  return child;
}

Status DeviceStore::truncate(DeviceSequence* seq, uint64_t n_tokens) {
  if (seq->on_host) {
    return Status(KVM_ERR_BUSY, "the sequence is on the host: kvm_cuda_fetch it first");
  }
  if (n_tokens >= seq->n_tokens) {
    return Status::ok();
  }
  KVM_TRY(check_visible(*seq, n_tokens, n_tokens));
  const uint64_t n_pages = div_up(n_tokens, kPageTokens);
  for (DevicePageList& list : seq->lists) {
    for (uint64_t block = n_pages; block < list.pages.size(); ++block) {
      release(*seq, list.pages[block]);
    }
    list.pages.resize(n_pages);
  }
  seq->n_tokens = n_tokens;
  forget_dropped(seq);
  mark_changed(seq);
  return Status::ok();
}

void DeviceStore::mark_changed(DeviceSequence* seq) {
  ++seq->version;
  ++n_changes_;
}

// The dropped tokens lay behind the end: those that come there are others.
void DeviceStore::forget_dropped(DeviceSequence* seq) const {
  for (uint32_t list = 0; list < seq->lists.size(); ++list) {
    const uint64_t first = seq->space->lists[list].first_droppable();
    if (seq->n_tokens <= first) {
      seq->lists[list].kept_from = first;
    }
  }
}

void DeviceStore::clear(DeviceSequence* seq) {
  for (DevicePageList& list : seq->lists) {
    for (const PageRef page : list.pages) {
      release(*seq, page);
    }
    list.pages.clear();
  }
  if (seq->on_host) {
    give_back_chunks(seq, seq->left);
  }
  seq->n_tokens = 0;
  mark_changed(seq);
}

void DeviceStore::release(const DeviceSequence& seq, PageRef page) {
  if (page == kNoPage) {
    return;
  }
  if (seq.ready == nullptr || pool_->n_refs(page) > 1) {
    pool_->release(page);
    return;
  }
  try {
    if (page_fences_.empty() || page_fences_.back().event != seq.ready) {
      page_fences_.push_back({seq.ready, {}, {}});
    }
    page_fences_.back().pages.push_back(page);
  } catch (const std::bad_alloc&) {
    // Waiting needs no memory. Where the device has faulted the page is lost with it.
    if (driver_->synchronize(seq.ready.get()).is_ok()) {
      pool_->release(page);
    }
  }
}

DeviceStore::Usage DeviceStore::usage(const DeviceSequence& seq) const {
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
  for (const DeviceSequence::HostPage& place : seq.host_pages) {
    usage.n_pages += place.part == 0 ? 1 : 0;
    usage.host_bytes += seq.space->lists[place.list].part_bytes;
  }
  usage.bytes += usage.host_bytes;
  return usage;
}

uint64_t DeviceStore::n_dropped(const DeviceSequence& seq) const {
  uint64_t n = 0;
  for (uint32_t list = 0; list < seq.lists.size(); ++list) {
    const ListLayout& of = seq.space->lists[list];
    n += (seq.lists[list].kept_from - of.first_droppable()) * of.n_parts;
  }
  return n;
}

// --- Growth -------------------------------------------------------------------------------------

Status DeviceStore::check_growth(const Growth& growth) const {
  const DeviceSequence& seq = *growth.seq;
  if (seq.on_host) {
    return Status(KVM_ERR_BUSY, "a sequence of the batch is on the host: kvm_cuda_fetch it first");
  }
  const uint64_t n_after = seq.n_tokens + growth.n_append;
  if (growth.n_query > n_after) {
    return Status(KVM_ERR_INVALID, "n_query is " + number(growth.n_query) + "; the sequence has " +
                                       number(n_after) + " tokens after the append");
  }
  // The first row sees most.
  return growth.n_query == 0 ? Status::ok() : check_visible(seq, n_after - growth.n_query, n_after);
}

Status DeviceStore::begin_growth(std::span<const Growth> growths, Stream stream) {
  KVM_ASSERT(grown_.empty() && changes_.empty());
  for (const Growth& growth : growths) {
    KVM_TRY(check_growth(growth));
  }
  collect_fences();
  // Also where there is no memory for the lists.
  Undo undoing([this] { undo_growth(); });
  for (const Growth& growth : growths) {
    DeviceSequence* const seq = growth.seq;
    if (seq->ready != nullptr) {
      KVM_TRY(driver_->wait(stream, seq->ready.get()));
      seq->ready.reset();
    }
    grown_.push_back({growth, seq->n_tokens, seq->version});
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
  // Memory for the lists first: a page that is in none of them would be lost.
  reserve_growing(pages, n_blocks);
  reserve_growing(changes_, changes_.size() + n_blocks - pages.size() + 1);
  if (n % kPageTokens != 0 && pool_->n_refs(pages.back()) > 1) {
    // A fork ends in the same page.
    seq->changed_from = std::min<uint64_t>(seq->changed_from, pages.size() - 1);
    KVM_TRY_ASSIGN(const PageRef copy, allocate(slab, stream));
    changes_.push_back(
        {seq, list, static_cast<uint32_t>(pages.size() - 1), std::exchange(pages.back(), copy)});
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

void DeviceStore::finish_growth() {
  for (const Grown& grown : grown_) {
    drop_unseen(grown.growth, grown.n_before);
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

// Pages that no later query sees go back. Those that were begun in this growth stay until the next:
// the rows of its tokens are not enqueued yet.
void DeviceStore::drop_unseen(const Growth& growth, uint64_t n_before) {
  DeviceSequence* const seq = growth.seq;
  const uint64_t n = seq->n_tokens;
  for (uint32_t list = 0; list < seq->lists.size(); ++list) {
    const ListLayout& of = seq->space->lists[list];
    const uint64_t behind = std::max<uint64_t>({growth.n_query, of.slack + 1, 1});
    const uint64_t first_query = n > behind ? n - behind : 0;
    if (of.n_recent == 0 || first_query + 1 <= of.n_recent) {
      continue;
    }
    const uint64_t end =
        std::min((first_query + 1 - of.n_recent) / kPageTokens, n_before / kPageTokens);
    DevicePageList& lies = seq->lists[list];
    for (uint64_t block = lies.kept_from / kPageTokens; block < end; ++block) {
      release(*seq, std::exchange(lies.pages[block], kNoPage));
    }
    lies.kept_from = std::max(lies.kept_from, end * kPageTokens);
  }
}

Result<PageRef> DeviceStore::allocate(uint32_t slab, Stream stream) {
  Result<PageRef> page = pool_->allocate(slab);
  while (!page.is_ok() && page.status().code() == KVM_ERR_NO_SPACE && !page_fences_.empty()) {
    KVM_TRY(driver_->wait(stream, page_fences_.front().event.get()));
    open_fence(page_fences_.front());
    page_fences_.pop_front();
    page = pool_->allocate(slab);
  }
  return page;
}

void DeviceStore::open_fence(const Fence& fence) {
  for (const PageRef page : fence.pages) {
    pool_->release(page);
  }
  for (const uint32_t chunk : fence.chunks) {
    host_->give_back(chunk);
  }
}

void DeviceStore::collect_fences() {
  for (std::deque<Fence>* const fences : {&page_fences_, &chunk_fences_}) {
    while (!fences->empty()) {
      const Result<bool> done = driver_->is_done(fences->front().event.get());
      if (!done.is_ok() || !done.value()) {
        break;
      }
      open_fence(fences->front());
      fences->pop_front();
    }
  }
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

Status DeviceStore::take_chunks(uint64_t n, std::vector<uint32_t>* out) {
  while (host_->n_free() < n && !chunk_fences_.empty()) {
    KVM_TRY(driver_->wait(to_host_, chunk_fences_.front().event.get()));
    open_fence(chunk_fences_.front());
    chunk_fences_.pop_front();
  }
  if (host_->n_free() < n) {
    return Status(KVM_ERR_NO_SPACE, "the sequence takes " + number(n * kChunkBytes) +
                                        " bytes of host memory; free are " +
                                        number(host_->n_free() * kChunkBytes) + " of " +
                                        number(host_->n_chunks() * kChunkBytes));
  }
  for (uint64_t i = 0; i < n; ++i) {
    out->push_back(host_->take());
  }
  return Status::ok();
}

void DeviceStore::give_back_chunks(DeviceSequence* seq, EventPtr event) {
  if (!seq->chunks.empty()) {
    chunk_fences_.push_back({std::move(event), {}, std::move(seq->chunks)});
  }
  seq->chunks.clear();
  seq->host_pages.clear();
  seq->left.reset();
  seq->on_host = false;
  --counters_.n_spilled;
}

Status DeviceStore::spill(DeviceSequence* seq, Stream stream) {
  KVM_TRY(not_captured(stream));
  if (seq->on_host) {
    return Status::ok();
  }
  collect_fences();
  // Packed one behind the other; what forks share stays.
  std::vector<DeviceSequence::HostPage> places;
  std::vector<PageRef> pages;
  std::vector<uint8_t*> parts;
  uint64_t n_chunks = 0, filled = kChunkBytes;
  for (uint32_t list = 0; list < seq->lists.size(); ++list) {
    const std::vector<PageRef>& of = seq->lists[list].pages;
    for (uint32_t block = 0; block < of.size(); ++block) {
      if (of[block] == kNoPage || pool_->n_refs(of[block]) > 1) {
        continue;
      }
      const ListLayout& layout = seq->space->lists[list];
      for (uint32_t part = 0; part < layout.n_parts; ++part) {
        if (filled + layout.part_bytes > kChunkBytes) {
          ++n_chunks;
          filled = 0;
        }
        places.push_back({list, block, part, static_cast<uint32_t>(n_chunks - 1),
                          static_cast<uint32_t>(filled)});
        parts.push_back(pool_->data(of[block]) + part * layout.part_bytes);
        filled += layout.part_bytes;
      }
      pages.push_back(of[block]);
    }
  }
  std::vector<uint32_t> chunks;
  KVM_TRY(take_chunks(n_chunks, &chunks));
  EventPtr done;
  const Status moved =
      transfer(*seq->space, places, parts, chunks, true, stream, seq->ready, &done);
  if (!moved.is_ok()) {
    for (const uint32_t chunk : chunks) {
      host_->give_back(chunk);
    }
    return moved;
  }
  for (const DeviceSequence::HostPage& place : places) {
    seq->lists[place.list].pages[place.block] = kNoPage;
    counters_.spilled_bytes += seq->space->lists[place.list].part_bytes;
  }
  page_fences_.push_back({done, std::move(pages), {}});
  seq->on_host = true;
  seq->host_pages = std::move(places);
  seq->chunks = std::move(chunks);
  seq->left = std::move(done);
  mark_changed(seq);
  ++counters_.n_spilled;
  return Status::ok();
}

Status DeviceStore::fetch(DeviceSequence* seq, Stream stream) {
  KVM_TRY(not_captured(stream));
  if (!seq->on_host) {
    return Status::ok();
  }
  collect_fences();
  std::vector<PageRef> pages;
  std::vector<uint8_t*> parts;
  Status status;
  for (const DeviceSequence::HostPage& place : seq->host_pages) {
    const ListLayout& layout = seq->space->lists[place.list];
    if (place.part == 0) {
      Result<PageRef> page = allocate(layout.slab, stream);
      if (!page.is_ok()) {
        status = page.status();
        break;
      }
      pages.push_back(page.value());
    }
    parts.push_back(pool_->data(pages.back()) + place.part * layout.part_bytes);
  }
  EventPtr done;
  if (status.is_ok()) {
    status =
        transfer(*seq->space, seq->host_pages, parts, seq->chunks, false, stream, seq->left, &done);
  }
  if (!status.is_ok()) {
    for (const PageRef page : pages) {
      pool_->release(page);
    }
    return status;
  }
  size_t n_pages = 0;
  for (const DeviceSequence::HostPage& place : seq->host_pages) {
    if (place.part == 0) {
      seq->lists[place.list].pages[place.block] = pages[n_pages++];
      seq->changed_from = std::min<uint64_t>(seq->changed_from, place.block);
    }
    counters_.fetched_bytes += seq->space->lists[place.list].part_bytes;
  }
  give_back_chunks(seq, done);
  // Pages that stayed, for forks share them, may still be on their way from an earlier fetch: that
  // copy is on the same stream, before this one.
  seq->ready = std::move(done);
  mark_changed(seq);
  return Status::ok();
}

Status DeviceStore::transfer(const SpaceLayout& space,
                             std::span<const DeviceSequence::HostPage> places,
                             std::span<uint8_t* const> parts, std::span<const uint32_t> chunks,
                             bool to_host, Stream stream, const EventPtr& also, EventPtr* done) {
  const Stream copies = to_host ? to_host_ : to_device_;
  KVM_TRY_ASSIGN(const EventPtr before, new_event());
  KVM_TRY_ASSIGN(*done, new_event());
  const auto enqueue = [&]() -> Status {
    KVM_TRY(driver_->record(before.get(), stream));
    KVM_TRY(driver_->wait(copies, before.get()));
    if (also != nullptr) {
      KVM_TRY(driver_->wait(copies, also.get()));
    }
    // Runs of pages of one size that lie in one chunk.
    for (size_t begin = 0; begin < places.size();) {
      size_t end = begin + 1;
      while (end < places.size() && places[end].chunk == places[begin].chunk &&
             places[end].list == places[begin].list &&
             end - begin < attention::gpu::kMaxMovedPages) {
        ++end;
      }
      uint8_t* const packed = host_->data(chunks[places[begin].chunk]) + places[begin].offset;
      KVM_TRY(copy_run(packed, parts.subspan(begin, end - begin),
                       space.lists[places[begin].list].part_bytes, to_host));
      begin = end;
    }
    return driver_->record(done->get(), copies);
  };
  const Status enqueued = enqueue();
  if (!enqueued.is_ok()) {
    // Part of the copies may be under way; pages and chunks are the caller's again.
    (void)driver_->synchronize_device();
  }
  return enqueued;
}

Status DeviceStore::copy_run(uint8_t* packed, std::span<uint8_t* const> parts, uint64_t size,
                             bool to_host) {
  bool gather = false;
  // Neighbours in one copy.
  std::vector<size_t> begins;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i == 0 || parts[i] != parts[i - 1] + size) {
      begins.push_back(i);
    }
  }
  begins.push_back(parts.size());
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    gather = gather || (begins[i + 1] - begins[i]) * size < kLongPiece;
  }
  if (gather && begins.size() > 2) {
    return gather_run(packed, parts, size, to_host);
  }
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    KVM_TRY(copy(parts[begins[i]], packed + begins[i] * size, (begins[i + 1] - begins[i]) * size,
                 to_host));
  }
  return Status::ok();
}

Status DeviceStore::gather_run(uint8_t* packed, std::span<uint8_t* const> parts,
                               uint64_t part_bytes, bool to_host) {
  attention::gpu::MoveParams move;
  move.packed = bounce_[to_host ? 0 : 1];
  move.page_bytes = part_bytes;
  move.n_pages = static_cast<uint32_t>(parts.size());
  move.pack = to_host;
  std::copy(parts.begin(), parts.end(), move.pages);
  const uint64_t size = parts.size() * move.page_bytes;
  if (to_host) {
    KVM_TRY(driver_->move(move, to_host_));
    return copy(move.packed, packed, size, true);
  }
  KVM_TRY(copy(move.packed, packed, size, false));
  return driver_->move(move, to_device_);
}

Status DeviceStore::copy(uint8_t* on_device, uint8_t* on_host, uint64_t size_bytes, bool to_host) {
  ++counters_.n_copies;
  return to_host ? driver_->copy(on_host, on_device, size_bytes, to_host_)
                 : driver_->copy(on_device, on_host, size_bytes, to_device_);
}

void DeviceStore::check_accounts(std::span<const DeviceSequence* const> all) const {
  KVM_ASSERT(grown_.empty() && changes_.empty());
  pool_->check_accounts();
  std::unordered_map<PageRef, uint32_t> n_refs;
  uint64_t n_chunks = host_->n_free();
  for (const DeviceSequence* const seq : all) {
    for (const DevicePageList& list : seq->lists) {
      KVM_ASSERT(list.pages.size() == div_up(seq->n_tokens, kPageTokens));
      for (const PageRef page : list.pages) {
        n_refs[page] += page == kNoPage ? 0 : 1;
      }
    }
    n_chunks += seq->chunks.size();
    KVM_ASSERT(seq->on_host || seq->host_pages.empty());
  }
  for (const std::deque<Fence>* const fences : {&page_fences_, &chunk_fences_}) {
    for (const Fence& fence : *fences) {
      for (const PageRef page : fence.pages) {
        ++n_refs[page];
      }
      n_chunks += fence.chunks.size();
    }
  }
  n_refs.erase(kNoPage);
  KVM_ASSERT(n_refs.size() == pool_->n_pages());
  for (const auto& [page, n] : n_refs) {
    KVM_ASSERT(pool_->n_refs(page) == n);
  }
  KVM_ASSERT(n_chunks == host_->n_chunks());
}

}  // namespace kvm::device
