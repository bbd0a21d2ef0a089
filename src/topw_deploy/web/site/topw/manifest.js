// Reads topw_manifest.json (docs/contract/graph.md, section 9) and checks the fields that the library uses.

import { ManifestError, show } from "./errors.js";
import { TOP_W_NAMES, TOP_W_RANGES, betaCoefficients } from "./presets.js";
import { LONGEST_LIST, RULES } from "./rules.js";

export const MANIFEST_NAME = "topw_manifest.json";
export const MOST_MANIFEST = 2 ** 24; // bytes; manifests have a few KB
const FORMAT_VERSION = 1;
const FORMS = {
  concat: ["input_ids"],
  static: ["input_ids", "write_indices", "row_lengths"],
  shared: ["input_ids", "attention_mask"],
};
const MOST_TOKENS = 2 ** 31 - 1;
const MOST_VOCABULARY = 2 ** 24;
const METRICS = ["mahalanobis", "unit", "cosine", "uniform"];

/** ONNX element type of a state -> onnxruntime's name and the class of its array. */
export const STATE_TYPES = {
  float: { type: "float32", Array: Float32Array },
  float16: { type: "float16", Array: Uint16Array }, // a tensor may show the bits as a Float16Array
  uint8: { type: "uint8", Array: Uint8Array },
  int8: { type: "int8", Array: Int8Array },
  int32: { type: "int32", Array: Int32Array },
  int64: { type: "int64", Array: BigInt64Array },
  bool: { type: "bool", Array: Uint8Array },
};

/**
 * @typedef {{past: string, present: string, dtype: string, shape: number[], grows: boolean}} State
 *   a tensor [batch, ...shape] that a layer keeps between calls; the size 0 marks the axis of tokens
 * @typedef {object} Decoder
 * @property {"concat" | "static" | "shared"} form
 * @property {State[]} states
 * @property {number} contextLength
 * @property {boolean} leftPadding
 * @property {boolean} rightPadding
 * @property {boolean} raggedChunks
 * @property {number} mostColumns maximum number of columns of a run; 0 for any
 * @property {number} bufferStep
 * @property {number} bufferLeast
 * @property {boolean} evicts whether a state keeps only a window of tokens
 * @property {boolean} recurs whether each token must be read exactly once
 * @typedef {{vocabSize: number, hiddenSize: number | null, metric: string, rules: string[], sortsAll: boolean}} Sampler
 *   rules: names of the rules that the graph carries; sortsAll: whether the graph sorts all tokens
 * @typedef {object} Manifest
 * @property {Decoder} decoder
 * @property {Sampler} sampler
 * @property {Record<string, number | string>} defaults beta is text if it depends on the temperature
 * @property {number | null} medianDistance
 * @property {Map<string, (number | string)[]>} inputs shapes by name
 * @property {string[]} outputs
 * @property {Map<string, number>} files sizes in bytes by name
 */

/**
 * Reads a manifest.
 * @param {string} text
 * @returns {Manifest}
 * @throws {ManifestError} naming the first wrong field
 */
export function parseManifest(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new ManifestError(`${MANIFEST_NAME} is not JSON (${error.message}); export the model again.`);
  }
  if (!isObject(data) || data.format_version !== FORMAT_VERSION) {
    throw new ManifestError(
      `${MANIFEST_NAME} has format version ${show(data?.format_version)}, this library reads ${FORMAT_VERSION}; export ` +
        "the model again or install the version that wrote it.",
    );
  }
  if (data.kind !== "decoder") {
    throw new ManifestError(
      `the folder holds a ${show(data.kind)}, but only exported models have a decoder; export the model with topw-export.`,
    );
  }
  try {
    return readManifest(data);
  } catch (error) {
    if (!(error instanceof Malformed)) throw error;
    throw new ManifestError(`${MANIFEST_NAME} is malformed (${error.message}); export the model again.`);
  }
}

class Malformed extends Error {}

function readManifest(data) {
  const { status, median_distance: median } = requireObject("verification", data.verification);
  if (status === "provisional") {
    throw new ManifestError("the export was interrupted before its verification; export the model again.");
  }
  const found = {
    decoder: readDecoder(requireObject("decoder", data.decoder)),
    sampler: readSampler(requireObject("sampler", data.sampler)),
    defaults: readDefaults(requireObject("defaults", data.defaults), data.default_beta),
    inputs: new Map(
      requireList("inputs", data.inputs).map((each) => [requireText("a name in inputs", each?.name), each.shape]),
    ),
    outputs: requireList("outputs", data.outputs).map((each) => requireText("a name in outputs", each?.name)),
    files: new Map(
      Object.entries(requireObject("files", data.files)).map(([name, entry]) => [
        requirePlainPath(name),
        requireSize(name, entry),
      ]),
    ),
  };
  if (!found.files.has("model.onnx")) throw new Malformed("files does not list model.onnx");
  if (median !== null && !(Number.isFinite(median) && median > 0)) {
    throw new Malformed(`verification.median_distance is ${show(median)}, not a number > 0`);
  }
  checkTensors(found);
  return { ...found, medianDistance: found.sampler.metric === "uniform" ? 1 : median };
}

function readDecoder(data) {
  if (!Object.hasOwn(FORMS, data.kv_form)) {
    throw new Malformed(`decoder.kv_form is ${show(data.kv_form)}, not one of ${Object.keys(FORMS).join(", ")}`);
  }
  const states = requireList("decoder.states", data.states).map(readState);
  if (!states.length) throw new Malformed("decoder.states is empty");
  return {
    form: data.kv_form,
    states,
    contextLength: requireInteger("decoder.context_length", data.context_length, 1, MOST_TOKENS),
    leftPadding: requireFlag("decoder.left_padding", data.left_padding),
    rightPadding: requireFlag("decoder.right_padding", data.right_padding),
    raggedChunks: requireFlag("decoder.ragged_chunks", data.ragged_chunks),
    mostColumns: requireInteger("decoder.most_columns", data.most_columns, 0, MOST_TOKENS),
    bufferStep: requireInteger("decoder.buffer_step", data.buffer_step, 0, MOST_TOKENS),
    bufferLeast: requireInteger("decoder.buffer_least", data.buffer_least, 0, MOST_TOKENS),
    evicts: states.some((each) => each.window > 0),
    recurs: states.some((each) => !each.grows),
  };
}

function readState(data, index) {
  const where = `decoder.states[${index}]`;
  const { past, present, dtype, shape, window } = requireObject(where, data);
  if (!Object.hasOwn(STATE_TYPES, dtype)) {
    throw new ManifestError(
      `${show(past)} has the element type ${show(dtype)}, which onnxruntime for JavaScript does not have; export with ` +
        "--dtype fp32 or fp16.",
    );
  }
  const sizes = requireList(`${where}.shape`, shape).map((axis) =>
    requireInteger(`an axis of ${where}`, axis, 0, MOST_VOCABULARY),
  );
  const axes = sizes.filter((axis) => axis === 0).length;
  if (!sizes.length || sizes.length > 4 || axes > 1) {
    throw new Malformed(`${where}.shape is ${show(shape)}, not 1 to 4 axes with at most one 0`);
  }
  return {
    past: requireText(`${where}.past`, past),
    present: requireText(`${where}.present`, present),
    dtype,
    shape: sizes,
    grows: axes === 1,
    window: requireInteger(`${where}.window`, window, 0, MOST_TOKENS),
  };
}

function readSampler(data) {
  const metric = requireObject("sampler.options", data.options).metric;
  if (!METRICS.includes(metric)) throw new Malformed(`sampler.options.metric is ${show(metric)}`);
  const hidden = data.hidden_size;
  const vocabSize = requireInteger("sampler.vocab_size", data.vocab_size, 1, MOST_VOCABULARY);
  return {
    vocabSize,
    hiddenSize: hidden === null ? null : requireInteger("sampler.hidden_size", hidden, 1, MOST_VOCABULARY),
    metric,
    rules: requireList("sampler.rules", data.rules).map(readRule),
    sortsAll: vocabSize <= LONGEST_LIST,
  };
}

function readRule(name) {
  if (!RULES.has(name)) throw new Malformed(`sampler.rules names ${show(name)}`);
  return name;
}

function readDefaults(data, defaultBeta) {
  const found = {};
  for (const name of TOP_W_NAMES) {
    const [holds, bound] = TOP_W_RANGES[name];
    const number = data[name];
    if (typeof number !== "number" || !holds(Math.fround(number))) {
      throw new Malformed(`defaults.${name} is ${show(number)}, not ${bound}`);
    }
    found[name] = number;
  }
  if (requireText("default_beta", defaultBeta)) {
    betaCoefficients(defaultBeta);
    found.beta = defaultBeta;
  }
  return found;
}

function checkTensors({ decoder: { form, states }, inputs, outputs }) {
  const needed = [...FORMS[form], ...states.map((each) => each.past), "uniform", "rule", ...TOP_W_NAMES];
  for (const name of needed) {
    if (!inputs.has(name)) throw new Malformed(`inputs has no ${name}`);
  }
  for (const name of [...states.map((each) => each.present), "next_token", "logprob", "kept", "certified"]) {
    if (!outputs.includes(name)) throw new Malformed(`outputs has no ${name}`);
  }
}

export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function requireObject(name, value) {
  if (!isObject(value)) throw new Malformed(`${name} is ${show(value)}, not an object`);
  return value;
}

function requireList(name, value) {
  if (!Array.isArray(value)) throw new Malformed(`${name} is ${show(value)}, not a list`);
  return value;
}

function requireText(name, value) {
  if (typeof value !== "string") throw new Malformed(`${name} is ${show(value)}, not a text`);
  return value;
}

function requireFlag(name, value) {
  if (typeof value !== "boolean") throw new Malformed(`${name} is ${show(value)}, not true or false`);
  return value;
}

function requireInteger(name, value, least, most) {
  if (!Number.isInteger(value) || value < least || value > most) {
    throw new Malformed(`${name} is ${show(value)}, not an integer in [${least}, ${most}]`);
  }
  return value;
}

const requireSize = (name, entry) =>
  requireInteger(`size of ${name}`, requireObject(name, entry).size, 0, Number.MAX_SAFE_INTEGER);

/** Returns `name`. Throws ManifestError unless it is a plain path inside the folder. */
function requirePlainPath(name) {
  const parts = name.split("/");
  if (/[\\:\0]/.test(name) || parts.some((part) => part === "" || part === "." || part === "..")) {
    throw new ManifestError(
      `the manifest lists the file ${show(name)}, which is not a plain path inside the folder; do not use this folder.`,
    );
  }
  return name;
}
