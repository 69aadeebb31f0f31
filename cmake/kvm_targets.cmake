# The functions with which a folder describes what it builds. A folder's CMakeLists.txt is a few
# lines, its sources listed by hand:
#
#   kvm_add_library(kvm_ipc
#     SOURCES ring.cc validate.cc                # none: the folder is headers only
#     DEPS    kvm_base flatbuffers::flatbuffers) # ours and third-party ones, linked PUBLIC
#   kvm_isa_source(kvm_attention exact/exact_avx2.cc -mavx2 -mfma -mf16c)
#   kvm_flatbuffers(kvm_ipc hello.fbs)           # #include "ipc/hello_generated.h"
#
#   kvm_add_executable(kvmd SOURCES main.cc DEPS kvm_engine kvm_ipc)
#   kvm_use_mimalloc(kvmd)                       # in place of the system's malloc
#   kvm_add_shared_library(kvm MAP libkvm.map SOURCES thin.cc DEPS kvm_ipc)
#
#   kvm_add_test(ipc_ring_test ring_test.cc LIBS kvm_ipc [LABELS tsan ...] [TIMEOUT seconds]
#     [ARGS ...] [ENV NAME=VALUE ...] [COMPUTES]) # GoogleTest, one ctest entry for the binary
#   kvm_register_test(NAME COMMAND ...)          # any command, with the same options
#   kvm_register_python_test(NAME SCRIPT)        # needs packages of packages/python.txt
#   kvm_register_binding_test(NAME SCRIPT)       # needs the Python binding, too
#   kvm_add_fuzzer(ring_fuzz ring_fuzz.cc LIBS kvm_ipc)            # libFuzzer, in tests/fuzz
#   kvm_add_bench(merge_bench merge_bench.cc LIBS kvm_attention)   # Google Benchmark
#
# Where KVM_PLAIN_TESTS is set (tests/CMakeLists.txt), tests are compiled without optimisation, but
# for those that compute much themselves; where KVM_PLAIN_CODE is (bench, tools), so are libraries
# and programs.
#
# What they add by themselves: the warnings, include paths rooted at the repository (and include/,
# so that the ABI is "kvm.h"), KVM_CHECK, and precompiled standard headers. Executables land in
# <build>/bin, libraries in <build>/lib. Tests run in <build>/tests with KVM_BIN_DIR set to
# <build>/bin and KVM_SOURCE_DIR to the root of the tree.

# --- What every target of ours is compiled with -------------------------------------------------

add_library(kvm_flags INTERFACE)
target_include_directories(kvm_flags INTERFACE "${PROJECT_SOURCE_DIR}"
                                               "${PROJECT_SOURCE_DIR}/include")
target_include_directories(kvm_flags SYSTEM INTERFACE "${PROJECT_BINARY_DIR}/generated")
target_compile_definitions(kvm_flags INTERFACE KVM_CHECK=${KVM_CHECK})
if(KVM_CHECK GREATER_EQUAL 2)
  # The standard library checks indices and preconditions as well.
  target_compile_definitions(kvm_flags INTERFACE _GLIBCXX_ASSERTIONS)
endif()
if(KVM_KILL_POINTS)
  target_compile_definitions(kvm_flags INTERFACE KVM_KILL_POINTS=1)
endif()
target_link_libraries(kvm_flags INTERFACE Threads::Threads)

add_library(kvm_warnings INTERFACE)
target_compile_options(
  kvm_warnings
  INTERFACE
    "$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wpedantic;-Wconversion;-Wshadow;-Wvla>"
    # Braces that leave fields out mean zero there: the ABI is built on it.
    "$<$<COMPILE_LANGUAGE:C,CXX>:-Wno-missing-field-initializers>"
    "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wthread-safety;-Wno-gnu-zero-variadic-macro-arguments>"
    "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wsuggest-override>")

# The precompiled standard headers exist once for libraries and programs and once for tests (with
# GoogleTest). They hold nothing of ours, so no edit of ours rebuilds them; and no path of this
# checkout, so that ccache serves another checkout what it compiled for this one.
function(kvm_add_pch_target name)
  file(WRITE "${PROJECT_BINARY_DIR}/generated/${name}.cc" "// Carries precompiled headers.\n")
  add_library(${name} OBJECT "${PROJECT_BINARY_DIR}/generated/${name}.cc")
  # The warnings too: some change which macros are predefined, and those must agree.
  target_link_libraries(${name} PRIVATE kvm_flags kvm_warnings ${ARGN})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
endfunction()

if(KVM_PCH)
  kvm_add_pch_target(kvm_pch)
  target_precompile_headers(
    kvm_pch PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<cmake/pch.h$<ANGLE-R>>")
  if(KVM_PLAIN_OPTIONS)
    kvm_add_pch_target(kvm_plain_pch)
    target_compile_options(kvm_plain_pch PRIVATE ${KVM_PLAIN_OPTIONS})
    target_precompile_headers(
      kvm_plain_pch PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<cmake/pch.h$<ANGLE-R>>")
  endif()
  if(KVM_TESTS)
    kvm_add_pch_target(kvm_test_pch GTest::gtest)
    target_precompile_headers(
      kvm_test_pch PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<cmake/test_pch.h$<ANGLE-R>>")
    if(KVM_PLAIN_OPTIONS)
      kvm_add_pch_target(kvm_plain_test_pch GTest::gtest)
      target_compile_options(kvm_plain_test_pch PRIVATE ${KVM_PLAIN_OPTIONS})
      target_precompile_headers(
        kvm_plain_test_pch PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<cmake/test_pch.h$<ANGLE-R>>")
    endif()
  endif()
endif()

# Sets the precompiled headers of a target, `pch` or `test_pch`, and, where it is plain, no
# optimisation.
function(kvm_use_pch name kind is_plain)
  set(pch kvm_${kind})
  if(is_plain AND KVM_PLAIN_OPTIONS)
    target_compile_options(${name} PRIVATE ${KVM_PLAIN_OPTIONS})
    set(pch kvm_plain_${kind})
  endif()
  get_target_property(sources ${name} SOURCES)
  if(KVM_PCH AND "${sources}" MATCHES "\\.cc(;|$)")
    target_precompile_headers(${name} REUSE_FROM ${pch})
  endif()
endfunction()

# --- Libraries and programs ---------------------------------------------------------------------

# kvm_add_library(NAME [SOURCES ...] [DEPS ...])
function(kvm_add_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "kvm_add_library(${name}): unknown ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_SOURCES)
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE kvm_flags ${arg_DEPS})
    return()
  endif()
  add_library(${name} STATIC ${arg_SOURCES})
  target_link_libraries(${name} PUBLIC kvm_flags ${arg_DEPS} PRIVATE kvm_warnings)
  kvm_use_pch(${name} pch "${KVM_PLAIN_CODE}")
endfunction()

# Adds a target to kvm_programs, unless it belongs to the tests or benches.
function(kvm_list_program name)
  file(RELATIVE_PATH folder "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")
  if(NOT folder MATCHES "^(tests|bench)")
    set_property(GLOBAL APPEND PROPERTY KVM_PROGRAMS ${name})
  endif()
endfunction()

# kvm_add_executable(NAME SOURCES ... [DEPS ...])
function(kvm_add_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "kvm_add_executable(${name}): unknown ${arg_UNPARSED_ARGUMENTS}")
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE kvm_flags kvm_warnings ${arg_DEPS})
  kvm_use_pch(${name} pch "${KVM_PLAIN_CODE}")
  kvm_list_program(${name})
endfunction()

# kvm_add_shared_library(NAME MAP version_script SOURCES ... [DEPS ...])
# lib<NAME>.so with soname lib<NAME>.so.<KVM_ABI_VERSION>, exporting what the map names and nothing
# else, not even symbols of the static libraries that it contains.
function(kvm_add_shared_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "MAP" "SOURCES;DEPS")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_MAP)
    message(FATAL_ERROR "kvm_add_shared_library(${name}): MAP missing or unknown arguments")
  endif()
  add_library(${name} SHARED ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE kvm_flags kvm_warnings ${arg_DEPS})
  target_include_directories(
    ${name} INTERFACE "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
                      "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
  set(map "${CMAKE_CURRENT_SOURCE_DIR}/${arg_MAP}")
  target_link_options(${name} PRIVATE "LINKER:--version-script=${map}" "LINKER:--exclude-libs,ALL")
  if(NOT KVM_SANITIZE)
    target_link_options(${name} PRIVATE "LINKER:-z,defs")
  endif()
  set_target_properties(${name} PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${KVM_ABI_VERSION}
                                           LINK_DEPENDS "${map}")
  kvm_use_pch(${name} pch "${KVM_PLAIN_CODE}")
  kvm_list_program(${name})
endfunction()

# kvm_use_mimalloc(PROGRAM)
# mimalloc replaces malloc: the engine allocates small metadata from several threads for months, and
# mimalloc neither fragments nor contends as glibc's does; and it keeps large memory that is freed,
# which glibc gives back, to be cleared again. Sanitizers need malloc themselves.
function(kvm_use_mimalloc name)
  if(NOT KVM_SANITIZE)
    target_link_options(${name} PRIVATE "LINKER:--push-state,--no-as-needed"
                        "$<TARGET_FILE:mimalloc>" "LINKER:--pop-state")
  endif()
endfunction()

# kvm_isa_source(TARGET FILE flags...)
# FILE of TARGET is compiled for one instruction set. It gets no precompiled headers: standard
# templates instantiated under its flags would be shared, by the linker, with generic code. A test
# reads the symbols of the object and fails on any that could be shared.
function(kvm_isa_source target file)
  set_property(GLOBAL APPEND PROPERTY KVM_ISA_SOURCES "${file}")
  set_property(SOURCE "${file}" APPEND PROPERTY COMPILE_OPTIONS ${ARGN})
  set_property(SOURCE "${file}" PROPERTY SKIP_PRECOMPILE_HEADERS ON)
  set_property(GLOBAL APPEND PROPERTY KVM_ISA_TARGETS ${target})
endfunction()

# kvm_all_checks(FILE...)
# Product code that a test compiles anew gets the checks that tests do without (KVM_FEWER_CHECKS).
function(kvm_all_checks)
  if(KVM_FEWER_CHECKS)
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -fsanitize=undefined)
  endif()
endfunction()

# kvm_flatbuffers(TARGET SCHEMA)
# Generates <folder>/<schema>_generated.h from SCHEMA for TARGET and those that link it.
function(kvm_flatbuffers target schema)
  file(RELATIVE_PATH folder "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")
  get_filename_component(stem "${schema}" NAME_WE)
  set(directory "${PROJECT_BINARY_DIR}/generated/${folder}")
  set(header "${directory}/${stem}_generated.h")
  add_custom_command(
    OUTPUT "${header}"
    COMMAND "${CMAKE_COMMAND}" -E make_directory "${directory}"
    COMMAND "${KVM_FLATC}" --cpp --cpp-std c++17 --scoped-enums -o "${directory}"
            "${CMAKE_CURRENT_SOURCE_DIR}/${schema}"
    DEPENDS "${schema}"
    COMMENT "Generating ${folder}/${stem}_generated.h"
    VERBATIM)
  add_custom_target(${target}_${stem}_schema DEPENDS "${header}")
  add_dependencies(${target} ${target}_${stem}_schema)
endfunction()

# --- Tests and benches --------------------------------------------------------------------------

# kvm_register_test(NAME COMMAND ... [LABELS ...] [TIMEOUT s] [ENV NAME=VALUE ...])
# A ctest entry for any command. Exit status 77 means "skipped": `./dev test` counts those.
function(kvm_register_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "COMMAND;LABELS;ENV")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(KVM_SANITIZE MATCHES "thread")
    # Five to ten times as slow, and their threads run in earnest.
    math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * 5")
  endif()
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  add_test(NAME ${name} COMMAND ${arg_COMMAND} WORKING_DIRECTORY "${PROJECT_BINARY_DIR}/tests"
           COMMAND_EXPAND_LISTS)
  # NumPy's and PyTorch's threads spin while they wait, on the core of the test beside.
  list(APPEND arg_ENV "KVM_BIN_DIR=${PROJECT_BINARY_DIR}/bin"
       "KVM_SOURCE_DIR=${PROJECT_SOURCE_DIR}" "PYTHONDONTWRITEBYTECODE=1"
       "OPENBLAS_NUM_THREADS=1" "OMP_NUM_THREADS=1" "MKL_NUM_THREADS=1")
  # The long ones begin first, for none shall run alone at the end.
  set_tests_properties(${name} PROPERTIES TIMEOUT ${arg_TIMEOUT} COST ${arg_TIMEOUT}
                                          SKIP_RETURN_CODE 77 LABELS "${arg_LABELS}"
                                          ENVIRONMENT "${arg_ENV}")
endfunction()

# kvm_register_python_test(NAME SCRIPT [LABELS ...] [TIMEOUT s] [ENV NAME=VALUE ...])
# SCRIPT runs in build/venv, which ./dev fills from packages/python.txt; where that could not be
# done, the test counts as skipped. Scripts that need the standard library only take
# kvm_register_test(NAME COMMAND ${KVM_PYTHON} SCRIPT).
function(kvm_register_python_test name script)
  kvm_register_test(${name} COMMAND "${PROJECT_SOURCE_DIR}/tests/run_in_venv"
                    "${CMAKE_CURRENT_SOURCE_DIR}/${script}" ${ARGN})
endfunction()

# kvm_register_binding_test(NAME SCRIPT [LABELS ...] [TIMEOUT s] [ENV NAME=VALUE ...])
# The same with the package kvm of this build (bindings/python); skipped where that was not built.
# A Python that was not built with AddressSanitizer loads its runtime first; that of C++ too, for
# exceptions are looked up when it begins. Leaks are not looked for: Python ends with many. There
# are no such tests under ThreadSanitizer, for which Python itself would have to be built.
function(kvm_register_binding_test name script)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "ENV")
  if(KVM_FUZZ OR KVM_SANITIZE MATCHES "thread"
     OR (KVM_SANITIZE AND NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU"))
    return()
  endif()
  list(APPEND arg_ENV "PYTHONPATH=${PROJECT_BINARY_DIR}/python"
       "KVM_BINDING=${PROJECT_BINARY_DIR}/python/kvm")
  if(KVM_SANITIZE MATCHES "address")
    set(preload)
    foreach(library asan stdc++)
      execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=lib${library}.so
                      OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE)
      list(APPEND preload "${path}")
    endforeach()
    list(JOIN preload ":" preload)
    list(APPEND arg_ENV "KVM_PRELOAD=${preload}" "ASAN_OPTIONS=detect_leaks=0")
  endif()
  kvm_register_python_test(${name} ${script} ${arg_UNPARSED_ARGUMENTS} ENV ${arg_ENV})
endfunction()

# kvm_add_test(NAME FILE... [LIBS ...] [ARGS ...] [LABELS ...] [TIMEOUT s] [ENV NAME=VALUE ...]
#              [COMPUTES])
function(kvm_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "COMPUTES" "TIMEOUT" "LIBS;ARGS;LABELS;ENV")
  if(arg_COMPUTES)
    set(KVM_PLAIN_TESTS OFF)
  endif()
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE kvm_flags kvm_warnings ${arg_LIBS} GTest::gtest
                                        GTest::gtest_main)
  kvm_use_pch(${name} test_pch "${KVM_PLAIN_TESTS}")
  set(options)
  foreach(option TIMEOUT LABELS ENV)
    if(DEFINED arg_${option})
      list(APPEND options ${option} ${arg_${option}})
    endif()
  endforeach()
  kvm_register_test(${name} COMMAND ${name} ${arg_ARGS} ${options})
  # For the preset of that name, which runs no others.
  if("tsan" IN_LIST arg_LABELS)
    if(NOT TARGET tsan_tests)
      add_custom_target(tsan_tests)
    endif()
    add_dependencies(tsan_tests ${name})
  endif()
endfunction()

# kvm_add_fuzzer(NAME FILE... [LIBS ...] [SEEDS folder])
# A libFuzzer program (tests/fuzz only), with a short run over its seeds as ctest entry "fuzz".
function(kvm_add_fuzzer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "SEEDS" "LIBS")
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE kvm_flags kvm_warnings ${arg_LIBS})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  if(arg_SEEDS)
    set(arg_SEEDS "${CMAKE_CURRENT_SOURCE_DIR}/${arg_SEEDS}")
  endif()
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/tests/${name}_corpus")
  kvm_register_test(${name} LABELS fuzz TIMEOUT 300 COMMAND ${name} -max_total_time=20 -seed=1
                    "${PROJECT_BINARY_DIR}/tests/${name}_corpus" ${arg_SEEDS})
endfunction()

# kvm_add_bench(NAME FILE... [LIBS ...])
function(kvm_add_bench name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LIBS")
  kvm_add_executable(${name} SOURCES ${arg_UNPARSED_ARGUMENTS} DEPS ${arg_LIBS}
                     benchmark::benchmark benchmark::benchmark_main)
endfunction()
