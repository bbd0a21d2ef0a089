/* Top-W and other rules for rows of logits on a CPU (docs/contract/graph.md): the step from edits to the drawn token.
 *
 * Used by the onnxruntime operator, the Python binding and the fuzzers. Pointers are borrowed for the call.
 */
#ifndef TOPW_H
#define TOPW_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define TOPW_EXPORT __declspec(dllexport)
#else
#define TOPW_EXPORT __attribute__((visibility("default")))
#endif

#define TOPW_ABI_VERSION 4

enum { TOPW_MAHALANOBIS = 0, TOPW_UNIT = 1, TOPW_COSINE = 2, TOPW_UNIFORM = 3 };     /* metric */
enum { TOPW_FLOAT32 = 1, TOPW_UINT8 = 2, TOPW_FLOAT16 = 10, TOPW_BFLOAT16 = 16, TOPW_UINT4 = 21, TOPW_INT4 = 22 };
enum { TOPW_INVALID = 0, TOPW_GREEDY = 1, TOPW_CANDIDATES = 2, TOPW_POOL = 3, TOPW_GEOMETRY = 4, TOPW_LITERAL = 5 };

/* rule, with its values (v0, v1) */
enum {
  TOPW_RULE_TOP_W = 0,
  TOPW_RULE_TOP_K = 1,       /* k, an integer >= 1 */
  TOPW_RULE_TOP_P = 2,       /* mass in (0, 1] */
  TOPW_RULE_MIN_P = 3,       /* share of the largest probability in [0, 1] */
  TOPW_RULE_TOP_H = 4,       /* share of the entropy in (0, 1]; size of the pool, an integer >= 1 */
  TOPW_RULE_TYPICAL = 5,     /* mass in (0, 1) */
  TOPW_RULE_EPSILON = 6,     /* probability in (0, 1) */
  TOPW_RULE_ETA = 7,         /* probability in (0, 1) */
  TOPW_RULE_TOP_N_SIGMA = 8, /* n >= 0 */
  TOPW_RULE_P_LESS = 9,
  TOPW_RULE_MIN_K = 10, /* tau >= 0 */
  TOPW_RULE_NONE = 11
};

typedef struct {
  int64_t top_m, alt_iters; /* both >= 1 */
  int32_t metric;
  int32_t knn_k; /* 0: nearest */
} topw_options;

/* Quantisation as in onnxruntime's GatherBlockQuantized(gather_axis=0, quantize_axis=1): every block_size coordinates
 * of a row share a scale and a zero point; a value is (code - zero point) * scale. Codes and zero points have the
 * table's type: TOPW_UINT8 with one 8-bit or two 4-bit codes per byte (a row's zero points start at a byte); TOPW_UINT4
 * and TOPW_INT4, packed without gaps. The default zero point is 2^(bits - 1) for TOPW_UINT8, else 0. */
typedef struct {
  int32_t bits, block_size; /* bits 0: not quantised, the rest unused */
  int32_t scale_type;       /* TOPW_FLOAT32, or TOPW_FLOAT16: rows are then rounded to it */
  int32_t reserved;
  const void *scales;      /* [tokens, blocks per row] */
  const void *zero_points; /* or NULL */
} topw_blocks;

/* The input embeddings [tokens, hidden], tokens >= vocab, and their statistics [hidden]. */
typedef struct {
  const void *rows;
  int64_t tokens, hidden;
  int32_t dtype; /* enum above, numbered as ONNX's TensorProto.DataType */
  int32_t reserved;
  const float *mean, *inverse_std;
  const float *neighbour_bound; /* [vocab] lower bounds of distances to the nearest other token, or NULL */
  topw_blocks blocks;
} topw_table;

/* logits [batch, vocab]; edits [batch, edits]; allowed [batch, words]; the rest [batch].
 * words: 0, or ceil(vocab / 32). Bit id % 32 of word id / 32 is 1 if the token is allowed; others have the logit -inf,
 * also after an edit. Bits beyond the vocabulary have no effect. */
typedef struct {
  int64_t batch, vocab, edits, words;
  const float *logits;
  const int64_t *edit_ids;
  const float *edit_penalty, *edit_bias;
  const int32_t *allowed;
  const float *temperature, *selection_temperature, *lam, *beta, *init_top_p, *geom_scale, *uniform;
  const int32_t *rule;      /* enum above; NULL: Top-W for every row */
  const float *rule_values; /* [batch, 2] (v0, v1); not read if `rule` is NULL, nor where the rule has fewer values */
} topw_inputs;

/* The work that a row took. `stage`: the last stage that ran, see the enum above. */
typedef struct {
  int32_t stage, candidates, steps, reserved;
  int64_t distances, distances_avoided; /* pairs of tokens */
} topw_report;

/* [batch] each, keep_mask [batch, vocab]; the last three may be NULL. */
typedef struct {
  int64_t *next_token;
  float *logprob;
  int32_t *kept;
  uint8_t *certified;
  float *mass;
  uint8_t *keep_mask;
  topw_report *reports;
} topw_outputs;

typedef struct topw_workspace topw_workspace; /* scratch memory of one thread */

TOPW_EXPORT topw_workspace *topw_workspace_create(void); /* NULL: out of memory */
TOPW_EXPORT void topw_workspace_destroy(topw_workspace *);

/* Samples one row; returns 1 if out of memory, else 0. One workspace per thread. `table`: NULL for the uniform
 * metric. */
TOPW_EXPORT int topw_sample_row(const topw_options *, const topw_table *table, const topw_inputs *, int64_t row,
                                topw_workspace *, const topw_outputs *);

/* Samples every row in this thread. */
TOPW_EXPORT int topw_sample(const topw_options *, const topw_table *table, const topw_inputs *, const topw_outputs *);

TOPW_EXPORT int topw_abi_version(void);

/* "avx512", "avx2", "neon" or "generic": chosen on first use by the processor or TOPW_INSTRUCTION_SET. */
TOPW_EXPORT const char *topw_instruction_set(void);
TOPW_EXPORT int topw_use_instruction_set(const char *name); /* 1 if the processor or the build lacks the set, else 0 */

/* Products with 4- and 8-bit weights by "amx", "avx512_vnni", "avx_vnni", "avx2", "dotprod" or "generic"; null: that of
 * the instruction set. 1 if the processor or the build lacks them, else 0. */
TOPW_EXPORT int topw_use_product(const char *name);

#ifdef __cplusplus
}
#endif
#endif
