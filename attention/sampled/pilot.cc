// SPDX-License-Identifier: Apache-2.0
#include "attention/sampled/pilot.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/sampled/estimate.h"
#include "base/merge.h"

namespace kvm::attention {
namespace {

using hash_index::permanent_random;

constexpr uint64_t kPilotSeed = 0x9d39247e33776d41;
constexpr uint64_t kProbeSeed = 0x2af7398005aaa5c7;
constexpr uint32_t kPilotShare = 16;
constexpr uint32_t kFewestBlocks = 32;
constexpr uint32_t kMostBlocks = 512;
// Keys of the pilot that are read for each row, and for all rows together.
constexpr double kProbeKeys = 64;
constexpr uint32_t kMostProbes = 2048;
// How far the probe looks into F.
constexpr uint64_t kProbeTail = 256;
constexpr uint32_t kMostProbeRanges = 16;

// Blocks of R for each one that the pilot looks at.
uint64_t pilot_stride(uint64_t n_blocks) {
  const uint64_t stride = std::clamp<uint64_t>(n_blocks / kFewestBlocks, 1, kPilotShare);
  return std::max(stride, (n_blocks + kMostBlocks - 1) / kMostBlocks);
}

uint64_t n_pilot_blocks(uint64_t n_keys) {
  const uint64_t n_blocks = n_keys / kPageTokens;
  const uint64_t stride = pilot_stride(n_blocks);
  return (n_blocks + stride - 1) / stride;
}

struct Pilot {
  float top[kMaxApproxRows];     // largest logit of a row in the pilot
  float factor[kMaxApproxRows];  // c e^top
  size_t n;                      // keys
  double share;                  // keys of R for each key of the pilot
  float* logits;                 // [rows][n]
  float* sizes;                  // [rows][n], each row relative to its largest logit
  float* largest_size;           // [n]: over rows, c applied
  float* norms;                  // [n]
  uint64_t* positions;           // [blocks]
  float* block_logits;           // [rows][64]
  // The probe.
  uint64_t* probe_position;  // [kMostProbes]
  uint32_t* probe_ids;
  float* probe_factor;  // [kMostProbes][rows]: what a key stands for
  float* probe_size;    // [kMostProbes][rows]
  float* probe_excess;  // [kMostProbes][rows]: share of sigma^2 / eps^2 at p = 1/2
  float* o;             // [padded rows][acc_stride]
  void* sums;
  void* state;
  std::byte* exact_scratch;
};

Pilot carve_pilot(const Problem& problem, const Plan& exact, uint64_t n_keys, Carver& carver) {
  const uint32_t rows = problem.n_query * problem.group;
  Pilot p;
  const uint64_t n_blocks = n_pilot_blocks(n_keys);
  p.n = n_blocks * kPageTokens;
  p.share = static_cast<double>(n_keys) / static_cast<double>(std::max<size_t>(p.n, 1));
  p.logits = carver.take<float>(rows * p.n);
  p.sizes = carver.take<float>(rows * p.n);
  p.largest_size = carver.take<float>(p.n);
  p.norms = carver.take<float>(p.n);
  p.positions = carver.take<uint64_t>(n_blocks);
  p.block_logits = carver.take<float>(size_t{rows} * kPageTokens);
  p.probe_position = carver.take<uint64_t>(kMostProbes);
  p.probe_ids = carver.take<uint32_t>(kMostProbes);
  p.probe_factor = carver.take<float>(size_t{kMostProbes} * rows);
  p.probe_size = carver.take<float>(size_t{kMostProbes} * rows);
  p.probe_excess = carver.take<float>(size_t{kMostProbes} * rows);
  p.o = carver.take<float>(size_t{padded_rows(rows)} * acc_stride(problem));
  p.sums = carver.take<std::byte>(gather_sums_bytes(problem));
  p.state = carver.take<std::byte>(state_bytes(problem, rows));
  p.exact_scratch = carver.take<std::byte>(exact_scratch_bytes(problem, exact));
  return p;
}

// Sketch logits and |v| of the pilot's blocks.
void look(const Context& c, Pilot& p) {
  const uint64_t seed = c.params().seed ^ kPilotSeed;
  const uint64_t stride = pilot_stride(c.plan->n_keys_indexed / kPageTokens);
  const QueryRows q = query_rows(c.problem, c.prepared.exact);
  uint64_t at = 0;     // index of a stretch's first block among those of R
  uint64_t group = 0;  // how many of the pilot's blocks are found
  uint64_t next = 0;   // index of the one that is looked for
  const uint64_t n_blocks = c.plan->n_keys_indexed / kPageTokens;
  const auto choose = [&] {
    const uint64_t first = group * stride;
    const uint64_t n = first < n_blocks ? std::min(stride, n_blocks - first) : 1;
    const float u = permanent_random(seed, group);
    next = first + std::min(n - 1, static_cast<uint64_t>(u * static_cast<float>(n)));
  };
  choose();
  for_stretches_in(c, 0, UINT64_MAX, [&](const Use& use, const Stretch& stretch) {
    const SketchedRun& run = c.input->index.sketches[stretch.index_run];
    const uint64_t offset = (stretch.position - run.position) / kPageTokens;
    const hash_index::SketchSpan span{.frame = run.frame,
                                      .query = c.prepared.queries + use.query_at,
                                      .blocks = run.blocks,
                                      .n_blocks = run.n_blocks,
                                      .position = run.position};
    const float* bias = bias_of(q, use.variant);
    for (; next < at + stretch.n_blocks; ++group, choose()) {
      const uint64_t block = offset + next - at;
      const size_t to = group * kPageTokens;
      hash_index::scan_logits(span, c.rows, static_cast<uint32_t>(block), p.block_logits,
                              p.norms + to);
      for (uint32_t r = 0; r < c.rows; ++r) {
        float* logits = p.logits + r * p.n + to;
        std::memcpy(logits, p.block_logits + r * kPageTokens, kPageTokens * sizeof(float));
        for (uint32_t i = 0; bias != nullptr && i < kPageTokens; ++i) {
          logits[i] += bias[r] * c.problem.scale;
        }
      }
      p.positions[group] = run.position + block * kPageTokens;
    }
    at += stretch.n_blocks;
  });
}

// Thresholds with which each row draws `wanted` keys of the pilot.
void solve(const Context& c, Pilot& p, double wanted) {
  const SampledKernels& kernels = *c.table->sampled;
  for (uint32_t r = 0; r < c.rows; ++r) {
    float* sizes = p.sizes + r * p.n;
    p.top[r] = kernels.largest(p.logits + r * p.n, p.n);
    kernels.sizes(p.logits + r * p.n, p.norms, p.top[r], p.n, sizes);
    p.factor[r] = threshold(kernels, sizes, p.n, wanted);
  }
}

// largest_size becomes the largest of c size over rows.
void unite(const Context& c, Pilot& p) {
  std::memset(p.largest_size, 0, p.n * sizeof(float));
  for (uint32_t r = 0; r < c.rows; ++r) {
    c.table->sampled->raise(p.sizes + r * p.n, p.factor[r], p.n, p.largest_size);
  }
}

// --- Without a budget ---------------------------------------------------------------------------

// Draws keys of the pilot. Returns how many.
uint32_t draw_probe(const Context& c, Pilot& p) {
  const uint64_t seed = c.params().seed ^ kProbeSeed;
  uint32_t n = 0;
  for (size_t i = 0; i < p.n && n < kMostProbes; ++i) {
    const float size = std::max(p.largest_size[i], hash_index::kMinSize);
    const uint64_t position = p.positions[i / kPageTokens] + i % kPageTokens;
    if (size < 1.0f && permanent_random(seed, position) >= size) {
      continue;
    }
    const double chance = std::min(1.0, static_cast<double>(size));
    p.probe_position[n] = position;
    p.probe_ids[n] = n;
    for (uint32_t r = 0; r < c.rows; ++r) {
      p.probe_size[n * c.rows + r] =
          std::max(p.sizes[r * p.n + i] * p.factor[r], hash_index::kMinSize);
      p.probe_factor[n * c.rows + r] = static_cast<float>(p.share / chance);
      p.probe_excess[n * c.rows + r] = p.logits[r * p.n + i];  // s_hat, until it is used
    }
    ++n;
  }
  return n;
}

// The state of the first and the last tokens of F, which hold most of its mass.
void eval_near_fixed(const Context& c, Pilot& p) {
  PositionRange ranges[kMostProbeRanges];
  size_t n = 0;
  const KvRun& last = c.problem.runs.back();
  uint64_t end = last.position + last.n_tokens;
  if (c.problem.visible.causal || c.problem.visible.tree != nullptr) {
    end = std::min(end, c.problem.visible.query_position + c.problem.n_query);
  }
  const uint64_t near = end - std::min(end, kProbeTail);
  for (uint32_t i = 0; i < c.prepared.head->n_fixed; ++i) {
    const PositionRange& range = c.prepared.fixed[i];
    const PositionRange parts[2] = {
        {range.begin, std::min<uint64_t>(range.end, kPageTokens)},
        {std::max({range.begin, near, uint64_t{kPageTokens}}), std::min(range.end, end)}};
    for (const PositionRange& part : parts) {
      if (part.begin < part.end && n < kMostProbeRanges) {
        ranges[n++] = part;
      }
    }
  }
  const PositionRange none{UINT64_MAX - 1, UINT64_MAX};
  Problem problem = c.problem;
  problem.visible.include =
      n > 0 ? std::span<const PositionRange>(ranges, n) : std::span<const PositionRange>(&none, 1);
  const Plan plan = make_plan(problem, c.table);
  eval_exact(problem, plan, c.prepared.exact, 0, UINT64_MAX, p.exact_scratch, p.state);
}

struct RowProbe {
  double top = 0;
  double mass = 0;  // D, relative to e^top
  double norm_o = 0;
  double kappa = 0;
};

// o of each row to p.o; the rest is returned.
void estimate_probe(const Context& c, Pilot& p, uint32_t n, RowProbe* probes) {
  const Problem& problem = c.problem;
  const GatherContext context = c.gathering();
  const GatherSums sums = gather_sums_view(problem, p.sums);
  clear_sums(problem, sums);
  gather(context,
         {.kind = kGatherWeighted,
          .ids = {p.probe_ids, n},
          .position = p.probe_position,
          .per_row = p.probe_factor},
         sums);
  const StateView fixed = state_view(problem, c.rows, p.state);
  std::memset(p.o, 0, size_t{padded_rows(c.rows)} * acc_stride(problem) * sizeof(float));
  for (uint32_t r = 0; r < c.rows; ++r) {
    RowProbe& probe = probes[r];
    const double sink = problem.sink_logits == nullptr
                            ? -INFINITY
                            : static_cast<double>(problem.sink_logits[r % problem.group]);
    probe.top = std::max({static_cast<double>(fixed.m[r]), static_cast<double>(sums.m[r]), sink});
    if (probe.top == -INFINITY) {
      continue;
    }
    const double of_fixed = std::exp(static_cast<double>(fixed.m[r]) - probe.top);
    const double of_sample = std::exp(static_cast<double>(sums.m[r]) - probe.top);
    double closed = 0;
    for (uint32_t i = 0; i < kGatherKeys; ++i) {
      closed += static_cast<double>(sums.sums[(r * kGatherSums + kSumClosed) * kGatherKeys + i]);
    }
    probe.mass = of_fixed * static_cast<double>(fixed.l[r]) + of_sample * closed +
                 std::exp(sink - probe.top);
    double o2 = 0;
    for (uint32_t d = 0; d < problem.dim_v; ++d) {
      const double numerator =
          of_fixed * static_cast<double>(fixed.o[size_t{r} * problem.dim_v + d]) +
          of_sample * static_cast<double>(sums.acc[size_t{r} * acc_stride(problem) + d]);
      const double o = probe.mass > 0 ? numerator / probe.mass : 0.0;
      p.o[size_t{r} * acc_stride(problem) + d] = static_cast<float>(o);
      o2 += o * o;
    }
    probe.norm_o = std::sqrt(o2);
  }
}

// Leaves in probe_excess, for each key and row, w^2 |v - o|^2 / (D |o|)^2 times what it stands for,
// and in probes the kappa that the noise asks for.
void weigh_probe(const Context& c, Pilot& p, uint32_t n, RowProbe* probes) {
  const GatherContext context = c.gathering();
  const GatherList list{.ids = {p.probe_ids, n}, .position = p.probe_position};
  BatchMaker maker(context, list);
  GatherArgs args;
  GatherBatch batch;
  const uint32_t padded = padded_rows(c.rows);
  alignas(64) float logits[kMaxGatherRows * kGatherKeys];
  alignas(64) float dots[kMaxGatherRows * kGatherKeys];
  alignas(64) float squares[kGatherKeys];
  double moments[kMaxApproxRows][3] = {};  // of s - s_hat, over keys with p < 1
  while (maker.next(&args, &batch)) {
    context.kernels->logits(&args, &batch, logits);
    context.kernels->norms(batch.v, batch.dtype_v, args.dim_v, squares);
    // v . o by the kernel that gives q . k.
    GatherBatch values = batch;
    std::copy_n(batch.v, 2 * kGatherKeys, values.k);
    std::copy_n(batch.v, kGatherKeys, values.k + 2 * kGatherKeys);
    std::copy_n(batch.v_scale, kGatherKeys, values.k_scale);
    values.dtype_k = batch.dtype_v;
    const GatherArgs by_o{.q = p.o,
                          .q_bf16 = nullptr,
                          .bias = nullptr,
                          .q_stride = args.acc_stride,
                          .rows = c.rows,
                          .rows_padded = padded,
                          .dim_k = args.dim_v,
                          .dim_v = args.dim_v,
                          .acc_stride = args.acc_stride,
                          .scale = 1.0f,
                          .softcap = 0.0f};
    context.kernels->logits(&by_o, &values, dots);
    for (uint32_t i = 0; i < batch.n; ++i) {
      const size_t id = maker.first() + i;
      const double v2 = static_cast<double>(squares[i]) * static_cast<double>(batch.v_scale[i]) *
                        static_cast<double>(batch.v_scale[i]);
      for (uint32_t r = 0; r < c.rows; ++r) {
        const RowProbe& probe = probes[r];
        const double s = static_cast<double>(logits[r * kGatherKeys + i]);
        const double w = std::exp(s - probe.top);
        const double factor = static_cast<double>(p.probe_factor[id * c.rows + r]);
        if (static_cast<double>(p.probe_factor[id * c.rows + r]) > p.share) {
          const double e = s - static_cast<double>(p.probe_excess[id * c.rows + r]);
          moments[r][0] += factor * w;
          moments[r][1] += factor * w * e;
          moments[r][2] += factor * w * e * e;
        }
        const double o2 = probe.norm_o * probe.norm_o;
        const double away =
            std::max(v2 - 2 * static_cast<double>(dots[r * kGatherKeys + i]) + o2, 0.0);
        const double scale = probe.mass * probe.mass * o2;
        p.probe_excess[id * c.rows + r] =
            static_cast<float>(scale > 0 ? factor * w * w * away / scale : 0.0);
      }
    }
  }
  for (uint32_t r = 0; r < c.rows; ++r) {
    const double mass = std::max(moments[r][0], 1e-300);
    const double mean = moments[r][1] / mass;
    const double variance = std::clamp(moments[r][2] / mass - mean * mean, 0.0, 50.0);
    probes[r].kappa = kappa_of(static_cast<double>(c.params().delta)) *
                      std::max(1.0, std::exp((variance - kNoiseAllowance) / 2));
  }
}

// For each row, the square of (its bar over eps) with all c grown by growth[row].
void probe_bars(const Context& c, const Pilot& p, uint32_t n, const RowProbe* probes,
                const double* growth, double* ratio) {
  const auto eps = static_cast<double>(c.params().eps);
  float factor[kMaxApproxRows];
  double variance[kMaxApproxRows] = {};
  std::transform(growth, growth + c.rows, factor, [](double g) { return static_cast<float>(g); });
  for (uint32_t i = 0; i < n; ++i) {
    float chance = 0;
    for (uint32_t r = 0; r < c.rows; ++r) {
      chance = std::max(chance, factor[r] * p.probe_size[i * c.rows + r]);
    }
    if (chance < 1.0f) {
      const double odds = 1.0 / static_cast<double>(chance) - 1.0;
      for (uint32_t r = 0; r < c.rows; ++r) {
        variance[r] += static_cast<double>(p.probe_excess[i * c.rows + r]) * odds;
      }
    }
  }
  for (uint32_t r = 0; r < c.rows; ++r) {
    ratio[r] = variance[r] * probes[r].kappa * probes[r].kappa / std::max(eps * eps, 1e-8);
  }
}

// Growth of each c with which all bars are eps: V falls like 1/c or faster. A row gains from what
// is drawn for others, so each goes its own way by small steps, and all together by the last.
void solve_growth(const Context& c, const Pilot& p, uint32_t n, const RowProbe* probes,
                  double* growth) {
  constexpr int kSteps = 8;
  constexpr double kDamping = 0.8;
  const double least = 1.0 / p.share;
  double ratio[kMaxApproxRows];
  std::fill_n(growth, c.rows, 1.0);
  for (int step = 0; step < kSteps; ++step) {
    probe_bars(c, p, n, probes, growth, ratio);
    bool done = true;
    for (uint32_t r = 0; r < c.rows; ++r) {
      done = done && (std::abs(ratio[r] - 1.0) < 0.1 || (ratio[r] < 1.0 && growth[r] <= least));
      const double factor = std::pow(std::clamp(ratio[r], 1.0 / 64, 64.0), kDamping);
      growth[r] = std::clamp(growth[r] * factor, least, 1e9);
    }
    if (done) {
      break;
    }
  }
  probe_bars(c, p, n, probes, growth, ratio);
  const double worst = std::max(1.0, *std::max_element(ratio, ratio + c.rows));
  for (uint32_t r = 0; r < c.rows; ++r) {
    growth[r] = std::min(growth[r] * std::min(worst, 64.0), 1e9);
  }
}

void probe_growth(const Context& c, Pilot& p) {
  solve(c, p, std::min(kProbeKeys, static_cast<double>(p.n) / 2));
  unite(c, p);
  const uint32_t n = draw_probe(c, p);
  RowProbe probes[kMaxApproxRows];
  double growth[kMaxApproxRows];
  eval_near_fixed(c, p);
  estimate_probe(c, p, n, probes);
  weigh_probe(c, p, n, probes);
  solve_growth(c, p, n, probes, growth);
  for (uint32_t r = 0; r < c.rows; ++r) {
    p.factor[r] *= static_cast<float>(growth[r]);
  }
  unite(c, p);
  uint64_t closed = 0;
  double open = 0;
  c.table->sampled->saturation(p.largest_size, 1.0f, p.n, &closed, &open);
  const double keys = p.share * (static_cast<double>(closed) + open);
  const double most =
      max_read_fraction(c.params(), c.problem) * static_cast<double>(c.plan->n_keys_present);
  c.prepared.head->answer_exactly = keys > most ? 1 : 0;
}

}  // namespace

float threshold(const SampledKernels& kernels, const float* sizes, size_t n, double wanted) {
  uint64_t closed = 0;
  double open = 0;
  kernels.saturation(sizes, INFINITY, n, &closed, &open);
  double c = 0;
  // c rises towards the solution: each round takes out the keys that it saturates.
  for (int round = 0; round < 64 && open > 0; ++round) {
    const double next = (wanted - static_cast<double>(closed)) / open;
    if (!(next > c)) {
      break;
    }
    c = next;
    uint64_t reaching = 0;
    kernels.saturation(sizes, static_cast<float>(1.0 / c), n, &reaching, &open);
    if (reaching == closed) {
      break;
    }
    closed = reaching;
    if (static_cast<double>(closed) >= wanted) {
      break;
    }
  }
  return static_cast<float>(std::clamp(c, 1e-30, 1e30));
}

double max_read_fraction(const ApproxParams& params, const Problem& problem) {
  if (params.max_read_fraction > 0) {
    return static_cast<double>(params.max_read_fraction);
  }
  const double row = static_cast<double>(row_bytes(problem)) * (13.5 / 512);  // ns
  constexpr double kScan = 1.5;
  constexpr double kAlone = 14;
  return std::max(0.7 * (row - kScan) / (row + kAlone), 0.02);
}

size_t pilot_scratch_bytes(const Problem& problem, const Plan& exact, uint64_t n_keys) {
  Carver carver(nullptr);
  carve_pilot(problem, exact, n_keys, carver);
  return carver.used_bytes();
}

void find_thresholds(const Context& c, void* scratch) {
  Carver carver(scratch);
  Pilot p = carve_pilot(c.problem, c.exact, c.plan->n_keys_indexed, carver);
  look(c, p);
  c.prepared.head->answer_exactly = 0;
  if (c.params().budget > 0) {
    solve(c, p, static_cast<double>(c.params().budget) / p.share);
  } else {
    probe_growth(c, p);
  }
  for (uint32_t r = 0; r < c.rows; ++r) {
    c.prepared.head->log_c[r] = std::log(p.factor[r]) - p.top[r];
  }
}

}  // namespace kvm::attention
