// SPDX-License-Identifier: Apache-2.0
#include "device/batch.h"

#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/assert.h"
#include "base/limits.h"
#include "base/round.h"
#include "base/undo.h"

namespace kvm::device {

using attention::gpu::AppendParams;
using attention::gpu::AppendToken;
using attention::gpu::DecodeParams;
using attention::gpu::kMaxClasses;
using attention::gpu::kMaxLengthsKinds;
using attention::gpu::kMaxMergeSlots;
using attention::gpu::LengthsItem;
using attention::gpu::LengthsKind;
using attention::gpu::LengthsParams;
using attention::gpu::Merge;
using attention::gpu::MergeParams;
using attention::gpu::PageClass;
using attention::gpu::PlanCounts;
using attention::gpu::PlanOptions;
using attention::gpu::ReadParams;
using attention::gpu::Request;
using attention::gpu::ScatterParams;
using attention::gpu::Sight;
using attention::gpu::Tail;
using attention::gpu::tail_of;
using attention::gpu::WordRun;
using attention::gpu::Work;

namespace {

// Changes of the page table that go in one message, and runs that they may make.
constexpr uint32_t kEntriesAtOnce = 16384;
constexpr uint32_t kEntryRunsAtOnce = 8192;
// Blocks of captured launches, which take what there is in turn.
constexpr uint32_t kAppendBlocksPerSm = 16;
constexpr uint32_t kMergeBlocksPerSm = 8;
// Of reads: enough to keep a link busy, which is slower than memory.
constexpr uint32_t kReadBlocksPerSm = 16;
constexpr uint32_t kLengthsThreadsPerSm = 512;
constexpr uint64_t kAlign = 256;

std::string number(uint64_t n) { return std::to_string(n); }
Status invalid(std::string sentence) { return Status(KVM_ERR_INVALID, std::move(sentence)); }

}  // namespace

// --- Making one ---------------------------------------------------------------------------------

Result<std::unique_ptr<Batch>> Batch::create(Driver* driver, SequenceStore* store,
                                             std::shared_ptr<const SpaceLayout> space,
                                             const BatchOptions& options) {
  std::unique_ptr<Batch> batch(new Batch(driver, store, std::move(space), options));
  KVM_TRY(batch->init());
  return batch;
}

Batch::Batch(Driver* driver, SequenceStore* store, std::shared_ptr<const SpaceLayout> space,
             const BatchOptions& options)
    : driver_(driver),
      events_(driver),
      store_(store),
      space_(std::move(space)),
      options_(options),
      places_(options.max_items) {}

Status Batch::init() {
  max_pages_ = div_up(options_.max_tokens, kPageTokens);
  const bool prefill = options_.max_query > kMaxTreeRows;
  if (prefill && !attention::gpu::is_prefill_on_devices(space_->codec, space_->dim)) {
    return Status(KVM_ERR_UNSUPPORTED,
                  "max_query is " + number(options_.max_query) + "; for pages of " +
                      codecs::codec_of(space_->codec).name + " with head_dim " +
                      number(space_->dim) + " it is at most " + number(kMaxTreeRows));
  }
  uint32_t most_rows = 0;
  for (const LayerLayout& layer : space_->layers) {
    most_rows =
        layer.has_keys ? std::max(most_rows, layer.group() * options_.max_query) : most_rows;
  }
  kernel_ = {space_->codec, space_->dim,
             prefill ? attention::gpu::kPrefillRows
                     : attention::gpu::block_rows_for(space_->codec, space_->dim, most_rows)};
  KVM_TRY_ASSIGN(const uint32_t blocks, driver_->decode_blocks(kernel_));
  blocks_ = std::min(blocks, kMaxMergeSlots);
  // Kernels name its entries by 32 bits.
  const uint64_t table = uint64_t{space_->lists.size()} * options_.max_items * max_pages_;
  if (table > UINT32_MAX) {
    return Status(KVM_ERR_UNSUPPORTED, "the batch's page table has " + number(table) +
                                           " entries; allowed are " + number(UINT32_MAX));
  }
  KVM_TRY(make_kinds());
  KVM_TRY(lay_out());
  return allocate();
}

Batch::~Batch() {
  (void)driver_->synchronize_device();
  if (device_ != nullptr) {
    driver_->free(device_);
  }
  if (host_ != nullptr) {
    if (ring_[0].data != nullptr) {
      driver_->unregister_host(host_);
    }
    ::munmap(host_, kRing * slot_bytes_);
  }
}

bool Batch::per_row(const Kind& kind) const {
  return options_.max_query > 1 && !is_prefill() &&
         (kind.window != 0 || std::any_of(kind.classes.begin(), kind.classes.end(),
                                          [](const ClassLayout& of) { return of.n_recent != 0; }));
}

Status Batch::make_kinds() {
  kind_of_layer_.assign(space_->layers.size(), UINT32_MAX);
  for (uint32_t index = 0; index < space_->layers.size(); ++index) {
    const LayerLayout& layer = space_->layers[index];
    if (!layer.has_keys) {
      continue;
    }
    const std::vector<ClassLayout>& classes = space_->storage(index).classes;
    const auto same = [&](const Kind& kind) {
      return kind.window == layer.window && kind.group == layer.group() &&
             std::equal(kind.classes.begin(), kind.classes.end(), classes.begin(), classes.end(),
                        [](const ClassLayout& a, const ClassLayout& b) {
                          return a.list == b.list && a.kv_heads == b.kv_heads;
                        });
    };
    auto kind = std::find_if(kinds_.begin(), kinds_.end(), same);
    if (kind == kinds_.end()) {
      kinds_.push_back({classes, layer.window, layer.group()});
      KVM_TRY(size_kind(&kinds_.back()));
      kind = kinds_.end() - 1;
    }
    kind->stores = kind->stores || layer.storage_layer == index;
    kind_of_layer_[index] = static_cast<uint32_t>(kind - kinds_.begin());
  }
  return Status::ok();
}

uint32_t Batch::max_merge_rows(const Kind& kind) const {
  return std::min(kernel_.block_rows, options_.max_query * kind.group);
}

// That a step has at most: none has rows of two items.
uint64_t Batch::max_row_blocks(const Kind& kind) const {
  const uint64_t of_item = div_up(uint64_t{options_.max_query} * kind.group, kernel_.block_rows);
  const uint64_t of_rows = uint64_t{options_.max_query_rows} * kind.group / kernel_.block_rows;
  return std::min(options_.max_items * of_item, options_.max_items + of_rows);
}

Status Batch::size_kind(Kind* kind) const {
  if (kind->classes.size() > kMaxClasses) {
    return Status(KVM_ERR_UNSUPPORTED, "a layer has " + number(kind->classes.size()) +
                                           " head classes; a device takes " + number(kMaxClasses));
  }
  uint64_t n_items = 0, n_heads_of_items = 0, n_tokens = 0;
  for (const ClassLayout& of : kind->classes) {
    const auto n_heads = static_cast<uint32_t>(of.kv_heads.size());
    const tiers::SlabClass lies = space_->slab_class(n_heads);
    PageClass page_class;
    page_class.page_bytes = store_->slab(space_->lists[of.list].slab).page_bytes;
    page_class.v_offset_bytes = lies.v_in_k ? 0 : lies.v_offset();
    page_class.head_stride_bytes = static_cast<uint32_t>(lies.k().head_rows_bytes(lies.dim_k));
    page_class.heads_first = static_cast<uint32_t>(kind->heads.size());
    page_class.n_heads = n_heads;
    page_class.scales_offset_bytes = static_cast<uint32_t>(lies.k_params_offset());
    page_class.v_scales_offset_bytes =
        static_cast<uint32_t>(lies.v_params_offset() - lies.k_params_offset());
    kind->page_classes.push_back(page_class);
    kind->heads.insert(kind->heads.end(), of.kv_heads.begin(), of.kv_heads.end());
    Sight& sight = kind->sights.emplace_back();
    if (kind->window != 0) {
      sight.window = static_cast<uint32_t>(std::min<uint64_t>(kind->window, UINT32_MAX));
    }
    if (of.n_recent != 0) {
      sight.n_sinks = static_cast<uint32_t>(std::min<uint64_t>(of.n_sinks, UINT32_MAX));
      sight.n_recent = static_cast<uint32_t>(std::min<uint64_t>(of.n_recent, UINT32_MAX));
    }
    const bool rows_apart = per_row(*kind) && (kind->window != 0 || of.n_recent != 0);
    // An item may be taken row by row or, while it is short, as one.
    const uint64_t n_items_of =
        n_heads * (rows_apart ? std::max(uint64_t{options_.max_items} * options_.max_query,
                                         max_row_blocks(*kind))
                              : max_row_blocks(*kind));
    n_items += n_items_of;
    n_tokens += n_items_of * options_.max_tokens;
    n_heads_of_items += uint64_t{options_.max_items} * n_heads;
  }
  // Speed: every cut is the end of a block, or the tail's; a piece that this one cuts off is a
  // state more, and what is left of an item that nothing else cuts another one. Reproducible: items
  // are cut by their length; those of the prefill kernel by it and their rows, so an item's blocks
  // of rows that are cut at all make at most twice as many pieces as one of them would.
  const uint64_t fixed_pieces = div_up(options_.max_tokens, kFixedTokens);
  kind->tail_cuts = most_tail_cuts(n_tokens, plan_options(*kind));
  uint64_t pieces = n_items + blocks_ + kind->tail_cuts;
  uint64_t slots =
      2 * uint64_t{blocks_} + kind->tail_cuts + std::min<uint64_t>(kind->tail_cuts, n_items);
  if (options_.reproducible) {
    slots = is_prefill() ? n_heads_of_items * 2 * fixed_pieces
                         : n_items * std::min<uint64_t>(kMaxMergeSlots, fixed_pieces);
    pieces = is_prefill() ? n_items + slots : slots;
  }
  const uint64_t tokens = uint64_t{options_.max_append} * kind->classes.size();
  constexpr uint64_t kMost = uint64_t{1} << 26;
  if (pieces + blocks_ > kMost || slots > kMost || tokens > kMost) {
    return Status(KVM_ERR_UNSUPPORTED, "the batch has " + number(pieces) + " pieces of work and " +
                                           number(tokens) +
                                           " rows to append a layer; allowed are " + number(kMost));
  }
  kind->work_capacity = static_cast<uint32_t>(pieces + blocks_);
  kind->merge_capacity = static_cast<uint32_t>(
      options_.reproducible ? n_items
                            : std::min<uint64_t>(n_items, uint64_t{blocks_} + kind->tail_cuts));
  kind->slot_capacity = static_cast<uint32_t>(slots);
  kind->token_capacity = static_cast<uint32_t>(tokens);
  kind->merge_rows = max_merge_rows(*kind);
  return Status::ok();
}

Status Batch::lay_out() {
  uint64_t at = 0;
  const auto take = [&at](uint64_t size_bytes) {
    const uint64_t begin = at;
    at = round_up(at + size_bytes, kAlign);
    return begin;
  };
  max_runs_ = kEntryRunsAtOnce;
  uint64_t max_words = kEntriesAtOnce;
  // What an update may change all of.
  const auto take_changing = [&](uint64_t size_bytes) {
    max_runs_ += Message::runs_for(size_bytes);
    max_words += Message::words_for(size_bytes);
    return take(size_bytes);
  };
  const bool is_unsure = options_.max_unsure != 0;
  const auto take_plan = [&](uint64_t size_bytes, uint64_t* planned_at, uint64_t* read_at) {
    *planned_at = take_changing(size_bytes);
    *read_at = is_unsure ? take(size_bytes) : *planned_at;
  };
  for (Kind& kind : kinds_) {
    take_plan(uint64_t{kind.work_capacity} * sizeof(Work), &kind.planned_work_at, &kind.work_at);
    take_plan(uint64_t{kind.merge_capacity} * sizeof(Merge), &kind.planned_merges_at,
              &kind.merges_at);
    take_plan(uint64_t{kind.token_capacity} * sizeof(AppendToken), &kind.planned_tokens_at,
              &kind.tokens_at);
    kind.n_work_at = take_changing(is_unsure ? sizeof(uint32_t) : 0);
    kind.heads_at = take_changing(round_up(kind.heads.size() * sizeof(uint16_t), 4));
    kind.n_merges_at = take_changing(sizeof(uint32_t));
    kind.n_tokens_at = take_changing(sizeof(uint32_t));
    kind.tail_at = take_changing(kind.tail_cuts != 0 ? sizeof(Tail) : 0);
  }
  // Behind something, so none of them is 0.
  for (const LayerLayout& layer : space_->layers) {
    sinks_at_.push_back(
        layer.sink_logits.empty() ? 0 : take_changing(layer.sink_logits.size() * sizeof(float)));
  }
  lengths_items_at_ =
      take_changing(is_unsure ? options_.max_items * sizeof(LengthsItem) : uint64_t{0});
  tree_at_ = take_changing(is_prefill() ? 0 : options_.max_query_rows * sizeof(uint64_t));
  if (max_words > INT32_MAX) {
    return Status(KVM_ERR_UNSUPPORTED, "an update of the batch may change " +
                                           number(max_words * 4) + " bytes; allowed are " +
                                           number(uint64_t{INT32_MAX} * 4));
  }
  max_words_ = static_cast<uint32_t>(max_words);
  slot_bytes_ = round_up(Message::bytes_for(max_runs_, max_words_), 4096);
  message_at_ = take(slot_bytes_);
  uint64_t slots = 0;
  for (const Kind& kind : kinds_) {
    slots = std::max<uint64_t>(slots, kind.slot_capacity);
  }
  // Layers follow each other on the stream, so they share the room for partial states.
  partial_o_at_ = take(slots * kernel_.block_rows * space_->dim_v() * sizeof(float));
  partial_lse_at_ = take(slots * kernel_.block_rows * sizeof(float));
  table_at_ =
      take(space_->lists.size() * uint64_t{options_.max_items} * max_pages_ * sizeof(uint32_t));
  device_bytes_ = at;
  return Status::ok();
}

Status Batch::allocate() {
  Driver& driver = *driver_;
  KVM_TRY_ASSIGN(device_, driver.allocate(device_bytes_));
  void* memory = ::mmap(nullptr, kRing * slot_bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return Status(KVM_ERR_NO_MEMORY,
                  number(kRing * slot_bytes_) + " bytes for a batch cannot be mapped");
  }
  host_ = static_cast<uint8_t*>(memory);
  (void)::madvise(memory, kRing * slot_bytes_, MADV_DONTFORK);  // as HostChunks does
  KVM_TRY(driver.register_host(host_, kRing * slot_bytes_));
  for (uint32_t i = 0; i < kRing; ++i) {
    ring_[i].data = host_ + i * slot_bytes_;
  }
  forget_device();
  return Status::ok();
}

// --- A step -------------------------------------------------------------------------------------

Status Batch::check_items(std::span<const BatchItem> items) {
  if (items.size() > options_.max_items) {
    return invalid("n_items is " + number(items.size()) + "; the batch has room for " +
                   number(options_.max_items));
  }
  rows_.clear();
  seqs_.clear();
  uint64_t n_append = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const BatchItem& item = items[i];
    const auto where = [i] { return "item " + number(i) + ": "; };
    if (item.seq == nullptr) {
      if ((item.n_append | item.n_query) != 0) {
        return invalid(where() + "no sequence, but tokens to append or to query");
      }
      continue;
    }
    if (item.seq->space != space_) {
      return invalid(where() + "the sequence is of another space than the batch");
    }
    n_append += item.n_append;
    if (item.n_append != 0 && (n_append > options_.max_append ||
                               uint64_t{item.append_row} + item.n_append > options_.max_append)) {
      return invalid(where() + "rows " + number(item.append_row) + " to " +
                     number(uint64_t{item.append_row} + item.n_append) + " of k and v, " +
                     number(n_append) + " so far; max_append is " + number(options_.max_append));
    }
    if (item.n_query != 0 && (item.n_query > options_.max_query ||
                              uint64_t{item.query_row} + item.n_query > options_.max_query_rows)) {
      return invalid(where() + "n_query is " + number(item.n_query) + " from row " +
                     number(item.query_row) + " on; max_query is " + number(options_.max_query) +
                     " and max_query_rows " + number(options_.max_query_rows));
    }
    if (!item.tree.empty() && is_prefill()) {
      return Status(KVM_ERR_UNSUPPORTED, where() + "a tree_mask, in a batch whose max_query is " +
                                             number(options_.max_query) +
                                             "; trees are for batches of at most " +
                                             number(kMaxTreeRows));
    }
    for (size_t row = 0; row < item.tree.size(); ++row) {
      if (item.n_query < 64 && item.tree[row] >> item.n_query != 0) {
        return invalid(where() + "word " + number(row) + " of tree_mask is " +
                       number(item.tree[row]) + "; with " + number(item.n_query) +
                       " query rows it must be below 2^" + number(item.n_query));
      }
    }
    if (item.seq->n_tokens + item.n_append > options_.max_tokens) {
      return Status(KVM_ERR_LIMIT, where() + "the sequence would have " +
                                       number(item.seq->n_tokens + item.n_append) +
                                       " tokens; max_tokens is " + number(options_.max_tokens));
    }
    seqs_.push_back(item.seq.get());
    if (item.n_query != 0) {
      rows_.emplace_back(item.query_row, item.query_row + item.n_query);
    }
  }
  std::sort(seqs_.begin(), seqs_.end());
  if (std::adjacent_find(seqs_.begin(), seqs_.end()) != seqs_.end()) {
    return invalid("a sequence is in two items");
  }
  std::sort(rows_.begin(), rows_.end());
  for (size_t i = 1; i < rows_.size(); ++i) {
    if (rows_[i].first < rows_[i - 1].second) {
      return invalid("query row " + number(rows_[i].first) + " is in two items");
    }
  }
  return Status::ok();
}

Status Batch::update(std::span<const BatchItem> items, Stream stream) {
  KVM_TRY_ASSIGN(const bool captured, driver_->is_capturing(stream));
  if (captured) {
    return Status(KVM_ERR_UNSUPPORTED,
                  "the stream is being captured; update before the graph is launched");
  }
  KVM_TRY(check_items(items));
  growths_.clear();
  for (const BatchItem& item : items) {
    if (item.seq != nullptr) {
      growths_.push_back(
          Growth::of(item.seq.get(), item.n_append, item.n_query, options_.max_unsure));
    }
  }
  KVM_TRY(store_->begin_growth(growths_, stream));
  current_ = false;
  // Also where there is no memory for what the plan is made in.
  Undo undoing([this] { undo_update(); });
  KVM_TRY(enqueue_update(items, stream));
  undoing.dismiss();
  store_->finish_growth();
  append_rows_ = query_rows_ = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    if (i >= items.size() || items[i].seq == nullptr) {
      place = {};
      continue;
    }
    const BatchItem& item = items[i];
    if (place.seq != item.seq) {
      place.seq = item.seq;
    }
    place.version = item.seq->version;
    item.seq->noted_by = this;
    item.seq->changed_from = UINT64_MAX;
    append_rows_ = std::max(append_rows_, item.n_append == 0 ? 0 : item.append_row + item.n_append);
    query_rows_ = std::max(query_rows_, item.n_query == 0 ? 0 : item.query_row + item.n_query);
  }
  n_changes_ = store_->n_changes();
  current_ = true;
  has_lengths_ = captures_lengths_ = false;
  return Status::ok();
}

// The device may have anything now.
void Batch::forget_device() {
  std::fill(places_.begin(), places_.end(), Place{});
  constants_written_ = false;
}

void Batch::undo_update() {
  // The ring and the pages are free again only when what was enqueued of it is done.
  (void)driver_->synchronize_device();
  store_->undo_growth();
  forget_device();
}

Result<Batch::Slot*> Batch::next_slot() {
  Slot* const slot = &ring_[next_];
  next_ = (next_ + 1) % kRing;
  if (slot->event != nullptr) {
    KVM_TRY(driver_->synchronize(slot->event.get()));
  } else {
    KVM_TRY_ASSIGN(slot->event, events_.take());
  }
  return slot;
}

Status Batch::send(const Slot& slot, const Message& message, Stream stream) {
  if (message.n_runs() == 0) {
    return Status::ok();
  }
  Driver& driver = *driver_;
  uint8_t* const to = device_ + message_at_;
  KVM_TRY(driver.copy(to + message.begin(), message.data() + message.begin(),
                      message.end() - message.begin(), stream));
  ScatterParams params;
  params.to = reinterpret_cast<uint32_t*>(device_);
  params.words = reinterpret_cast<const uint32_t*>(to + message.words_begin());
  params.runs = reinterpret_cast<const WordRun*>(to + message.begin());
  params.n_runs = message.n_runs();
  KVM_TRY(driver.scatter(params, stream));
  ++n_launches_;
  return driver.record(slot.event.get(), stream);
}

Status Batch::enqueue_update(std::span<const BatchItem> items, Stream stream) {
  Slot* slot = nullptr;
  KVM_TRY_ASSIGN(slot, next_slot());
  Message message = message_in(*slot);
  for (Kind& kind : kinds_) {
    KVM_TRY(plan_kind(&kind, items, &message));
    if (kind.stores) {
      add_tokens(&kind, items, &message);
    }
  }
  if (!constants_written_) {
    add_heads(&message);
    add_sinks(&message);
    constants_written_ = true;
  }
  add_trees(items, &message);
  if (options_.max_unsure != 0) {
    add_lengths_items(items, &message);
  }
  KVM_TRY(add_table(items, &slot, &message, stream));
  return send(*slot, message, stream);
}

// Requests for each item and class.
void Batch::list_requests(const Kind& kind, std::span<const BatchItem> items) {
  requests_.clear();
  for (uint32_t i = 0; i < items.size(); ++i) {
    const BatchItem& item = items[i];
    if (item.n_query == 0) {
      continue;
    }
    const auto n = static_cast<uint32_t>(item.seq->n_tokens);
    for (uint32_t c = 0; c < kind.classes.size(); ++c) {
      Request request;
      request.table = table_row(kind.classes[c].list, i);
      request.page_class = c;
      if (options_.log_weight_stride_item != 0 || options_.log_weight_stride_head != 0) {
        request.log_weights = static_cast<int64_t>(i * options_.log_weight_stride_item);
        request.log_weight_stride = static_cast<uint32_t>(options_.log_weight_stride_head);
      }
      request.q_token = item.query_row;
      request.n_query = item.n_query;
      if (is_prefill()) {
        // The kernel knows windows and policies itself.
        request.n_first = request.n_tokens = n;
        requests_.push_back(request);
        continue;
      }
      request.tree_first = item.tree.empty() ? attention::gpu::kNoTree : 0;
      attention::gpu::add_requests(request, n, kind.sights[c], options_.max_unsure, &requests_);
    }
  }
}

PlanOptions Batch::plan_options(const Kind& kind) const {
  PlanOptions options;
  options.blocks = blocks_;
  options.block_rows = kernel_.block_rows;
  options.group = kind.group;
  options.fixed_tokens = options_.reproducible ? kFixedTokens : 0;
  if (is_prefill()) {
    options.sights = kind.sights;
    options.least_tokens = attention::gpu::kLeastPrefillTokens;
  }
  if (space_->v_in_k()) {
    options.tail_part = 0;  // its kernel takes none
  }
  options.max_unsure = options_.max_unsure;
  return options;
}

Status Batch::plan_kind(Kind* kind, std::span<const BatchItem> items, Message* message) {
  list_requests(*kind, items);
  Work* const work = message->next<Work>();
  const PlanCounts plan =
      plan_decode(requests_, kind->page_classes, kind->heads, plan_options(*kind), blocks_,
                  {work, kind->work_capacity}, &merges_);
  if (plan.n_work > kind->work_capacity || merges_.size() > kind->merge_capacity ||
      plan.n_slots > kind->slot_capacity) {
    return Status(KVM_ERR_INTERNAL, "a plan of " + number(plan.n_work) + " pieces, " +
                                        number(merges_.size()) + " merges and " +
                                        number(plan.n_slots) + " partial states does not fit");
  }
  // A captured launch has all blocks: those without work get a piece of no query.
  Work idle;
  idle.request.n_query = 0;
  std::fill(work + plan.n_blocks, work + blocks_, idle);
  message->end(kind->planned_work_at, work + plan.n_work);
  std::copy(merges_.begin(), merges_.end(),
            message->add<Merge>(kind->planned_merges_at, merges_.size()));
  // Blocks that have none of the work take what there is of the tail.
  kind->n_blocks = plan.n_tail != 0 ? blocks_ : plan.n_blocks;
  kind->n_work = plan.n_work;
  kind->n_tail = plan.n_tail;
  if (kind->tail_cuts != 0) {
    // Launches have left 0 of the count; this one is behind all of them.
    *message->add<Tail>(kind->tail_at, 1) = tail_of(plan.n_work, plan.n_tail);
  }
  if (options_.max_unsure != 0) {
    *message->add<uint32_t>(kind->n_work_at, 1) = kind->n_work;
  }
  kind->n_merges = static_cast<uint32_t>(merges_.size());
  *message->add<uint32_t>(kind->n_merges_at, 1) = kind->n_merges;
  return Status::ok();
}

void Batch::add_tokens(Kind* kind, std::span<const BatchItem> items, Message* message) {
  AppendToken* const tokens = message->next<AppendToken>();
  uint32_t n = 0;
  for (uint32_t i = 0; i < items.size(); ++i) {
    const BatchItem& item = items[i];
    for (uint32_t t = 0; t < item.n_append; ++t) {
      const uint64_t position = item.seq->n_tokens - item.n_append + t;
      for (uint32_t c = 0; c < kind->classes.size(); ++c) {
        const uint64_t table = table_row(kind->classes[c].list, i);
        tokens[n++] = {static_cast<uint32_t>(table + position / kPageTokens),
                       static_cast<uint32_t>(position % kPageTokens), item.append_row + t, c};
      }
    }
  }
  message->end(kind->planned_tokens_at, tokens + n);
  kind->n_tokens = n;
  *message->add<uint32_t>(kind->n_tokens_at, 1) = n;
}

void Batch::add_heads(Message* message) {
  for (const Kind& kind : kinds_) {
    const uint64_t n = round_up(kind.heads.size(), 2);
    std::copy(kind.heads.begin(), kind.heads.end(), message->add<uint16_t>(kind.heads_at, n));
  }
}

void Batch::add_sinks(Message* message) {
  for (size_t layer = 0; layer < sinks_at_.size(); ++layer) {
    const std::vector<float>& logits = space_->layers[layer].sink_logits;
    if (!logits.empty()) {
      std::copy(logits.begin(), logits.end(), message->add<float>(sinks_at_[layer], logits.size()));
    }
  }
}

void Batch::add_trees(std::span<const BatchItem> items, Message* message) {
  for (const BatchItem& item : items) {
    if (!item.tree.empty()) {
      std::copy(
          item.tree.begin(), item.tree.end(),
          message->add<uint64_t>(tree_at_ + item.query_row * sizeof(uint64_t), item.tree.size()));
    }
  }
}

// REQUIRES: growths_ are the items', those without a sequence left out.
void Batch::add_lengths_items(std::span<const BatchItem> items, Message* message) {
  LengthsItem* to = message->add<LengthsItem>(lengths_items_at_, items.size());
  auto growth = growths_.begin();
  for (const BatchItem& item : items) {
    *to = {};
    if (item.seq != nullptr) {
      to->n_before = static_cast<uint32_t>(item.seq->n_tokens - item.n_append);
      to->n_unsure = growth->n_unsure;
      to->n_append = item.n_append;
      to->n_query = item.n_query;
      to->query_row = item.query_row;
      ++growth;
    }
    ++to;
  }
}

// Entries of the page table that differ from what the device's has. Where they are more than the
// message has room for it is sent, and another one begun.
Status Batch::add_table(std::span<const BatchItem> items, Slot** slot, Message* message,
                        Stream stream) {
  for (uint32_t i = 0; i < items.size(); ++i) {
    const DeviceSequence* const seq = items[i].seq.get();
    if (seq == nullptr) {
      continue;
    }
    const bool is_known = places_[i].seq.get() == seq && seq->noted_by == this;
    for (uint32_t list = 0; list < seq->lists.size(); ++list) {
      const std::vector<tiers::PageRef>& pages = seq->lists[list].pages;
      const uint64_t row = table_row(list, i);
      for (uint64_t block = is_known ? seq->changed_from : 0; block < pages.size();) {
        if (pages[block] == tiers::kNoPage) {
          ++block;  // dropped: nothing refers to it
          continue;
        }
        uint64_t end = block + 1;
        while (end < pages.size() && end - block < attention::gpu::kMaxRunWords &&
               pages[end] != tiers::kNoPage) {
          ++end;
        }
        if (!message->has_room<uint32_t>(end - block)) {
          KVM_TRY(send(**slot, *message, stream));
          KVM_TRY_ASSIGN(*slot, next_slot());
          *message = message_in(**slot);
        }
        std::copy(
            pages.data() + block, pages.data() + end,
            message->add<uint32_t>(table_at_ + (row + block) * sizeof(uint32_t), end - block));
        block = end;
      }
    }
  }
  return Status::ok();
}

// --- Launches -----------------------------------------------------------------------------------

Status Batch::check_current() {
  if (!current_) {
    return invalid("the batch has had no update, or the last one failed");
  }
  if (n_changes_ == store_->n_changes()) {
    return Status::ok();
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].seq != nullptr && places_[i].seq->version != places_[i].version) {
      return invalid("the sequence of item " + number(i) +
                     " has changed since the batch's last update");
    }
  }
  n_changes_ = store_->n_changes();
  return Status::ok();
}

Status Batch::check_launch(bool captured) {
  KVM_TRY(check_current());
  return options_.max_unsure == 0 || has_lengths_ || (captured && captures_lengths_)
             ? Status::ok()
             : invalid("the batch has max_unsure " + number(options_.max_unsure) +
                       ", and kvm_cuda_set_lengths has not been called since its last update");
}

Status Batch::set_lengths(const uint8_t* lengths, uint64_t size_bytes, Stream stream) {
  if (options_.max_unsure == 0) {
    return invalid("the batch has max_unsure 0: its sequences are as long as they are said to be");
  }
  const uint64_t wanted = options_.max_items * sizeof(uint32_t);
  if (lengths != nullptr &&
      (size_bytes < wanted || reinterpret_cast<uintptr_t>(lengths) % 4 != 0)) {
    return invalid("lengths has " + number(size_bytes) + " bytes at address " +
                   number(reinterpret_cast<uintptr_t>(lengths)) + "; it must have " +
                   number(wanted) + ", at a multiple of 4");
  }
  KVM_TRY(check_current());
  KVM_TRY_ASSIGN(const bool captured, driver_->is_capturing(stream));
  for (size_t first = 0; first < kinds_.size(); first += kMaxLengthsKinds) {
    LengthsParams params;
    params.n_kinds =
        static_cast<uint32_t>(std::min<size_t>(kinds_.size() - first, kMaxLengthsKinds));
    params.items = reinterpret_cast<const LengthsItem*>(device_ + lengths_items_at_);
    params.lengths = reinterpret_cast<const uint32_t*>(lengths);
    params.max_items = options_.max_items;
    params.max_pages = static_cast<uint32_t>(max_pages_);
    params.page_tokens = kPageTokens;
    params.block_rows = kernel_.block_rows;
    uint32_t most = 0;
    for (uint32_t i = 0; i < params.n_kinds; ++i) {
      const Kind& kind = kinds_[first + i];
      params.kinds[i] = lengths_kind(kind);
      // A captured launch serves any number of them.
      most = std::max(most, captured ? std::max(kind.work_capacity, kind.token_capacity)
                                     : std::max(kind.n_work, kind.n_tokens));
    }
    most = std::min(most, kLengthsThreadsPerSm * driver_->facts().n_sms);
    KVM_TRY(driver_->lengths(params, most, stream));
    ++n_launches_;
  }
  (captured ? captures_lengths_ : has_lengths_) = true;
  return Status::ok();
}

LengthsKind Batch::lengths_kind(const Kind& kind) const {
  LengthsKind to;
  to.planned_work = reinterpret_cast<const Work*>(device_ + kind.planned_work_at);
  to.planned_merges = reinterpret_cast<const Merge*>(device_ + kind.planned_merges_at);
  to.planned_tokens = reinterpret_cast<const AppendToken*>(device_ + kind.planned_tokens_at);
  to.work = reinterpret_cast<Work*>(device_ + kind.work_at);
  to.merges = reinterpret_cast<Merge*>(device_ + kind.merges_at);
  to.tokens = reinterpret_cast<AppendToken*>(device_ + kind.tokens_at);
  to.n_work = reinterpret_cast<const uint32_t*>(device_ + kind.n_work_at);
  to.n_merges = reinterpret_cast<const uint32_t*>(device_ + kind.n_merges_at);
  to.n_tokens =
      kind.stores ? reinterpret_cast<const uint32_t*>(device_ + kind.n_tokens_at) : nullptr;
  to.group = kind.group;
  std::copy(kind.sights.begin(), kind.sights.end(), to.sights);
  return to;
}

attention::gpu::PagePool Batch::pool_of(const Kind& kind, uint32_t layer) const {
  attention::gpu::PagePool pool;
  for (const ListLayout& list : space_->lists) {
    pool.segments[list.slab] = store_->slab(list.slab).base;
  }
  std::copy(kind.page_classes.begin(), kind.page_classes.end(), pool.classes);
  const std::vector<ClassLayout>& classes = space_->storage(layer).classes;
  for (size_t c = 0; c < classes.size(); ++c) {
    pool.classes[c].layer_offset_bytes =
        static_cast<uint32_t>(classes[c].rank * space_->lists[classes[c].list].layer_bytes);
  }
  pool.heads = reinterpret_cast<const uint16_t*>(device_ + kind.heads_at);
  pool.page_tokens = attention::gpu::make_divider(kPageTokens);
  return pool;
}

// v: as k, with strides of `row` and `head` elements; absent where it is in k.
Status Batch::check_values(const DeviceTensor& k, const DeviceTensor& v, uint64_t n_rows,
                           uint64_t n_heads, uint64_t row, uint64_t head) const {
  if (space_->v_in_k()) {
    return v.data == nullptr
               ? Status::ok()
               : invalid("v is there; the space has KVM_SPACE_V_IN_K, so it must be NONE");
  }
  if (v.data == nullptr) {
    return invalid("v is no device memory");
  }
  uint64_t row_v = 0, head_v = 0;
  KVM_TRY(check_tensor("v", v, n_rows, n_heads, space_->dim_v(), 16, &row_v, &head_v));
  return k.dtype == v.dtype && row == row_v && head == head_v
             ? Status::ok()
             : invalid("k and v have different dtypes or strides");
}

Result<AppendParams> Batch::append_params(uint32_t layer, const DeviceTensor& k,
                                          const DeviceTensor& v, uint64_t n_rows) const {
  if (layer >= space_->layers.size() || !space_->stores(layer)) {
    return invalid("layer " + number(layer) + " stores no keys and values of its own");
  }
  const uint64_t n_heads = space_->layers[layer].n_kv_heads;
  uint64_t row = 0, head = 0;
  KVM_TRY(check_tensor("k", k, n_rows, n_heads, space_->dim, 16, &row, &head));
  KVM_TRY(check_values(k, v, n_rows, n_heads, row, head));
  const Kind& kind = kinds_[kind_of_layer_[layer]];
  AppendParams params;
  params.pool = pool_of(kind, layer);
  params.page_table = table();
  params.k = k.data;
  params.v = v.data;
  params.stride_token = static_cast<int64_t>(row);
  params.stride_head = static_cast<int64_t>(head);
  params.tokens = reinterpret_cast<const AppendToken*>(device_ + kind.tokens_at);
  params.dtype = k.dtype;
  params.dim = space_->dim;
  return params;
}

Status Batch::append(uint32_t layer, const DeviceTensor& k, const DeviceTensor& v, Stream stream) {
  KVM_TRY_ASSIGN(const bool captured, driver_->is_capturing(stream));
  KVM_TRY(check_launch(captured));
  KVM_TRY_ASSIGN(AppendParams params, append_params(layer, k, v, append_rows_));
  const Kind& kind = kinds_[kind_of_layer_[layer]];
  params.n_tokens = reinterpret_cast<const uint32_t*>(device_ + kind.n_tokens_at);
  // A captured launch serves any number of them.
  const uint32_t n_tokens =
      captured ? std::min(kind.token_capacity, kAppendBlocksPerSm * driver_->facts().n_sms)
               : kind.n_tokens;
  if (n_tokens == 0) {
    return Status::ok();
  }
  ++n_launches_;
  return driver_->append(space_->codec, params, n_tokens, stream);
}

Status Batch::append_part(uint32_t layer, uint32_t first, uint32_t n_tokens, const DeviceTensor& k,
                          const DeviceTensor& v, Stream stream) {
  KVM_TRY(check_launch(false));
  KVM_TRY_ASSIGN(AppendParams params, append_params(layer, k, v, n_tokens));
  const Kind& kind = kinds_[kind_of_layer_[layer]];
  const auto n_classes = static_cast<uint32_t>(kind.classes.size());
  KVM_ASSERT(options_.max_items == 1 && n_tokens != 0 && first + n_tokens <= append_rows_);
  // The tokens name rows of tensors that hold all of them.
  const uint64_t before =
      first * static_cast<uint64_t>(params.stride_token) * dtype_size_bytes(params.dtype);
  const auto back = [before](const void* at) {
    return at == nullptr ? nullptr
                         : reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) - before);
  };
  params.k = back(params.k);
  params.v = back(params.v);
  params.tokens += uint64_t{first} * n_classes;
  ++n_launches_;
  return driver_->append(space_->codec, params, n_tokens * n_classes, stream);
}

Status Batch::check_log_weights(const DeviceTensor& log_weights, uint64_t n_kv_heads) const {
  const bool weighted =
      options_.log_weight_stride_item != 0 || options_.log_weight_stride_head != 0;
  if (weighted != (log_weights.data != nullptr)) {
    return invalid(weighted ? "the batch has strides of log_weights, but there are none"
                            : "log_weights, but the batch has no strides for them");
  }
  if (weighted) {
    const uint64_t last = (options_.max_items - 1) * options_.log_weight_stride_item +
                          (n_kv_heads - 1) * options_.log_weight_stride_head + options_.max_tokens;
    if (last * sizeof(float) > log_weights.size_bytes ||
        reinterpret_cast<uintptr_t>(log_weights.data) % sizeof(float) != 0) {
      return invalid("log_weights has " + number(log_weights.size_bytes) +
                     " bytes; the batch reaches to byte " + number(last * sizeof(float)));
    }
  }
  return Status::ok();
}

Status Batch::resolve_tensors(const AttendCall& call, uint64_t n_rows,
                              attention::gpu::AttendTensors* tensors) const {
  const LayerLayout& layer = space_->layers[call.layer];
  const codecs::Codec& codec = codecs::codec_of(space_->codec);
  if (codec.is_scaled()) {
    if (call.q.dtype != Dtype::kF16 && call.q.dtype != Dtype::kBf16) {
      return invalid(std::string("q is ") + dtype_name(call.q.dtype) + "; for pages of " +
                     codec.name + " it must be fp16 or bf16");
    }
  } else if (codecs::codec_of_tensor(call.q.dtype) != codec.id) {
    return invalid(std::string("q is ") + dtype_name(call.q.dtype) + "; the space has " +
                   codec.name);
  }
  uint64_t q_row = 0, q_head = 0, o_row = 0, o_head = 0, lse_row = 0, lse_head = 0;
  KVM_TRY(check_tensor("q", call.q, n_rows, layer.n_q_heads, space_->dim, 16, &q_row, &q_head));
  KVM_TRY(check_tensor("o", call.o, n_rows, layer.n_q_heads, space_->dim_v(), 16, &o_row, &o_head));
  if (call.lse.data != nullptr) {
    if (call.lse.dtype != Dtype::kF32) {
      return invalid("lse is not F32");
    }
    KVM_TRY(check_tensor("lse", call.lse, n_rows, layer.n_q_heads, 1, 4, &lse_row, &lse_head));
  }
  KVM_TRY(check_log_weights(call.log_weights, layer.n_kv_heads));
  tensors->q = call.q.data;
  tensors->q_stride_token = static_cast<int64_t>(q_row);
  tensors->q_stride_head = static_cast<int64_t>(q_head);
  tensors->o = call.o.data;
  tensors->o_stride_token = static_cast<int64_t>(o_row);
  tensors->o_stride_head = static_cast<int64_t>(o_head);
  tensors->lse = reinterpret_cast<float*>(call.lse.data);
  tensors->lse_stride_token = static_cast<int64_t>(lse_row);
  tensors->lse_stride_head = static_cast<int64_t>(lse_head);
  tensors->dtype_q = call.q.dtype;
  tensors->dtype_o = call.o.dtype;
  tensors->group = layer.group();
  tensors->sink_logits = layer.sink_logits.empty()
                             ? nullptr
                             : reinterpret_cast<const float*>(device_ + sinks_at_[call.layer]);
  return Status::ok();
}

DecodeParams Batch::decode_params(const AttendCall& call, const Kind& kind,
                                  const attention::gpu::AttendTensors& tensors) const {
  DecodeParams params;
  params.pool = pool_of(kind, call.layer);
  params.tensors = tensors;
  params.page_table = table();
  params.log_weights = reinterpret_cast<const float*>(call.log_weights.data);
  params.work = reinterpret_cast<const Work*>(device_ + kind.work_at);
  params.partial_o = reinterpret_cast<float*>(device_ + partial_o_at_);
  params.partial_lse = reinterpret_cast<float*>(device_ + partial_lse_at_);
  params.tree_mask = reinterpret_cast<const uint64_t*>(device_ + tree_at_);
  std::copy(kind.sights.begin(), kind.sights.end(), params.sights);
  attention::gpu::set_scale(&params, call.scale != 0 ? call.scale : space_->scale, space_->softcap);
  return params;
}

MergeParams Batch::merge_params(const Kind& kind,
                                const attention::gpu::AttendTensors& tensors) const {
  MergeParams merge;
  merge.tensors = tensors;
  merge.merges = reinterpret_cast<const Merge*>(device_ + kind.merges_at);
  merge.n_merges = reinterpret_cast<const uint32_t*>(device_ + kind.n_merges_at);
  merge.partial_o = reinterpret_cast<float*>(device_ + partial_o_at_);
  merge.partial_lse = reinterpret_cast<float*>(device_ + partial_lse_at_);
  merge.rows = kind.merge_rows;
  merge.block_rows = kernel_.block_rows;
  return merge;
}

Status Batch::attend(const AttendCall& call, Stream stream) {
  if (call.layer >= space_->layers.size() || !space_->layers[call.layer].has_keys) {
    return invalid("layer " + number(call.layer) + " does not exist or is ABSENT");
  }
  Driver& driver = *driver_;
  KVM_TRY_ASSIGN(const bool captured, driver.is_capturing(stream));
  KVM_TRY(check_launch(captured));
  attention::gpu::AttendTensors tensors;
  KVM_TRY(resolve_tensors(call, query_rows_, &tensors));
  const Kind& kind = kinds_[kind_of_layer_[call.layer]];
  const uint32_t n_blocks = captured ? blocks_ : kind.n_blocks;
  const auto most_merges =
      static_cast<uint32_t>(div_up(kMergeBlocksPerSm * driver.facts().n_sms, kind.merge_rows));
  const uint32_t n_merges = captured ? std::min(kind.merge_capacity, most_merges) : kind.n_merges;
  if (n_blocks != 0) {
    DecodeParams decode = decode_params(call, kind, tensors);
    decode.merge_follows = n_merges != 0;
    if (captured ? kind.tail_cuts != 0 : kind.n_tail != 0) {
      decode.tail = reinterpret_cast<Tail*>(device_ + kind.tail_at);
    }
    KVM_TRY(driver.decode(kernel_, decode, n_blocks, stream));
    ++n_launches_;
  }
  if (n_merges != 0) {
    KVM_TRY(driver.merge(space_->dim_v(), merge_params(kind, tensors), n_merges, stream));
    ++n_launches_;
  }
  return Status::ok();
}

// --- Rows back, and pages for kernels of others --------------------------------------------------

Result<const DeviceSequence*> Batch::sequence_at(uint32_t item) const {
  if (item >= places_.size()) {
    return invalid("item is " + number(item) + "; the batch has room for " +
                   number(places_.size()));
  }
  return places_[item].seq.get();
}

Status Batch::read(const ReadCall& call, Stream stream) {
  if (call.layer >= space_->layers.size() || !space_->layers[call.layer].has_keys) {
    return invalid("layer " + number(call.layer) + " does not exist or is ABSENT");
  }
  KVM_TRY_ASSIGN(const bool captured, driver_->is_capturing(stream));
  if (captured) {
    return Status(KVM_ERR_UNSUPPORTED,
                  "the stream is being captured; which tokens are there is known now only");
  }
  KVM_TRY(check_current());
  KVM_TRY_ASSIGN(const DeviceSequence* const seq, sequence_at(call.item));
  const uint64_t n_tokens = seq == nullptr ? 0 : seq->n_tokens;
  if (call.position > n_tokens || call.n_tokens > n_tokens - call.position) {
    return invalid(number(call.n_tokens) + " tokens from " + number(call.position) + " on; item " +
                   number(call.item) + " has " + number(n_tokens));
  }
  const Kind& kind = kinds_[kind_of_layer_[call.layer]];
  ReadParams params;
  const uint32_t n_heads = space_->storage(call.layer).n_kv_heads;
  KVM_TRY_ASSIGN(params.k, row_tensor("k", call.k, call.n_tokens, n_heads, space_->dim, 16));
  KVM_TRY_ASSIGN(params.v, row_tensor("v", call.v, call.n_tokens, n_heads, space_->dim_v(), 16));
  if (call.n_tokens == 0) {
    return Status::ok();
  }
  const uint64_t last = (call.position + call.n_tokens - 1) / kPageTokens;
  for (uint32_t c = 0; c < kind.classes.size(); ++c) {
    const std::vector<tiers::PageRef>& pages = seq->lists[kind.classes[c].list].pages;
    for (uint64_t page = call.position / kPageTokens; page <= last; ++page) {
      if (pages[page] == tiers::kNoPage) {
        return Status(KVM_ERR_PARTIAL,
                      "tokens from " + number(page * kPageTokens) + " on: a policy of kv head " +
                          number(kind.classes[c].kv_heads[0]) + " has dropped them");
      }
    }
    params.tables[c] = table_row(kind.classes[c].list, call.item);
  }
  params.pool = pool_of(kind, call.layer);
  params.page_table = table();
  params.n_classes = static_cast<uint32_t>(kind.classes.size());
  params.first = static_cast<uint32_t>(call.position);
  params.n_tokens = static_cast<uint32_t>(call.n_tokens);
  params.dim = space_->dim;
  ++n_launches_;
  return driver_->read(space_->codec, params,
                       std::min(params.n_tokens, kReadBlocksPerSm * driver_->facts().n_sms),
                       stream);
}

Result<PagesPlace> Batch::pages(uint32_t layer, uint32_t head_class) const {
  if (layer >= space_->layers.size() || !space_->layers[layer].has_keys) {
    return invalid("layer " + number(layer) + " does not exist or is ABSENT");
  }
  const LayerLayout& stored = space_->storage(layer);
  if (head_class >= stored.classes.size()) {
    return invalid("head_class is " + number(head_class) + "; the layer has " +
                   number(stored.classes.size()));
  }
  PagesPlace place;
  place.of = &stored.classes[head_class];
  place.n_classes = static_cast<uint32_t>(stored.classes.size());
  place.lies = space_->slab_class(static_cast<uint32_t>(place.of->kv_heads.size()));
  const ListLayout& list = space_->lists[place.of->list];
  place.page_bytes = list.n_layers * list.layer_bytes;
  const SlabPlace slab = store_->slab(list.slab);
  place.base = slab.base + place.of->rank * list.layer_bytes;
  place.n_pages = slab.n_slots;
  place.table = table() + uint64_t{place.of->list} * options_.max_items * max_pages_;
  place.table_stride = max_pages_ * sizeof(uint32_t);
  return place;
}

Result<uint64_t> Batch::indices(uint32_t layer, uint32_t head_class, uint32_t item,
                                std::span<int32_t> out) {
  if (const Result<PagesPlace> place = pages(layer, head_class); !place.is_ok()) {
    return place.status();
  }
  KVM_TRY(check_current());
  KVM_TRY_ASSIGN(const DeviceSequence* const seq, sequence_at(item));
  if (seq == nullptr) {
    return uint64_t{0};
  }
  const std::vector<tiers::PageRef>& refs =
      seq->lists[space_->storage(layer).classes[head_class].list].pages;
  if (refs.size() > out.size()) {
    return invalid("capacity is " + number(out.size()) + "; the item has " + number(refs.size()) +
                   " pages");
  }
  std::transform(refs.begin(), refs.end(), out.begin(), [](tiers::PageRef page) {
    return page == tiers::kNoPage ? -1 : static_cast<int32_t>(tiers::page_slot(page));
  });
  return seq->n_tokens;
}

}  // namespace kvm::device
