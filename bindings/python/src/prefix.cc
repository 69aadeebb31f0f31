// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/src/prefix.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include "bindings/python/src/client.h"
#include "bindings/python/src/records.h"

namespace nb = nanobind;

namespace kvm::python {
namespace {

using Array = nb::ndarray<nb::ro, nb::device::cpu>;

constexpr auto kInt = static_cast<uint8_t>(nb::dlpack::dtype_code::Int);
constexpr auto kUInt = static_cast<uint8_t>(nb::dlpack::dtype_code::UInt);

std::string refusal_of(size_t i, const std::string& what) {
  return "tokens[" + std::to_string(i) + "] is " + what +
         "; it must be a whole number from 0 to 2**32 - 1";
}

template <typename T>
void add_elements(const Array& array, std::vector<uint32_t>* tokens) {
  const auto* data = static_cast<const T*>(array.data());
  const int64_t stride = array.stride(0);
  for (size_t i = 0; i < array.shape(0); ++i) {
    const T token = data[static_cast<int64_t>(i) * stride];
    if (!std::in_range<uint32_t>(token)) {
      refuse(refusal_of(i, std::to_string(token)));
    }
    tokens->push_back(static_cast<uint32_t>(token));
  }
}

void add_array(const Array& array, std::vector<uint32_t>* tokens) {
  if (array.ndim() != 1) {
    refuse("tokens has " + std::to_string(array.ndim()) + " axes; it must have one");
  }
  tokens->reserve(tokens->size() + array.shape(0));
  const nb::dlpack::dtype type = array.dtype();
  const bool is_signed = type.code == kInt;
  if (type.lanes == 1 && (is_signed || type.code == kUInt)) {
    switch (type.bits) {
      case 8:
        return is_signed ? add_elements<int8_t>(array, tokens)
                         : add_elements<uint8_t>(array, tokens);
      case 16:
        return is_signed ? add_elements<int16_t>(array, tokens)
                         : add_elements<uint16_t>(array, tokens);
      case 32:
        return is_signed ? add_elements<int32_t>(array, tokens)
                         : add_elements<uint32_t>(array, tokens);
      case 64:
        return is_signed ? add_elements<int64_t>(array, tokens)
                         : add_elements<uint64_t>(array, tokens);
      default:
        break;
    }
  }
  throw nb::type_error("the elements of tokens are not whole numbers");
}

uint32_t token_of(nb::handle object, size_t i) {
  uint32_t token = 0;
  if (nb::try_cast(object, token, false)) {
    return token;
  }
  // A number of NumPy, say.
  const nb::object number = nb::steal(PyNumber_Index(object.ptr()));
  if (!number.is_valid()) {
    PyErr_Clear();
    throw nb::type_error(refusal_of(i, nb::repr(object).c_str()).c_str());
  }
  if (!nb::try_cast(number, token, false)) {
    refuse(refusal_of(i, nb::str(number).c_str()));
  }
  return token;
}

// Appends the tokens of an array with one axis, or of whatever can be iterated over.
void add_tokens(nb::handle object, std::vector<uint32_t>* tokens) {
  Array array;
  if (!nb::isinstance<nb::list>(object) && !nb::isinstance<nb::tuple>(object) &&
      nb::try_cast(object, array, false)) {
    return add_array(array, tokens);
  }
  size_t i = 0;
  for (const nb::handle element : nb::iter(object)) {
    tokens->push_back(token_of(element, i++));
  }
}

template <typename T>
nb::bytes to_bytes(const T* first, size_t n) {
  return nb::bytes(first, n * sizeof(T));
}

kvm_prefix_hash hash_in(const nb::bytes& bytes) {
  const std::span<const kvm_prefix_hash> hashes = hashes_in(bytes);
  if (hashes.size() != 1) {
    refuse("there are " + std::to_string(hashes.size()) + " hashes in the place of one");
  }
  return hashes[0];
}

// The hashes of the pages that `rest` and then `tokens` fill, behind that of `before`; and the
// tokens that fill none. rest: of an earlier call.
nb::tuple hash_tokens(const nb::bytes& before, const nb::bytes& rest, nb::handle tokens) {
  const kvm_prefix_hash last = hash_in(before);
  std::vector<uint32_t> all(rest.size() / sizeof(uint32_t));
  if (!all.empty()) {
    std::memcpy(all.data(), rest.data(), all.size() * sizeof(uint32_t));
  }
  add_tokens(tokens, &all);
  std::vector<kvm_prefix_hash> hashes(all.size() / KVM_PREFIX_TOKENS);
  if (!hashes.empty()) {
    const Unlocked unlocked;
    check(kvm_prefix_hashes(&last, all.data(), all.size(), hashes.data()));
  }
  const size_t n_hashed = hashes.size() * KVM_PREFIX_TOKENS;
  return nb::make_tuple(to_bytes(hashes.data(), hashes.size()),
                        to_bytes(all.data() + n_hashed, all.size() - n_hashed));
}

nb::bytes prefix_seed(Client& client, uint64_t space, const nb::bytes& salt) {
  const void* data = salt.data();
  const size_t size = salt.size();
  kvm_prefix_hash seed{};
  client.call([&](kvm_client* c) { return kvm_prefix_seed(c, space, data, size, &seed); });
  return to_bytes(&seed, 1);
}

void publish_prefix(Client& client, uint64_t seq, const nb::bytes& hashes, uint64_t keep_ns) {
  const std::span<const kvm_prefix_hash> all = hashes_in(hashes);
  client.call([&](kvm_client* c) {
    return kvm_prefix_publish(c, seq, all.data(), count_of(all), keep_ns);
  });
}

// The sequence to fork and at how many tokens; 0 tokens: nothing was found.
std::pair<uint64_t, uint64_t> find_prefix(Client& client, uint64_t space, const nb::bytes& hashes,
                                          double prefill_rate) {
  const std::span<const kvm_prefix_hash> all = hashes_in(hashes);
  auto params = sized<kvm_prefix_find_params>();
  params.space = space;
  params.hashes = all.data();
  params.n_hashes = all.size();
  params.prefill_rate = prefill_rate;
  auto found = sized<kvm_prefix>();
  client.call([&](kvm_client* c) { return kvm_prefix_find(c, &params, &found); });
  return {found.seq, found.n_tokens};
}

}  // namespace

std::span<const kvm_prefix_hash> hashes_in(const nb::bytes& bytes) {
  if (bytes.size() % sizeof(kvm_prefix_hash) != 0) {
    refuse("the hashes have " + std::to_string(bytes.size()) + " bytes together; each has " +
           std::to_string(sizeof(kvm_prefix_hash)));
  }
  return {static_cast<const kvm_prefix_hash*>(bytes.data()),
          bytes.size() / sizeof(kvm_prefix_hash)};
}

void register_prefix(nb::module_& module) {
  module.def("prefix_seed", prefix_seed, nb::arg("client"), nb::arg("space"), nb::arg("salt"));
  module.def("hash_tokens", hash_tokens, nb::arg("before"), nb::arg("rest"), nb::arg("tokens"));
  module.def("publish_prefix", publish_prefix, nb::arg("client"), nb::arg("seq"), nb::arg("hashes"),
             nb::arg("keep_ns"));
  module.def("find_prefix", find_prefix, nb::arg("client"), nb::arg("space"), nb::arg("hashes"),
             nb::arg("prefill_rate"));
}

}  // namespace kvm::python
