/* topw.h's step on a CUDA device, enqueued on a stream.
 *
 * Only launches: no allocation, copy or host synchronisation, so a CUDA graph can capture a step. All addresses are the
 * device's, borrowed until the step has run.
 */
#ifndef TOPW_CUDA_H
#define TOPW_CUDA_H

#include "../native/topw.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Incremented if these functions or the workspace size change; a TensorRT engine stores both. */
#define TOPW_CUDA_ABI_VERSION 4

/* Upper bounds of a call; they determine its scratch memory. */
typedef struct {
  topw_options options;
  topw_table table;           /* sizes and types; addresses unused; hidden 0 with the uniform metric */
  int64_t batch, vocab, edits;
  int32_t logits_type;        /* TOPW_FLOAT32, TOPW_FLOAT16 or TOPW_BFLOAT16 */
  int32_t reserved;
} topw_cuda_shape;

/* NULL if the kernels support this shape, else the reason, as a clause. */
TOPW_EXPORT const char *topw_cuda_refusal(const topw_cuda_shape *);

/* Device memory for a step of this shape, the same on every device; 0 for a refused shape. Align both blocks to 256
 * bytes. Control memory: zero before the first launch and left zero by each, even a failed one; keep it between steps.
 * Workspace: any content. Launches that share either must not overlap. */
TOPW_EXPORT int64_t topw_cuda_control_bytes(const topw_cuda_shape *);
TOPW_EXPORT int64_t topw_cuda_workspace_bytes(const topw_cuda_shape *);

/* Enqueues the step on `stream`, a cudaStream_t of the current device. `inputs`: at most the shape's batch and edits;
 * its vocabulary and logits_type; a mask or none, rules or none. `table`: NULL for the uniform metric. Structures are
 * read during the call, their data later. Returns 0 or a cudaError_t. */
TOPW_EXPORT int topw_cuda_launch(const topw_cuda_shape *, const topw_table *table, const topw_inputs *,
                                 const topw_outputs *, void *control, void *workspace, void *stream);

/* Enqueues some launches of a step, for measurements. Geometry alone answers rows that an earlier certify left open in
 * the same memory. */
#define TOPW_CUDA_CERTIFY 1
#define TOPW_CUDA_GEOMETRY 2
TOPW_EXPORT int topw_cuda_launch_parts(const topw_cuda_shape *, const topw_table *table, const topw_inputs *,
                                       const topw_outputs *, void *control, void *workspace, void *stream,
                                       int32_t parts);

/* Allocates zeroed control memory on the current device, aligned to 256 bytes; releases it, with any device current,
 * once unused. Both may wait: do not call them while the thread captures a stream. Return 0 or a cudaError_t. */
TOPW_EXPORT int topw_cuda_allocate(int64_t bytes, void **memory);
TOPW_EXPORT int topw_cuda_release(void *memory);

TOPW_EXPORT const char *topw_cuda_error(int code); /* text of such a code */
TOPW_EXPORT int topw_cuda_device_count(void);      /* 0 without a device or a driver */
TOPW_EXPORT int topw_cuda_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif
