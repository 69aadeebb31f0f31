// SPDX-License-Identifier: Apache-2.0
#include "client/head_probe.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/limits.h"
#include "client/checks.h"

namespace kvm::client {
namespace {

constexpr uint32_t kDefaultRows = 256;

// A checked HOST tensor [token][head][dim].
struct Rows {
  const uint8_t* data = nullptr;
  Dtype dtype = Dtype::kF32;
  uint64_t stride_row = 0;
  uint64_t stride_head = 0;

  void load(uint64_t token, uint64_t head, uint32_t dim, float* out) const {
    const uint8_t* from =
        data + (token * stride_row + head * stride_head) * dtype_size_bytes(dtype);
    for (uint32_t i = 0; i < dim; ++i) {
      switch (dtype) {
        case Dtype::kF16:
          out[i] = f16_to_f32(reinterpret_cast<const uint16_t*>(from)[i]);
          break;
        case Dtype::kBf16:
          out[i] = bf16_to_f32(reinterpret_cast<const uint16_t*>(from)[i]);
          break;
        default:
          out[i] = reinterpret_cast<const float*>(from)[i];
      }
    }
  }
};

Status invalid(const std::string& message) { return Status(KVM_ERR_INVALID, message); }

Status check_params(const kvm_probe_params& p, uint32_t n_kv_heads) {
  KVM_TRY(check_flags(p.flags, 0, "kvm_probe_params"));
  KVM_TRY(check_reserved(p.reserved, std::size(p.reserved), "kvm_probe_params"));
  if (p.period < 2) {
    return invalid("period is " + std::to_string(p.period) + "; it must be at least 2");
  }
  if (p.n_tokens < p.n_prefix || (p.n_tokens - p.n_prefix) % p.period != 0 ||
      (p.n_tokens - p.n_prefix) / p.period < 2) {
    return invalid("n_tokens is " + std::to_string(p.n_tokens) + "; it must be n_prefix, " +
                   std::to_string(p.n_prefix) + ", and two or more times period, " +
                   std::to_string(p.period));
  }
  if (p.n_q_heads == 0 || p.n_q_heads > kMaxQHeads || p.n_q_heads % n_kv_heads != 0 ||
      p.n_q_heads / n_kv_heads > kMaxGroup) {
    return invalid("n_q_heads is " + std::to_string(p.n_q_heads) + " with n_kv_heads " +
                   std::to_string(n_kv_heads) + "; there must be 1 to " +
                   std::to_string(kMaxQHeads) + ", in groups of 1 to " + std::to_string(kMaxGroup));
  }
  if (p.head_dim == 0 || p.head_dim > kMaxHeadDim) {
    return invalid("head_dim is " + std::to_string(p.head_dim) + "; it must be 1 to " +
                   std::to_string(kMaxHeadDim));
  }
  if (!std::isfinite(p.scale) || p.scale < 0) {
    return invalid("scale is " + std::to_string(p.scale) +
                   "; it must be positive and finite, or 0 for 1 / sqrt(head_dim)");
  }
  return Status::ok();
}

Status resolve(const kvm_probe_params& p, const kvm_tensor& tensor, const char* name,
               uint32_t n_heads, Rows* out) {
  if (tensor.buffer.kind != KVM_BUFFER_HOST) {
    return invalid(std::string(name) + " has buffer kind " + std::to_string(tensor.buffer.kind) +
                   "; kvm_probe_heads takes HOST buffers");
  }
  static const ArenaDirectory kNoArenas;
  Tensor checked;
  const TensorSlot slot{&tensor, name, Element::kAny, &checked};
  KVM_TRY(kNoArenas.resolve({&slot, 1}));
  out->data = checked.data;
  out->dtype = static_cast<Dtype>(checked.dtype);
  out->stride_head = checked.stride_head != 0 ? checked.stride_head : p.head_dim;
  out->stride_row = checked.stride_row;
  uint64_t tokens = 0;
  uint64_t heads = 0;
  uint64_t bytes = 0;
  const bool is_too_far =
      (out->stride_row == 0 &&
       __builtin_mul_overflow(uint64_t{n_heads}, out->stride_head, &out->stride_row)) ||
      __builtin_mul_overflow(uint64_t{p.n_tokens} - 1, out->stride_row, &tokens) ||
      __builtin_mul_overflow(uint64_t{n_heads} - 1, out->stride_head, &heads) ||
      __builtin_add_overflow(tokens, heads, &bytes) ||
      __builtin_add_overflow(bytes, uint64_t{p.head_dim}, &bytes) ||
      __builtin_mul_overflow(bytes, uint64_t{dtype_size_bytes(out->dtype)}, &bytes);
  if (is_too_far || bytes > checked.size_bytes) {
    return invalid(std::string(name) + " has " + std::to_string(checked.size_bytes) +
                   " bytes; its shape and strides need more");
  }
  return Status::ok();
}

struct Scores {
  double echo = 0;
  double induction = 0;
};

// Attention of the query at `token` to earlier copies of it, and to what follows those.
Scores score_row(const kvm_probe_params& p, const std::vector<float>& keys, const float* q,
                 uint32_t token, double scale, std::vector<double>* logits) {
  logits->resize(token + 1);
  double most = -INFINITY;
  for (uint32_t x = 0; x <= token; ++x) {
    const float* key = keys.data() + uint64_t{x} * p.head_dim;
    float dot = 0;
    for (uint32_t i = 0; i < p.head_dim; ++i) {
      dot += q[i] * key[i];
    }
    (*logits)[x] = static_cast<double>(dot) * scale;
    most = std::max(most, (*logits)[x]);
  }
  double sum = 0;
  for (double& logit : *logits) {
    logit = std::exp(logit - most);
    sum += logit;
  }
  Scores scores;
  for (uint32_t x = token; x >= p.n_prefix + p.period;) {
    x -= p.period;
    scores.echo += (*logits)[x] / sum;
    scores.induction += (*logits)[x + 1] / sum;
  }
  return scores;
}

}  // namespace

Status probe_heads(const kvm_probe_params& p, float* echo, float* induction) {
  const uint32_t n_kv_heads = p.n_kv_heads == 0 ? p.n_q_heads : p.n_kv_heads;
  if (n_kv_heads == 0) {
    return invalid("n_q_heads is 0; it is required");
  }
  KVM_TRY(check_params(p, n_kv_heads));
  Rows q;
  Rows k;
  KVM_TRY(resolve(p, p.q, "q", p.n_q_heads, &q));
  KVM_TRY(resolve(p, p.k, "k", n_kv_heads, &k));
  const double scale = p.scale != 0 ? static_cast<double>(p.scale) : 1.0 / std::sqrt(p.head_dim);
  const uint32_t first = p.n_prefix + p.period;
  const uint32_t n_later = p.n_tokens - first;
  const uint32_t n_rows = std::min(n_later, p.n_rows == 0 ? kDefaultRows : p.n_rows);
  const uint32_t group = p.n_q_heads / n_kv_heads;
  std::vector<float> keys(uint64_t{p.n_tokens} * p.head_dim);
  std::vector<float> query(p.head_dim);
  std::vector<double> logits;
  for (uint32_t head = 0; head < n_kv_heads; ++head) {
    for (uint32_t x = 0; x < p.n_tokens; ++x) {
      k.load(x, head, p.head_dim, keys.data() + uint64_t{x} * p.head_dim);
    }
    Scores best;
    for (uint32_t g = 0; g < group; ++g) {
      Scores sum;
      for (uint32_t row = 0; row < n_rows; ++row) {
        const auto token = static_cast<uint32_t>(first + uint64_t{row} * n_later / n_rows);
        q.load(token, head * group + g, p.head_dim, query.data());
        const Scores scores = score_row(p, keys, query.data(), token, scale, &logits);
        sum.echo += scores.echo / n_rows;
        sum.induction += scores.induction / n_rows;
      }
      best.echo = std::max(best.echo, sum.echo);
      best.induction = std::max(best.induction, sum.induction);
    }
    if (echo != nullptr) {
      echo[head] = static_cast<float>(best.echo);
    }
    if (induction != nullptr) {
      induction[head] = static_cast<float>(best.induction);
    }
  }
  return Status::ok();
}

}  // namespace kvm::client
