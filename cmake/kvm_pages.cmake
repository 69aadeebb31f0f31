# What the programs write about themselves while building: manual pages, completions and the default
# configuration, in KVM_SHARE. They cannot differ from what the programs do.

set(KVM_PAGES)

# kvm_page(FILE PROGRAM ARGUMENT...): FILE is what PROGRAM prints.
function(kvm_page file program)
  set(depends ${program})
  foreach(argument IN LISTS ARGN)
    if(EXISTS "${argument}")
      list(APPEND depends "${argument}")
    endif()
  endforeach()
  # Leaks at the end of a build's program are of no interest, and cannot be looked for everywhere.
  add_custom_command(
    OUTPUT "${KVM_SHARE}/${file}"
    COMMAND "${CMAKE_COMMAND}" -E env ASAN_OPTIONS=detect_leaks=0 $<TARGET_FILE:${program}> ${ARGN}
            > "${KVM_SHARE}/${file}"
    DEPENDS ${depends}
    VERBATIM)
  set(KVM_PAGES ${KVM_PAGES} "${KVM_SHARE}/${file}" PARENT_SCOPE)
endfunction()

set(man "${PROJECT_SOURCE_DIR}/docs/man")
if(TARGET kvmd_pages)
  kvm_page(kvmd.8 kvmd_pages flags "${man}/kvmd.8.in")
  kvm_page(kvmd.toml.5 kvmd_pages keys "${man}/kvmd.toml.5.in")
  kvm_page(kvmd.toml kvmd_pages config)
endif()
if(TARGET kvmctl_page)
  kvm_page(kvmctl.1 kvmctl_page "${man}/kvmctl.1.in")
  kvm_page(kvmctl.bash kvmctl completion bash)
  kvm_page(_kvmctl kvmctl completion zsh)
  kvm_page(kvmctl.fish kvmctl completion fish)
endif()
if(KVM_PAGES)
  add_custom_target(kvm_pages ALL DEPENDS ${KVM_PAGES})
  set_property(GLOBAL APPEND PROPERTY KVM_PROGRAMS kvm_pages)
endif()
