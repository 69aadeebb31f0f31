// SPDX-License-Identifier: Apache-2.0
// The policy seam: policies get events and plain views and return actions. They decide and move
// nothing; the engine's store applies what they return, to committed tokens only.
//
// docs/adr/0003-policy-seam.md shows how the published cache policies fit.
//
// Threads: any, several at once.  Memory: views refer to memory of the caller, valid during
// the call; actions are values.  Errors: none; an action that cannot be applied is skipped whole.
#ifndef KVM_POLICIES_POLICY_H_
#define KVM_POLICIES_POLICY_H_

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/codec_id.h"
#include "base/kv_view.h"

namespace kvm::policies {

// Of those that are due at a time, policies hear the first first.
enum class Event : uint8_t {
  kPromptEnd = 0,  // the prompt is there, all of it, in all layers
  kCommitted = 1,  // the commit point moved
};

inline constexpr uint32_t kEvents = 2;

// Set of events: bits (1 << value).
using EventSet = uint32_t;
constexpr EventSet event_bit(Event event) { return 1u << static_cast<uint32_t>(event); }

// Tokens stored in consecutive pages of one encoding.
struct StoredRange {
  PositionRange positions;
  CodecId codec_k = CodecId::kBf16;
  CodecId codec_v = CodecId::kBf16;
};

// A token that was kept when its page was given up.
struct KeptToken {
  uint64_t position = 0;
  float mass = 0;
};

// Moments of some numbers: how many, their mean, and the squares of their distances from it.
struct Moments {
  double n = 0;
  double mean = 0;
  double squares = 0;

  // Welford, "Note on a method for calculating corrected sums of squares and products" (1962).
  void add(double number) {
    n += 1;
    const double distance = number - mean;
    mean += distance / n;
    squares += distance * (number - mean);
  }
  // Those of both together: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm
  // for computing sample variances" (1979).
  void add(const Moments& other) {
    const double all = n + other.n;
    if (other.n > 0) {
      const double distance = other.mean - mean;
      mean += distance * (other.n / all);
      squares += other.squares + distance * distance * (n * (other.n / all));
      n = all;
    }
  }
  // 0 of none, and where it is no number.
  double variance() const { return n > 0 && std::isfinite(squares) ? squares / n : 0.0; }
};

// One (sequence, layer, head class).
struct ListView {
  uint32_t layer = 0;
  uint32_t class_index = 0;
  uint64_t length = 0;  // tokens appended, dropped ones included
  // The end of the full pages before `end`: what actions are about.
  uint64_t full_pages(uint64_t end) const {
    return (end < length ? end : length) / kPageTokens * kPageTokens;
  }
  // The stored ranges, in position order; the gaps have been dropped.
  std::span<const StoredRange> stored;
  // How full pages of the list are stored, and from where on they are not yet. Pages before that
  // which are stored otherwise stay as they are: the codec cannot hold them.
  CodecId codec_k = CodecId::kBf16;
  CodecId codec_v = CodecId::kBf16;
  uint64_t settled_end = 0;
  // Budgets of the configuration; meaning by policy.
  uint64_t n_sinks = 0;
  uint64_t n_recent = 0;
  uint64_t slack = 0;
  uint64_t n_heavy = 0;
  // n_recent and n_heavy are to be the list's share of what several have: share_out() has not
  // spoken yet.
  bool awaits_share = false;
  // Where the sequence's prompt ends; UINT64_MAX: not known yet.
  uint64_t prompt_end = UINT64_MAX;
  // kPromptEnd: what lies before has been measured.
  uint64_t measured_end = 0;
  // What is given up is compared with what is kept, each with each.
  bool merges = false;
  // What is given up stays, demoted, in the places of the last pages that are given up; n_heavy is
  // whole pages of tokens then.
  bool demotes = false;
  // Lists of one head that choose tokens: those kept of pages that are gone, in position order, and
  // the attention mass that queries of the service gave to these and to the stored tokens from
  // mass_begin on (none: 0), summed over the group.
  std::span<const KeptToken> kept;
  uint64_t chosen_end = 0;  // tokens of pages before this are kept, or out of reach
  uint64_t mass_begin = 0;
  std::span<const float> masses;
  // Statistics that kvm_observe left, or null. Column sums [n_columns][n_kv_heads of the layer] of
  // positions from 0; kv_heads says which of them are this class's.
  std::span<const uint16_t> kv_heads;
  const float* column_sums = nullptr;
  uint64_t n_columns = 0;
  uint32_t n_kv_heads = 0;
};

// The lists of one sequence that one policy governs: all of them at once, so that budgets may be
// shared out among layers and layers may choose together; or one, where it decides by list.
struct View {
  Event event = Event::kCommitted;
  uint64_t n_committed = 0;  // tokens at and beyond it are out of reach; a list may be shorter
  std::span<const ListView> lists;
};

enum class ActionKind : uint8_t {
  kDrop = 0,    // forget the tokens of `range`
  kDemote = 1,  // store them as codec_k, codec_v
  kFold = 2,    // add `range` to the one entry of its list (mean K, mean V, log-weight ln n)
  // Of `range`, and of what was kept before, keep only certain tokens. Where the list demotes, the
  // others are whole pages.
  kKeep = 3,
  // Add `moments` of `range` to those of the list, for when budgets are shared out. At kPromptEnd
  // only, by policies that decide by list.
  kMeasure = 4,
};

// Ranges are whole pages (multiples of kPageTokens), but for those of kMeasure; tokens of them that
// are not stored, because they were dropped before, do not matter.
struct Action {
  ActionKind kind = ActionKind::kDrop;
  uint32_t layer = 0;
  uint32_t class_index = 0;
  PositionRange range;
  CodecId codec_k = CodecId::kBf16;  // kDemote
  CodecId codec_v = CodecId::kBf16;
  // kKeep: ActionList::kept[first_kept, first_kept + n_kept), positions in order.
  size_t first_kept = 0;
  size_t n_kept = 0;
  Moments moments;  // kMeasure
};

// How many tokens a list keeps.
struct Budget {
  uint64_t n_recent = 0;
  uint64_t n_heavy = 0;

  bool operator==(const Budget&) const = default;
};

// What share_out() knows of a list.
struct Measured {
  uint32_t layer = 0;
  bool shares_budget = false;  // else its budget stays
  double measure = 0;          // the variance of what was measured
  Budget budget;               // in: of the configuration; out: its share
};

// LIMIT: a policy returns at most kMaxActions at a time. One that has more to do sets `more`, and
// is asked again, with fresh views, after these have been applied.
inline constexpr size_t kMaxActions = 64;

struct ActionList {
  std::array<Action, kMaxActions> actions;
  std::vector<uint64_t> kept;  // by all kKeep
  uint32_t n_actions = 0;
  bool more = false;
  // The policy need not hear kCommitted again before the commit point has reached this.
  uint64_t next_commit = 0;

  // False, and `more` set, when the list is full.
  bool add(const Action& action) {
    if (n_actions == kMaxActions) {
      more = true;
      return false;
    }
    actions[n_actions++] = action;
    return true;
  }
};

// Stateless towards sequences: everything that a decision rests on is in the view, so that a
// decision can be repeated after a restart and shared by forks.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual EventSet events() const = 0;
  // Says whether its decision about a list rests on that list alone: it is shown one at a time
  // then, and asked about several at once.
  virtual bool decides_by_list() const { return false; }
  // Fills an empty `actions`.
  virtual void decide(const View& view, ActionList* actions) const = 0;
  // Shares the budgets of a sequence's lists out among them, once decide() has measured each at the
  // prompt's end. Lists are ordered by layer.
  virtual void share_out(std::span<Measured> /*lists*/) const {}
};

}  // namespace kvm::policies

#endif  // KVM_POLICIES_POLICY_H_
