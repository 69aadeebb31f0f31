/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the CUDA runtime that examples/cuda uses, for a program over the fake driver, where
 * no CUDA toolkit need be. Copies wait; all else is enqueued. */
#ifndef KVM_TESTS_GPU_FAKE_CUDART_CUDA_RUNTIME_API_H_
#define KVM_TESTS_GPU_FAKE_CUDART_CUDA_RUNTIME_API_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorUnknown = 999 };
enum { cudaStreamNonBlocking = 1 };
enum { cudaEventDisableTiming = 2 };
enum { cudaHostAllocDefault = 0 };
enum { cudaStreamCaptureModeThreadLocal = 1 };
enum { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
typedef void* cudaStream_t;
typedef void* cudaEvent_t;
typedef struct FakeGraph* cudaGraph_t;
typedef struct FakeGraph* cudaGraphExec_t;

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaMalloc(void** out, size_t size);
cudaError_t cudaFree(void* memory);
cudaError_t cudaHostAlloc(void** out, size_t size, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVM_TESTS_GPU_FAKE_CUDART_CUDA_RUNTIME_API_H_ */
