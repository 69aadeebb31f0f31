// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/src/step.h"

#include <optional>
#include <span>
#include <string>
#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include "bindings/python/src/prefix.h"
#include "bindings/python/src/records.h"

namespace nb = nanobind;

namespace kvm::python {
namespace {

using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;

Item make_item(uint64_t seq, uint32_t n_append, uint32_t n_query,
               const std::optional<uint64_t>& append_position,
               const std::optional<uint64_t>& query_position,
               const std::optional<uint32_t>& append_row, const std::optional<uint32_t>& query_row,
               const std::optional<Ranges>& ranges,
               const std::optional<std::vector<uint64_t>>& tree, uint32_t flags) {
  Item made;
  kvm_item& item = made.item;
  item.seq = seq;
  item.n_append = n_append;
  item.n_query = n_query;
  item.append_position = append_position.value_or(KVM_POSITION_END);
  item.query_position = query_position.value_or(KVM_POSITION_END);
  item.append_row = append_row.value_or(Item::kNext);
  item.query_row = query_row.value_or(Item::kNext);
  item.flags = flags;
  if (ranges.has_value()) {
    for (const auto& [begin, end] : *ranges) {
      made.ranges.push_back({begin, end});
    }
  }
  if (tree.has_value()) {
    if (tree->size() != n_query) {
      refuse("tree has " + std::to_string(tree->size()) + " words; the item has " +
             std::to_string(n_query) + " query rows, a word for each");
    }
    made.tree = *tree;
    item.flags |= KVM_ITEM_TREE;
  }
  return made;
}

// The tensors of one side of a step: k and v, or q, o, lse and err.
class Side {
 public:
  Side(Request* request, Layout layout) : request_(request), layout_(layout) {}

  kvm_tensor add(nb::handle array, const Shape& shape) {
    Tensor read = read_tensor(request_->client.get(), array, layout_, shape);
    if (array.is_none()) {
      return read.tensor;
    }
    if (!is_first_ && (read.n_rows != first_.n_rows || read.n_entries != first_.n_entries ||
                       read.n_layers != first_.n_layers)) {
      refuse(std::string(shape.name) + " has " + std::to_string(read.n_rows) + " rows, " +
             std::to_string(read.n_entries) + " items and " + std::to_string(read.n_layers) +
             " layers; the array before it has " + std::to_string(first_.n_rows) + ", " +
             std::to_string(first_.n_entries) + " and " + std::to_string(first_.n_layers));
    }
    if (!is_first_ && read.entry_rows != first_.entry_rows) {
      refuse(std::string("the items of ") + shape.name + " lie " + std::to_string(read.entry_rows) +
             " of its tokens apart, those of the array before it " +
             std::to_string(first_.entry_rows) +
             "; the two must agree (make both contiguous, or neither)");
    }
    is_first_ = false;
    request_->copied_bytes += read.copied_bytes;
    request_->owners.push_back(std::move(read.owner));
    first_.n_rows = read.n_rows;
    first_.n_entries = read.n_entries;
    first_.n_layers = read.n_layers;
    first_.entry_rows = read.entry_rows;
    return read.tensor;
  }
  bool is_there() const { return !is_first_; }
  uint64_t n_layers() const { return first_.n_layers; }
  // Places the rows of item `index`; *next is the first row that no item before it has.
  uint32_t place(size_t index, uint32_t asked, uint64_t n, uint64_t* next, const char* what) const {
    uint64_t row = asked;
    if (!is_there() && n != 0) {
      refuse("item " + std::to_string(index) + " has " + std::to_string(n) + " rows of " + what +
             ", which is not given");
    }
    if (layout_ == Layout::kHeads) {
      row = asked == Item::kNext ? 0 : asked;
      if (n != 0 && (index >= first_.n_entries || row + n > first_.n_rows)) {
        refuse("item " + std::to_string(index) + " has rows " + std::to_string(row) + " to " +
               std::to_string(row + n) + " of " + what + "; there are " +
               std::to_string(first_.n_entries) + " items of " + std::to_string(first_.n_rows) +
               " tokens");
      }
      row += index * first_.entry_rows;
      if (row + n > UINT32_MAX) {
        refuse("item " + std::to_string(index) + " begins at row " + std::to_string(row) + " of " +
               what + "; rows are numbers of 32 bits (make it contiguous)");
      }
      return static_cast<uint32_t>(row);
    }
    row = asked == Item::kNext ? *next : asked;
    if (row + n > UINT32_MAX || (is_there() && row + n > first_.n_rows)) {
      refuse("item " + std::to_string(index) + " has rows " + std::to_string(row) + " to " +
             std::to_string(row + n) + " of " + what + "; there are " +
             std::to_string(first_.n_rows));
    }
    *next = row + n;
    return static_cast<uint32_t>(row);
  }

 private:
  Request* request_;
  Layout layout_;
  Tensor first_;  // its counts
  bool is_first_ = true;
};

}  // namespace

std::shared_ptr<Request> make_step(std::shared_ptr<Client> client, uint64_t space, uint32_t layer,
                                   uint32_t n_q_heads, uint32_t n_kv_heads, uint32_t dim_k,
                                   uint32_t dim_v, const nb::list& items, nb::handle k,
                                   nb::handle v, nb::handle q, nb::handle o, nb::handle lse,
                                   nb::handle err, bool heads_first, uint32_t flags, uint32_t mode,
                                   uint32_t proposal, float scale, float eps, float delta,
                                   uint64_t budget, uint64_t seed, uint64_t deadline_ns) {
  auto request = std::make_shared<Request>();
  request->client = std::move(client);
  const Layout layout = heads_first ? Layout::kHeads : Layout::kRows;
  auto& params = request->step;
  params = sized<kvm_step_params>();
  Side kv(request.get(), layout);
  params.k = kv.add(k, {.name = "k", .n_heads = n_kv_heads, .dim = dim_k, .may_have_layers = true});
  params.v = kv.add(v, {.name = "v", .n_heads = n_kv_heads, .dim = dim_v, .may_have_layers = true});
  Side rows(request.get(), layout);
  params.q = rows.add(q, {.name = "q", .n_heads = n_q_heads, .dim = dim_k});
  params.o = rows.add(o, {.name = "o", .n_heads = n_q_heads, .dim = dim_v, .is_written = true});
  params.lse = rows.add(
      lse, {.name = "lse", .n_heads = n_q_heads, .dim = 1, .is_written = true, .is_f32 = true});
  params.err = rows.add(
      err, {.name = "err", .n_heads = n_q_heads, .dim = 2, .is_written = true, .is_f32 = true});
  request->verb = !rows.is_there() ? Request::Verb::kAppend
                  : kv.is_there()  ? Request::Verb::kStep
                                   : Request::Verb::kAttend;
  uint64_t next_append = 0;
  uint64_t next_query = 0;
  for (const nb::handle object : items) {
    const Item& item = nb::cast<const Item&>(object);
    kvm_item placed = item.item;
    const size_t index = request->items.size();
    placed.append_row = kv.place(index, placed.append_row, placed.n_append, &next_append, "k or v");
    placed.query_row = rows.place(index, placed.query_row, placed.n_query, &next_query, "q");
    placed.range_begin = static_cast<uint32_t>(request->ranges.size());
    placed.n_ranges = static_cast<uint32_t>(item.ranges.size());
    placed.tree_begin = static_cast<uint32_t>(request->tree.size());
    request->ranges.insert(request->ranges.end(), item.ranges.begin(), item.ranges.end());
    request->tree.insert(request->tree.end(), item.tree.begin(), item.tree.end());
    request->items.push_back(placed);
  }
  params.space = space;
  params.layer_begin = layer;
  params.n_layers = static_cast<uint32_t>(kv.n_layers());
  params.n_items = static_cast<uint32_t>(request->items.size());
  params.items = request->items.data();
  params.n_ranges = static_cast<uint32_t>(request->ranges.size());
  params.ranges = request->ranges.data();
  params.n_tree_words = static_cast<uint32_t>(request->tree.size());
  params.tree_mask = request->tree.data();
  if (request->verb != Request::Verb::kAppend) {
    params.flags = flags;
    params.mode = mode;
    params.proposal = proposal;
    params.scale = scale;
    params.eps = eps;
    params.delta = delta;
    params.budget = budget;
    params.seed = seed;
  }
  params.deadline_ns = deadline_ns;
  return request;
}

namespace {

std::shared_ptr<Request> make_read(std::shared_ptr<Client> client, uint64_t seq, uint32_t layer,
                                   uint32_t n_kv_heads, uint32_t dim_k, uint32_t dim_v,
                                   uint64_t position, uint64_t n_tokens, nb::handle k,
                                   nb::handle v) {
  auto request = std::make_shared<Request>();
  request->verb = Request::Verb::kRead;
  request->client = std::move(client);
  Side rows(request.get(), Layout::kRows);
  auto& params = request->read;
  params = sized<kvm_read_params>();
  params.seq = seq;
  params.layer = layer;
  params.position = position;
  params.n_tokens = n_tokens;
  params.k = rows.add(k, {.name = "k", .n_heads = n_kv_heads, .dim = dim_k, .is_written = true});
  params.v = rows.add(v, {.name = "v", .n_heads = n_kv_heads, .dim = dim_v, .is_written = true});
  uint64_t next = 0;
  rows.place(0, 0, n_tokens, &next, "k and v");
  return request;
}

std::shared_ptr<Request> make_observe(std::shared_ptr<Client> client, uint64_t seq, uint32_t layer,
                                      uint32_t n_q_heads, uint32_t n_kv_heads, uint32_t dim_k,
                                      uint64_t query_position, uint64_t column_begin, nb::handle q,
                                      nb::handle column_sums) {
  auto request = std::make_shared<Request>();
  request->verb = Request::Verb::kObserve;
  request->client = std::move(client);
  auto& params = request->observe;
  params = sized<kvm_observe_params>();
  params.seq = seq;
  params.layer = layer;
  params.query_position = query_position;
  params.column_begin = column_begin;
  const auto add = [&request](nb::handle array, const Shape& shape) {
    Tensor read = read_tensor(request->client.get(), array, Layout::kRows, shape);
    request->copied_bytes += read.copied_bytes;
    if (!array.is_none()) {
      request->owners.push_back(read.owner);
    }
    return read;
  };
  const Tensor rows = add(q, {.name = "q", .n_heads = n_q_heads, .dim = dim_k});
  const Tensor columns =
      add(column_sums, {.name = "column_sums", .n_heads = n_kv_heads, .dim = 1, .is_f32 = true});
  params.q = rows.tensor;
  params.n_rows = static_cast<uint32_t>(rows.n_rows);
  params.column_sums = columns.tensor;
  params.n_columns = columns.n_rows;
  return request;
}

std::shared_ptr<Request> make_verb(std::shared_ptr<Client> client, Request::Verb verb, uint64_t id,
                                   uint64_t n_tokens, uint32_t flags, uint64_t reserve) {
  auto request = std::make_shared<Request>();
  request->verb = verb;
  request->client = std::move(client);
  request->id = id;
  request->n_tokens = n_tokens;
  request->create = sized<kvm_seq_params>();
  request->create.flags = flags;
  request->create.reserve = reserve;
  return request;
}

std::shared_ptr<Request> make_snapshot_verb(std::shared_ptr<Client> client, Request::Verb verb,
                                            uint64_t id, const std::string& name, uint32_t flags) {
  auto request = make_verb(std::move(client), verb, id, 0, 0, 0);
  request->name = name;
  request->flags = flags;
  return request;
}

std::shared_ptr<Request> make_prefix_verb(std::shared_ptr<Client> client, uint64_t seq,
                                          const nb::bytes& hashes, uint64_t keep_ns) {
  auto request = make_verb(std::move(client), Request::Verb::kPublishPrefix, seq, 0, 0, 0);
  const std::span<const kvm_prefix_hash> all = hashes_in(hashes);
  request->hashes.assign(all.begin(), all.end());
  request->keep_ns = keep_ns;
  return request;
}

std::shared_ptr<Request> make_priority_verb(std::shared_ptr<Client> client, uint64_t seq,
                                            uint32_t priority, uint64_t begin, uint64_t end,
                                            uint64_t keep_ns) {
  auto request = make_verb(std::move(client), Request::Verb::kSetPriority, seq, 0, 0, 0);
  request->priority = priority_params(seq, priority, begin, end, keep_ns);
  return request;
}

std::shared_ptr<Request> make_drop_verb(std::shared_ptr<Client> client, uint64_t seq,
                                        uint64_t begin, uint64_t end) {
  auto request = make_verb(std::move(client), Request::Verb::kDrop, seq, end, 0, 0);
  request->begin = begin;
  return request;
}

}  // namespace

kvm_priority_params priority_params(uint64_t seq, uint32_t priority, uint64_t begin, uint64_t end,
                                    uint64_t keep_ns) {
  auto params = sized<kvm_priority_params>();
  params.seq = seq;
  params.priority = priority;
  params.begin = begin;
  params.end = end;
  params.keep_ns = keep_ns;
  return params;
}

void register_step(nb::module_& module) {
  nb::class_<Item>(module, "Item")
      .def(
          "__init__",
          [](Item* self, uint64_t seq, uint32_t n_append, uint32_t n_query,
             const std::optional<uint64_t>& append_position,
             const std::optional<uint64_t>& query_position,
             const std::optional<uint32_t>& append_row, const std::optional<uint32_t>& query_row,
             const std::optional<Ranges>& ranges, const std::optional<std::vector<uint64_t>>& tree,
             uint32_t flags) {
            new (self) Item(make_item(seq, n_append, n_query, append_position, query_position,
                                      append_row, query_row, ranges, tree, flags));
          },
          nb::arg("seq"), nb::arg("n_append"), nb::arg("n_query"),
          nb::arg("append_position").none(), nb::arg("query_position").none(),
          nb::arg("append_row").none(), nb::arg("query_row").none(), nb::arg("ranges").none(),
          nb::arg("tree").none(), nb::arg("flags"));
  nb::enum_<Request::Verb>(module, "Verb")
      .value("CREATE", Request::Verb::kCreate)
      .value("FORK", Request::Verb::kFork)
      .value("TRUNCATE", Request::Verb::kTruncate)
      .value("COMMIT", Request::Verb::kCommit)
      .value("FREE", Request::Verb::kFree)
      .value("PUBLISH", Request::Verb::kPublish)
      .value("TAKE", Request::Verb::kTake)
      .value("PREFETCH", Request::Verb::kPrefetch)
      .value("SAVE", Request::Verb::kSave)
      .value("LOAD", Request::Verb::kLoad)
      .value("DELETE_SNAPSHOT", Request::Verb::kDeleteSnapshot)
      .value("PUBLISH_PREFIX", Request::Verb::kPublishPrefix)
      .value("SET_PRIORITY", Request::Verb::kSetPriority)
      .value("DROP", Request::Verb::kDrop)
      .value("NOP", Request::Verb::kNop);
  nb::class_<Request>(module, "Request").def_prop_ro("copied_bytes", [](const Request& r) {
    return r.copied_bytes;
  });
  module.def("make_step", make_step, nb::arg("client"), nb::arg("space"), nb::arg("layer"),
             nb::arg("n_q_heads"), nb::arg("n_kv_heads"), nb::arg("dim_k"), nb::arg("dim_v"),
             nb::arg("items"), nb::arg("k").none(), nb::arg("v").none(), nb::arg("q").none(),
             nb::arg("o").none(), nb::arg("lse").none(), nb::arg("err").none(),
             nb::arg("heads_first"), nb::arg("flags"), nb::arg("mode"), nb::arg("proposal"),
             nb::arg("scale"), nb::arg("eps"), nb::arg("delta"), nb::arg("budget"), nb::arg("seed"),
             nb::arg("deadline_ns"));
  module.def("make_read", make_read, nb::arg("client"), nb::arg("seq"), nb::arg("layer"),
             nb::arg("n_kv_heads"), nb::arg("dim_k"), nb::arg("dim_v"), nb::arg("position"),
             nb::arg("n_tokens"), nb::arg("k").none(), nb::arg("v").none());
  module.def("make_observe", make_observe, nb::arg("client"), nb::arg("seq"), nb::arg("layer"),
             nb::arg("n_q_heads"), nb::arg("n_kv_heads"), nb::arg("dim_k"),
             nb::arg("query_position"), nb::arg("column_begin"), nb::arg("q").none(),
             nb::arg("column_sums").none());
  module.def("make_verb", make_verb, nb::arg("client"), nb::arg("verb"), nb::arg("id"),
             nb::arg("n_tokens"), nb::arg("flags"), nb::arg("reserve"));
  module.def("make_snapshot_verb", make_snapshot_verb, nb::arg("client"), nb::arg("verb"),
             nb::arg("id"), nb::arg("name"), nb::arg("flags"));
  module.def("make_prefix_verb", make_prefix_verb, nb::arg("client"), nb::arg("seq"),
             nb::arg("hashes"), nb::arg("keep_ns"));
  module.def("make_priority_verb", make_priority_verb, nb::arg("client"), nb::arg("seq"),
             nb::arg("priority"), nb::arg("begin"), nb::arg("end"), nb::arg("keep_ns"));
  module.def("make_drop_verb", make_drop_verb, nb::arg("client"), nb::arg("seq"), nb::arg("begin"),
             nb::arg("end"));
}

}  // namespace kvm::python
