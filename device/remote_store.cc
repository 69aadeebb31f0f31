// SPDX-License-Identifier: Apache-2.0
#include "device/remote_store.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "base/kill_point.h"
#include "base/reserve.h"
#include "base/round.h"
#include "base/undo.h"

namespace kvm::device {

using tiers::kNoPage;
using tiers::PageRef;
using wire::Call;
using wire::CallKind;
using wire::Command;
using wire::CommandKind;
using wire::FrameKind;
using wire::Note;
using wire::NoteKind;
using wire::Order;
using wire::OrderKind;
using wire::Verdict;

namespace {

// Notes that are sent by themselves when there are so many.
constexpr size_t kNotesAtOnce = 4096;
static_assert(kNotesAtOnce < wire::kMaxNotes);
constexpr auto kPollMoves = std::chrono::microseconds(100);
// What kvmd's device has begun to write when kvmd ended may come later than the poison.
constexpr auto kPoisonEvery = std::chrono::milliseconds(5);

constexpr auto kNothing = [](ipc::FrameWriter*) {};
constexpr auto kNoAnswer = [](ipc::FrameReader*) {};

}  // namespace

struct RemoteSequence final : DeviceSequence {
  using DeviceSequence::DeviceSequence;
  RemoteSequence(const RemoteSequence&) = default;

  uint64_t id = 0;      // 0: it was cleared
  bool moved = false;   // since its lists were read
  bool awaited = true;  // the stream waits for what moves have brought since
  // Tokens that kvmd knows of; they take as many pages as n_tokens do.
  uint64_t n_told = 0;
  // Blocks from here on are no other sequence's, in no list. (Some of those before may not be,
  // either: kvmd knows.)
  uint64_t own_from = 0;
};

namespace {

RemoteSequence* remote(DeviceSequence* seq) { return static_cast<RemoteSequence*>(seq); }
const RemoteSequence& remote(const DeviceSequence& seq) {
  return static_cast<const RemoteSequence&>(seq);
}
uint64_t n_entries_of(const DeviceSequence& seq) {
  return wire::n_entries(seq.lists.size(), seq.n_tokens);
}

}  // namespace

Result<std::unique_ptr<RemoteStore>> RemoteStore::open(std::unique_ptr<Driver> driver,
                                                       ipc::Fd channel, ipc::Mapping words,
                                                       const RemoteStoreOptions& options) {
  std::unique_ptr<RemoteStore> store(
      new RemoteStore(std::move(driver), std::move(channel), std::move(words), options));
  KVM_TRY(store->init(options.ready_within_ns));
  return store;
}

RemoteStore::RemoteStore(std::unique_ptr<Driver> driver, ipc::Fd channel, ipc::Mapping words,
                         const RemoteStoreOptions& options)
    : driver_(std::move(driver)),
      channel_(std::move(channel)),
      words_(std::move(words)),
      timeout_ns_(options.timeout_ns),
      held_(options.held) {}

Status RemoteStore::init(uint64_t ready_within_ns) {
  KVM_TRY(driver_->register_host(words_.data(), sizeof(wire::Words)));
  words_registered_ = true;
  KVM_TRY(channel_.receive(ready_within_ns, &frame_));
  ipc::FrameReader reader(frame_.bytes);
  const Status ready = reader.get_status();
  if (frame_.kind != static_cast<uint32_t>(FrameKind::kReady) || !reader.is_whole()) {
    return Status(KVM_ERR_PROTOCOL, "kvmd has begun with something else than it should");
  }
  if (!ready.is_ok()) {
    return Status(ready.code(), "kvmd: " + std::string(ready.message()));
  }
  KVM_KILL_POINT("device_client/opened");
  try {
    watcher_ = std::thread([this] { watch(); });
  } catch (const std::system_error& error) {
    return Status(KVM_ERR_NO_MEMORY, std::string("no thread to watch kvmd: ") + error.what());
  }
  return Status::ok();
}

RemoteStore::~RemoteStore() {
  // Streams may still come to words. If kvmd ends meanwhile, the watcher lets them go.
  (void)driver_->synchronize_device();
  is_ending_.store(true, std::memory_order_relaxed);
  channel_.shut_down();
  if (watcher_.joinable()) {
    watcher_.join();
  }
  for (auto& [number, range] : ranges_) {
    for (const auto& [offset, size] : range.mapped) {
      driver_->unmap(range.base + offset, size);
    }
    driver_->release(range.base, range.size_bytes);
  }
  if (words_registered_) {
    driver_->unregister_host(words_.data());
  }
}

// --- The other side -----------------------------------------------------------------------------

void RemoteStore::watch() {
  pollfd entry{channel_.fd(), POLLRDHUP, 0};
  while (::poll(&entry, 1, -1) < 0) {
  }
  is_down_.store(true, std::memory_order_relaxed);
  while (!is_ending_.load(std::memory_order_relaxed)) {
    let_go();
    std::this_thread::sleep_for(kPoisonEvery);
  }
}

void RemoteStore::let_go() {
  auto* const words = reinterpret_cast<wire::Words*>(words_.data());
  for (wire::Words::Word& word : words->server) {
    // SYNC: release, which nobody needs: what a stream reads behind it is anything.
    std::atomic_ref<uint64_t>(word.value).store(wire::kPoison, std::memory_order_release);
  }
}

Status RemoteStore::gone() const {
  return Status(KVM_ERR_DISCONNECTED,
                "kvmd, whose device memory this is, has closed the connection or has ended");
}

void RemoteStore::hang_up() {
  is_down_.store(true, std::memory_order_relaxed);
  channel_.shut_down();
}

Status RemoteStore::break_off(const std::string& why) {
  hang_up();
  return Status(KVM_ERR_PROTOCOL, why);
}

Status RemoteStore::state() const {
  return is_down_.load(std::memory_order_relaxed) ? gone() : Status::ok();
}

void RemoteStore::note(const Note& note) {
  if (is_down_.load(std::memory_order_relaxed)) {
    return;  // nobody takes it any more
  }
  bool many = false;
  {
    const std::lock_guard lock(outbox_->mutex);
    outbox_->notes.push_back(note);
    many = outbox_->notes.size() >= kNotesAtOnce;
  }
  if (many) {
    (void)call({}, kNothing, kNoAnswer, nullptr);
  }
}

void RemoteStore::note_tokens(RemoteSequence* seq) {
  if (seq->n_told != seq->n_tokens) {
    note({NoteKind::kExtend, 0, seq->id, 0, seq->n_tokens});
    seq->n_told = seq->n_tokens;
  }
}

template <class Put, class Take>
Status RemoteStore::call(const Call& what, Put put, Take take, std::vector<Command>* commands,
                         bool first) {
  const std::lock_guard lock(call_mutex_);
  KVM_TRY(state());
  writer_.clear();
  // A question of another thread may come between a growth and its verdict, which is not its to
  // give: it says none, and the server must not take that for one.
  writer_.put(first ? verdict_ : Verdict::kNone);
  if (first) {
    const std::lock_guard notes_lock(outbox_->mutex);
    writer_.put_all(std::span<const Note>(outbox_->notes));
    writer_.put(what);
    put(&writer_);
    // The last thing that may ask for memory is done.
    outbox_->notes.clear();
    verdict_ = Verdict::kNone;
  } else {
    writer_.put_all(std::span<const Note>());
    writer_.put(what);
    put(&writer_);
  }
  // Where there is no memory for an answer, the next call must not take it for its own.
  Undo hanging_up([this] { hang_up(); });
  Status status = channel_.send(static_cast<uint32_t>(FrameKind::kCall), writer_.bytes());
  KVM_KILL_POINT("device_client/sent");
  if (status.is_ok()) {
    status = receive_reply();
  }
  if (!status.is_ok()) {
    return status.code() == KVM_ERR_DISCONNECTED ? gone() : status;
  }
  ipc::FrameReader reader(frame_.bytes);
  const Status answer = reader.get_status();
  if (answer.is_ok()) {
    take(&reader);
  }
  std::vector<Command> wanted = reader.get_all<Command>(wire::kMaxEntries);
  if (!reader.is_whole() || !std::all_of(wanted.begin(), wanted.end(), [this](const Command& of) {
        return of.kind == CommandKind::kWait
                   ? of.word < wire::kServerWords
                   : ranges_.contains(of.to_range) && ranges_.contains(of.from_range);
      })) {
    return Status(KVM_ERR_PROTOCOL, "kvmd has sent an answer that is none");
  }
  hanging_up.dismiss();
  KVM_KILL_POINT("device_client/answered");
  if (commands != nullptr) {
    *commands = std::move(wanted);
  }
  return answer;
}

Status RemoteStore::receive_reply() {
  for (;;) {
    // kvmd may be waiting for the device, as the calls of kvm_cuda.h do that say so.
    KVM_TRY(channel_.receive(timeout_ns_, &frame_));
    if (frame_.kind == static_cast<uint32_t>(FrameKind::kReply)) {
      return Status::ok();
    }
    ipc::FrameReader reader(frame_.bytes);
    const auto order = reader.get<Order>();
    if (frame_.kind != static_cast<uint32_t>(FrameKind::kOrder) || !reader.is_whole()) {
      return Status(KVM_ERR_PROTOCOL, "kvmd has sent something else than an answer");
    }
    KVM_KILL_POINT("device_client/obeying");
    const Status done = obey(order, frame_.fd);
    KVM_KILL_POINT("device_client/obeyed");
    ipc::FrameWriter answer;
    answer.put_status(done);
    KVM_TRY(channel_.send(static_cast<uint32_t>(FrameKind::kDone), answer.bytes()));
  }
}

Status RemoteStore::obey(const Order& order, const ipc::Fd& memory) {
  if (order.kind == OrderKind::kSynchronize) {
    return driver_->synchronize_device();
  }
  if (order.kind == OrderKind::kReserve) {
    Range range;
    range.size_bytes = order.n_bytes;
    KVM_TRY_ASSIGN(range.base, driver_->reserve(order.n_bytes));
    ranges_[order.range] = std::move(range);
    return Status::ok();
  }
  const auto found = ranges_.find(order.range);
  if (found == ranges_.end()) {
    return Status(KVM_ERR_PROTOCOL, "there is no such range");
  }
  Range& range = found->second;
  switch (order.kind) {
    case OrderKind::kMap:
      KVM_TRY(driver_->map_from(range.base + order.offset, order.n_bytes, memory));
      range.mapped[order.offset] = order.n_bytes;
      return Status::ok();
    case OrderKind::kUnmap:
      driver_->unmap(range.base + order.offset, order.n_bytes);
      range.mapped.erase(order.offset);
      return Status::ok();
    default:
      driver_->release(range.base, range.size_bytes);
      ranges_.erase(found);
      return Status::ok();
  }
}

void RemoteStore::owe(std::span<const Command> commands) {
  for (const Command& command : commands) {
    if (command.kind == CommandKind::kWait) {
      uint64_t& owed = owed_[command.word];
      owed = std::max(owed, command.value);
    }
  }
}

Status RemoteStore::pay(Stream stream) {
  const auto* const words = reinterpret_cast<const wire::Words*>(words_.data());
  for (uint32_t word = 0; word < wire::kServerWords; ++word) {
    if (owed_[word] != 0) {
      KVM_TRY(driver_->wait_word(&words->server[word].value, owed_[word], stream));
      owed_[word] = 0;
    }
  }
  return Status::ok();
}

Status RemoteStore::enqueue(std::span<const Command> commands, Stream stream) {
  owe(commands);
  KVM_TRY(pay(stream));
  for (const Command& command : commands) {
    if (command.kind == CommandKind::kCopy) {
      KVM_TRY(driver_->copy(ranges_.at(command.to_range).base + command.to,
                            ranges_.at(command.from_range).base + command.from, command.n_bytes,
                            stream));
    }
  }
  return Status::ok();
}

// --- Spaces and sequences -----------------------------------------------------------------------

Result<std::shared_ptr<const SpaceLayout>> RemoteStore::prepare(SpaceLayout layout) {
  KVM_TRY(make_lists(&layout));
  Call what;
  what.kind = CallKind::kPrepare;
  what.id = ++last_space_;
  std::vector<wire::List> lists;
  for (const ListLayout& list : layout.lists) {
    lists.push_back({list.n_heads, list.n_layers, list.n_sinks, list.n_recent, list.slack});
  }
  std::vector<wire::Slab> slabs;
  KVM_TRY(call(
      what,
      [&](ipc::FrameWriter* writer) {
        writer->put(wire::Layout{static_cast<uint32_t>(layout.codec), layout.dim, layout.dim_v(),
                                 layout.v_in_k() ? 1u : 0u});
        writer->put_all(std::span<const wire::List>(lists));
      },
      [&](ipc::FrameReader* reader) { slabs = reader->get_all<wire::Slab>(lists.size()); },
      nullptr));
  if (slabs.size() != lists.size()) {
    return break_off("kvmd has sent " + std::to_string(slabs.size()) + " slabs for " +
                     std::to_string(lists.size()) + " lists");
  }
  for (size_t i = 0; i < slabs.size(); ++i) {
    layout.lists[i].slab = slabs[i].slab;
    slabs_[slabs[i].slab] = {slabs[i].range, slabs[i].page_bytes, slabs[i].n_slots};
  }
  layout.number = what.id;
  return std::shared_ptr<const SpaceLayout>(
      new SpaceLayout(std::move(layout)),
      [outbox = std::weak_ptr<Outbox>(outbox_), id = what.id](const SpaceLayout* gone) {
        if (const std::shared_ptr<Outbox> of = outbox.lock(); of != nullptr) {
          const std::lock_guard lock(of->mutex);
          of->notes.push_back({NoteKind::kDropSpace, 0, id, 0, 0});
        }
        delete gone;
      });
}

SlabPlace RemoteStore::slab(uint32_t slab) const {
  const KnownSlab& known = slabs_.at(slab);
  return {ranges_.at(known.range).base, known.page_bytes, known.n_slots};
}

Status RemoteStore::check_entries(uint64_t n_new) const {
  return n_new <= wire::kMaxEntries - n_entries_ ? Status::ok()
                                                 : wire::too_many_entries(n_entries_);
}

Result<SequencePtr> RemoteStore::create(std::shared_ptr<const SpaceLayout> space) {
  const uint64_t n_new = wire::n_entries(space->lists.size(), 0);
  KVM_TRY(check_entries(n_new));
  const uint64_t of = space->number;
  auto seq = std::make_shared<RemoteSequence>(std::move(space));
  seq->id = ++last_sequence_;
  note({NoteKind::kCreate, 0, seq->id, of, 0});
  n_entries_ += n_new;
  return SequencePtr(std::move(seq));
}

Status RemoteStore::settle(RemoteSequence* seq) {
  if (!seq->moved) {
    return Status::ok();
  }
  Call what;
  what.kind = CallKind::kSettle;
  what.id = seq->id;
  std::vector<std::vector<PageRef>> lists(seq->lists.size());
  bool whole = true;
  KVM_TRY(call(
      what, kNothing,
      [&](ipc::FrameReader* reader) {
        for (size_t i = 0; i < lists.size(); ++i) {
          lists[i] = reader->get_all<PageRef>(wire::kMaxEntries);
          whole = whole && lists[i].size() == seq->lists[i].pages.size();
        }
      },
      nullptr));
  if (!whole) {
    return break_off("kvmd's books have other lengths than they should");
  }
  for (size_t i = 0; i < lists.size(); ++i) {
    seq->lists[i].pages = std::move(lists[i]);
  }
  seq->moved = false;
  seq->awaited = false;
  seq->changed_from = 0;
  return Status::ok();
}

Result<SequencePtr> RemoteStore::fork(DeviceSequence& parent, uint64_t n_tokens) {
  KVM_TRY(settle(remote(&parent)));
  if (n_tokens > parent.n_tokens) {
    return Status(KVM_ERR_INVALID, "n_tokens is " + std::to_string(n_tokens) +
                                       "; the sequence has " + std::to_string(parent.n_tokens));
  }
  if (n_tokens < parent.n_tokens) {
    KVM_TRY(parent.check_visible(n_tokens, n_tokens));
  }
  const uint64_t n_new = wire::n_entries(parent.lists.size(), n_tokens);
  KVM_TRY(check_entries(n_new));
  auto child = std::make_shared<RemoteSequence>(remote(parent));
  child->version = 0;
  child->noted_by = nullptr;
  child->cut(n_tokens, [](PageRef) {});
  child->id = ++last_sequence_;
  // Also where the child has fewer: they are in a page that it may share.
  note_tokens(remote(&parent));
  note({NoteKind::kFork, 0, child->id, remote(parent).id, n_tokens});
  child->n_told = n_tokens;
  child->own_from = div_up(n_tokens, kPageTokens);
  remote(&parent)->own_from = std::max(remote(parent).own_from, child->own_from);
  n_entries_ += n_new;
  return SequencePtr(std::move(child));
}

Status RemoteStore::truncate(DeviceSequence* seq, uint64_t n_tokens) {
  KVM_TRY(settle(remote(seq)));
  if (n_tokens >= seq->n_tokens) {
    return Status::ok();
  }
  KVM_TRY(seq->check_visible(n_tokens, n_tokens));
  n_entries_ -= n_entries_of(*seq);
  seq->cut(n_tokens, [](PageRef) {});
  n_entries_ += n_entries_of(*seq);
  if (n_tokens < remote(seq)->n_told) {
    note({NoteKind::kTruncate, 0, remote(seq)->id, 0, n_tokens});
    remote(seq)->n_told = n_tokens;
  }
  mark_changed(seq);
  return Status::ok();
}

void RemoteStore::clear(DeviceSequence* seq) {
  n_entries_ -= n_entries_of(*seq);
  seq->cut(0, [](PageRef) {});
  remote(seq)->moved = false;
  note({NoteKind::kClear, 0, std::exchange(remote(seq)->id, 0), 0, 0});
  mark_changed(seq);
}

// --- Growth -------------------------------------------------------------------------------------

bool RemoteStore::follows_from_books(const Growth& growth) const {
  const RemoteSequence& seq = remote(*growth.seq);
  const uint64_t n = seq.n_tokens;
  if (!seq.awaited || !growth.stays_in_its_pages(n) ||
      (growth.n_append != 0 && growth.first_written_block(n) < seq.own_from)) {
    return false;
  }
  for (uint32_t list = 0; list < seq.lists.size(); ++list) {
    if (growth.unseen_before(list, n, n + growth.n_append) > seq.lists[list].kept_from) {
      return false;
    }
  }
  return true;
}

Status RemoteStore::begin_growth(std::span<const Growth> growths, Stream stream) {
  KVM_TRY(state());
  for (const Growth& growth : growths) {
    KVM_TRY(settle(remote(growth.seq)));
  }
  for (const Growth& growth : growths) {
    KVM_TRY(growth.check());
  }
  KVM_TRY(pay(stream));
  // Memory first: what kvmd has done cannot fail here.
  asked_.clear();
  uint64_t n_at_most = 0;
  for (const Growth& growth : growths) {
    if (follows_from_books(growth)) {
      continue;
    }
    asked_.push_back(growth);
    note_tokens(remote(growth.seq));
    const uint64_t n_blocks = div_up(growth.seq->n_tokens + growth.n_append, kPageTokens);
    for (DevicePageList& list : growth.seq->lists) {
      n_at_most += n_blocks - growth.first_written_block(growth.seq->n_tokens);
      reserve_growing(list.pages, n_blocks);
    }
  }
  reserve_growing(changes_, n_at_most);
  reserve_growing(grown_, growths.size());
  std::vector<wire::Change> changes;
  std::vector<Command> commands;
  if (!asked_.empty()) {
    const Status grown = ask_for_growth(n_at_most, &changes, &commands);
    if (!grown.is_ok()) {
      // What kvmd had the stream wait for before it was refused something, it counts as waited for.
      owe(commands);
      return grown;
    }
  }
  for (const Growth& growth : growths) {
    RemoteSequence* const seq = remote(growth.seq);
    grown_.push_back({growth, seq->n_tokens, seq->own_from});
    n_entries_ -= n_entries_of(*seq);
    seq->n_tokens += growth.n_append;
    n_entries_ += n_entries_of(*seq);
  }
  for (const Growth& growth : asked_) {
    RemoteSequence* const seq = remote(growth.seq);
    if (growth.n_append != 0) {
      // What it shared of pages that may be written is copied, what comes behind is new.
      seq->own_from = std::min(seq->own_from, growth.first_written_block(seq->n_told));
    }
    seq->n_told = seq->n_tokens;
    seq->awaited = true;
  }
  for (const wire::Change& change : changes) {
    if (change.growth >= asked_.size() || change.list >= asked_[change.growth].seq->lists.size() ||
        change.block > asked_[change.growth].seq->lists[change.list].pages.size()) {
      undo_growth();
      return break_off("kvmd has sent pages for no place of a sequence");
    }
    DeviceSequence* const seq = asked_[change.growth].seq;
    std::vector<PageRef>& pages = seq->lists[change.list].pages;
    seq->changed_from = std::min<uint64_t>(seq->changed_from, change.block);
    if (change.block < pages.size()) {
      changes_.push_back(
          {seq, change.list, change.block, std::exchange(pages[change.block], change.page)});
    } else {
      changes_.push_back({seq, change.list, change.block, kNoPage});
      pages.push_back(change.page);
    }
  }
  const Status enqueued = enqueue(commands, stream);
  if (!enqueued.is_ok()) {
    undo_growth();
  }
  return enqueued;
}

Status RemoteStore::ask_for_growth(uint64_t n_at_most, std::vector<wire::Change>* changes,
                                   std::vector<Command>* commands) {
  Call what;
  what.kind = CallKind::kGrow;
  return call(
      what,
      [&](ipc::FrameWriter* writer) {
        std::vector<wire::Grow> items;
        for (const Growth& growth : asked_) {
          items.push_back({remote(growth.seq)->id, growth.n_append, growth.n_query, growth.n_unsure,
                           growth.max_unsure});
        }
        writer->put_all(std::span<const wire::Grow>(items));
      },
      [&](ipc::FrameReader* reader) { *changes = reader->get_all<wire::Change>(n_at_most); },
      commands);
}

void RemoteStore::end_growth(Verdict verdict) {
  // Of one that kvmd has not heard of there is nothing to say.
  verdict_ = asked_.empty() ? verdict_ : verdict;
  asked_.clear();
  changes_.clear();
  grown_.clear();
}

void RemoteStore::finish_growth() {
  for (const Grown& grown : grown_) {
    grown.growth.finish(grown.n_before, [](PageRef) {});
    mark_changed(grown.growth.seq);
  }
  end_growth(Verdict::kFinish);
}

void RemoteStore::undo_growth() {
  for (auto change = changes_.rbegin(); change != changes_.rend(); ++change) {
    std::vector<PageRef>& pages = change->seq->lists[change->list].pages;
    if (change->before != kNoPage) {
      pages[change->block] = change->before;
    } else {
      pages.pop_back();
    }
  }
  for (const Grown& grown : grown_) {
    RemoteSequence* const seq = remote(grown.growth.seq);
    n_entries_ -= n_entries_of(*seq);
    seq->n_tokens = grown.n_before;
    seq->n_told = std::min(seq->n_told, grown.n_before);
    seq->own_from = grown.own_from;
    n_entries_ += n_entries_of(*seq);
  }
  end_growth(Verdict::kUndo);
}

// --- Between device and host --------------------------------------------------------------------

Status RemoteStore::move(CallKind kind, DeviceSequence* seq, uint64_t begin, uint64_t end,
                         Stream stream) {
  KVM_TRY_ASSIGN(const bool captured, driver_->is_capturing(stream));
  if (captured) {
    return Status(KVM_ERR_UNSUPPORTED,
                  "the stream is being captured; a graph cannot move sequences");
  }
  KVM_TRY(pay(stream));
  auto* const words = reinterpret_cast<wire::Words*>(words_.data());
  KVM_TRY(driver_->write_word(&words->client.value, ++last_marker_, stream));
  KVM_KILL_POINT("device_client/marked");
  note_tokens(remote(seq));
  Call what;
  what.kind = kind;
  what.id = remote(seq)->id;
  what.begin = begin;
  what.end = end;
  what.marker = last_marker_;
  std::vector<Command> commands;
  // Also where it has failed: a move of before may have been taken back, and is told of once.
  remote(seq)->moved = true;
  mark_changed(seq);
  const Status moved = call(what, kNothing, kNoAnswer, &commands);
  // kvmd has done it: where the driver fails, whatever comes next waits.
  owe(commands);
  (void)pay(stream);
  return moved;
}

Status RemoteStore::spill(DeviceSequence* seq, uint64_t begin, uint64_t end, Stream stream) {
  return move(CallKind::kSpill, seq, begin, end, stream);
}

Status RemoteStore::fetch(DeviceSequence* seq, uint64_t begin, uint64_t end, Stream stream) {
  return move(CallKind::kFetch, seq, begin, end, stream);
}

SequenceStore::Wait RemoteStore::moves_of(std::span<DeviceSequence* const> seqs, bool also_spills) {
  std::vector<uint64_t> ids;
  for (DeviceSequence* const seq : seqs) {
    if (remote(seq)->moved) {
      ids.push_back(remote(seq)->id);
    }
  }
  if (ids.empty()) {
    return nullptr;
  }
  return [this, ids = std::move(ids), also_spills] {
    Call what;
    what.kind = CallKind::kIsMoving;
    what.also_spills = also_spills ? 1 : 0;
    for (;;) {
      uint32_t moving = 0;
      const Status asked = call(
          what, [&](ipc::FrameWriter* writer) { writer->put_all(std::span<const uint64_t>(ids)); },
          [&](ipc::FrameReader* reader) { moving = reader->get<uint32_t>(); }, nullptr, false);
      if (!asked.is_ok() || moving == 0) {
        return;
      }
      std::this_thread::sleep_for(kPollMoves);
    }
  };
}

void RemoteStore::finish_moves() {
  Call what;
  what.kind = CallKind::kFinishMoves;
  (void)call(what, kNothing, kNoAnswer, nullptr);
}

// --- Figures ------------------------------------------------------------------------------------

Result<SequenceStore::Usage> RemoteStore::usage(const DeviceSequence& seq) {
  Call what;
  what.kind = CallKind::kUsage;
  what.id = remote(seq).id;
  Usage usage;
  KVM_TRY(call(
      what, kNothing, [&](ipc::FrameReader* reader) { usage = reader->get<Usage>(); }, nullptr));
  return usage;
}

Result<SequenceStore::Residence> RemoteStore::residence(DeviceSequence* seq) {
  Call what;
  what.kind = CallKind::kResidence;
  what.id = remote(seq)->id;
  wire::Residence is;
  KVM_TRY(call(
      what, kNothing, [&](ipc::FrameReader* reader) { is = reader->get<wire::Residence>(); },
      nullptr));
  return Residence{is.on_host != 0, is.leaves != 0,     is.n_pages,
                   is.n_host_pages, is.n_waiting_pages, static_cast<int32_t>(is.failure)};
}

Result<SequenceStore::Figures> RemoteStore::figures() {
  Call what;
  what.kind = CallKind::kFigures;
  Figures figures;
  KVM_TRY(call(
      what, kNothing, [&](ipc::FrameReader* reader) { figures = reader->get<Figures>(); },
      nullptr));
  return figures;
}

}  // namespace kvm::device
