// SPDX-License-Identifier: Apache-2.0
#include "bench/recorded/record_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

namespace kvm::bench {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "records are read in place");

constexpr std::string_view kMagic = "\x89KVREC\r\n";
constexpr uint32_t kVersion = 1;
constexpr uint64_t kAlignment = 64;
constexpr uint32_t kMaxExtent = 1u << 30;  // LIMIT: of one dimension; products then fit 64 bits

// DISK: the first 64 bytes of a record.
struct Header {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  uint64_t json_bytes;
  uint64_t data_offset;
  uint64_t file_bytes;
  uint32_t json_crc32;
  char zero[20];
};
static_assert(sizeof(Header) == 64);

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1) ^ ((value & 1) != 0 ? 0xedb88320u : 0u);
    }
    table[byte] = value;
  }
  return table;
}

uint32_t crc32(const std::byte* data, uint64_t size_bytes) {
  static constexpr std::array<uint32_t, 256> kTable = make_crc_table();
  uint32_t value = 0xffffffffu;
  for (uint64_t i = 0; i < size_bytes; ++i) {
    value = kTable[(value ^ std::to_integer<uint32_t>(data[i])) & 0xff] ^ (value >> 8);
  }
  return ~value;
}

// A whole number from `low` to `high`, or nothing.
std::optional<uint64_t> whole(const Json& object, const char* key, uint64_t low, uint64_t high) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned()) {
    return std::nullopt;
  }
  const uint64_t value = found->get<uint64_t>();
  return value >= low && value <= high ? std::optional(value) : std::nullopt;
}

std::optional<std::string> text(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) {
    return std::nullopt;
  }
  return found->get<std::string>();
}

// The value of `key` if it has the wanted kind, else null.
const Json* child(const Json& object, const char* key, Json::value_t kind) {
  const auto found = object.find(key);
  return found != object.end() && found->type() == kind ? &*found : nullptr;
}

uint64_t dtype_bytes(const std::string& dtype) {
  if (dtype == "bf16" || dtype == "fp16") {
    return 2;
  }
  return dtype == "i32" ? 4 : 0;
}

std::string shown(const std::vector<uint64_t>& shape) {
  std::string out = "[";
  for (const uint64_t extent : shape) {
    out += (out.size() > 1 ? ", " : "") + std::to_string(extent);
  }
  return out + "]";
}

}  // namespace

// Fills a RecordFile from its mapping, one part after the other.
class RecordFile::Loader {
 public:
  explicit Loader(RecordFile& file) : file_(file) {}

  Status load() {
    KVM_TRY(map());
    Json json;
    KVM_TRY(read_header(json));
    KVM_TRY(read_sizes(json));
    KVM_TRY(read_arrays(json));
    KVM_TRY(read_integers());
    return read_groups(json);
  }

 private:
  Status corrupt(const std::string& what) const {
    return {KVM_ERR_CORRUPT, file_.path_ + ": " + what};
  }
  Status io_error(const char* call) const {
    return {KVM_ERR_IO, file_.path_ + ": " + call + ": " + std::strerror(errno)};
  }

  Status map() {
    const int fd = ::open(file_.path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
      return io_error("open");
    }
    struct stat info {};
    Status status;
    if (::fstat(fd, &info) != 0) {
      status = io_error("fstat");
    } else if (!S_ISREG(info.st_mode)) {
      status = Status(KVM_ERR_IO, file_.path_ + ": not a regular file");
    } else if (static_cast<uint64_t>(info.st_size) < sizeof(Header)) {
      status = corrupt(std::to_string(info.st_size) + " bytes are too few for a header");
    } else {
      const auto size = static_cast<size_t>(info.st_size);
      void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
      if (data == MAP_FAILED) {
        status = io_error("mmap");
      } else {
        file_.mapping_ = static_cast<const std::byte*>(data);
        file_.size_bytes_ = size;
      }
    }
    ::close(fd);
    return status;
  }

  Status read_header(Json& json) {
    Header header;
    std::memcpy(&header, file_.mapping_, sizeof header);
    if (std::string_view(header.magic, sizeof header.magic) != kMagic) {
      return corrupt("not a record: the magic number differs");
    }
    if (header.version != kVersion || header.header_bytes != sizeof header) {
      return corrupt("version " + std::to_string(header.version) + " with a header of " +
                     std::to_string(header.header_bytes) + " bytes; this reader knows 1 and 64");
    }
    if (header.file_bytes != file_.size_bytes_) {
      return corrupt(std::to_string(file_.size_bytes_) + " bytes of " +
                     std::to_string(header.file_bytes) + ": the file is cut or has a tail");
    }
    if (header.data_offset > file_.size_bytes_ || header.data_offset % kAlignment != 0 ||
        header.data_offset < sizeof header ||
        header.json_bytes > header.data_offset - sizeof header) {
      return corrupt("metadata of " + std::to_string(header.json_bytes) +
                     " bytes does not fit before the data at " +
                     std::to_string(header.data_offset));
    }
    data_offset_ = header.data_offset;
    const std::byte* begin = file_.mapping_ + sizeof header;
    if (crc32(begin, header.json_bytes) != header.json_crc32) {
      return corrupt("the checksum of the metadata differs");
    }
    file_.metadata_.assign(reinterpret_cast<const char*>(begin), header.json_bytes);
    json = Json::parse(file_.metadata_, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) {
      return corrupt("the metadata is no JSON object");
    }
    return Status::ok();
  }

  Status read_sizes(const Json& json) {
    for (const auto& [key, target] :
         {std::pair("n_tokens", &file_.n_tokens_), std::pair("n_queries", &file_.n_queries_),
          std::pair("head_dim", &file_.head_dim_)}) {
      const auto value = whole(json, key, 1, kMaxExtent);
      if (!value) {
        return corrupt(std::string("'") + key + "' is missing or not from 1 to " +
                       std::to_string(kMaxExtent));
      }
      *target = static_cast<uint32_t>(*value);
    }
    const auto scale = json.find("softmax_scale");
    if (scale == json.end() || !scale->is_number() || !(scale->get<double>() > 0) ||
        !(scale->get<double>() < 1e6)) {
      return corrupt("'softmax_scale' is missing or not positive");
    }
    file_.softmax_scale_ = scale->get<double>();
    return Status::ok();
  }

  Status read_arrays(const Json& json) {
    const Json* arrays = child(json, "arrays", Json::value_t::object);
    if (arrays == nullptr) {
      return corrupt("'arrays' is missing");
    }
    for (const auto& [name, entry] : arrays->items()) {
      KVM_TRY(read_array(name, entry));
    }
    return Status::ok();
  }

  Status read_array(const std::string& name, const Json& entry) {
    const std::string label = "array '" + name + "': ";
    const Json* shape = nullptr;
    if (entry.is_object()) {
      shape = child(entry, "shape", Json::value_t::array);
    }
    if (shape == nullptr || shape->empty() || shape->size() > 3) {
      return corrupt(label + "no shape of 1 to 3 sizes");
    }
    Stored stored;
    stored.name = name;
    stored.dtype = text(entry, "dtype").value_or("none");
    uint64_t size_bytes = dtype_bytes(stored.dtype);
    if (size_bytes == 0) {
      return corrupt(label + "dtype " + stored.dtype + "; known are bf16, fp16, i32");
    }
    for (const Json& extent : *shape) {
      if (!extent.is_number_unsigned() || extent.get<uint64_t>() > kMaxExtent) {
        return corrupt(label + "a size is not from 0 to " + std::to_string(kMaxExtent));
      }
      stored.shape.push_back(extent.get<uint64_t>());
      // Whatever exceeds the file stays so large: the product cannot wrap.
      if (__builtin_mul_overflow(size_bytes, stored.shape.back(), &size_bytes)) {
        return corrupt(label + "shape " + shown(stored.shape) + " is beyond any file");
      }
    }
    const uint64_t room = file_.size_bytes_ - data_offset_;
    const auto offset = whole(entry, "offset", data_offset_, file_.size_bytes_);
    if (!offset || *offset % kAlignment != 0) {
      return corrupt(label + "its offset is no multiple of 64 in the data");
    }
    if (whole(entry, "bytes", 0, UINT64_MAX) != size_bytes) {
      return corrupt(label + "'bytes' is not the " + std::to_string(size_bytes) +
                     " that its shape needs");
    }
    if (size_bytes > room || *offset - data_offset_ > room - size_bytes) {
      return corrupt(label + "ends beyond the " + std::to_string(file_.size_bytes_) +
                     " bytes of the file");
    }
    const auto crc = whole(entry, "crc32", 0, UINT32_MAX);
    if (!crc) {
      return corrupt(label + "no crc32");
    }
    stored.offset = *offset;
    stored.size_bytes = size_bytes;
    stored.crc32 = static_cast<uint32_t>(*crc);
    file_.arrays_.push_back(std::move(stored));
    return Status::ok();
  }

  // The array `name` if it has the wanted shape; `floats` tells bf16 and fp16 from i32.
  Result<const Stored*> array(const std::string& name, bool floats,
                              const std::vector<uint64_t>& shape) const {
    for (const Stored& stored : file_.arrays_) {
      if (stored.name != name) {
        continue;
      }
      if ((stored.dtype != "i32") != floats) {
        return corrupt("array '" + name + "': dtype " + stored.dtype);
      }
      if (stored.shape != shape) {
        return corrupt("array '" + name + "': shape " + shown(stored.shape) + "; wanted " +
                       shown(shape));
      }
      return &stored;
    }
    return corrupt("array '" + name + "' is missing");
  }

  Status read_integers() {
    for (const auto& [name, target, count] :
         {std::tuple("positions", &file_.positions_, file_.n_tokens_),
          std::tuple("tokens", &file_.tokens_, file_.n_tokens_),
          std::tuple("query_steps", &file_.query_steps_, file_.n_queries_)}) {
      KVM_TRY_ASSIGN(const Stored* stored, array(name, false, {count}));
      *target = {reinterpret_cast<const int32_t*>(file_.mapping_ + stored->offset), count};
    }
    int64_t before = -1;
    for (const int32_t step : file_.query_steps_) {
      if (step <= before || static_cast<uint32_t>(step) >= file_.n_tokens_) {
        return corrupt("'query_steps' does not ascend within the tokens: " + std::to_string(step) +
                       " after " + std::to_string(before));
      }
      before = step;
    }
    return Status::ok();
  }

  Result<RecordedArray> floats(const Json& group, const char* key,
                               const std::vector<uint64_t>& shape) const {
    const auto name = text(group, key);
    if (!name) {
      return corrupt(std::string("a group does not name its '") + key + "'");
    }
    KVM_TRY_ASSIGN(const Stored* stored, array(*name, true, shape));
    RecordedArray out;
    out.dtype = stored->dtype == "bf16" ? Dtype::kBf16 : Dtype::kF16;
    out.data = file_.mapping_ + stored->offset;
    out.head_dim = file_.head_dim_;
    out.n_rows = stored->size_bytes / 2 / file_.head_dim_;
    return out;
  }

  Status read_groups(const Json& json) {
    const Json* groups = child(json, "groups", Json::value_t::array);
    if (groups == nullptr || groups->empty()) {
      return corrupt("'groups' is missing or empty");
    }
    std::set<std::pair<uint32_t, uint32_t>> seen;
    for (const Json& entry : *groups) {
      if (!entry.is_object()) {
        return corrupt("a group is no object");
      }
      KVM_TRY_ASSIGN(RecordedGroup group, read_group(entry));
      if (!seen.insert({group.layer, group.kv_head}).second) {
        return corrupt("layer " + std::to_string(group.layer) + " kv head " +
                       std::to_string(group.kv_head) + " appears twice");
      }
      file_.groups_.push_back(std::move(group));
    }
    return Status::ok();
  }

  Result<RecordedGroup> read_group(const Json& entry) const {
    const auto layer = whole(entry, "layer", 0, UINT32_MAX);
    const auto kv_head = whole(entry, "kv_head", 0, UINT32_MAX);
    const Json* q_heads = child(entry, "q_heads", Json::value_t::array);
    if (!layer || !kv_head || q_heads == nullptr || q_heads->empty()) {
      return corrupt("a group lacks its layer, kv_head or q_heads");
    }
    RecordedGroup group;
    group.layer = static_cast<uint32_t>(*layer);
    group.kv_head = static_cast<uint32_t>(*kv_head);
    for (const Json& head : *q_heads) {
      if (!head.is_number_unsigned() || head.get<uint64_t>() > UINT32_MAX) {
        return corrupt("layer " + std::to_string(group.layer) + ": a q head is no number");
      }
      group.q_heads.push_back(head.get<uint32_t>());
    }
    const uint64_t n = file_.n_tokens_;
    const uint64_t dim = file_.head_dim_;
    KVM_TRY_ASSIGN(group.q, floats(entry, "q", {file_.n_queries_, group.q_heads.size(), dim}));
    KVM_TRY_ASSIGN(group.k, floats(entry, "k", {n, dim}));
    KVM_TRY_ASSIGN(group.v, floats(entry, "v", {n, dim}));
    if (entry.contains("k_pre")) {
      KVM_TRY_ASSIGN(group.k_pre, floats(entry, "k_pre", {n, dim}));
    }
    return group;
  }

  RecordFile& file_;
  uint64_t data_offset_ = 0;
};

void RecordedArray::read_row(uint64_t row, float* out) const {
  KVM_ASSERT(row < n_rows);
  const auto* bits = static_cast<const uint16_t*>(data) + row * head_dim;
  for (uint32_t i = 0; i < head_dim; ++i) {
    out[i] = dtype == Dtype::kBf16 ? bf16_to_f32(bits[i]) : f16_to_f32(bits[i]);
  }
}

Result<RecordFile> RecordFile::open(const std::string& path) {
  RecordFile file;
  file.path_ = path;
  KVM_TRY(Loader(file).load());
  return file;
}

Status RecordFile::verify() const {
  for (const Stored& stored : arrays_) {
    if (crc32(mapping_ + stored.offset, stored.size_bytes) != stored.crc32) {
      return {KVM_ERR_CORRUPT, path_ + ": the checksum of array '" + stored.name + "' differs"};
    }
  }
  return Status::ok();
}

RecordFile::~RecordFile() {
  if (mapping_ != nullptr) {
    ::munmap(const_cast<std::byte*>(mapping_), size_bytes_);
  }
}

void RecordFile::swap(RecordFile& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(mapping_, other.mapping_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(n_tokens_, other.n_tokens_);
  std::swap(n_queries_, other.n_queries_);
  std::swap(head_dim_, other.head_dim_);
  std::swap(softmax_scale_, other.softmax_scale_);
  std::swap(positions_, other.positions_);
  std::swap(tokens_, other.tokens_);
  std::swap(query_steps_, other.query_steps_);
  std::swap(groups_, other.groups_);
  std::swap(arrays_, other.arrays_);
  std::swap(metadata_, other.metadata_);
}

}  // namespace kvm::bench
