# KVM_CUDA=AUTO|ON|OFF decides whether the CUDA language is enabled; KVM_HAVE_CUDA says what came
# out. OFF builds and passes everything. ON fails where there is no nvcc, or one that is too old;
# AUTO goes without it. Sanitizer builds are CPU-only: device code knows no AddressSanitizer, and
# the host part of the CUDA runtime trips it.

set(KVM_HAVE_CUDA FALSE)
if(NOT KVM_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVM_CUDA is '${KVM_CUDA}'; it must be AUTO, ON or OFF")
endif()
if(KVM_CUDA STREQUAL "ON" AND KVM_SANITIZE)
  message(FATAL_ERROR "KVM_CUDA=ON and KVM_SANITIZE=${KVM_SANITIZE} exclude each other")
endif()

if(NOT KVM_CUDA STREQUAL "OFF" AND NOT KVM_SANITIZE)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Without this CMake picks the oldest architecture that nvcc knows.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      include(kvm_cuda_architectures)
      kvm_cuda_architectures(CMAKE_CUDA_ARCHITECTURES "${CMAKE_CUDA_COMPILER}")
    endif()
    enable_language(CUDA)
    # CMake 3.25 does not know nvcc's C++20 flag and would compile .cu files as C++17 in silence.
    if(NOT "cuda_std_20" IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    # Older ones have not been tried; those of CUDA 11, as Debian 12 has one, know no C++20.
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.4)
      set(KVM_HAVE_CUDA TRUE)
    else()
      set(kind WARNING)
      if(KVM_CUDA STREQUAL "ON")
        set(kind FATAL_ERROR)
      endif()
      message(${kind} "KVM_CUDA=${KVM_CUDA}: no CUDA part, for ${CMAKE_CUDA_COMPILER} is of CUDA "
                      "${CMAKE_CUDA_COMPILER_VERSION}; it takes 12.4 or newer")
    endif()
  elseif(KVM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVM_CUDA=ON, but no CUDA compiler works (looked for nvcc and CUDACXX)")
  endif()
endif()
