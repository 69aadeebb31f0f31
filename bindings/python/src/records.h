// SPDX-License-Identifier: Apache-2.0
// Structures of kvm.h from and to Python dictionaries, by the fields that generate.py has listed.
#ifndef KVM_BINDINGS_PYTHON_SRC_RECORDS_H_
#define KVM_BINDINGS_PYTHON_SRC_RECORDS_H_

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include "bindings/python/src/status.h"
#include "kvm.h"

namespace kvm::python {

// Fields<T>::visit(value, f) calls f("name", value.name) for each field.
template <typename T>
struct Fields;

#define FIELD(name) f(#name, s.name);
#define KVM_STRUCT(type, fields)          \
  template <>                             \
  struct Fields<type> {                   \
    template <typename S, typename F>     \
    static void visit(S& s, const F& f) { \
      fields                              \
    }                                     \
  };
#include "bindings/python/src/fields.inc"
#undef KVM_STRUCT
#undef FIELD

template <typename T>
nanobind::dict to_dict(const T& value);

template <typename T>
nanobind::object to_python(const T& value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return nanobind::cast(value);
  } else if constexpr (std::is_array_v<T>) {
    using Element = std::remove_extent_t<T>;
    if constexpr (std::is_same_v<Element, char>) {
      return nanobind::str(value, strnlen(value, sizeof(value)));
    } else if constexpr (std::is_same_v<Element, uint8_t>) {
      return nanobind::bytes(reinterpret_cast<const char*>(value), sizeof(value));
    } else {
      nanobind::list list;
      for (const Element& element : value) {
        list.append(to_python(element));
      }
      return nanobind::tuple(list);
    }
  } else {
    return to_dict(value);
  }
}

template <typename T>
nanobind::dict to_dict(const T& value) {
  nanobind::dict dict;
  Fields<T>::visit(value,
                   [&dict](const char* name, const auto& field) { dict[name] = to_python(field); });
  return dict;
}

template <typename T>
void from_dict(const nanobind::dict& dict, T* value);

template <typename T>
void from_python(const char* name, nanobind::handle object, T* field) {
  if constexpr (std::is_arithmetic_v<T>) {
    if (!nanobind::try_cast(object, *field)) {
      refuse(std::string(name) + " is " + nanobind::repr(object).c_str() +
             (std::is_integral_v<T> ? "; it must be a whole number of " +
                                          std::to_string(sizeof(T)) + " bytes, not negative"
                                    : "; it must be a number"));
    }
  } else if constexpr (std::is_array_v<T>) {
    using Element = std::remove_extent_t<T>;
    if constexpr (std::is_same_v<Element, uint8_t>) {
      const auto bytes = nanobind::cast<nanobind::bytes>(object);
      if (bytes.size() != sizeof(T)) {
        refuse(std::string(name) + " has " + std::to_string(bytes.size()) +
               " bytes; it must have " + std::to_string(sizeof(T)));
      }
      std::memcpy(*field, bytes.data(), sizeof(T));
    } else {
      size_t i = 0;
      for (const nanobind::handle element : nanobind::cast<nanobind::tuple>(object)) {
        if (i < std::extent_v<T>) {
          from_python(name, element, &(*field)[i++]);
        }
      }
    }
  } else {
    from_dict(nanobind::cast<nanobind::dict>(object), field);
  }
}

// Fields that the dictionary does not have stay as they are.
template <typename T>
void from_dict(const nanobind::dict& dict, T* value) {
  Fields<T>::visit(*value, [&dict](const char* name, auto& field) {
    if (dict.contains(name)) {
      from_python(name, dict[name], &field);
    }
  });
}

// A structure with its struct_size, and zeros.
template <typename T>
T sized() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

}  // namespace kvm::python

#endif  // KVM_BINDINGS_PYTHON_SRC_RECORDS_H_
