// SPDX-License-Identifier: Apache-2.0
#include "engine/retention/retention_slice.h"

#include <algorithm>
#include <new>
#include <utility>

namespace kvm::engine {
namespace {

// Pages of a piece that adds rows up, by their numbers: sums do not depend on how runs are cut.
constexpr uint64_t kPiecePages = 8;
// Cost of a piece that encodes planes of pages: some 0.05 ms.
constexpr uint64_t kPieceCost = 64 << 10;
// Tokens of a piece that copies rows.
constexpr uint32_t kPieceCopies = 512;
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

void RetentionSlice::add_pages(uint32_t index, const Work& work, bool demotes) {
  const uint32_t n = work.recodings.n_planes();
  const uint64_t cost = work.recodings.plane_cost();
  const auto each = static_cast<uint32_t>((kPieceCost + cost - 1) / cost);
  for (uint32_t begin = 0; begin < n; begin += each) {
    const uint32_t end = std::min(n, begin + each);
    add_piece({.work = index, .begin = begin, .end = end, .demotes = demotes},
              (end - begin) * cost * kEncodeWeight);
  }
}

void RetentionSlice::add_demote(Work&& work, const tiers::SlabClass& slab_class) {
  add_pages(static_cast<uint32_t>(works_.size()), work, false);
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
      n_bytes += work.runs[end].n_tokens * slab_class.token_bytes();
    }
    add_piece({.work = index,
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
    add_piece({.work = index, .begin = begin, .end = end}, (end - begin) * token_bytes);
  }
}

void RetentionSlice::add_keep(Work&& work, const tiers::SlabClass& slab_class) {
  const auto index = static_cast<uint32_t>(works_.size());
  if (work.recodings.size() != 0) {
    add_pages(index, work, true);
  } else if (work.merge == nullptr) {
    add_copies(index, work, slab_class.token_bytes());
  }
  for (uint32_t i = 0; work.merge != nullptr && i < work.merge->n_finds(); ++i) {
    add_piece({.work = index, .begin = i, .end = i + 1, .merges = true}, work.merge->find_bytes());
  }
  add_work(std::move(work), slab_class);
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
  phase_ = phase_ == Phase::kFirst ? Phase::kMix : Phase::kWrite;
  bool goes_on = false;
  for (uint32_t index = 0; index < works_.size(); ++index) {
    Work& work = works_[index];
    if (work.kept != nullptr && work.recodings.size() != 0 && !work.has_failed &&
        phase_ == Phase::kMix) {
      goes_on = true;
      add_copies(index, work, classes_[index].token_bytes());
    }
    if (work.merge == nullptr || work.has_failed) {
      continue;
    }
    goes_on = true;
    if (phase_ == Phase::kMix) {
      work.merge->gate(*work.kept);
      for (uint32_t i = 0; i < work.merge->n_mixes(); ++i) {
        add_piece({.work = index, .begin = i, .end = i + 1, .merges = true},
                  work.merge->mix_bytes() / work.merge->n_mixes());
      }
      continue;
    }
    std::erase_if(work.choice.copies, [&](const KeptTokens::Token& token) {
      return work.merge->writes(token.position);
    });
    add_copies(index, work, classes_[index].token_bytes());
    const uint32_t n = work.merge->n_targets();
    for (uint32_t begin = 0; begin < n; begin += kPieceCopies) {
      const uint32_t end = std::min(n, begin + kPieceCopies);
      add_piece({.work = index, .begin = begin, .end = end, .merges = true},
                (end - begin) * classes_[index].token_bytes());
    }
  }
  return goes_on;
}

void RetentionSlice::run_merge(const Piece& piece, Work* work, ThreadWorkspace& workspace,
                               Failed* failed) {
  switch (phase_) {
    case Phase::kFirst:
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
  if (piece.merges) {
    run_merge(piece, &work, workspace, &failed_[index]);
    return;
  }
  if (work.action.kind == policies::ActionKind::kDemote || piece.demotes) {
    if (!work.recodings.run(piece.begin, piece.end, &workspace.scratch)) {
      failed_[index] = Failed::kMemory;
    } else if (piece.demotes && !work.recodings.are_encoded(piece.begin, piece.end)) {
      failed_[index] = Failed::kUnfit;  // tokens change places all together
    }
    return;
  }
  if (work.kept != nullptr) {
    work.kept->copy(std::span(work.choice.copies).subspan(piece.begin, piece.end - piece.begin),
                    work.runs);
    return;
  }
  const KvRuns runs = KvRuns(work.runs).subspan(piece.begin, piece.end - piece.begin);
  failed_[index] = sum_rows(runs, classes_[piece.work], &workspace.scratch, &work.sums[piece.sums])
                       ? Failed::kNo
                       : Failed::kMemory;
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
