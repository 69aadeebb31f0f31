# The Debian package, by CPack: everything that `cmake --install` puts into a prefix, below /usr,
# and what belongs to a system besides (component `system`): unit, user, configuration.
# `./dev package` makes it from a release build.

if(NOT (TARGET kvmd AND TARGET kvmctl))
  return()
endif()
set(packaging "${PROJECT_SOURCE_DIR}/packaging")
foreach(rule "kvmd.service;lib/systemd/system;kvmd.service"
             "kvmd.sysusers;lib/sysusers.d;kvmd.conf")
  list(GET rule 0 file)
  list(GET rule 1 folder)
  list(GET rule 2 name)
  install(FILES "${packaging}/${file}" DESTINATION "${folder}" RENAME "${name}"
          COMPONENT system EXCLUDE_FROM_ALL)
endforeach()
install(FILES "${KVM_SHARE}/kvmd.toml" DESTINATION /etc/kvm COMPONENT system EXCLUDE_FROM_ALL)
# What an operator reads besides the manual pages.
foreach(page operations configuration security)
  install(FILES "${PROJECT_SOURCE_DIR}/docs/${page}.md" DESTINATION share/doc/kvm
          COMPONENT system EXCLUDE_FROM_ALL)
endforeach()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME kvm)
set(CPACK_PACKAGE_VERSION "${PROJECT_VERSION}")
set(CPACK_PACKAGE_CONTACT "the kvm developers <kvm@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "KV-cache service for LLM inference engines")
string(JOIN "\n" CPACK_PACKAGE_DESCRIPTION
    "A daemon keeps the keys and values of long contexts and computes attention next to them."
    "The package has the daemon kvmd with its systemd unit, the tool kvmctl, the client libraries"
    "libkvm and libkvm_embedded, and the header kvm.h with pkg-config and CMake files.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
# One package of both components.
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_COMPONENTS_ALL Unspecified system)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${PROJECT_BINARY_DIR}/lib")
set(CPACK_DEBIAN_PACKAGE_DEPENDS "systemd | systemd-standalone-sysusers")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
file(WRITE "${PROJECT_BINARY_DIR}/packaging/conffiles" "/etc/kvm/kvmd.toml\n")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA
    "${PROJECT_BINARY_DIR}/packaging/conffiles;${packaging}/postinst;${packaging}/prerm"
    "${packaging}/postrm;${packaging}/triggers")
set(CPACK_OUTPUT_FILE_PREFIX "${PROJECT_BINARY_DIR}/package")
include(CPack)
