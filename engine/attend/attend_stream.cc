// SPDX-License-Identifier: Apache-2.0
#include "engine/attend/attend_stream.h"

#include <algorithm>
#include <span>

#include "attention/exact/visibility.h"
#include "engine/store/stored_runs.h"

namespace kvm::engine {

uint32_t AttendStream::place_window(uint32_t index, std::byte* slot, StreamRead* reads) {
  const AttendPlan::Window& window = plan_->windows[index];
  const AttendPlan::Away& away = plan_->aways[window.away];
  const std::span<const AwayPage> pages = window.pages.in(std::as_const(plan_->away_pages));
  const PageSet seen = seen_pages(away, pages);
  uint32_t n = 0;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (seen[i]) {
      reads[n++] = {pages[i].place, slot, pages[i].size_bytes};
      point_views_to(away, pages[i], slot);
      slot += pages[i].size_bytes;
    }
  }
  return n;
}

// What no row sees is neither read nor looked at.
AttendStream::PageSet AttendStream::seen_pages(const AttendPlan::Away& away,
                                               std::span<const AwayPage> pages) const {
  KVM_ASSERT(pages.size() <= kMaxPages);
  PageSet seen;
  for (const AttendPlan::Away::View& view : away.views.in(std::as_const(plan_->away_views))) {
    const attention::Problem& problem = plan_->heads[view.first_head].problem;
    const attention::VisibleSet visible(problem.visible, problem.n_query, 0, problem.n_query);
    for (size_t i = 0; i < pages.size(); ++i) {
      seen[i] = seen[i] || visible.any(pages[i].block * kPageTokens) != 0;
    }
  }
  return seen;
}

// Views that follow each other may have the same runs.
void AttendStream::point_views_to(const AttendPlan::Away& away, const AwayPage& page,
                                  const std::byte* data) {
  const auto views = away.views.in(std::as_const(plan_->away_views));
  for (size_t i = 0; i < views.size(); ++i) {
    if (i != 0 && views[i].runs.begin == views[i - 1].runs.begin) {
      continue;
    }
    point_runs_to(views[i].runs.in(plan_->runs), page, data);
  }
}

void point_runs_to(std::span<KvRun> runs, const AwayPage& page, const std::byte* data) {
  const auto first = std::partition_point(runs.begin(), runs.end(), [&](const KvRun& run) {
    return run.position < page.block * kPageTokens;
  });
  for (auto run = first; run != runs.end() && run->position / kPageTokens == page.block; ++run) {
    point_to_page(*page.slab_class, data, &*run);
  }
}

}  // namespace kvm::engine
