# The Debian packages, by CPack: kvm (the daemon, its tool, its unit), libkvm0 (both libraries) and
# libkvm-dev (header, pkg-config and CMake files, examples), below /usr as Debian wants them:
# libraries in the multiarch folder and found there without a run path, pages compressed.
# `./dev package` makes them from a release build.

if(NOT (TARGET kvmd AND TARGET kvmctl AND TARGET kvm AND TARGET kvm_embedded))
  return()
endif()
set(packaging "${PROJECT_SOURCE_DIR}/packaging")
set(lib "lib/${CMAKE_LIBRARY_ARCHITECTURE}")

# kvm_package_files(COMPONENT FOLDER FILE...), and with RENAME as its last two words one by a name.
function(kvm_package_files component folder)
  install(FILES ${ARGN} DESTINATION "${folder}" COMPONENT ${component} EXCLUDE_FROM_ALL)
endfunction()

# Debian's form: gzip without a time stamp, so that the same files make the same package.
function(kvm_package_gzip component)
  foreach(file IN LISTS ARGN)
    install(CODE "set(file \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${file}\")
                  execute_process(COMMAND gzip -9nf \"\${file}\" COMMAND_ERROR_IS_FATAL ANY)"
            COMPONENT ${component} EXCLUDE_FROM_ALL)
  endforeach()
endfunction()

foreach(pair "daemon;kvm" "libraries;libkvm0" "development;libkvm-dev")
  list(GET pair 0 component)
  list(GET pair 1 package)
  kvm_package_files(${component} "share/doc/${package}" "${packaging}/copyright"
                    "${packaging}/changelog")
  kvm_package_gzip(${component} "share/doc/${package}/changelog")
endforeach()

# --- kvm ----------------------------------------------------------------------------------------

foreach(program kvmd kvmctl)
  install(PROGRAMS "$<TARGET_FILE:${program}>" DESTINATION bin COMPONENT daemon EXCLUDE_FROM_ALL)
  install(CODE "set(file \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/bin/${program}\")
                file(RPATH_REMOVE FILE \"\${file}\")
                execute_process(COMMAND ${CMAKE_STRIP} \"\${file}\" COMMAND_ERROR_IS_FATAL ANY)"
          COMPONENT daemon EXCLUDE_FROM_ALL)
endforeach()
kvm_package_files(daemon lib/systemd/system "${packaging}/kvmd.service")
kvm_package_files(daemon lib/sysusers.d "${packaging}/kvmd.sysusers" RENAME kvmd.conf)
kvm_package_files(daemon /etc/kvm "${KVM_SHARE}/kvmd.toml")
foreach(page "kvmd.8;man8" "kvmd.toml.5;man5" "kvmctl.1;man1")
  list(GET page 0 file)
  list(GET page 1 section)
  kvm_package_files(daemon "share/man/${section}" "${KVM_SHARE}/${file}")
  kvm_package_gzip(daemon "share/man/${section}/${file}")
endforeach()
kvm_package_files(daemon share/bash-completion/completions "${KVM_SHARE}/kvmctl.bash"
                  RENAME kvmctl)
kvm_package_files(daemon share/zsh/vendor-completions "${KVM_SHARE}/_kvmctl")
kvm_package_files(daemon share/fish/vendor_completions.d "${KVM_SHARE}/kvmctl.fish")
# What an operator reads besides the manual pages.
kvm_package_files(daemon share/doc/kvm "${PROJECT_SOURCE_DIR}/README.md"
                  "${PROJECT_SOURCE_DIR}/docs/operations.md"
                  "${PROJECT_SOURCE_DIR}/docs/configuration.md"
                  "${PROJECT_SOURCE_DIR}/docs/disk.md"
                  "${PROJECT_SOURCE_DIR}/docs/security.md")

# --- libkvm0 and libkvm-dev ---------------------------------------------------------------------

install(TARGETS kvm kvm_embedded EXPORT kvm-package-targets
        LIBRARY DESTINATION "${lib}" COMPONENT libraries NAMELINK_COMPONENT development
        EXCLUDE_FROM_ALL)
install(EXPORT kvm-package-targets NAMESPACE kvm:: FILE kvm-config.cmake
        DESTINATION "${lib}/cmake/kvm" COMPONENT development EXCLUDE_FROM_ALL)
kvm_package_files(development "${lib}/cmake/kvm" "${PROJECT_BINARY_DIR}/kvm-config-version.cmake")
kvm_package_files(development include "${PROJECT_SOURCE_DIR}/include/kvm.h"
                  "${PROJECT_SOURCE_DIR}/include/kvm_cuda.h")
file(RELATIVE_PATH KVM_PC_PREFIX "/${lib}/pkgconfig" "/")
foreach(library kvm kvm_embedded)
  configure_file(cmake/kvm.pc.in "${PROJECT_BINARY_DIR}/packaging/${library}.pc" @ONLY)
  kvm_package_files(development "${lib}/pkgconfig" "${PROJECT_BINARY_DIR}/packaging/${library}.pc")
endforeach()
kvm_package_files(development share/doc/libkvm-dev "${PROJECT_SOURCE_DIR}/README.md")
foreach(example quickstart approximate pause_and_share)
  kvm_package_files(development share/doc/libkvm-dev/examples
                    "${PROJECT_SOURCE_DIR}/examples/${example}/${example}.c")
endforeach()

# --- CPack --------------------------------------------------------------------------------------

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME kvm)
set(CPACK_PACKAGE_VERSION "${PROJECT_VERSION}")
set(CPACK_PACKAGE_CONTACT "The kvm developers <kvm@kvm.invalid>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_COMPONENTS_ALL daemon libraries development)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${PROJECT_BINARY_DIR}/lib")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ
    GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)

set(CPACK_DEBIAN_DAEMON_PACKAGE_NAME kvm)
set(CPACK_DEBIAN_DAEMON_PACKAGE_SECTION net)
set(CPACK_DEBIAN_DAEMON_PACKAGE_DEPENDS
    "libkvm0 (= ${PROJECT_VERSION}), systemd | systemd-standalone-sysusers")
string(JOIN "\n" CPACK_COMPONENT_DAEMON_DESCRIPTION
    "KV-cache service for LLM inference engines"
    "A daemon keeps the keys and values of long contexts and computes attention"
    "next to them. This package has the daemon kvmd with its systemd unit, and the"
    "tool kvmctl.")
set(CPACK_DEBIAN_LIBRARIES_PACKAGE_NAME libkvm0)
set(CPACK_DEBIAN_LIBRARIES_PACKAGE_SECTION libs)
string(JOIN "\n" CPACK_COMPONENT_LIBRARIES_DESCRIPTION
    "KV-cache service for LLM inference engines - libraries"
    "A daemon keeps the keys and values of long contexts and computes attention"
    "next to them. This package has libkvm, with which engines ask the daemon, and"
    "libkvm_embedded, which does the same inside of an engine's process.")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libkvm-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "libkvm0 (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SHLIBDEPS OFF)
string(JOIN "\n" CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION
    "KV-cache service for LLM inference engines - development files"
    "A daemon keeps the keys and values of long contexts and computes attention"
    "next to them. This package has the header, pkg-config and CMake files for"
    "libkvm and libkvm_embedded, and examples.")

file(WRITE "${PROJECT_BINARY_DIR}/packaging/conffiles" "/etc/kvm/kvmd.toml\n")
file(WRITE "${PROJECT_BINARY_DIR}/packaging/shlibs"
     "libkvm ${KVM_ABI_VERSION} libkvm0 (>= ${PROJECT_VERSION})\n"
     "libkvm_embedded ${KVM_ABI_VERSION} libkvm0 (>= ${PROJECT_VERSION})\n")
file(WRITE "${PROJECT_BINARY_DIR}/packaging/triggers" "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_DAEMON_PACKAGE_CONTROL_EXTRA
    "${PROJECT_BINARY_DIR}/packaging/conffiles;${packaging}/postinst;${packaging}/prerm"
    "${packaging}/postrm")
set(CPACK_DEBIAN_LIBRARIES_PACKAGE_CONTROL_EXTRA
    "${PROJECT_BINARY_DIR}/packaging/shlibs;${PROJECT_BINARY_DIR}/packaging/triggers")
set(CPACK_OUTPUT_FILE_PREFIX "${PROJECT_BINARY_DIR}/package")
include(CPack)
