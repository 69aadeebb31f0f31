// SPDX-License-Identifier: Apache-2.0
// LeavingOrder: which sequences leave memory first. The grain is a sequence: a decode step reads
// all of it, so none of its pages is used more than the others.
//
//   kS3Fifo   three queues: sequences enter the small one; those used twice there pass to the main
//             one, and the others leave. The main one gives another turn for each use, three at
//             most. Who left the small one is remembered, and enters the main one the next time.
//             So what is written once and not used pushes nothing out that is. Published: Yang et
//             al., "FIFO queues are all you need for cache eviction", SOSP 2023.
//   kLru      the one whose last use is longest ago.
//
// Going through it is a pass: who cannot leave now is set aside until the next pass, which finds it
// where it was. A pass of the default priority goes through all; one of another, through those with
// parts of that priority alone, the last used last, and is no turn of theirs.
//
// Threads: the driver.  Memory: links in the sequences; nothing is allocated, and all is O(1), but
// for priorities.
#ifndef KVM_ENGINE_STORE_LEAVING_ORDER_H_
#define KVM_ENGINE_STORE_LEAVING_ORDER_H_

#include <array>
#include <boost/intrusive/list.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "engine/store/movement_options.h"
#include "engine/store/priorities.h"
#include "kvm.h"

namespace kvm::engine {

class LeavingOrder;

struct ByLeaving;
struct ByPriority;
struct ByReturning;
template <typename Tag>
using ResidenceHook =
    boost::intrusive::list_base_hook<boost::intrusive::tag<Tag>,
                                     boost::intrusive::link_mode<boost::intrusive::auto_unlink>>;

// A Residence is what is known of how a sequence is used, and of where its pages are. It leaves all
// lists when it goes.
class Residence final : public ResidenceHook<ByLeaving>,
                        public ResidenceHook<ByPriority>,
                        public ResidenceHook<ByReturning> {
 public:
  Residence() = default;
  ~Residence();
  Residence(const Residence&) = delete;
  Residence& operator=(const Residence&) = delete;

  kvm_seq_id seq() const { return seq_; }
  bool is_in_order() const { return queue_ == Queue::kSmall || queue_ == Queue::kMain; }

  const Priorities& priorities() const { return priorities_; }

  // Movement's (engine/run/movement.h).
  uint32_t last_layer = UINT32_MAX;  // that a request named: a lower one begins another pass
  uint32_t n_uses_away = 0;          // since pages of it were sent
  // Pages of it may be in the slow tier. Requests that meet some set it, too.
  bool has_away = false;

 private:
  friend class LeavingOrder;
  enum class Queue : uint8_t { kNone, kSmall, kMain, kGhost };

  LeavingOrder* order_ = nullptr;  // null: it is in none of its queues
  kvm_seq_id seq_ = 0;
  uint64_t bytes_ = 0;  // that it grew by since it entered
  uint32_t n_uses_ = 0;
  Priorities priorities_;
  Queue queue_ = Queue::kNone;
};

class LeavingOrder {
 public:
  // What the small queue has beyond this leaves before what is in the main one.
  static constexpr uint64_t kSmallShare = 10;
  // Uses that count.
  static constexpr uint32_t kMaxUses = 3;
  // LIMIT: sequences that are remembered: as many as there are in the main queue, or so many.
  static constexpr size_t kLeastGhosts = 64;

  LeavingOrder(LeavingRule rule, uint64_t capacity_bytes)
      : rule_(rule), max_small_bytes_(capacity_bytes / kSmallShare) {}
  ~LeavingOrder();
  LeavingOrder(const LeavingOrder&) = delete;
  LeavingOrder& operator=(const LeavingOrder&) = delete;

  // The sequence may have pages in memory. Does nothing where it is in already.
  void enter(Residence* residence, kvm_seq_id seq);
  // REQUIRES here and below: it is in.
  void use(Residence* residence);
  // About: sequences are weighed by what they were appended.
  void grow(Residence* residence, uint64_t size_bytes);
  void shrink(Residence* residence, uint64_t size_bytes);

  // What parts of a sequence are worth. Who goes through the order does so for each priority that
  // anything in it may have, from lowest_priority() on.
  void set_priorities(Residence* residence, Priorities priorities);
  // Those whose time has passed are there no more.
  void expire_priorities(Residence* residence, uint64_t now_ns);
  uint32_t lowest_priority() const { return *priority_from(0); }
  // None: nothing in it has a higher one.
  std::optional<uint32_t> next_priority(uint32_t priority) const {
    return priority_from(priority + 1);
  }

  // All are in their places again.
  void begin_pass(uint32_t priority = KVM_PRIORITY_DEFAULT);
  // Those in it.
  size_t size() const { return n_small_ + n_main_; }
  // Whether nobody is left to look at in this pass.
  bool is_exhausted() const {
    return is_default_pass() ? small_.empty() && main_.empty() : prioritised_.empty();
  }
  // Looks at one, and returns it if it is the next to leave; null: it has another turn.
  // REQUIRES: !is_exhausted().
  Residence* next();
  // It cannot leave in this pass.
  void set_aside(Residence* residence);
  // It has left.
  void leave(Residence* residence);

 private:
  friend class Residence;
  template <typename Tag>
  using ListBy = boost::intrusive::list<Residence, boost::intrusive::base_hook<ResidenceHook<Tag>>,
                                        boost::intrusive::constant_time_size<false>>;
  using List = ListBy<ByLeaving>;

  void push(Residence* residence, Residence::Queue queue);
  // Takes it out of its queue.
  void take_out(Residence* residence);
  void forget_ghosts();
  // It is in, and has those from now on; or has them no more.
  void enter_priorities(Residence* residence);
  void leave_priorities(Residence* residence);
  bool is_default_pass() const { return pass_priority_ == KVM_PRIORITY_DEFAULT; }
  std::optional<uint32_t> priority_from(uint32_t priority) const;

  const LeavingRule rule_;
  const uint64_t max_small_bytes_;
  // The newest first.
  List small_;
  List main_;
  List ghosts_;
  List small_aside_;
  List main_aside_;
  uint64_t small_bytes_ = 0;  // of those aside, too
  size_t n_small_ = 0;        // likewise
  size_t n_main_ = 0;
  size_t n_ghosts_ = 0;
  // Those in it that have parts, the last used first.
  ListBy<ByPriority> prioritised_;
  ListBy<ByPriority> prioritised_aside_;
  uint32_t pass_priority_ = KVM_PRIORITY_DEFAULT;
  // Parts of those in it, by priority.
  std::array<uint32_t, KVM_PRIORITY_MAX + 1> n_parts_{};
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_LEAVING_ORDER_H_
