/* Top-W for rows of logits on a CUDA device, as docs/contract/graph.md defines it: topw.h's step, enqueued on a stream.
 *
 * A C interface without a runtime around it. Launches only: no allocation, no copy, no synchronisation with the host,
 * so a step can be captured into a CUDA graph. Every address is the device's and is borrowed until the stream has
 * passed the step.
 */
#ifndef TOPW_CUDA_H
#define TOPW_CUDA_H

#include "../native/topw.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of these functions, and of how much workspace they ask for, which an engine of TensorRT keeps: one more where either
 * changes. */
#define TOPW_CUDA_ABI_VERSION 2

/* The most a call may bring, which is all that scratch memory depends on. */
typedef struct {
  topw_options options;
  topw_table table;           /* sizes and types; addresses unused; hidden 0 with the uniform metric */
  int64_t batch, vocab, edits;
  int32_t logits_type;        /* TOPW_FLOAT32, TOPW_FLOAT16 or TOPW_BFLOAT16 */
  int32_t reserved;
} topw_cuda_shape;

/* NULL: the kernels serve calls of this shape. Else why not, as a clause. */
TOPW_EXPORT const char *topw_cuda_refusal(const topw_cuda_shape *);

/* The device memory that a step of this shape needs, whatever the device; 0 for a shape that is refused. Both blocks are
 * aligned to 256 bytes. Control memory is zero before the first launch and zero again after each, also after one that
 * answers an error, so it must be kept between steps. The workspace may hold anything. Launches that share either must
 * not overlap. */
TOPW_EXPORT int64_t topw_cuda_control_bytes(const topw_cuda_shape *);
TOPW_EXPORT int64_t topw_cuda_workspace_bytes(const topw_cuda_shape *);

/* Enqueues the step on `stream`, a cudaStream_t, of the current device. `inputs` has at most the shape's batch and
 * edits and its vocabulary; its logits are of the shape's logits_type. `table` is NULL for the uniform metric. The
 * structures are read during the call; what they point to, later. 0, or a cudaError_t. */
TOPW_EXPORT int topw_cuda_launch(const topw_cuda_shape *, const topw_table *table, const topw_inputs *,
                                 const topw_outputs *, void *control, void *workspace, void *stream);

/* Enqueues some of the launches of a step, to measure them one by one. Geometry alone answers the rows that an earlier
 * certify left open in the same control memory and workspace. */
#define TOPW_CUDA_CERTIFY 1
#define TOPW_CUDA_GEOMETRY 2
TOPW_EXPORT int topw_cuda_launch_parts(const topw_cuda_shape *, const topw_table *table, const topw_inputs *,
                                       const topw_outputs *, void *control, void *workspace, void *stream,
                                       int32_t parts);

/* Zeroed memory of the current device, aligned to 256 bytes, for control memory that outlives a call; and its release,
 * whichever device is current, once no work uses it. Both may wait, so neither is allowed in a thread that captures a
 * stream. 0, or a cudaError_t. */
TOPW_EXPORT int topw_cuda_allocate(int64_t bytes, void **memory);
TOPW_EXPORT int topw_cuda_release(void *memory);

TOPW_EXPORT const char *topw_cuda_error(int code); /* the text of such a code */
TOPW_EXPORT int topw_cuda_device_count(void);      /* 0 without a device or a driver */
TOPW_EXPORT int topw_cuda_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif
