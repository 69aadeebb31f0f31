// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "engine/image/image_pages.h"
#include "engine/image/image_restore.h"
#include "engine/image/sequence_image.h"
#include "engine/retention/policy_actions.h"
#include "engine/retention/retention_work.h"
#include "engine/store/store.h"
#include "tests/fuzz/seeds.h"
#include "tests/fuzz/targets.h"
#include "tiers/simulated/simulated_tier.h"

namespace kvm::testing {
namespace {

using namespace engine;
using tiers::ObjectRequest;

constexpr uint32_t kMostPages = 256;
constexpr uint32_t kLayers = 2;

// Heads of each kind.
SpaceSpec spec() {
  SpaceSpec spec;
  spec.name = "fuzzed";
  spec.params.struct_size = sizeof(spec.params);
  spec.params.n_layers = kLayers;
  spec.params.n_q_heads = 5;
  spec.params.n_kv_heads = 5;
  spec.params.head_dim_k = 8;
  const auto policy = [&](uint64_t head_mask, uint32_t retention) {
    spec.policies.push_back(
        {.kv_head_mask = {head_mask, 0}, .retention = retention, .n_sinks = 4, .n_recent = 100});
    return &spec.policies.back();
  };
  policy(1, KVM_RETAIN_SINKS_RECENT);
  policy(2, KVM_RETAIN_SINKS_RECENT_FOLD);
  kvm_policy_params* heavy = policy(4, KVM_RETAIN_HEAVY);
  heavy->n_heavy = 20;
  heavy->merge = KVM_MERGE_COUNTED;
  heavy->budgets = KVM_BUDGETS_BY_DENSITY;
  kvm_policy_params* demoting = policy(16, KVM_RETAIN_HEAVY);
  demoting->n_heavy = 70;
  demoting->merge = KVM_MERGE_DEMOTED;
  spec.codecs.push_back({.kv_head_mask = {16, 0},
                         .codec_k = KVM_CODEC_I4,
                         .codec_v = KVM_CODEC_I8,
                         .demoted_k = KVM_CODEC_I2,
                         .demoted_v = KVM_CODEC_I2});
  spec.codecs.push_back(
      {.kv_head_mask = {8, 0}, .codec_k = KVM_CODEC_I8_CHANNEL, .codec_v = KVM_CODEC_I8_CHANNEL});
  return spec;
}

struct Way final : tiers::Transfer {
  void on_done() noexcept override {}
};

// A store whose transfers end at once.
class World {
 public:
  World() {
    StoreOptions options;
    options.host_capacity_bytes = uint64_t{64} << 20;
    options.slow_tier = &tier_;
    store = Store::open(options).value();
    client = store->add_client({});
    space = store->register_space(spec()).value();
  }
  tiers::PageTable& pages() { return store->memory().pages(); }

  tiers::PlaceId write(const std::byte* data, uint64_t size_bytes) {
    Way way;
    way.kind = tiers::Transfer::Kind::kWrite;
    way.data = const_cast<std::byte*>(data);
    way.size_bytes = static_cast<uint32_t>(size_bytes);
    run(&way);
    return way.place;
  }
  void fetch(const Sequence& seq) {
    for (const PageList& list : seq.lists) {
      list.for_each([&](const PageEntry& entry, bool) {
        const tiers::PageTable::Move move = pages().begin_fetch(entry.page).value();
        Way way;
        way.place = pages().place(entry.page);
        way.data = move.target;
        way.size_bytes = static_cast<uint32_t>(move.size_bytes);
        run(&way);
        pages().end_fetch(move, true);
      });
    }
  }
  // Tokens of all layers, whatever they hold; and policies act.
  void append(Sequence* seq, uint32_t n_tokens) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      std::vector<AppendPiece> pieces;
      const AppendItem item = {.seq = seq, .layer = layer, .n_tokens = n_tokens};
      if (!store->reserve_append({&item, 1}, &pieces).is_ok()) {
        return;
      }
      store->publish(item);
    }
    RetentionWork work;
    ThreadWorkspace workspace;
    JobPlan plan;
    work.add(seq);
    RetentionWork::Next next = RetentionWork::Next::kMore;
    while (next != RetentionWork::Next::kDone) {
      next = work.next(*store, 1, workspace, &plan);
      for (uint32_t i = 0; next == RetentionWork::Next::kTasks && i < plan.n_tasks; ++i) {
        work.run(i, workspace);
      }
    }
  }

 private:
  void run(Way* way) {
    tiers::Transfer* transfer = way;
    tier_.submit({&transfer, 1});
    tier_.finish_all();
    KVM_ASSERT(way->status.is_ok());
  }

  tiers::SimulatedTier tier_{{.is_manual = true}};

 public:
  std::unique_ptr<Store> store;
  ClientId client = 0;
  kvm_space_id space = 0;
};

// What was read as a sequence can be used as one.
void use(SequenceImage&& image, const std::vector<uint32_t>& page_bytes) {
  World world;
  const std::vector<std::byte> zeros(tiers::kExtentBytes);
  std::vector<ObjectRequest::Page> places;
  for (const uint32_t size : page_bytes) {
    places.push_back({world.write(zeros.data(), size), size});
  }
  ImageRestore restore(std::move(places));
  restore.take(std::move(image));
  const Space& space = *world.store->space_for(world.client, world.space).value();
  Aside* aside =
      world.store->begin_aside(world.client, world.space, restore.page_bytes(space)).value();
  for (;;) {
    const Result<bool> is_done = restore.go_on(world.store.get(), aside, 10);
    KVM_ASSERT(is_done.is_ok());
    world.store->check_accounts();
    if (is_done.value()) {
      break;
    }
  }
  Sequence* seq = world.store->find_seq(world.client, world.store->admit_aside(aside)).value();
  world.fetch(*seq);
  std::vector<KvRun> runs;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t i = 0; i < seq->space().layers[layer].classes.size(); ++i) {
      world.store->collect_runs(seq, layer, i, &runs);
    }
  }
  world.append(seq, 150);
  world.append(seq, 1);
  world.store->check_accounts();
  (void)world.store->truncate_seq(seq, 100);
  world.store->check_accounts();
}

}  // namespace

void run_image(std::span<const uint8_t> input) {
  static const std::shared_ptr<const Space> kSpace = resolve_space(spec()).value();
  InputReader reader(input);
  const auto page_bytes = reader.take_many<uint32_t>(reader.take<uint16_t>() % kMostPages);
  const std::span<const uint8_t> rest = reader.take_bytes(input.size());
  std::vector<std::byte> body(rest.size());
  std::transform(rest.begin(), rest.end(), body.begin(),
                 [](uint8_t byte) { return std::byte{byte}; });
  Result<SequenceImage> image = decode_image(body, *kSpace, page_bytes);
  if (image.is_ok()) {
    use(std::move(image).value(), page_bytes);
  } else {
    KVM_ASSERT(!image.status().message().empty());
  }
}

Seeds image_seeds() {
  Seeds seeds;
  for (const uint32_t n_tokens : {0u, 100u, 700u}) {
    World world;
    Sequence* seq =
        world.store
            ->find_seq(world.client, world.store->create_seq(world.client, world.space, 0).value())
            .value();
    if (n_tokens != 0) {
      world.append(seq, n_tokens);
      const std::vector<float> sums(n_tokens, 0.5f);
      add_list_masses(&world.store->memory(), seq, 0, 2, sums, 0, false);
      const std::vector<float> row(40, 0.25f);
      KVM_ASSERT(world.store->observe(seq, {.layer = 1, .n_rows = 1, .q = row.data()}).is_ok());
      world.append(seq, 1);
      world.append(seq, 100);
    }
    ImagePages numbers;
    while (!numbers.go_on(world.pages(), *seq, 1000)) {
    }
    Bytes bytes;
    put(&bytes, static_cast<uint16_t>(numbers.pages().size()));
    for (const tiers::PageRef page : numbers.pages()) {
      put(&bytes, static_cast<uint32_t>(world.pages().page_bytes(page)));
    }
    const std::vector<std::byte> body = encode_image(*seq, numbers.lists()).value();
    for (const std::byte byte : body) {
      bytes.push_back(static_cast<uint8_t>(byte));
    }
    seeds.emplace_back(std::to_string(n_tokens) + "_tokens", std::move(bytes));
  }
  return seeds;
}

}  // namespace kvm::testing
