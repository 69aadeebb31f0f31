// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/src/tensor.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include <nanobind/ndarray.h>

namespace nb = nanobind;

namespace kvm::python {
namespace {

using Input = nb::ndarray<nb::ro, nb::device::cpu>;
using Output = nb::ndarray<nb::device::cpu>;

constexpr uint8_t kBfloat = 4;  // kDLBfloat

uint32_t dtype_of(const nb::dlpack::dtype& type) {
  if (type.lanes != 1) {
    return 0;
  }
  if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) {
    return type.bits == 32 ? KVM_DTYPE_F32 : type.bits == 16 ? KVM_DTYPE_F16 : 0;
  }
  return type.code == kBfloat && type.bits == 16 ? KVM_DTYPE_BF16 : 0;
}

// "float64", as NumPy and PyTorch call it.
std::string dtype_text(const nb::dlpack::dtype& type) {
  const char* const names[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  if (type.lanes != 1 || type.code >= std::size(names)) {
    return "a type that has no name here";
  }
  return names[type.code] + std::to_string(type.bits);
}

template <typename Array>
std::string shape_text(const Array& array) {
  std::string text = "[";
  for (size_t i = 0; i < array.ndim(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(array.shape(i));
  }
  return text + "]";
}

std::string wanted_text(Layout layout, const Shape& shape) {
  std::string text = "[";
  const std::string heads = shape.n_heads == 0 ? "heads" : std::to_string(shape.n_heads);
  text += layout == Layout::kRows ? "rows, " + heads : "items, " + heads + ", tokens";
  text += shape.dim == 1 ? "" : ", " + std::to_string(shape.dim);
  text += "]";
  return layout == Layout::kRows && shape.may_have_layers ? text + ", or a layers axis before that"
                                                          : text;
}

[[noreturn]] void refuse_shape(const std::string& got, Layout layout, const Shape& shape) {
  refuse(std::string(shape.name) + " has the shape " + got + "; it must be " +
         wanted_text(layout, shape));
}

// The axes of an array by what they mean; -1: it has none.
struct Axes {
  int layer = -1;
  int entry = -1;
  int row = -1;
  int head = -1;
  int channel = -1;
};

Axes axes_of(Layout layout, const Shape& shape, bool has_layers) {
  Axes axes;
  int n = 0;
  if (layout == Layout::kHeads) {
    axes.entry = n++;
    axes.head = n++;
    axes.row = n++;
  } else {
    axes.layer = has_layers ? n++ : -1;
    axes.row = n++;
    axes.head = n++;
  }
  axes.channel = shape.dim == 1 ? -1 : n++;
  return axes;
}

template <typename Array>
Tensor read_array(const Client* client, const Array& array, Layout layout, const Shape& shape) {
  const bool has_layers = layout == Layout::kRows && shape.may_have_layers && array.ndim() == 4;
  const Axes axes = axes_of(layout, shape, has_layers);
  const auto n_axes =
      static_cast<size_t>(1 + (axes.layer >= 0) + (axes.entry >= 0) + 1 + (axes.channel >= 0));
  const auto extent = [&array](int axis) {
    return axis < 0 ? uint64_t{1} : array.shape(static_cast<size_t>(axis));
  };
  const auto stride = [&array](int axis) {
    return axis < 0 ? int64_t{0} : array.stride(static_cast<size_t>(axis));
  };
  if (array.ndim() != n_axes || (shape.n_heads != 0 && extent(axes.head) != shape.n_heads) ||
      (axes.channel >= 0 && extent(axes.channel) != shape.dim)) {
    refuse_shape(shape_text(array), layout, shape);
  }
  Tensor read;
  read.tensor.dtype = dtype_of(array.dtype());
  if (read.tensor.dtype == 0 || (shape.is_f32 && read.tensor.dtype != KVM_DTYPE_F32)) {
    refuse(std::string(shape.name) + " has elements of " + dtype_text(array.dtype()) +
           "; they must be " + (shape.is_f32 ? "float32" : "float32, float16 or bfloat16"));
  }
  uint64_t last = 0;  // element
  bool is_empty = false;
  for (size_t i = 0; i < array.ndim(); ++i) {
    is_empty = is_empty || array.shape(i) == 0;  // then strides mean nothing
  }
  read.n_layers = extent(axes.layer);
  read.n_entries = extent(axes.entry);
  read.n_rows = extent(axes.row);
  if (is_empty) {
    return read;
  }
  if (axes.channel >= 0 && stride(axes.channel) != 1 && extent(axes.channel) != 1) {
    refuse(std::string("the channels of ") + shape.name + " lie " +
           std::to_string(stride(axes.channel)) +
           " elements apart; they must lie next to each other (make it contiguous)");
  }
  for (size_t i = 0; i < array.ndim(); ++i) {
    if (array.shape(i) > 1 && array.stride(i) < 0) {
      refuse(std::string(shape.name) + " has a negative stride (make it contiguous)");
    }
    last += (array.shape(i) - 1) * static_cast<uint64_t>(std::max<int64_t>(array.stride(i), 0));
  }
  // The stride of an axis of one element means nothing; zero would mean "packed" to kvm.h.
  const auto row_stride = [&]() -> uint64_t {
    if (read.n_rows > 1) {
      return static_cast<uint64_t>(stride(axes.row));
    }
    return read.n_entries > 1 && stride(axes.entry) > 0 ? static_cast<uint64_t>(stride(axes.entry))
                                                        : last + 1;
  }();
  if (read.n_entries > 1) {
    const auto entry_stride = static_cast<uint64_t>(stride(axes.entry));
    if (row_stride == 0 || entry_stride % row_stride != 0) {
      refuse(std::string("the items of ") + shape.name + " lie " + std::to_string(entry_stride) +
             " elements apart, and its tokens " + std::to_string(row_stride) +
             "; the one must be a multiple of the other (make it contiguous)");
    }
    read.entry_rows = entry_stride / row_stride;
  }
  const auto distinct = [](uint64_t n, int64_t s) { return n > 1 && s == 0; };
  if (shape.is_written &&
      (distinct(read.n_rows, stride(axes.row)) || distinct(extent(axes.head), stride(axes.head)) ||
       distinct(read.n_entries, stride(axes.entry)))) {
    refuse(std::string(shape.name) + " has a stride of 0, so that rows lie upon each other");
  }
  const uint64_t head_stride =
      extent(axes.head) > 1 ? static_cast<uint64_t>(stride(axes.head)) : last + 1;
  read.tensor.stride_row = row_stride;
  read.tensor.stride_head = head_stride;
  read.tensor.stride_layer =
      read.n_layers > 1 ? static_cast<uint64_t>(stride(axes.layer)) : last + 1;
  if (row_stride == 0 || head_stride == 0 || read.tensor.stride_layer == 0) {
    refuse(std::string(shape.name) + " has a stride of 0 (an expanded array: make it contiguous)");
  }
  const uint64_t size = (last + 1) * array.itemsize();
  read.tensor.buffer = client == nullptr ? kvm_buffer{} : client->find(array.data(), size);
  if (read.tensor.buffer.kind == KVM_BUFFER_NONE) {
    read.tensor.buffer = kvm_host_buffer(array.data(), size);
    read.copied_bytes = client == nullptr || client->is_embedded() ? 0 : size;
  }
  return read;
}

// NumPy's arrays say where they lie faster by the buffer protocol than by DLPack. This is such an
// answer, by the names of nb::ndarray, for as long as it lives.
class View {
 public:
  // Whether `object` answered, with elements that steps can have.
  bool get(nb::handle object, bool is_written) {
    const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      return false;
    }
    is_held_ = true;
    const bool is_float = std::strcmp(view_.format, "f") == 0 && view_.itemsize == 4;
    bool is_whole = is_float || (std::strcmp(view_.format, "e") == 0 && view_.itemsize == 2);
    for (size_t i = 0; i < ndim(); ++i) {
      is_whole = is_whole && view_.strides[i] % view_.itemsize == 0;
    }
    return is_whole;
  }
  View() = default;
  ~View() {
    if (is_held_) {
      PyBuffer_Release(&view_);
    }
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  size_t ndim() const { return static_cast<size_t>(view_.ndim); }
  size_t shape(size_t i) const { return static_cast<size_t>(view_.shape[i]); }
  int64_t stride(size_t i) const { return view_.strides[i] / view_.itemsize; }
  size_t itemsize() const { return static_cast<size_t>(view_.itemsize); }
  void* data() const { return view_.buf; }
  nb::dlpack::dtype dtype() const {
    return {static_cast<uint8_t>(nb::dlpack::dtype_code::Float),
            static_cast<uint8_t>(view_.itemsize * 8), 1};
  }

 private:
  Py_buffer view_{};
  bool is_held_ = false;
};

// A LateType is one of a module that may not be imported yet: it is looked up until it is there.
// (The stable ABI does not tell the name of a type.)
struct LateType {
  const char* module;
  const char* name;
  PyTypeObject* type = nullptr;

  bool is_of(nb::handle object) {
    if (type == nullptr) {
      const nb::dict modules = nb::module_::import_("sys").attr("modules");
      if (modules.contains(module) && nb::hasattr(modules[module], name)) {
        nb::object found = modules[module].attr(name);
        type = reinterpret_cast<PyTypeObject*>(found.release().ptr());
      }
    }
    return type != nullptr && Py_TYPE(object.ptr()) == type;
  }
};

bool is_of_numpy(nb::handle object) {
  static LateType array{"numpy", "ndarray"};
  return array.is_of(object);
}

bool requires_gradient(nb::handle object) {
  return nb::getattr(object, "requires_grad", nb::handle(Py_False)).is(nb::handle(Py_True));
}

// What to ask for the memory of an array: a tensor of PyTorch takes ten times as long to answer for
// itself (2.6 us) as the function that it calls in the end.
nb::object exporter_of(nb::handle object) {
  static LateType tensor{"torch", "Tensor"};
  static PyObject* to_dlpack = nullptr;
  if (!tensor.is_of(object)) {
    return nb::borrow(object);
  }
  if (to_dlpack == nullptr) {
    nb::object function = nb::module_::import_("torch.utils.dlpack").attr("to_dlpack");
    to_dlpack = function.release().ptr();
  }
  PyObject* arguments[] = {object.ptr()};
  PyObject* made = PyObject_Vectorcall(to_dlpack, arguments, 1, nullptr);
  if (made == nullptr) {
    PyErr_Clear();  // the tensor says why, when it is asked
    return nb::borrow(object);
  }
  return nb::steal(made);
}

// Why nothing could be made of `object`: what its own export says, or what it lacks.
std::string why_not(nb::handle object, bool is_written) {
  try {
    if (nb::hasattr(object, "__dlpack_device__")) {
      const auto device = nb::cast<nb::tuple>(object.attr("__dlpack_device__")());
      if (nb::cast<int>(device[0]) != nb::device::cpu::value) {
        return "it is not in host memory (device " + std::string(nb::str(device).c_str()) +
               " of DLPack)";
      }
    }
    if (nb::hasattr(object, "__dlpack__")) {
      (void)object.attr("__dlpack__")();
    }
  } catch (nb::python_error& failed) {
    return nb::str(failed.value()).c_str();
  } catch (const nb::cast_error&) {
    return "its __dlpack_device__ is no pair of numbers";
  }
  if (!nb::hasattr(object, "__dlpack__") && PyObject_CheckBuffer(object.ptr()) == 0) {
    return "it is none";
  }
  return is_written ? "it is read-only, or of a type of elements that has no name there"
                    : "its elements are of a type that has no name there";
}

[[noreturn]] void refuse_object(nb::handle object, const Shape& shape) {
  refuse(std::string(shape.name) + " is a " + nb::inst_name(object).c_str() + "; it must be " +
         (shape.is_written ? "a writable" : "an") +
         " array in host memory that speaks DLPack or the buffer protocol: " +
         why_not(object, shape.is_written));
}

}  // namespace

Tensor read_tensor(const Client* client, nb::handle object, Layout layout, const Shape& shape) {
  if (object.is_none()) {
    return {};
  }
  if (is_of_numpy(object)) {
    View view;
    if (view.get(object, shape.is_written)) {
      Tensor read = read_array(client, view, layout, shape);
      // NumPy does not count who looks at an array: a reference keeps as much as the view would.
      read.owner.object = nb::borrow(object);
      return read;
    }
  } else if (requires_gradient(object)) {  // NumPy's have no such attribute
    refuse(std::string(shape.name) + " requires a gradient, which kvm does not compute; pass " +
           shape.name + ".detach()");
  }
  Tensor read;
  const nb::object exporter = exporter_of(object);
  // Nothing is converted: the copy of an output would go nowhere.
  if (shape.is_written) {
    Output array;
    if (!nb::try_cast(exporter, array, false)) {
      refuse_object(object, shape);
    }
    read = read_array(client, array, layout, shape);
    read.owner.exported = std::make_shared<Output>(std::move(array));
  } else {
    Input array;
    if (!nb::try_cast(exporter, array, false)) {
      refuse_object(object, shape);
    }
    read = read_array(client, array, layout, shape);
    read.owner.exported = std::make_shared<Input>(std::move(array));
  }
  read.owner.object = nb::borrow(object);
  return read;
}

}  // namespace kvm::python
