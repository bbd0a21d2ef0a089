// Runs models that topw-export wrote, in browsers (onnxruntime-web) and in Node (onnxruntime-node). It draws the tokens
// that the Python runtime draws from the same seed; docs/guide/web.md says how exactly.

export * from "./errors.js";
export { folderAt } from "./folder.js";
export { MANIFEST_NAME, parseManifest } from "./manifest.js";
export { TopWModel } from "./model.js";
export { PARAMETERS, REQUEST_PARAMETERS } from "./parameters.js";
export { PRESETS } from "./presets.js";
export { uniform, word } from "./random.js";
export { RULES } from "./rules.js";
