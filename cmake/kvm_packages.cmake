# Third-party libraries. All are Debian packages (packages/debian.txt gives the reason for each) and
# arrive as imported targets, so their headers are system headers to our warnings.

find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)

function(kvm_require name debian_package)
  find_package(${name} QUIET CONFIG ${ARGN})
  if(NOT ${name}_FOUND)
    message(FATAL_ERROR "kvm needs ${name}. On Debian: apt-get install ${debian_package}\n"
                        "(./dev installs all that is needed; the list is packages/debian.txt)")
  endif()
  set(${name}_FOUND TRUE PARENT_SCOPE)
endfunction()

kvm_require(FlatBuffers libflatbuffers-dev GLOBAL)       # flatbuffers::flatbuffers
kvm_require(tomlplusplus libtomlplusplus-dev GLOBAL)     # tomlplusplus::tomlplusplus
kvm_require(CLI11 libcli11-dev GLOBAL)                   # CLI11::CLI11
kvm_require(fmt libfmt-dev GLOBAL)                       # fmt::fmt
kvm_require(spdlog libspdlog-dev GLOBAL)                 # spdlog::spdlog
kvm_require(nlohmann_json nlohmann-json3-dev GLOBAL)     # nlohmann_json::nlohmann_json
kvm_require(mimalloc libmimalloc-dev GLOBAL)             # mimalloc-static, mimalloc
kvm_require(boost_headers libboost-dev GLOBAL)           # Boost::headers
if(KVM_TESTS)
  kvm_require(GTest libgtest-dev GLOBAL)                 # GTest::gtest, GTest::gtest_main
  find_program(KVM_PYTHON python3 REQUIRED)              # the scripts need its library only
endif()
if(KVM_BENCH)
  kvm_require(benchmark libbenchmark-dev GLOBAL)         # benchmark::benchmark
endif()

find_program(KVM_FLATC flatc)
if(NOT KVM_FLATC)
  message(FATAL_ERROR "kvm needs flatc. On Debian: apt-get install flatbuffers-compiler")
endif()

# BLAKE2b for the hashes of prefixes, tested and reviewed as we could not: linked into libkvm, which
# needs no other library.
find_library(KVM_SODIUM_ARCHIVE libsodium.a)
find_path(KVM_SODIUM_INCLUDE sodium.h)
if(NOT KVM_SODIUM_ARCHIVE OR NOT KVM_SODIUM_INCLUDE)
  message(FATAL_ERROR "kvm needs libsodium.a. On Debian: apt-get install libsodium-dev")
endif()
add_library(kvm_sodium STATIC IMPORTED GLOBAL)
set_target_properties(
  kvm_sodium PROPERTIES IMPORTED_LOCATION "${KVM_SODIUM_ARCHIVE}"
                        INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${KVM_SODIUM_INCLUDE}")

# kvmd serves metrics where it is: KVM_HAVE_MICROHTTPD tells.
pkg_check_modules(microhttpd QUIET IMPORTED_TARGET GLOBAL libmicrohttpd>=0.9.71)
set(KVM_HAVE_MICROHTTPD ${microhttpd_FOUND})

# The disk tier prefers io_uring and works without: KVM_HAVE_URING tells.
pkg_check_modules(uring QUIET IMPORTED_TARGET GLOBAL liburing>=2.1) # PkgConfig::uring
set(KVM_HAVE_URING ${uring_FOUND})
