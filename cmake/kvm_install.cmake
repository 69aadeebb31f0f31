# What `cmake --install` puts into a prefix: the header, both libraries, pkg-config files and a
# CMake package to find them, the programs, and their manual pages and completions. The prefix can
# be moved afterwards. cmake/kvm_package.cmake has what a Debian package has besides.

# From <libdir>/pkgconfig back to the prefix: the library directory may be lib or lib/<triplet>.
file(RELATIVE_PATH KVM_PC_PREFIX "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
install(FILES include/kvm.h include/kvm_cuda.h DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")

set(KVM_INSTALLED_LIBRARIES)
foreach(library kvm kvm_embedded)
  if(TARGET ${library})
    list(APPEND KVM_INSTALLED_LIBRARIES ${library})
    configure_file(cmake/kvm.pc.in "${PROJECT_BINARY_DIR}/${library}.pc" @ONLY)
    install(FILES "${PROJECT_BINARY_DIR}/${library}.pc"
            DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
  endif()
endforeach()

if(KVM_INSTALLED_LIBRARIES)
  include(CMakePackageConfigHelpers)
  set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kvm")
  install(TARGETS ${KVM_INSTALLED_LIBRARIES} EXPORT kvm-targets
          LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  install(EXPORT kvm-targets NAMESPACE kvm:: FILE kvm-config.cmake DESTINATION "${package_dir}")
  # Before 1.0 a minor version may change the ABI.
  write_basic_package_version_file("${PROJECT_BINARY_DIR}/kvm-config-version.cmake"
                                   COMPATIBILITY SameMinorVersion)
  install(FILES "${PROJECT_BINARY_DIR}/kvm-config-version.cmake" DESTINATION "${package_dir}")
endif()

# The programs find libkvm in any prefix, wherever that was moved, without ldconfig.
file(RELATIVE_PATH KVM_BIN_TO_LIB "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")
foreach(program kvmd kvmctl)
  if(TARGET ${program})
    set_target_properties(${program} PROPERTIES INSTALL_RPATH "$ORIGIN/${KVM_BIN_TO_LIB}")
    install(TARGETS ${program} RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
  endif()
endforeach()
if(TARGET kvmd AND TARGET kvmctl)
  set(man "${CMAKE_INSTALL_MANDIR}")
  install(FILES "${KVM_SHARE}/kvmd.8" DESTINATION "${man}/man8")
  install(FILES "${KVM_SHARE}/kvmd.toml.5" DESTINATION "${man}/man5")
  install(FILES "${KVM_SHARE}/kvmctl.1" DESTINATION "${man}/man1")
  set(data "${CMAKE_INSTALL_DATADIR}")
  install(FILES "${KVM_SHARE}/kvmctl.bash" DESTINATION "${data}/bash-completion/completions"
          RENAME kvmctl)
  install(FILES "${KVM_SHARE}/_kvmctl" DESTINATION "${data}/zsh/vendor-completions")
  install(FILES "${KVM_SHARE}/kvmctl.fish" DESTINATION "${data}/fish/vendor_completions.d")
endif()
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
