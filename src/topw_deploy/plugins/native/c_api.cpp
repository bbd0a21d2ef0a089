// The C interface of topw.h.

#include <stdlib.h>

#include <new>

#include "row.h"
#include "topw.h"

extern "C" {

topw_workspace *topw_workspace_create(void) {
  void *memory = malloc(sizeof(topw_workspace));
  return memory ? new (memory) topw_workspace() : nullptr;
}

void topw_workspace_destroy(topw_workspace *workspace) {
  if (!workspace) return;
  workspace->~topw_workspace();
  free(workspace);
}

int topw_sample_row(const topw_options *options, const topw_table *table, const topw_inputs *inputs, int64_t row,
                    topw_workspace *workspace, const topw_outputs *outputs) {
  return topw::sample_row(*options, table, *inputs, row, *workspace, *outputs) ? 0 : 1;
}

int topw_sample(const topw_options *options, const topw_table *table, const topw_inputs *inputs,
                const topw_outputs *outputs) {
  topw_workspace *workspace = topw_workspace_create();
  if (!workspace) return 1;
  int failed = 0;
  for (int64_t row = 0; row < inputs->batch && !failed; ++row)
    failed = topw_sample_row(options, table, inputs, row, workspace, outputs);
  topw_workspace_destroy(workspace);
  return failed;
}

int topw_abi_version(void) { return TOPW_ABI_VERSION; }

}  // extern "C"
