// Which instruction set the hot loops use.

#include <string.h>

#include "topw.h"

extern "C" {

const char *topw_instruction_set(void) { return "generic"; }

int topw_use_instruction_set(const char *name) { return strcmp(name, "generic") == 0 ? 0 : 1; }

}  // extern "C"
