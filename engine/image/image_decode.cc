// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/limits.h"
#include "base/round.h"
#include "engine/image/image_view.h"
#include "engine/image/sequence_image.h"

namespace kvm::engine {
namespace {

// The verifier looks at where a vector begins, and not at where its elements do, which is anywhere
// for those of 8 bytes.
template <typename T>
std::vector<T> values_of(const flatbuffers::Vector<T>* vector) {
  std::vector<T> values(size_of(vector));
  if (!values.empty()) {
    std::memcpy(values.data(), vector->Data(), values.size() * sizeof(T));
  }
  return values;
}

RawBytes bytes_of(const flatbuffers::Vector<uint8_t>* vector) {
  RawBytes bytes(size_of(vector));
  if (bytes.size() != 0) {
    std::memcpy(bytes.data(), vector->data(), bytes.size());
  }
  return bytes;
}

template <size_t kSize>
Status check_same(const flatbuffers::Vector<uint8_t>* saved, const std::array<uint8_t, kSize>& own,
                  const char* what, const char* which) {
  if (size_of(saved) != kSize) {
    return corrupt_image(fmt::format("{} of {} bytes", what, size_of(saved)));
  }
  if (!std::equal(own.begin(), own.end(), saved->begin())) {
    return {KVM_ERR_INVALID,
            fmt::format("the sequence was saved of a space with another {} than this one ({})",
                        what, which)};
  }
  return Status::ok();
}

bool are_finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](float value) { return std::isfinite(value); });
}

// Sums of weights: no number of them is less than nothing. They may have run over.
bool are_masses(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return value >= 0; });
}

// Reads one list.
class ListReader {
 public:
  ListReader(const Space& space, const disk::Image& image, const disk::List& list, uint32_t layer,
             uint32_t class_index)
      : image_(image),
        from_(list),
        own_(space.layers[layer]),
        class_(own_.classes[class_index]),
        given_up_begin_(round_up(class_.retention.n_sinks, kPageTokens)),
        n_layers_(space.n_layers),
        where_(fmt::format(" of head class {} of layer {}", class_index, layer)) {}

  // page_bytes: of the object's pages, of which *n_pages were read before.
  Result<ListImage> read(std::span<const uint32_t> page_bytes, uint64_t* n_pages);

 private:
  Status wrong(const char* what) const { return corrupt_image(what + where_); }
  Status read_pages(std::span<const uint32_t> page_bytes, uint64_t* n_pages);
  Status read_budget();
  Status read_mean();
  Status read_kept();
  Status read_masses();
  // What the policy can have given up: nothing, or all in [given_up_begin_, end).
  Status check_given_up(uint64_t end) const;
  // Where pages of demoted tokens are: in those behind the n_kept tokens that lead them, up to end.
  Status check_demoted(uint64_t end, uint64_t n_kept) const;
  Status check_kept(const KeptTokens::Parts& parts) const;

  const disk::Image& image_;
  const disk::List& from_;
  const Layer& own_;
  const HeadClass& class_;
  const uint64_t given_up_begin_;  // where the pages begin that the policy gives up
  const uint32_t n_layers_;
  const std::string where_;
  ListImage list_;
};

Status ListReader::read_pages(std::span<const uint32_t> page_bytes, uint64_t* n_pages) {
  const uint64_t n = size_of(from_.pages());
  if (n > page_bytes.size() - *n_pages) {
    return wrong("more pages than the object has, in the list");
  }
  list_.pages.reserve(n);
  uint64_t end = 0;       // of the page before
  uint64_t gaps_end = 0;  // of the last tokens that were dropped
  uint64_t n_stored = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const disk::Page& from = *from_.pages()->Get(static_cast<flatbuffers::uoffset_t>(i));
    ImagePage page = {.block = from.block(),
                      .page = from.page(),
                      .first = from.first(),
                      .count = from.count(),
                      .kind = static_cast<PageKind>(from.is_tail())};
    const PageKind last_kind = class_.demotes() ? PageKind::kDemoted : PageKind::kTail;
    const uint64_t position = uint64_t{page.block} * kPageTokens + page.first;
    const bool is_full = page.first + page.count == static_cast<int>(kPageTokens);
    const bool is_last = i + 1 == n && position + page.count == list_.length;
    if (page.page != *n_pages + i || page.kind > last_kind || page.count == 0 ||
        page.first + page.count > static_cast<int>(kPageTokens) || !(is_full || is_last) ||
        position < end || page.block < div_up(end, kPageTokens) ||
        position + page.count > list_.length) {
      return wrong("pages in no order, in the list");
    }
    if (page_bytes[page.page] != page.slab_class(class_).page_bytes()) {
      return wrong("a page of another size, in the list");
    }
    page.kind = page.kind == PageKind::kTail && !class_.settles() ? PageKind::kSettled : page.kind;
    gaps_end = position > end ? position : gaps_end;
    end = position + page.count;
    n_stored += page.count;
    list_.pages.push_back(page);
  }
  *n_pages += n;
  gaps_end = list_.length > end ? list_.length : gaps_end;
  list_.dropped_end = from_.dropped_end();
  if (list_.dropped_end < gaps_end || list_.dropped_end > list_.length ||
      from_.n_dropped() != list_.length - n_stored || from_.n_dropped() > list_.dropped_end) {
    return wrong("dropped tokens that are none, in the list");
  }
  return Status::ok();
}

Status ListReader::read_budget() {
  const Retention& retention = class_.retention;
  list_.budget = {retention.n_recent, retention.n_heavy};
  if (!image_.has_budgets()) {
    return Status::ok();
  }
  list_.budget = {from_.n_recent(), from_.n_heavy()};
  // A list may have what all of them were to have, and one token that rounding gives.
  const bool shares = retention.budgets != KVM_BUDGETS_EQUAL;
  const auto may_have = [&](uint64_t n, uint64_t own) {
    return shares ? n <= own * n_layers_ + 1 : n == own;
  };
  return may_have(list_.budget.n_recent, retention.n_recent) &&
                 may_have(list_.budget.n_heavy, retention.n_heavy)
             ? Status::ok()
             : wrong("a budget that nobody gives, in the list");
}

Status ListReader::check_given_up(uint64_t end) const {
  const uint64_t length = list_.length;
  if (end <= given_up_begin_) {
    return from_.n_dropped() == 0 ? Status::ok() : wrong("tokens that nobody dropped");
  }
  bool is_stored = end > length;
  for (const ImagePage& page : list_.pages) {
    const uint64_t begin = uint64_t{page.block} * kPageTokens;
    is_stored = is_stored || (begin >= given_up_begin_ && begin < end);
  }
  return !is_stored ? Status::ok() : wrong("pages that were given up");
}

Status ListReader::check_demoted(uint64_t end, uint64_t n_kept) const {
  const uint64_t length = list_.length;
  const bool is_none = end == given_up_begin_;  // and the list may be shorter than that
  if (n_kept % kPageTokens != 0 || (!is_none && end > length) || end - given_up_begin_ < n_kept ||
      from_.n_dropped() != n_kept) {
    return wrong("kept tokens that take no pages");
  }
  const uint64_t first = given_up_begin_ + n_kept;
  uint64_t n_demoted = 0;
  for (const ImagePage& page : list_.pages) {
    const uint64_t begin = uint64_t{page.block} * kPageTokens;
    const bool is_behind = begin < given_up_begin_ || begin >= end;
    if (is_behind ? page.kind == PageKind::kDemoted
                  : begin < first || page.slab_class(class_) != class_.demoted) {
      return wrong("pages of demoted tokens out of place");
    }
    n_demoted += is_behind ? 0 : page.count;
  }
  return n_demoted == end - first ? Status::ok() : wrong("demoted tokens that are not there");
}

Status ListReader::read_mean() {
  const disk::Mean* from = from_.mean();
  if (from == nullptr) {
    return class_.retention.kind == KVM_RETAIN_SINKS_RECENT_FOLD ? check_given_up(0) : Status::ok();
  }
  const tiers::SlabClass& slab_class = class_.slab_class;
  MeanEntry mean;
  mean.end = from->end();
  mean.n_tokens = from->n_tokens();
  mean.log_weight = from->log_weight();
  mean.k = values_of(from->k());
  mean.v = values_of(from->v());
  if (class_.retention.kind != KVM_RETAIN_SINKS_RECENT_FOLD || mean.k.size() != slab_class.dim_k ||
      mean.v.size() != (slab_class.v_in_k ? 0u : slab_class.dim_v) || mean.n_tokens > mean.end ||
      (mean.n_tokens == 0) != (mean.end == 0) || !std::isfinite(mean.log_weight)) {
    return wrong("a mean of no tokens");
  }
  KVM_TRY(check_given_up(mean.end));
  list_.mean = std::move(mean);
  return Status::ok();
}

Status ListReader::check_kept(const KeptTokens::Parts& parts) const {
  const uint64_t n = parts.tokens.size();
  std::vector<bool> has_slot(n);
  uint64_t next = given_up_begin_;
  for (const KeptTokens::Token& token : parts.tokens) {
    if (token.position < next || token.position >= parts.end || token.slot >= n ||
        has_slot[token.slot]) {
      return wrong("kept tokens in no order");
    }
    has_slot[token.slot] = true;
    next = token.position + 1;
  }
  if (!std::all_of(parts.counts.begin(), parts.counts.end(),
                   [](uint32_t n_of) { return n_of != 0; }) ||
      !are_finite(parts.log_weights)) {
    return wrong("kept tokens that stand for none");
  }
  return Status::ok();
}

Status ListReader::read_kept() {
  const disk::Kept* from = from_.kept();
  const Retention& retention = class_.retention;
  if (from == nullptr) {
    KVM_TRY(class_.demotes() ? check_demoted(given_up_begin_, 0) : Status::ok());
    return retention.kind == KVM_RETAIN_HEAVY ? check_given_up(0) : Status::ok();
  }
  const bool has_share = retention.budgets == KVM_BUDGETS_EQUAL || image_.has_budgets();
  const uint64_t n = size_of(from->positions());
  const tiers::SlabClass slab_class = class_.kept_class();
  const uint32_t capacity = from->capacity();
  const bool is_counted = retention.merge == KVM_MERGE_COUNTED;
  if (retention.kind != KVM_RETAIN_HEAVY || !has_share ||
      capacity != class_.kept_capacity(list_.budget.n_heavy)) {
    return wrong("kept tokens of another kind");
  }
  const auto are_rows = [&](const codecs::Codec& codec, uint32_t dim, uint64_t n_bytes,
                            uint64_t n_params) {
    return n_bytes == KeptTokens::row_bytes(codec, dim, capacity) &&
           n_params == KeptTokens::n_params(codec, dim, capacity);
  };
  const bool has_v = slab_class.v_in_k ? size_of(from->v()) == 0 && size_of(from->v_scales()) == 0
                                       : are_rows(slab_class.v(), slab_class.dim_v,
                                                  size_of(from->v()), size_of(from->v_scales()));
  if (n > capacity || size_of(from->slots()) != n || !has_v ||
      !are_rows(slab_class.k(), slab_class.dim_k, size_of(from->k()), size_of(from->k_scales())) ||
      size_of(from->counts()) != (is_counted ? capacity : 0) ||
      size_of(from->log_weights()) != (is_counted ? capacity : 0) ||
      from->end() < given_up_begin_ || from->end() % kPageTokens != 0) {
    return wrong("kept tokens of another kind");
  }
  KeptTokens::Parts parts;
  parts.end = from->end();
  parts.lead = class_.demotes() ? given_up_begin_ : UINT64_MAX;
  parts.capacity = capacity;
  parts.tokens.reserve(capacity);
  const std::vector<uint64_t> positions = values_of(from->positions());
  const std::vector<uint32_t> slots = values_of(from->slots());
  for (size_t i = 0; i < n; ++i) {
    parts.tokens.push_back({positions[i], slots[i]});
  }
  parts.counts = values_of(from->counts());
  parts.log_weights = values_of(from->log_weights());
  parts.threshold = from->threshold();
  parts.has_threshold = from->has_threshold();
  KVM_TRY(check_kept(parts));
  if (class_.demotes()) {
    KVM_TRY(check_demoted(parts.end, n));
  } else {
    KVM_TRY(check_given_up(parts.end));
    // Between what was given up and the end nothing is missing.
    if (from_.n_dropped() != parts.end - given_up_begin_) {
      return wrong("tokens that nobody dropped");
    }
  }
  list_.kept.emplace(slab_class, std::move(parts),
                     KeptTokens::Rows{.k = bytes_of(from->k()),
                                      .v = bytes_of(from->v()),
                                      .k_scales = values_of(from->k_scales()),
                                      .v_scales = values_of(from->v_scales())});
  return Status::ok();
}

Status ListReader::read_masses() {
  const disk::Masses* from = from_.masses();
  if (from == nullptr) {
    return Status::ok();
  }
  Masses masses;
  masses.begin = from->begin();
  masses.kept = values_of(from->kept());
  masses.recent = values_of(from->recent());
  const uint64_t begin = list_.kept ? list_.kept->end() : given_up_begin_;
  const size_t n_kept = list_.kept ? list_.kept->tokens().size() : 0;
  if (class_.retention.kind != KVM_RETAIN_HEAVY || masses.begin != begin ||
      masses.kept.size() != n_kept || !are_masses(masses.kept) || !are_masses(masses.recent)) {
    return wrong("masses of no tokens");
  }
  list_.masses = std::move(masses);
  return Status::ok();
}

Result<ListImage> ListReader::read(std::span<const uint32_t> page_bytes, uint64_t* n_pages) {
  list_.length = from_.length();
  if (list_.length > kMaxTokens) {
    return wrong("too many tokens");
  }
  list_.settled_end = from_.settled_end();
  if (list_.settled_end % kPageTokens != 0 || list_.settled_end > list_.length) {
    return wrong("settled pages that are none");
  }
  KVM_TRY(read_pages(page_bytes, n_pages));
  if (class_.retention.kind == KVM_RETAIN_FULL && from_.n_dropped() != 0) {
    return wrong("tokens that nobody dropped");
  }
  if (class_.retention.kind == KVM_RETAIN_PROMPT && from_.n_dropped() != 0 &&
      image_.prompt_end() > image_.n_committed()) {
    return wrong("tokens of a prompt that has not ended");
  }
  KVM_TRY(read_budget());
  KVM_TRY(read_mean());
  KVM_TRY(read_kept());
  KVM_TRY(read_masses());
  return std::move(list_);
}

Status read_seen(const disk::Seen* from, const Space& space, const SequenceImage& image,
                 uint32_t index, std::optional<Observed>* observed) {
  if (from == nullptr) {
    return corrupt_image("a layer without an entry");
  }
  if (!from->has()) {
    return Status::ok();
  }
  const Layer& layer = space.layers[index];
  if (layer.kind == KVM_LAYER_ABSENT) {
    return corrupt_image(fmt::format("observations of layer {}, which is absent", index));
  }
  Observed seen;
  seen.query_position = from->query_position();
  seen.n_rows = from->n_rows();
  seen.queries = values_of(from->queries());
  seen.column_sums = values_of(from->column_sums());
  const uint64_t length = image.lists[space.storage(index).first_list].length;
  if (seen.n_rows > kMaxObservedRows || seen.query_position > 2 * kMaxTokens ||
      seen.queries.size() != uint64_t{seen.n_rows} * layer.n_q_heads * layer.dim_k ||
      seen.column_sums.size() % layer.n_kv_heads != 0 ||
      seen.column_sums.size() / layer.n_kv_heads > length || !are_finite(seen.queries) ||
      !are_finite(seen.column_sums)) {
    return corrupt_image(fmt::format("observations of layer {} that nobody made", index));
  }
  *observed = std::move(seen);
  return Status::ok();
}

Status read_lists(const disk::Image& from, const Space& space, std::span<const uint32_t> page_bytes,
                  SequenceImage* image) {
  if (size_of(from.lists()) != space.n_lists) {
    return corrupt_image(fmt::format("{} lists of pages", size_of(from.lists())));
  }
  image->lists.reserve(space.n_lists);
  uint64_t n_pages = 0;
  for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
    const Layer& own = space.layers[layer];
    for (uint32_t i = 0; own.kind == KVM_LAYER_OWN && i < own.classes.size(); ++i) {
      const disk::List* list = from.lists()->Get(own.first_list + i);
      KVM_TRY_ASSIGN(ListImage read,
                     ListReader(space, from, *list, layer, i).read(page_bytes, &n_pages));
      if (i != 0 && read.length != image->lists.back().length) {
        return corrupt_image(fmt::format("head classes of layer {} that end apart", layer));
      }
      image->lists.push_back(std::move(read));
    }
  }
  if (n_pages != page_bytes.size()) {
    return corrupt_image("pages that are in no list");
  }
  return Status::ok();
}

Status read_whole(const disk::Image& from, const Space& space, SequenceImage* image) {
  constexpr policies::EventSet kAllEvents = (1u << policies::kEvents) - 1;
  uint64_t longest = 0;
  for (const ListImage& list : image->lists) {
    longest = std::max(longest, list.length);
  }
  image->flags = from.flags();
  image->n_committed = from.n_committed();
  image->prompt_end = from.prompt_end();
  image->has_budgets = from.has_budgets();
  image->due_events = from.due_events();
  image->next_commits = values_of(from.next_commits());
  const bool has_prompt = image->prompt_end != UINT64_MAX;
  if ((image->flags & ~kSeqFlags) != 0 || image->n_committed > longest ||
      (image->due_events & ~kAllEvents) != 0 ||
      image->next_commits.size() != find_governed(space).size() ||
      (has_prompt && (!space.awaits_prompt || image->prompt_end > kMaxTokens)) ||
      (image->has_budgets && !has_prompt)) {
    return corrupt_image("what its lists do not bear out");
  }
  return Status::ok();
}

Status read_prefix(const disk::Prefix* from, const SequenceImage& image, PrefixImage* prefix) {
  if (from == nullptr) {
    return Status::ok();
  }
  const uint64_t n_bytes = size_of(from->hashes());
  const uint64_t n_hashes = n_bytes / sizeof(kvm_prefix_hash);
  if (n_bytes == 0 || n_bytes % sizeof(kvm_prefix_hash) != 0 || n_hashes > kMaxPrefixPages ||
      from->keep_ns() > kMaxPrefixKeepNs ||
      std::any_of(image.lists.begin(), image.lists.end(), [n_hashes](const ListImage& list) {
        return list.length < n_hashes * kPageTokens;
      })) {
    return corrupt_image("hashes of tokens that it does not have");
  }
  prefix->hashes.resize(n_hashes);
  std::memcpy(prefix->hashes.data(), from->hashes()->Data(), n_bytes);
  prefix->keep_ns = from->keep_ns();
  return Status::ok();
}

}  // namespace

Result<SequenceImage> decode_image(std::span<const std::byte> body, const Space& space,
                                   std::span<const uint32_t> page_bytes) {
  KVM_TRY_ASSIGN(const disk::Image* const view, view_image(body));
  const disk::Image& from = *view;
  KVM_TRY(check_same(from.layout_digest(), space.layout_digest, "layout",
                     "layers, kv heads, dims, codecs, the shard"));
  KVM_TRY(check_same(from.policy_digest(), space.policy_digest, "policies", "what its heads keep"));
  KVM_TRY(check_same(from.fingerprint(), space.fingerprint, "fingerprint",
                     "of the weights, as the engine says"));
  if (space.has_pairs) {
    return corrupt_image("pages of two layers, which nobody saves");
  }
  SequenceImage image;
  KVM_TRY(read_lists(from, space, page_bytes, &image));
  KVM_TRY(read_whole(from, space, &image));
  if (from.seen() != nullptr && from.seen()->size() != 0) {
    if (from.seen()->size() != space.n_layers) {
      return corrupt_image("observations of other layers");
    }
    image.observed.resize(space.n_layers);
    for (uint32_t layer = 0; layer < space.n_layers; ++layer) {
      KVM_TRY(read_seen(from.seen()->Get(layer), space, image, layer, &image.observed[layer]));
    }
  }
  KVM_TRY(read_prefix(from.prefix(), image, &image.prefix));
  return image;
}

}  // namespace kvm::engine
