// All kernels, without the functions that launch them. The run-time compiler would compile those for the device too and
// need declarations of the CUDA functions they call.
#include <cuda_runtime.h>

cudaError_t cudaGetDevice(int *);
cudaError_t cudaGetDeviceCount(int *);
cudaError_t cudaDeviceGetAttribute(int *, cudaDeviceAttr, int);
cudaError_t cudaGetLastError();
cudaError_t cudaDriverGetVersion(int *);
cudaError_t cudaMalloc(void **, size_t);
cudaError_t cudaFree(void *);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *, unsigned);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *);
cudaError_t cudaMemsetAsync(void *, int, size_t, cudaStream_t);
char *getenv(const char *);
const char *cudaGetErrorString(cudaError_t);

#include "certify.cuh"
#include "geometry.cuh"
#include "mass.cuh"

namespace topw {

template __global__ void certify<float>(const __grid_constant__ Call);
template __global__ void certify<Float16>(const __grid_constant__ Call);
template __global__ void certify<Bfloat16>(const __grid_constant__ Call);

}  // namespace topw
