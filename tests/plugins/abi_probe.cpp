// A library without operators: it tries ort_abi.h on the runtime that loads it and records the results.
#include <string.h>

#include "ort_abi.h"
#include "topw.h"

namespace {
char found_version[64];
char found_message[64];
int steps;  // checks passed so far
}  // namespace

extern "C" {
TOPW_EXPORT const char *probe_version() { return found_version; }
TOPW_EXPORT const char *probe_message() { return found_message; }
TOPW_EXPORT int probe_steps() { return steps; }

TOPW_EXPORT ort::Status *RegisterCustomOps(ort::SessionOptions *options, const ort::ApiBase *base) {
  strncpy(found_version, base->version_string(), sizeof found_version - 1);
  if (base->get_api(100000)) return nullptr;  // no such version
  const ort::Api api(base->get_api(ort::kVersion));
  if (!api) return nullptr;
  steps = 1;

  ort::Status *made = api[ort::create_status](ort::kInvalidArgument, "said and read back");
  strncpy(found_message, api[ort::get_error_message](made), sizeof found_message - 1);
  api[ort::release_status](made);
  steps = 2;

  int known = -1;
  if (api[ort::has_config_entry](options, "topw.probe", &known) || known != 0) return nullptr;
  if (api[ort::add_config_entry](options, "topw.probe", "yes")) return nullptr;
  if (api[ort::has_config_entry](options, "topw.probe", &known) || known != 1) return nullptr;
  steps = 3;

  ort::Domain *domain = nullptr;
  if (api[ort::create_domain]("topw.probe", &domain) || !domain) return nullptr;
  steps = 4;
  return nullptr;
}
}
