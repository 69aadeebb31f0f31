// SPDX-License-Identifier: Apache-2.0
#include "engine/run/movement.h"

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "base/assert.h"

namespace kvm::engine {
namespace {

using ReturningHook = ResidenceHook<ByReturning>;

// LIMIT: sequences looked at in a turn: some 10 us.
constexpr uint32_t kLooksPerTurn = 64;
// LIMIT: of a batch that comes back: the extents for it take some 10 us each.
constexpr uint64_t kMaxFetchBytes = uint64_t{8} << 20;
// A batch takes so long at most under a cap, as a fraction of a second.
constexpr uint64_t kBatchesPerSecond = 20;
// A batch that begins later than the cap allows, because the driver had other things to do, makes
// up for that much: else the cap is never reached.
constexpr uint64_t kLateNs = 20'000'000;
// Uses of a sequence with pages away before they come back: one may be the last.
constexpr uint32_t kUsesToReturn = 2;
// A tier that refuses a batch is asked again so much later, where nobody waits.
constexpr uint64_t kRefusedNs = 100'000'000;

uint64_t fraction_of(uint64_t size_bytes, double fraction) {
  return static_cast<uint64_t>(static_cast<double>(size_bytes) * fraction);
}

void leave_returning(Residence* residence) {
  residence->n_uses_away = 0;
  if (residence->ReturningHook::is_linked()) {
    residence->ReturningHook::unlink();
  }
}

// How much memory the largest page of a space takes.
uint64_t largest_page_share(const Space& space) {
  uint64_t largest = 1;
  for (const Layer& layer : space.layers) {
    for (const HeadClass& cls : layer.classes) {
      const uint64_t page_bytes =
          std::max(cls.slab_class.page_bytes(), cls.slab_class.tail().page_bytes());
      largest = std::max(largest, tiers::kExtentBytes / (tiers::kExtentBytes / page_bytes));
    }
  }
  return largest;
}

}  // namespace

Movement::Movement(const MovementOptions& options, const Clock* clock, Store* store,
                   const SequenceOrder* sequence_order, Arrivals* arrivals)
    : options_(options),
      clock_(clock),
      store_(store),
      sequence_order_(sequence_order),
      high_bytes_(fraction_of(store->memory().capacity_bytes(), options.high)),
      low_bytes_(fraction_of(store->memory().capacity_bytes(), options.low)),
      order_(options.rule, store->memory().capacity_bytes()),
      sends_(arrivals),
      fetches_(arrivals) {}

// --- What requests say --------------------------------------------------------------------------

void Movement::touch(Sequence* seq, uint32_t layer, uint32_t n_layers, uint64_t n_append) {
  Residence& residence = seq->residence;
  order_.enter(&residence, seq->id);
  const Space& space = seq->space();
  order_.grow(&residence,
              n_append * space.bytes_per_token * std::max(1u, n_layers) / space.n_layers);
  const bool is_use = layer <= residence.last_layer && n_append <= kPageTokens;
  residence.last_layer = layer;
  if (is_use || options_.rule == LeavingRule::kLru) {
    order_.use(&residence);
  }
  if (is_use && residence.has_away && ++residence.n_uses_away >= kUsesToReturn) {
    if (residence.ReturningHook::is_linked()) {
      residence.ReturningHook::unlink();
    }
    returning_.push_front(residence);
  }
}

void Movement::note_fork(const Sequence& parent, Sequence* child) noexcept {
  order_.enter(&child->residence, child->id);
  child->residence.has_away = parent.residence.has_away;
  const Priorities& priorities = parent.residence.priorities();
  if (priorities.is_empty()) {
    return;
  }
  try {
    order_.set_priorities(&child->residence,
                          priorities.first(longest_layer(child), clock_->now_ns()));
  } catch (const std::bad_alloc&) {
    // It has none: what it shares may go sooner.
  }
}

void Movement::note_load(Sequence* seq, bool is_used) {
  order_.enter(&seq->residence, seq->id);
  seq->residence.has_away = true;
  if (is_used && options_.is_automatic) {
    try {
      fetch(seq);
    } catch (const std::bad_alloc&) {
      // They come back when it is used again and again.
    }
  }
}

void Movement::note_change() {
  has_news_ = true;
  is_resting_ = false;
  are_fetches_resting_ = false;
}

// --- What callers ask for -----------------------------------------------------------------------

void Movement::send(kvm_seq_id seq) {
  asked_sends_.push_back(seq);
  has_news_ = true;
}

void Movement::fetch(Sequence* seq) {
  asked_fetches_.push_back(seq->id);
  order_.enter(&seq->residence, seq->id);
  order_.use(&seq->residence);
  note_change();
}

bool Movement::is_sending() const {
  return sends_.has_begun() || !asked_sends_.empty() || (is_lowering_ && !is_resting_);
}

Status Movement::set_priority(Sequence* seq, PriorityRange range) {
  range.priority = std::min(range.priority, options_.max_priority);
  Priorities priorities = seq->residence.priorities();
  KVM_TRY(priorities.set(range, clock_->now_ns()));
  order_.set_priorities(&seq->residence, std::move(priorities));
  return Status::ok();
}

// --- Room ---------------------------------------------------------------------------------------

void Movement::set_has_waiters(bool has_waiters) {
  if (has_waiters != has_waiters_) {
    has_waiters_ = has_waiters;
    verdict_ = Verdict::kOpen;
    end_passes();
    note_change();
  }
}

bool Movement::take_freed() {
  const bool has_freed = has_freed_;
  has_freed_ = false;
  return has_freed;
}

bool Movement::wants_room() {
  const uint64_t needed = store_->memory().needed_bytes();
  is_lowering_ =
      options_.is_automatic && (needed > high_bytes_ || (is_lowering_ && needed > low_bytes_));
  if (has_waiters_) {
    return true;
  }
  return is_lowering_ && !is_resting_ &&
         (failed_until_ns_ == 0 || !must_wait_until(failed_until_ns_));
}

bool Movement::must_wait_until(uint64_t time_ns) {
  if (clock_->now_ns() >= time_ns) {
    return false;
  }
  wake_ns_ = std::min(wake_ns_, time_ns);
  return true;
}

// --- The cap ------------------------------------------------------------------------------------

void Movement::charge(uint64_t begin_ns, uint64_t size_bytes) {
  if (options_.bytes_per_s != 0) {
    const double takes_ns =
        static_cast<double>(size_bytes) * 1e9 / static_cast<double>(options_.bytes_per_s);
    const uint64_t first_ns = begin_ns - std::min(begin_ns, kLateNs);
    due_ns_ = add_saturating(std::max(due_ns_, first_ns), static_cast<uint64_t>(takes_ns));
  }
}

uint64_t Movement::capped(uint64_t max_bytes) const {
  return options_.bytes_per_s == 0
             ? max_bytes
             : std::min(max_bytes, std::max<uint64_t>(1, options_.bytes_per_s / kBatchesPerSecond));
}

// --- Sending ------------------------------------------------------------------------------------

Sequence* Movement::find(kvm_seq_id seq) noexcept {
  try {
    const Result<Sequence*> found = store_->find_any_seq(seq);
    return found.is_ok() ? found.value() : nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;  // for a sentence that says that it is gone
  }
}

Residence* Movement::residence_of(kvm_seq_id seq) {
  Sequence* found = find(seq);
  return found != nullptr ? &found->residence : nullptr;
}

bool Movement::go_on() {
  if (end_sends() || end_fetches()) {
    return true;
  }
  if (!is_ready()) {
    return false;
  }
  has_news_ = false;
  wake_ns_ = UINT64_MAX;
  const bool has_done = send_some() || fetch_some();
  has_news_ |= has_done;
  return has_done;
}

bool Movement::send_some() {
  if (sends_.has_begun() || (!has_waiters_ && hold())) {
    return false;
  }
  if (!asked_sends_.empty()) {
    return send_asked();
  }
  if (!wants_room()) {
    end_passes();
    return false;
  }
  if (is_second_look_due()) {
    verdict_ = Verdict::kSecondLook;
  }
  if (verdict_ == Verdict::kWaitsForReaders || verdict_ == Verdict::kGivenUp) {
    return false;
  }
  if (aim_ != Aim::kChosen) {
    return choose();
  }
  const uint64_t needed = store_->memory().needed_bytes();
  const uint64_t beyond = needed > low_bytes_ ? needed - low_bytes_ : 1;
  return begin_send({.worth = {.max_priority = priority_, .now_ns = clock_->now_ns()},
                     .takes_shared = level_ != Level::kOwn,
                     .writes = !is_tier_full_},
                    has_waiters_ ? UINT64_MAX : beyond);
}

bool Movement::send_asked() {
  if (aim_ != Aim::kAsked) {
    end_passes();
    sends_.aim(asked_sends_.front());
    aim_ = Aim::kAsked;
  }
  return begin_send({}, UINT64_MAX);
}

bool Movement::begin_send(const PageBatches::Limits& limits, uint64_t max_bytes) {
  try {
    sends_begin_ns_ = clock_->now_ns();
    is_send_capped_ = !has_waiters_;
    sends_.begin_send(store_, limits, is_send_capped_ ? capped(max_bytes) : max_bytes);
  } catch (const std::bad_alloc&) {
    settle(residence_of(sends_.target()), {.n_failed = 1, .is_last = true});
  }
  return true;
}

bool Movement::choose() {
  const uint64_t now_ns = clock_->now_ns();
  for (uint32_t i = 0; i < kLooksPerTurn; ++i) {
    if (!is_in_pass_ || n_looks_left_ == 0 || order_.is_exhausted()) {
      if (!begin_next_pass() || verdict_ == Verdict::kWaitsForReaders) {
        return has_news_;
      }
      continue;
    }
    --n_looks_left_;
    Residence* residence = order_.next();
    if (residence == nullptr) {
      continue;
    }
    order_.expire_priorities(residence, now_ns);
    if (level_ != Level::kBusy && sequence_order_->is_busy(residence->seq())) {
      has_met_busy_ = true;
      order_.set_aside(residence);
      continue;
    }
    sends_.aim(residence->seq());
    aim_ = Aim::kChosen;
    return true;
  }
  return true;
}

// Goes from pass to pass as long as something is left to try.
bool Movement::begin_next_pass() {
  const bool goes_on = is_in_pass_ && go_further();
  if (!goes_on && (!is_in_pass_ || has_sent_)) {
    begin_search();
  } else if (!goes_on) {
    end_passes();
    is_resting_ = true;
    if (!has_waiters_) {
      return false;
    }
    if (verdict_ == Verdict::kSecondLook) {
      verdict_ = Verdict::kGivenUp;
      has_freed_ = true;  // whoever waits is to hear of it
      return false;
    }
    // What requests write, or what was left and is still read, may go soon.
    verdict_ = Verdict::kWaitsForReaders;
    verdict_epoch_ = epochs().now();
    epochs().advance();
    has_news_ = epochs().has_ended(verdict_epoch_);
    return has_news_;
  }
  order_.begin_pass(priority_);
  // Each has a turn for each use at most; those that enter meanwhile may be looked at, too.
  n_looks_left_ = order_.size() * (1 + LeavingOrder::kMaxUses);
  return true;
}

bool Movement::go_further() {
  if (level_ == Level::kOwn) {
    level_ = Level::kShared;
    return true;
  }
  if (level_ == Level::kShared && has_waiters_) {
    level_ = Level::kBusy;
    return true;
  }
  // What is in use now may go in a moment, before what is worth more.
  const std::optional<uint32_t> next = order_.next_priority(priority_);
  if (!next || (has_met_busy_ && !has_waiters_)) {
    return false;
  }
  begin_priority(*next);
  return true;
}

void Movement::begin_priority(uint32_t priority) {
  level_ = Level::kOwn;
  priority_ = priority;
  has_met_busy_ = false;
}

void Movement::begin_search() {
  is_in_pass_ = true;
  begin_priority(order_.lowest_priority());
  has_sent_ = false;
  // The tier is asked anew; what it said before is no reason any more.
  is_tier_full_ = false;
  last_refusal_ = Status::ok();
}

void Movement::end_passes() {
  is_in_pass_ = false;
  forget_target();
}

void Movement::forget_target() {
  if (!sends_.has_begun()) {
    aim_ = Aim::kNone;
  }
}

bool Movement::end_sends() {
  if (!sends_.has_begun() || !sends_.is_over()) {
    return false;
  }
  const PageBatches::Batch batch = sends_.end(&store_->memory());
  store_->memory().pages().free_left_frames();
  stats_.n_pages_sent += batch.n_pages;
  stats_.bytes_sent += batch.size_bytes;
  stats_.bytes_written += batch.written_bytes;
  stats_.n_failed += batch.n_failed;
  charge(sends_begin_ns_, is_send_capped_ ? batch.written_bytes : 0);
  if (batch.n_failed != 0 || batch.written_bytes != 0) {
    last_refusal_ = batch.status;
  }
  is_tier_full_ |= batch.status.code() == KVM_ERR_NO_SPACE;
  failed_until_ns_ =
      batch.n_failed != 0 && batch.n_pages == 0 ? add_saturating(clock_->now_ns(), kRefusedNs) : 0;
  if (batch.n_pages != 0) {
    has_sent_ = true;
    has_freed_ = true;
    verdict_ = Verdict::kOpen;
    note_change();
  }
  settle(residence_of(sends_.target()), batch);
  has_news_ = true;
  return true;
}

void Movement::settle(Residence* residence, const PageBatches::Batch& batch) {
  if (residence != nullptr && batch.n_pages != 0) {
    residence->has_away = true;
    leave_returning(residence);
    order_.shrink(residence, batch.size_bytes);
  }
  const bool is_over = residence == nullptr || batch.is_last || batch.n_failed != 0;
  if (aim_ == Aim::kAsked) {
    // Where the tier takes no more, a sequence stays for the rest.
    if (is_over) {
      asked_sends_.erase(asked_sends_.begin());
      aim_ = Aim::kNone;
    }
    return;
  }
  const bool is_busy = residence != nullptr && sequence_order_->is_busy(residence->seq());
  const bool is_used = is_busy && level_ != Level::kBusy;
  has_met_busy_ |= aim_ == Aim::kChosen && is_used;
  // The passes that chose it may be over, and others would begin with something else.
  if (aim_ != Aim::kChosen || !(is_over || is_used || !is_in_pass_)) {
    return;
  }
  aim_ = Aim::kNone;
  if (residence == nullptr || !residence->is_in_order()) {
    return;
  }
  // One that has, or is about to have, more that may go later has its turn in the next pass.
  if (batch.is_last && batch.n_failed == 0 && !batch.has_passed && !is_busy) {
    order_.leave(residence);
  } else {
    order_.set_aside(residence);
  }
}

// --- Coming back --------------------------------------------------------------------------------

// A batch begins behind another of the same sequence; under a cap, when that has ended.
bool Movement::fetch_some() {
  const bool is_asked = !asked_fetches_.empty();
  const bool returns =
      options_.is_automatic && !is_lowering_ && !are_fetches_resting_ && !returning_.empty();
  if (has_waiters_ || is_fetch_ending_ || !fetches_.can_begin() || !(is_asked || returns)) {
    return false;
  }
  const kvm_seq_id id = is_asked ? asked_fetches_.front() : returning_.front().seq();
  if (fetches_.has_begun() && (options_.bytes_per_s != 0 || id != fetches_.target())) {
    return false;
  }
  if (hold()) {
    return false;
  }
  const bool has_begun = begin_fetch(is_asked ? high_bytes_ : low_bytes_, id);
  if (!has_begun) {
    end_target();
    if (is_asked) {
      asked_fetches_.erase(asked_fetches_.begin());
    }
  }
  return is_asked || has_begun;
}

// Whether there is room below the limit, and something may come.
bool Movement::begin_fetch(uint64_t limit_bytes, kvm_seq_id id) {
  const uint64_t needed = store_->memory().needed_bytes();
  Sequence* seq = needed < limit_bytes ? find(id) : nullptr;
  if (seq == nullptr) {
    return false;
  }
  const uint64_t page_bytes = largest_page_share(seq->space());
  const uint64_t n_pages = (limit_bytes - needed) / page_bytes;
  if (n_pages == 0) {
    return false;
  }
  if (fetches_.target() != id) {
    fetches_.aim(id);
  }
  try {
    fetches_begin_ns_ = clock_->now_ns();
    fetches_.begin_fetch(store_, capped(std::min(kMaxFetchBytes, n_pages * page_bytes)));
    return true;
  } catch (const std::bad_alloc&) {
    give_up_fetch(&seq->residence);
    return false;
  }
}

// What is fetched next begins with its first page: others may have left meanwhile.
void Movement::end_target() {
  is_fetch_ending_ = fetches_.has_begun();
  if (!is_fetch_ending_) {
    fetches_.aim(0);
  }
}

void Movement::give_up_fetch(Residence* residence) {
  end_target();
  if (residence != nullptr) {
    leave_returning(residence);
  }
}

bool Movement::end_fetches() {
  if (!fetches_.has_begun() || !fetches_.is_over()) {
    return false;
  }
  const kvm_seq_id target = fetches_.target();
  const PageBatches::Batch batch = fetches_.end(&store_->memory());
  stats_.n_pages_back += batch.n_pages;
  stats_.bytes_back += batch.size_bytes;
  stats_.n_failed += batch.n_failed;
  charge(fetches_begin_ns_, batch.size_bytes);
  has_news_ = true;
  Residence* residence = residence_of(target);
  if (residence != nullptr && batch.n_pages != 0) {
    order_.enter(residence, target);
    order_.grow(residence, batch.size_bytes);
  }
  if (batch.is_last && batch.n_failed == 0 && !is_fetch_ending_ && residence != nullptr) {
    residence->has_away = false;
  }
  are_fetches_resting_ |= batch.status.code() == KVM_ERR_NO_SPACE;
  const bool goes_on = !batch.is_last && batch.status.is_ok() && residence != nullptr;
  if (goes_on && !is_fetch_ending_) {
    return true;
  }
  // What is asked for while these end begins anew.
  if (!is_fetch_ending_ && !asked_fetches_.empty() && asked_fetches_.front() == target) {
    asked_fetches_.erase(asked_fetches_.begin());
  }
  give_up_fetch(residence);
  return true;
}

void Movement::stop() {
  sends_.stop(&store_->memory());
  fetches_.stop(&store_->memory());
  asked_sends_.clear();
  asked_fetches_.clear();
  is_fetch_ending_ = false;
  aim_ = Aim::kNone;
}

}  // namespace kvm::engine
