// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/src/client.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include "bindings/python/src/queue.h"
#include "bindings/python/src/records.h"

namespace nb = nanobind;

namespace kvm::python {
namespace {

constexpr uint64_t kArenaBytes = uint64_t{64} << 20;

std::atomic<uint32_t> n_forks{0};

template <typename Info>
nb::list to_list(const std::vector<Info>& infos) {
  nb::list list;
  for (const Info& info : infos) {
    list.append(to_dict(info));
  }
  return list;
}

// All entries of a list that may grow while it is read.
template <typename Info, typename F>
nb::list read_list(Client& client, const F& read) {
  std::vector<Info> infos(16);
  for (;;) {
    size_t n = 0;
    infos[0] = sized<Info>();
    client.call([&](kvm_client* c) { return read(c, infos.data(), infos.size(), &n); });
    if (n <= infos.size()) {
      infos.resize(n);
      return to_list(infos);
    }
    infos.resize(n + n / 8 + 16);
  }
}

template <typename F>
std::string read_text(Client& client, const F& read) {
  std::string text(1 << 16, '\0');
  for (;;) {
    size_t n = 0;
    client.call([&](kvm_client* c) { return read(c, text.data(), text.size(), &n); });
    if (n < text.size()) {
      text.resize(n);
      return text;
    }
    text.resize(n + n / 8 + 1);
  }
}

template <typename Params>
std::vector<Params> read_params(const nb::list& dicts) {
  std::vector<Params> all;
  for (const nb::handle dict : dicts) {
    from_dict(nb::cast<nb::dict>(dict), &all.emplace_back());
  }
  return all;
}

uint64_t register_space(Client& client, const std::string& name, const nb::dict& numbers,
                        const nb::list& layers, const nb::list& policies, const nb::list& codecs,
                        const nb::list& indexes, const std::vector<float>& rope_inv_freq,
                        const std::optional<std::vector<float>>& sink_logits,
                        const std::optional<std::vector<float>>& alibi_slopes) {
  auto params = sized<kvm_space_params>();
  from_dict(numbers, &params);
  const auto of_layers = read_params<kvm_layer_params>(layers);
  const auto of_policies = read_params<kvm_policy_params>(policies);
  const auto of_codecs = read_params<kvm_codec_params>(codecs);
  const auto of_indexes = read_params<kvm_index_params>(indexes);
  params.name = name.c_str();
  params.layers = of_layers.data();
  params.n_layer_params = static_cast<uint32_t>(of_layers.size());
  params.policies = of_policies.data();
  params.n_policies = static_cast<uint32_t>(of_policies.size());
  params.codecs = of_codecs.data();
  params.n_codecs = static_cast<uint32_t>(of_codecs.size());
  params.indexes = of_indexes.data();
  params.n_indexes = static_cast<uint32_t>(of_indexes.size());
  params.rope_inv_freq = rope_inv_freq.data();
  params.n_rope_pairs = static_cast<uint32_t>(rope_inv_freq.size());
  if (sink_logits.has_value()) {
    const uint64_t n = uint64_t{params.n_layers} * params.n_q_heads;
    if (sink_logits->size() != n) {
      refuse("sink_logits has " + std::to_string(sink_logits->size()) +
             " numbers; n_layers * n_q_heads is " + std::to_string(n));
    }
    params.sink_logits = sink_logits->data();
  }
  if (alibi_slopes.has_value()) {
    if (alibi_slopes->size() != params.n_q_heads) {
      refuse("alibi_slopes has " + std::to_string(alibi_slopes->size()) +
             " numbers; n_q_heads is " + std::to_string(params.n_q_heads));
    }
    params.alibi_slopes = alibi_slopes->data();
  }
  kvm_space_id space = 0;
  client.call([&](kvm_client* c) { return kvm_space_register(c, &params, &space); });
  return space;
}

template <typename Params>
nb::list to_dicts(const std::vector<Params>& all, uint32_t n) {
  nb::list dicts;
  for (uint32_t i = 0; i < n; ++i) {
    dicts.append(to_dict(all[i]));
  }
  return dicts;
}

// kv_head_masks: two words for each layer, or nothing.
nb::dict preset(const std::string& name, const nb::dict& numbers,
                const std::optional<std::vector<uint64_t>>& kv_head_masks) {
  auto params = sized<kvm_preset_params>();
  from_dict(numbers, &params);
  params.name = name.c_str();
  if (kv_head_masks.has_value()) {
    if (kv_head_masks->size() != uint64_t{params.n_layers} * 2) {
      refuse("heads is for " + std::to_string(kv_head_masks->size() / 2) + " layers; there are " +
             std::to_string(params.n_layers));
    }
    params.kv_head_masks = kv_head_masks->data();
  }
  constexpr uint32_t kRoom = 512;  // the most layers of a space
  std::vector<kvm_layer_params> layers(kRoom);
  std::vector<kvm_policy_params> policies(kRoom);
  std::vector<kvm_codec_params> codecs(kRoom);
  std::vector<kvm_index_params> indexes(kRoom);
  auto out = sized<kvm_preset>();
  out.n_layer_params = out.n_policies = out.n_codecs = out.n_indexes = kRoom;
  out.layers = layers.data();
  out.policies = policies.data();
  out.codecs = codecs.data();
  out.indexes = indexes.data();
  check(kvm_policy_preset(&params, &out));
  nb::dict dict;
  dict["layers"] = to_dicts(layers, out.n_layer_params);
  dict["policies"] = to_dicts(policies, out.n_policies);
  dict["codecs"] = to_dicts(codecs, out.n_codecs);
  dict["indexes"] = to_dicts(indexes, out.n_indexes);
  dict["default_mode"] = out.default_mode;
  dict["default_budget"] = out.default_budget;
  dict["text"] = to_python(out.text);
  return dict;
}

// Bytes that a framework sees as an array; they are given back with the last view of them.
struct Owned {
  Client::Piece piece;
  void* data = nullptr;
};

nb::object make_bytes(Client& client, uint64_t size) {
  auto owned = std::make_unique<Owned>();
  client.call([](kvm_client* /*client*/) { return KVM_OK; });  // it is open, and of this process
  if (client.is_embedded()) {
    owned->data = size > PTRDIFF_MAX - 64 ? nullptr : std::aligned_alloc(64, (size + 63) / 64 * 64);
    if (owned->data == nullptr) {
      throw StatusError{KVM_ERR_NO_MEMORY,
                        "the machine has refused " + std::to_string(size) + " bytes"};
    }
  } else {
    owned->piece = client.alloc(size);
    owned->data = owned->piece.arena->data(owned->piece.buffer);
  }
  void* data = owned->data;
  const nb::capsule owner(owned.release(), [](void* p) noexcept {
    const std::unique_ptr<Owned> gone(static_cast<Owned*>(p));
    if (gone->piece.arena != nullptr) {
      gone->piece.arena->free(gone->piece.buffer);
    } else {
      std::free(gone->data);
    }
  });
  const size_t shape[1] = {size};
  return nb::cast(nb::ndarray<nb::array_api, uint8_t, nb::ndim<1>>(data, 1, shape, owner));
}

}  // namespace

uint32_t fork_generation() { return n_forks.load(std::memory_order_relaxed); }

// --- Arena --------------------------------------------------------------------------------------

Arena::Arena(kvm_arena* arena, uint64_t size) : arena_(arena), size_(size) {
  if (kvm_arena_alloc(arena_, 64, 64, &first_) == KVM_OK) {
    begin_ = reinterpret_cast<uintptr_t>(kvm_arena_data(arena_, first_)) - first_.where;
    kvm_arena_free(arena_, first_);
  }
}

Arena::~Arena() {
  if (generation_ != fork_generation()) {
    return;
  }
  if (!Unlocked::is_here()) {
    const Unlocked unlocked;  // kvmd is told
    kvm_arena_destroy(arena_);
  } else {
    kvm_arena_destroy(arena_);
  }
}

void Arena::free(const kvm_buffer& buffer) {
  if (generation_ == fork_generation()) {
    kvm_arena_free(arena_, buffer);
  }
}

kvm_buffer Arena::alloc(uint64_t size) {
  kvm_buffer buffer{};
  return kvm_arena_alloc(arena_, size, 64, &buffer) == KVM_OK ? buffer : kvm_buffer{};
}

kvm_buffer Arena::find(const void* address, uint64_t size) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (begin_ == 0 || at < begin_ || at - begin_ > size_ || size > size_ - (at - begin_)) {
    return {};
  }
  kvm_buffer buffer = first_;
  buffer.where = at - begin_;
  buffer.size = size;
  return buffer;
}

// --- Client -------------------------------------------------------------------------------------

std::shared_ptr<Client> Client::connect(const std::optional<std::string>& socket,
                                        const std::optional<std::string>& name,
                                        uint64_t timeout_ns) {
  auto params = sized<kvm_connect_params>();
  params.socket_path = socket.has_value() ? socket->c_str() : nullptr;
  params.client_name = name.has_value() ? name->c_str() : nullptr;
  params.timeout_ns = timeout_ns;
  kvm_client* client = nullptr;
  {
    const Unlocked unlocked;
    check(kvm_connect(&params, &client));
  }
  return std::make_shared<Client>(client);
}

std::shared_ptr<Client> Client::open_embedded(uint32_t n_threads, uint64_t capacity_bytes) {
  auto params = sized<kvm_embedded_params>();
  params.n_threads = n_threads;
  params.host_capacity_bytes = capacity_bytes;
  kvm_client* client = nullptr;
  {
    const Unlocked unlocked;
    check(kvm_open_embedded(&params, &client));
  }
  return std::make_shared<Client>(client);
}

Client::Client(kvm_client* client) : client_(client) {
  auto info = sized<kvm_client_info>();
  if (kvm_client_get_info(client_, &info) == KVM_OK) {
    is_embedded_ = (info.features & KVM_FEATURE_EMBEDDED) != 0;
    max_arena_bytes_ = info.max_arena_bytes;
  }
}

Client::~Client() {
  const Unlocked unlocked;
  if (generation_ == fork_generation()) {
    kvm_client_close(client_);
  }
}

Client::Use::Use(Client* client) {
  if (client->generation_ != fork_generation()) {
    throw StatusError{KVM_ERR_FORKED, "the client belongs to the parent of this process"};
  }
  if (!client->is_closed()) {  // else close() would wait for calls that begin all the time
    lock_ = std::shared_lock(client->mutex_);
    client_ = client->client_;
  }
  if (client_ == nullptr) {
    throw StatusError{KVM_ERR_DISCONNECTED, "the client is closed"};
  }
}

void Client::close() {
  Queue::Done done;
  const Unlocked unlocked;
  if (generation_ != fork_generation()) {
    return;
  }
  is_closed_.store(true, std::memory_order_release);
  const std::unique_lock lock(mutex_);
  {
    const std::lock_guard queues_lock(queues_mutex_);
    for (Queue* queue : queues_) {
      queue->end(&done);
    }
  }
  kvm_client_close(std::exchange(client_, nullptr));
}

void Client::add_queue(Queue* queue) {
  const std::lock_guard lock(queues_mutex_);
  queues_.push_back(queue);
}

void Client::remove_queue(Queue* queue) {
  const std::lock_guard lock(queues_mutex_);
  std::erase(queues_, queue);
}

void Client::reconnect() {
  if (generation_ == fork_generation()) {
    spare_.reset();
  }
  const Unlocked unlocked;
  if (generation_ != fork_generation()) {
    throw StatusError{KVM_ERR_FORKED, "the client belongs to the parent of this process"};
  }
  const std::unique_lock lock(mutex_);
  if (client_ == nullptr) {
    throw StatusError{KVM_ERR_DISCONNECTED, "the client is closed"};
  }
  check(kvm_client_reconnect(client_));
}

Client::Piece Client::alloc(uint64_t size) {
  std::erase_if(arenas_, [](const std::weak_ptr<Arena>& arena) { return arena.expired(); });
  for (const std::weak_ptr<Arena>& weak : arenas_) {
    const std::shared_ptr<Arena> arena = weak.lock();
    const kvm_buffer buffer = arena != nullptr ? arena->alloc(size) : kvm_buffer{};
    if (buffer.kind != KVM_BUFFER_NONE) {
      return {arena, buffer};
    }
  }
  if (size > max_arena_bytes_) {
    throw StatusError{KVM_ERR_LIMIT, "the array has " + std::to_string(size) +
                                         " bytes; max_arena_bytes is " +
                                         std::to_string(max_arena_bytes_)};
  }
  auto params = sized<kvm_arena_params>();
  // Room for the arena's own lists beside a buffer that fills it.
  params.size =
      std::min(max_arena_bytes_, std::max(size + size / 64 + (uint64_t{1} << 16), kArenaBytes));
  kvm_arena* raw = nullptr;
  call([&](kvm_client* c) { return kvm_arena_create(c, &params, &raw); });
  auto arena = std::make_shared<Arena>(raw, params.size);
  const kvm_buffer buffer = arena->alloc(size);
  if (buffer.kind == KVM_BUFFER_NONE) {
    throw StatusError{KVM_ERR_NO_SPACE, kvm_last_error()};
  }
  arenas_.push_back(arena);
  if (params.size <= kArenaBytes) {
    spare_ = arena;
  }
  return {arena, buffer};
}

kvm_buffer Client::find(const void* address, uint64_t size) const {
  for (const std::weak_ptr<Arena>& weak : arenas_) {
    const std::shared_ptr<Arena> arena = weak.lock();
    const kvm_buffer buffer = arena != nullptr ? arena->find(address, size) : kvm_buffer{};
    if (buffer.kind != KVM_BUFFER_NONE) {
      return buffer;
    }
  }
  return {};
}

// --- Python -------------------------------------------------------------------------------------

void register_client(nb::module_& module) {
  module.def("preset", preset, nb::arg("name"), nb::arg("numbers"),
             nb::arg("kv_head_masks").none());
  pthread_atfork(nullptr, nullptr, [] { n_forks.fetch_add(1, std::memory_order_relaxed); });
  nb::class_<Client>(module, "Client", nb::is_weak_referenceable())
      .def_static("connect", &Client::connect, nb::arg("socket").none(), nb::arg("name").none(),
                  nb::arg("timeout_ns"))
      .def_static("open_embedded", &Client::open_embedded, nb::arg("n_threads"),
                  nb::arg("capacity_bytes"))
      .def("close", &Client::close)
      .def("reconnect", &Client::reconnect)
      .def_prop_ro("is_closed", &Client::is_closed)
      .def_prop_ro("is_embedded", &Client::is_embedded)
      .def_prop_ro("n_copied_bytes", [](const Client& c) { return c.n_copied_bytes.load(); })
      .def("info",
           [](Client& client) {
             auto info = sized<kvm_client_info>();
             client.call([&](kvm_client* c) { return kvm_client_get_info(c, &info); });
             return to_dict(info);
           })
      .def("ping",
           [](Client& client) {
             uint64_t took_ns = 0;
             client.call([&](kvm_client* c) { return kvm_client_ping(c, &took_ns); });
             return took_ns;
           })
      .def("stats",
           [](Client& client) {
             auto stats = sized<kvm_stats>();
             client.call([&](kvm_client* c) { return kvm_get_stats(c, &stats); });
             return to_dict(stats);
           })
      .def("stats_text", [](Client& client) { return read_text(client, kvm_get_stats_text); })
      .def("config_text", [](Client& client) { return read_text(client, kvm_get_config_text); })
      .def("register_space", register_space, nb::arg("name"), nb::arg("numbers"), nb::arg("layers"),
           nb::arg("policies"), nb::arg("codecs"), nb::arg("indexes"), nb::arg("rope_inv_freq"),
           nb::arg("sink_logits").none(), nb::arg("alibi_slopes").none())
      .def(
          "find_space",
          [](Client& client, const std::string& name) {
            kvm_space_id space = 0;
            client.call([&](kvm_client* c) { return kvm_space_find(c, name.c_str(), &space); });
            return space;
          },
          nb::arg("name"))
      .def(
          "space_info",
          [](Client& client, uint64_t space) {
            auto info = sized<kvm_space_info>();
            client.call([&](kvm_client* c) { return kvm_space_get_info(c, space, &info); });
            return to_dict(info);
          },
          nb::arg("space"))
      .def("spaces",
           [](Client& client) { return read_list<kvm_space_info>(client, kvm_space_list); })
      .def(
          "drop_space",
          [](Client& client, uint64_t space) {
            client.call([&](kvm_client* c) { return kvm_space_drop(c, space); });
          },
          nb::arg("space"))
      .def(
          "create_sequence",
          [](Client& client, uint64_t space, uint32_t flags, uint64_t reserve) {
            auto params = sized<kvm_seq_params>();
            params.flags = flags;
            params.reserve = reserve;
            kvm_seq_id seq = 0;
            client.call([&](kvm_client* c) { return kvm_seq_create(c, space, &params, &seq); });
            return seq;
          },
          nb::arg("space"), nb::arg("flags"), nb::arg("reserve"))
      .def(
          "fork_sequence",
          [](Client& client, uint64_t parent, uint64_t n_tokens) {
            kvm_seq_id seq = 0;
            client.call([&](kvm_client* c) { return kvm_seq_fork(c, parent, n_tokens, &seq); });
            return seq;
          },
          nb::arg("parent"), nb::arg("n_tokens"))
      .def(
          "truncate_sequence",
          [](Client& client, uint64_t seq, uint64_t n_tokens) {
            client.call([&](kvm_client* c) { return kvm_seq_truncate(c, seq, n_tokens); });
          },
          nb::arg("seq"), nb::arg("n_tokens"))
      .def(
          "commit_sequence",
          [](Client& client, uint64_t seq, uint64_t n_tokens) {
            client.call([&](kvm_client* c) { return kvm_seq_commit(c, seq, n_tokens); });
          },
          nb::arg("seq"), nb::arg("n_tokens"))
      .def(
          "free_sequence",
          [](Client& client, uint64_t seq) {
            client.call([&](kvm_client* c) { return kvm_seq_free(c, seq); });
          },
          nb::arg("seq"))
      .def(
          "publish_sequence",
          [](Client& client, uint64_t seq) {
            client.call([&](kvm_client* c) { return kvm_seq_publish(c, seq); });
          },
          nb::arg("seq"))
      .def(
          "take_sequence",
          [](Client& client, uint64_t seq) {
            client.call([&](kvm_client* c) { return kvm_seq_take(c, seq); });
          },
          nb::arg("seq"))
      .def(
          "prefetch_sequence",
          [](Client& client, uint64_t seq) {
            client.call([&](kvm_client* c) { return kvm_seq_prefetch(c, seq); });
          },
          nb::arg("seq"))
      .def(
          "drop_tokens",
          [](Client& client, uint64_t seq, uint64_t begin, uint64_t end) {
            client.call([&](kvm_client* c) { return kvm_seq_drop(c, seq, begin, end); });
          },
          nb::arg("seq"), nb::arg("begin"), nb::arg("end"))
      .def(
          "set_priority",
          [](Client& client, uint64_t seq, uint32_t priority, uint64_t begin, uint64_t end,
             uint64_t keep_ns) {
            const kvm_priority_params params = priority_params(seq, priority, begin, end, keep_ns);
            client.call([&](kvm_client* c) { return kvm_seq_set_priority(c, &params); });
          },
          nb::arg("seq"), nb::arg("priority"), nb::arg("begin"), nb::arg("end"), nb::arg("keep_ns"))
      .def(
          "save_sequence",
          [](Client& client, uint64_t seq, const std::string& name, uint32_t flags) {
            client.call([&](kvm_client* c) { return kvm_seq_save(c, seq, name.c_str(), flags); });
          },
          nb::arg("seq"), nb::arg("name"), nb::arg("flags"))
      .def(
          "load_sequence",
          [](Client& client, uint64_t space, const std::string& name) {
            uint64_t seq = 0;
            client.call([&](kvm_client* c) { return kvm_seq_load(c, space, name.c_str(), &seq); });
            return seq;
          },
          nb::arg("space"), nb::arg("name"))
      .def(
          "delete_snapshot",
          [](Client& client, const std::string& name) {
            client.call([&](kvm_client* c) { return kvm_snapshot_delete(c, name.c_str()); });
          },
          nb::arg("name"))
      .def(
          "snapshots",
          [](Client& client, uint32_t flags) {
            return read_list<kvm_snapshot_info>(
                client, [&](kvm_client* c, kvm_snapshot_info* out, size_t capacity, size_t* n) {
                  return kvm_snapshot_list(c, flags, out, capacity, n);
                });
          },
          nb::arg("flags"))
      .def(
          "sequence_info",
          [](Client& client, uint64_t seq) {
            auto info = sized<kvm_seq_info>();
            client.call([&](kvm_client* c) { return kvm_seq_get_info(c, seq, &info); });
            return to_dict(info);
          },
          nb::arg("seq"))
      .def(
          "sequences",
          [](Client& client, uint64_t space, uint32_t flags) {
            return read_list<kvm_seq_info>(
                client, [&](kvm_client* c, kvm_seq_info* out, size_t capacity, size_t* n) {
                  return kvm_seq_list(c, space, flags, out, capacity, n);
                });
          },
          nb::arg("space"), nb::arg("flags"))
      .def("clients",
           [](Client& client) { return read_list<kvm_client_entry>(client, kvm_client_list); })
      .def("users", [](Client& client) { return read_list<kvm_user_entry>(client, kvm_user_list); })
      .def(
          "set_quota",
          [](Client& client, const nb::dict& fields) {
            auto params = sized<kvm_quota_params>();
            from_dict(fields, &params);
            client.call([&](kvm_client* c) { return kvm_quota_set(c, &params); });
          },
          nb::arg("params"))
      .def(
          "evict",
          [](Client& client, const nb::dict& fields) {
            auto params = sized<kvm_evict_params>();
            from_dict(fields, &params);
            auto result = sized<kvm_evict_result>();
            client.call([&](kvm_client* c) { return kvm_evict(c, &params, &result); });
            return to_dict(result);
          },
          nb::arg("params"))
      .def("make_bytes", make_bytes, nb::arg("size"));
}

}  // namespace kvm::python
