# Language standards, flags that every object shares, output folders, ccache.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")

# Everything is hidden and position independent: the static libraries end up in libkvm.so. -fPIC is
# given as a plain option, the same for programs, because precompiled headers are shared by all and
# are only accepted where the code generation flags agree.
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fPIC>")

# Release stays debuggable and never depends on the machine that builds: the instruction sets beyond
# x86-64 are confined to the files that ask for them.
set(CMAKE_C_FLAGS_RELEASE "-O3 -g1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -g1 -DNDEBUG")
set(CMAKE_C_FLAGS_DEBUG "-O1 -g1")
set(CMAKE_CXX_FLAGS_DEBUG "-O1 -g1")

if(KVM_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${KVM_SANITIZE}>"
                      "$<$<COMPILE_LANGUAGE:C,CXX>:-fno-omit-frame-pointer>"
                      "$<$<COMPILE_LANGUAGE:C,CXX>:-fno-sanitize-recover=all>")
  add_link_options("-fsanitize=${KVM_SANITIZE}")
  # Some two hundred test programs of 80 MB each are linked: mold takes a third of the time.
  find_program(KVM_MOLD mold)
  mark_as_advanced(KVM_MOLD)
  if(KVM_MOLD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_link_options("-fuse-ld=mold")
  endif()
  # A compiler that has loaded a precompiled header begins near the size at which it looks for what
  # it can free. There is little: without, it takes 3 % less time, and 450 MB at most.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:--param ggc-min-heapsize=1000000>")
  endif()
  # What GCC 12 inlines under it looks out of bounds to the optimiser, which is not so elsewhere.
  if(KVM_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds>"
                        "$<$<COMPILE_LANGUAGE:CXX>:-Wno-stringop-overflow>"
                        "$<$<COMPILE_LANGUAGE:CXX>:-Wno-stringop-overread>"
                        "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>")
  endif()
endif()

# What the folders tests, bench and tools do without: UBSan's checks of each pointer before its use,
# which took a third of their compile time. One that leads nowhere ends in a report of
# AddressSanitizer all the same. Fuzzers keep them, and so does product code (kvm_all_checks).
set(KVM_FEWER_CHECKS)
if(KVM_SANITIZE MATCHES "undefined" AND NOT KVM_FUZZ)
  set(KVM_FEWER_CHECKS "$<$<COMPILE_LANGUAGE:C,CXX>:-fno-sanitize=null,vptr,alignment>")
endif()

# How tests, benches and tools that compute little are compiled: under AddressSanitizer -O1 takes
# twice the time of -O0, which their own code does not win back by running faster.
set(KVM_PLAIN_OPTIONS)
if(KVM_SANITIZE MATCHES "address" AND CMAKE_BUILD_TYPE STREQUAL "Debug")
  set(KVM_PLAIN_OPTIONS "$<$<COMPILE_LANGUAGE:C,CXX>:-O0>")
endif()

# How GPU kernels are compiled for the emulator, and the emulator itself, which does little else
# than to check each access to memory. Of the sanitizers they keep what finds an index outside a
# thread's own arrays, and arithmetic that overflows. With all of them the kernels took twice as
# long to compile, and what the emulator does took half as long again.
set(KVM_EMULATED_OPTIONS)
if(KVM_SANITIZE MATCHES "address,undefined")
  set(KVM_EMULATED_OPTIONS
      "$<$<COMPILE_LANGUAGE:CXX>:-O2;-fno-sanitize=address,undefined>"
      "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=bounds,shift,signed-integer-overflow>")
endif()

# Fuzzers are linked with libFuzzer; what they call has to report which branches it took.
if(KVM_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "KVM_FUZZ needs clang (cmake --preset fuzz)")
  endif()
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=fuzzer-no-link>")
endif()

# The launcher is used where it exists. Precompiled headers need two of its checks relaxed, which
# has to be said for each run: it is no business of ours to change a user's ccache configuration.
find_program(KVM_CCACHE ccache)
mark_as_advanced(KVM_CCACHE)
foreach(language C CXX)
  if("${CMAKE_${language}_COMPILER_LAUNCHER}" MATCHES "^(.*/)?ccache$|^$" AND KVM_CCACHE)
    set(CMAKE_${language}_COMPILER_LAUNCHER
        "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${KVM_CCACHE}")
  endif()
endforeach()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>")
endif()
