// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <filesystem>

#include "bench/approx/data.h"
#include "bench/recorded/record_file.h"

namespace kvm::bench {
namespace {

void copy_rows(const RecordedArray& from, uint32_t head,
               uint16_t* (DataSet::*row)(uint32_t, uint64_t), DataSet* out) {
  const auto* rows = static_cast<const uint16_t*>(from.data);
  for (uint64_t t = 0; t < out->n_tokens; ++t) {
    std::memcpy((out->*row)(head, t), rows + t * from.head_dim, size_t{from.head_dim} * 2);
  }
}

// The file itself, or the files of the folder by name.
Result<std::vector<std::string>> list_files(const std::string& name) {
  std::error_code error;
  if (!std::filesystem::is_directory(name, error)) {
    return std::vector<std::string>{name};
  }
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(name, error)) {
    if (entry.path().extension() == ".kvrec") {
      out.push_back(entry.path().string());
    }
  }
  if (error || out.empty()) {
    return Status(KVM_ERR_IO, name + ": " + (error ? error.message() : "no .kvrec files"));
  }
  std::sort(out.begin(), out.end());
  return out;
}

// The last `sets` query steps that lie within the tokens: the longest contexts.
std::vector<uint32_t> choose_steps(const RecordFile& file, uint32_t tokens, uint32_t sets) {
  std::vector<uint32_t> steps;
  for (uint32_t j = 0; j < file.n_queries(); ++j) {
    if (static_cast<uint32_t>(file.query_steps()[j]) < tokens) {
      steps.push_back(j);
    }
  }
  if (steps.size() > sets) {
    steps.erase(steps.begin(), steps.end() - sets);
  }
  return steps;
}

void copy_queries(const RecordFile& file, const RecordedGroup& group,
                  const std::vector<uint32_t>& steps, HeadData* head) {
  const auto* rows = static_cast<const uint16_t*>(group.q.data);
  const size_t size = group.q_heads.size() * file.head_dim();
  for (const uint32_t step : steps) {
    head->q_position.push_back(static_cast<uint64_t>(file.query_steps()[step]));
    head->q.insert(head->q.end(), rows + step * size, rows + (step + 1) * size);
  }
}

// One layout for all heads.
Status check_group(const RecordedGroup& group, const RecordedGroup& first) {
  if (group.k.dtype != first.k.dtype || group.v.dtype != first.k.dtype ||
      group.q.dtype != first.k.dtype || group.q_heads.size() != first.q_heads.size()) {
    return {KVM_ERR_UNSUPPORTED, "groups that differ in dtype or in the number of q heads"};
  }
  return Status::ok();
}

// The groups from `first_head` on of one file.
Result<DataSet> read_file(const RecordFile& file, const DataSpec& spec, uint32_t first_head) {
  KVM_TRY(file.verify());
  const uint32_t tokens =
      spec.tokens == 0 ? file.n_tokens() : std::min(spec.tokens, file.n_tokens());
  const std::vector<uint32_t> steps = choose_steps(file, tokens, spec.sets);
  if (steps.empty()) {
    return Status(KVM_ERR_INVALID,
                  spec.name + ": no query within " + std::to_string(tokens) + " tokens");
  }
  const auto& groups = file.groups();
  const auto n_heads =
      static_cast<uint32_t>(std::min<size_t>(std::max(1u, spec.heads), groups.size() - first_head));
  const RecordedGroup& first = groups[first_head];
  DataSet out;
  out.lay_out(n_heads, tokens, file.head_dim(), static_cast<uint32_t>(first.q_heads.size()),
              first.k.dtype);
  for (uint32_t h = 0; h < n_heads; ++h) {
    const RecordedGroup& group = groups[first_head + h];
    KVM_TRY(check_group(group, first));
    HeadData& head = out.heads[h];
    head.type = "layer " + std::to_string(group.layer) + " head " + std::to_string(group.kv_head);
    head.scale = static_cast<float>(file.softmax_scale());
    copy_rows(group.k, h, &DataSet::k_row, &out);
    copy_rows(group.v, h, &DataSet::v_row, &out);
    copy_queries(file, group, steps, &head);
  }
  return out;
}

}  // namespace

bool is_recorded(const std::string& name) {
  const std::vector<std::string>& generated = data_names();
  std::error_code ignored;
  return std::find(generated.begin(), generated.end(), name) == generated.end() &&
         (name.ends_with(".kvrec") || std::filesystem::is_directory(name, ignored));
}

Result<uint32_t> count_recorded_heads(const std::string& name) {
  KVM_TRY_ASSIGN(const std::vector<std::string> files, list_files(name));
  size_t n = 0;
  for (const std::string& path : files) {
    KVM_TRY_ASSIGN(const RecordFile file, RecordFile::open(path));
    n += file.groups().size();
  }
  return static_cast<uint32_t>(n);
}

Result<DataSet> read_recorded_data(const DataSpec& spec) {
  KVM_TRY_ASSIGN(const std::vector<std::string> files, list_files(spec.name));
  size_t first_head = spec.first_head;
  for (const std::string& path : files) {
    KVM_TRY_ASSIGN(const RecordFile file, RecordFile::open(path));
    if (first_head < file.groups().size()) {
      KVM_TRY_ASSIGN(DataSet out, read_file(file, spec, static_cast<uint32_t>(first_head)));
      out.name = std::filesystem::path(spec.name).filename();
      return out;
    }
    first_head -= file.groups().size();
  }
  return Status(KVM_ERR_INVALID,
                spec.name + ": no head " + std::to_string(spec.first_head) + " is recorded");
}

}  // namespace kvm::bench
