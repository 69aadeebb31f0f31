# kvm_cuda_architectures(OUT NVCC) sets OUT to the architectures that this nvcc compiles the kernels
# for. Devices that have no code of their own run PTX, which their driver compiles. nvcc knows
# sm_120 from 12.8 on.
function(kvm_cuda_architectures out nvcc)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE says ERROR_QUIET)
  set(architectures 80-real 90a-real 120-real 90-virtual)
  if(says MATCHES "release ([0-9]+\\.[0-9]+)" AND CMAKE_MATCH_1 VERSION_LESS 12.8)
    list(REMOVE_ITEM architectures 120-real)
  endif()
  set(${out} "${architectures}" PARENT_SCOPE)
endfunction()
