// Marks code shared by CPU and CUDA; empty outside CUDA.
#ifndef TOPW_HOST_DEVICE_H
#define TOPW_HOST_DEVICE_H

#if defined(__CUDACC__)
#define TOPW_SHARED_CODE __host__ __device__
#else
#define TOPW_SHARED_CODE
#endif

#endif
