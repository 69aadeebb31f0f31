// SPDX-License-Identifier: Apache-2.0
#include "engine/retention/retention_slice.h"

#include <algorithm>
#include <memory>
#include <new>
#include <span>
#include <utility>

namespace kvm::engine {
namespace {

// Pages of a piece that adds rows up, by their numbers: sums do not depend on how runs are cut.
constexpr uint64_t kPiecePages = 8;
// Cost of a piece that encodes planes of pages: some 0.05 ms.
constexpr uint64_t kPieceCost = 64 << 10;
// Tokens of a piece that copies rows.
constexpr uint32_t kPieceCopies = 128;
// Bytes that a policy looks at for each token that it may choose.
constexpr uint64_t kCandidateBytes = 64;

}  // namespace

uint64_t RetentionSlice::decide_bytes() const {
  uint64_t n = 0;
  for (const Group& group : groups_) {
    for (const policies::ListView& list : group.lists) {
      // What is measured may be observed sums alone.
      const bool measures = event_ == policies::Event::kPromptEnd && list.awaits_share;
      n += measures ? list.length - std::min(list.length, list.measured_end)
                    : list.kept.size() + list.masses.size();
    }
  }
  return n * kCandidateBytes;
}

void RetentionSlice::decide(uint32_t index) {
  Group& group = groups_[index];
  try {
    policy_->decide({.event = event_, .n_committed = n_committed_, .lists = group.lists},
                    &group.actions);
    group.is_decided = true;
  } catch (const std::bad_alloc&) {
    group.actions.n_actions = 0;
  }
}

void RetentionSlice::add_work(Work&& work, const tiers::SlabClass& slab_class) {
  works_.push_back(std::move(work));
  classes_.push_back(slab_class);
}

void RetentionSlice::add_piece(const Piece& piece, uint64_t n_bytes) {
  pieces_.push_back(piece);
  failed_.push_back(Failed::kNo);
  bytes_ += n_bytes;
  phase_bytes_ += n_bytes;
}

void RetentionSlice::add_pages(uint32_t index, const Work& work) {
  const uint32_t n = work.recodings.n_planes();
  const uint64_t cost = work.recodings.plane_cost();
  const auto each = static_cast<uint32_t>((kPieceCost + cost - 1) / cost);
  for (uint32_t begin = 0; begin < n; begin += each) {
    const uint32_t end = std::min(n, begin + each);
    add_piece({.work = index, .step = Step::kEncode, .begin = begin, .end = end},
              (end - begin) * cost * kEncodeWeight);
  }
}

void RetentionSlice::add_demote(Work&& work, const tiers::SlabClass& slab_class) {
  add_pages(static_cast<uint32_t>(works_.size()), work);
  add_work(std::move(work), slab_class);
}

void RetentionSlice::add_fold(Work&& work, const tiers::SlabClass& slab_class) {
  const auto index = static_cast<uint32_t>(works_.size());
  const auto n_runs = static_cast<uint32_t>(work.runs.size());
  const auto piece_of = [&](uint32_t run) {
    return work.runs[run].position / (kPiecePages * kPageTokens);
  };
  for (uint32_t begin = 0; begin < n_runs;) {
    uint64_t n_bytes = 0;
    uint32_t end = begin;
    for (; end < n_runs && piece_of(end) == piece_of(begin); ++end) {
      n_bytes += work.runs[end].n_tokens * slab_class.token_bytes() * kCopyWeight;
    }
    add_piece({.work = index,
               .step = Step::kSum,
               .begin = begin,
               .end = end,
               .sums = static_cast<uint32_t>(work.sums.size())},
              n_bytes);
    work.sums.emplace_back(slab_class);
    begin = end;
  }
  add_work(std::move(work), slab_class);
}

void RetentionSlice::add_copies(uint32_t index, const Work& work, uint64_t token_bytes) {
  const auto n = static_cast<uint32_t>(work.choice.copies.size());
  for (uint32_t begin = 0; begin < n; begin += kPieceCopies) {
    const uint32_t end = std::min(n, begin + kPieceCopies);
    add_piece({.work = index, .step = Step::kCopy, .begin = begin, .end = end},
              (end - begin) * token_bytes * kCopyWeight);
  }
}

void RetentionSlice::add_keep(Work&& work, const tiers::SlabClass& slab_class) {
  const auto index = static_cast<uint32_t>(works_.size());
  add_piece({.work = index, .step = Step::kChoose},
            (work.positions.size() + work.kept->tokens().size()) * kCandidateBytes);
  const uint32_t n_pages = work.clones == nullptr ? 0 : work.kept->n_pages();
  for (uint32_t begin = 0; begin < n_pages; begin += kPiecePages) {
    const uint32_t end = std::min<uint32_t>(n_pages, begin + kPiecePages);
    add_piece({.work = index, .step = Step::kClone, .begin = begin, .end = end},
              (end - begin) * kPageTokens * slab_class.token_bytes() * kCopyWeight);
  }
  add_work(std::move(work), slab_class);
}

// What a kKeep does first with its choice.
void RetentionSlice::add_go(uint32_t index, const Work& work) {
  if (work.recodings.size() != 0) {
    add_pages(index, work);
  } else if (work.merge == nullptr) {
    add_copies(index, work, classes_[index].token_bytes());
  }
  for (uint32_t i = 0; work.merge != nullptr && i < work.merge->n_finds(); ++i) {
    add_piece({.work = index, .step = Step::kMerge, .begin = i, .end = i + 1},
              work.merge->find_bytes());
  }
}

// Says where the rows of what stays go, with which mass, and, of those that go to other pages, who
// lies where. Throws std::bad_alloc.
void RetentionSlice::choose(const tiers::SlabClass& slab_class, Work* work) {
  const KeptTokens& kept = *work->kept;
  const Masses& masses = *work->masses;
  work->kept_masses.reserve(work->positions.size());
  size_t old = 0;
  for (const uint64_t position : work->positions) {
    while (old < kept.tokens().size() && kept.tokens()[old].position < position) {
      ++old;
    }
    const bool is_old = old < kept.tokens().size() && kept.tokens()[old].position == position;
    const uint64_t at = position - masses.begin;
    work->kept_masses.push_back(is_old                      ? masses.kept[old]
                                : at < masses.recent.size() ? masses.recent[at]
                                                            : 0.0f);
  }
  work->choice = kept.plan(work->positions);
  if (work->merges) {
    work->merge = std::make_unique<TokenMerge>(slab_class.tail(), kept, work->choice, work->runs);
  }
  if (work->recodings.size() == 0) {
    return;
  }
  kept.collect(false, &work->kept_runs);
  std::vector<TokenRef> goers;
  goers.reserve(uint64_t{work->recodings.size()} * kPageTokens);
  size_t next = 0;
  for (const std::vector<KvRun>* runs : {&work->kept_runs, &work->runs}) {
    for (const KvRun& run : *runs) {
      for (uint32_t i = 0; i < run.n_tokens; ++i) {
        if (next < work->positions.size() && work->positions[next] == run.position + i) {
          ++next;
        } else {
          goers.push_back({&run, i});
        }
      }
    }
  }
  KVM_ASSERT(goers.size() == uint64_t{work->recodings.size()} * kPageTokens);
  for (uint32_t i = 0; i < work->recodings.size(); ++i) {
    work->recodings.set_tokens(i, std::span(goers).subspan(uint64_t{i} * kPageTokens, kPageTokens));
  }
}

bool RetentionSlice::next_phase() {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    works_[pieces_[i].work].has_failed |= failed_[i] != Failed::kNo;
    works_[pieces_[i].work].is_unfit |= failed_[i] == Failed::kUnfit;
  }
  pieces_.clear();
  failed_.clear();
  phase_bytes_ = 0;
  if (phase_ == Phase::kWrite) {
    return false;
  }
  phase_ = static_cast<Phase>(static_cast<uint8_t>(phase_) + 1);
  bool goes_on = false;
  for (uint32_t index = 0; index < works_.size(); ++index) {
    Work& work = works_[index];
    const size_t n_before = pieces_.size();
    try {
      goes_on |= work.kept != nullptr && !work.has_failed && add_phase(index, &work);
    } catch (const std::bad_alloc&) {
      // It has changed nothing yet. Others may have, and must come to their end.
      pieces_.resize(n_before);
      failed_.resize(n_before);
      work.has_failed = true;
    }
  }
  return goes_on;
}

// The pieces of a kKeep in this phase; none of an earlier one has written rows. Returns whether it
// has something to do. Throws std::bad_alloc.
bool RetentionSlice::add_phase(uint32_t index, Work* work) {
  const uint64_t token_bytes = classes_[index].token_bytes();
  const bool demotes = work->recodings.size() != 0;
  if (phase_ == Phase::kGo) {
    add_go(index, *work);
    return true;
  }
  if (phase_ == Phase::kMix && demotes) {
    add_copies(index, *work, token_bytes);
    return true;
  }
  if (work->merge == nullptr) {
    return false;
  }
  if (phase_ == Phase::kMix) {
    work->merge->gate(*work->kept);
    for (uint32_t i = 0; i < work->merge->n_mixes(); ++i) {
      add_piece({.work = index, .step = Step::kMerge, .begin = i, .end = i + 1},
                work->merge->mix_bytes() / work->merge->n_mixes());
    }
    return true;
  }
  std::erase_if(work->choice.copies, [&](const KeptTokens::Token& token) {
    return work->merge->writes(token.position);
  });
  add_copies(index, *work, token_bytes);
  const uint32_t n = work->merge->n_targets();
  for (uint32_t begin = 0; begin < n; begin += kPieceCopies) {
    const uint32_t end = std::min(n, begin + kPieceCopies);
    add_piece({.work = index, .step = Step::kMerge, .begin = begin, .end = end},
              (end - begin) * token_bytes * kCopyWeight);
  }
  return true;
}

void RetentionSlice::run_merge(const Piece& piece, Work* work, ThreadWorkspace& workspace,
                               Failed* failed) {
  switch (phase_) {
    case Phase::kFirst:
      KVM_ASSERT(!"nothing is merged before it is chosen");
      break;
    case Phase::kGo:
      *failed = work->merge->find(piece.begin, &workspace.scratch) ? Failed::kNo : Failed::kMemory;
      break;
    case Phase::kMix:
      work->merge->mix(piece.begin);
      break;
    case Phase::kWrite:
      for (uint32_t i = piece.begin; i < piece.end; ++i) {
        work->merge->write(i, work->kept);
      }
      break;
  }
}

void RetentionSlice::run(uint32_t index, ThreadWorkspace& workspace) {
  const Piece& piece = pieces_[index];
  Work& work = works_[piece.work];
  Failed& failed = failed_[index];
  switch (piece.step) {
    case Step::kEncode:
      if (!work.recodings.run(piece.begin, piece.end, &workspace.scratch)) {
        failed = Failed::kMemory;
      } else if (work.kept != nullptr && !work.recodings.are_encoded(piece.begin, piece.end)) {
        failed = Failed::kUnfit;  // tokens change places all together
      }
      break;
    case Step::kSum: {
      const KvRuns runs = KvRuns(work.runs).subspan(piece.begin, piece.end - piece.begin);
      const bool has_summed =
          sum_rows(runs, classes_[piece.work], &workspace.scratch, &work.sums[piece.sums]);
      failed = has_summed ? Failed::kNo : Failed::kMemory;
      break;
    }
    case Step::kChoose:
      try {
        choose(classes_[piece.work], &work);
      } catch (const std::bad_alloc&) {
        failed = Failed::kMemory;
      }
      break;
    case Step::kClone:
      work.new_kept->clone_pages(*work.clones, piece.begin, piece.end);
      break;
    case Step::kMerge:
      run_merge(piece, &work, workspace, &failed);
      break;
    case Step::kCopy:
      work.kept->copy(std::span(work.choice.copies).subspan(piece.begin, piece.end - piece.begin),
                      work.runs);
      break;
  }
}

void RetentionSlice::give_up(const Work& work) {
  for (Group& group : groups_) {
    for (const policies::ListView& list : group.lists) {
      if (list.layer == work.action.layer && list.class_index == work.action.class_index) {
        group.is_cut = false;
        group.actions.more = false;
        group.actions.next_commit = work.is_unfit ? group.actions.next_commit : 0;
      }
    }
  }
}

}  // namespace kvm::engine
