// Request parameters: names, checks, and per-row lists. Names and defaults are those of the Python package.

import { ParameterError, show } from "./errors.js";
import { TOP_W_NAMES, TOP_W_RANGES, checkPreset, coefficients } from "./presets.js";
import { RULES, RULE_OF_VALUE, checkRule } from "./rules.js";

const IN_FLOAT32 = "in float32 too, which holds magnitudes from 1.4e-45 to 3.4e+38";
const SEEDS = 1n << 64n;

/** Names in vLLM, OpenAI's API and the authors' code -> ours. */
export const ALIASES = {
  lambda_geom: "lam",
  warm_p: "init_top_p",
  m: "top_m",
  max_tokens: "max_new_tokens",
  max_completion_tokens: "max_new_tokens",
  min_tokens: "min_new_tokens",
  stop: "stop_strings",
  n: "num_return_sequences",
  response_format: "structured_outputs",
};

const FIXED_BY_THE_EXPORT = ["top_m", "alt_iters", "metric", "potential", "knn_k"];
const PYTHON_ONLY = [
  "structured_outputs",
  "logprobs",
  "prompt_logprobs",
  "generation_config",
  "streamer",
  "stopping_criteria",
];

function integer(name, value, low, high = Infinity) {
  const whole = typeof value === "bigint" ? Number(value) : value;
  if (!Number.isSafeInteger(whole) || whole < low || whole >= high) {
    const bound = high === Infinity ? `>= ${low}` : `in [${low}, ${high})`;
    throw new ParameterError(`${name} is ${show(value)}, but must be an integer ${bound}.`);
  }
  return whole;
}

const atLeast = (low) => (name, value) => integer(name, value, low);

function real(name, value, holds, bound) {
  const number = typeof value === "number" ? value : NaN;
  if (!holds(number) || !holds(Math.fround(number))) {
    const wanted = holds(number) ? `${bound} ${IN_FLOAT32}` : bound;
    throw new ParameterError(`${name} is ${show(value)}, but must be ${wanted}.`);
  }
  return number;
}

function flag(name, value) {
  if (typeof value !== "boolean") {
    throw new ParameterError(`${name} is ${show(value)}, but must be true or false.`);
  }
  return value;
}

const positive = (name, value) => real(name, value, (x) => x > 0 && x < Infinity, "a finite number > 0");
const finite = (name, value) => real(name, value, Number.isFinite, "a finite number");
const topW = (name, value) => real(name, value, ...TOP_W_RANGES[name]);

function beta(name, value) {
  if (typeof value !== "string") return topW(name, value);
  const [constant, slope] = coefficients(value);
  return slope ? value.trim() : topW(name, constant);
}

function ofRule(name, value) {
  const stated = RULE_OF_VALUE.get(name).values.find((each) => each.name === name);
  return real(name, value, (x) => Number.isFinite(x) && stated.holds(x), stated.bound);
}

function seed(name, value) {
  const whole = typeof value === "bigint" ? value : Number.isSafeInteger(value) ? BigInt(value) : -1n;
  if (whole < 0n || whole >= SEEDS) {
    throw new ParameterError(
      `${name} is ${show(value)}, but must be an integer in [0, 2^64), as a BigInt from 2^53 on.`,
    );
  }
  return whole;
}

const ids = (name, value) => (isList(value) ? [...value] : [value]).map((each) => integer(name, each, 0));

function someIds(name, value) {
  const found = ids(name, value);
  if (!found.length) throw new ParameterError(`${name} is empty, but must have at least one token id.`);
  return found;
}

function idLists(name, value) {
  if (!isList(value) || !value.every((each) => isList(each) && each.length)) {
    throw new ParameterError(`${name} is ${show(value)}, but must be a list of non-empty lists of token ids.`);
  }
  return value.map((each) => ids(name, each));
}

function strings(name, value) {
  const values = typeof value === "string" ? [value] : value;
  if (!isList(values) || !values.every((each) => typeof each === "string" && each)) {
    throw new ParameterError(`${name} is ${show(value)}, but must be a non-empty string or a list of them.`);
  }
  return [...values];
}

function biases(name, value) {
  const isObject = typeof value === "object" && value !== null && !isList(value);
  if (!isObject) throw new ParameterError(`${name} is ${show(value)}, but must map token ids to numbers.`);
  const found = new Map();
  for (const [token, bias] of value instanceof Map ? value : Object.entries(value)) {
    const digits = typeof token === "string" && /^[0-9]+$/.test(token);
    const key = integer(`a token id of ${name}`, digits ? Number(token) : token, 0);
    if (found.has(key)) throw new ParameterError(`${name} names the token id ${key} twice; give it one bias.`);
    const bound = "a number below infinity (-inf bans the token)";
    found.set(key, real(`${name}[${key}]`, bias, (x) => x < Infinity, bound));
  }
  return found;
}

/** @returns {boolean} whether `value` is an array or a typed array */
export function isList(value) {
  return Array.isArray(value) || (ArrayBuffer.isView(value) && !(value instanceof DataView));
}

const parameter = (parse, usual, depth = 0) => ({ parse, default: usual, depth });

/**
 * Per-row parameters: name -> {parse(name, value), default, depth}.
 * `depth` is the list nesting of one row's value; one more level means one value per row.
 */
export const PARAMETERS = {
  max_new_tokens: parameter(atLeast(1), 256),
  max_length: parameter(atLeast(1)),
  min_new_tokens: parameter(atLeast(0), 0),
  min_length: parameter(atLeast(0), 0),
  do_sample: parameter(flag),
  eos_token_id: parameter(ids, [], 1),
  pad_token_id: parameter(atLeast(0)),
  ignore_eos: parameter(flag, false),
  stop_token_ids: parameter(ids, [], 1),
  stop_strings: parameter(strings, [], 1),
  repetition_penalty: parameter(positive, 1),
  presence_penalty: parameter(finite, 0),
  frequency_penalty: parameter(finite, 0),
  logit_bias: parameter(biases, new Map()),
  suppress_tokens: parameter(ids, [], 1),
  allowed_token_ids: parameter(someIds, [], 1),
  bad_words_ids: parameter(idLists, [], 2),
  bad_words: parameter(strings, [], 1),
  no_repeat_ngram_size: parameter(atLeast(0), 0),
  seed: parameter(seed),
  preset: parameter((_name, value) => checkPreset(value)),
  ...Object.fromEntries(TOP_W_NAMES.map((name) => [name, parameter(topW)])),
  beta: parameter(beta),
  geom_unit: parameter(unit),
  rule: parameter((_name, value) => checkRule(value)),
  ...Object.fromEntries([...RULE_OF_VALUE.keys()].map((name) => [name, parameter(ofRule)])),
};

/** Whole-request parameters. */
export const REQUEST_PARAMETERS = {
  num_return_sequences: parameter(atLeast(1), 1),
  skip_special_tokens: parameter(flag, true),
  add_special_tokens: parameter(flag, true),
};

function unit(name, value) {
  if (value !== "raw" && value !== "median") {
    throw new ParameterError(`${name} is ${show(value)}, but must be one of raw, median.`);
  }
  return value;
}

/**
 * Splits a request's parameters into those of rows and those of the whole request, the latter with defaults.
 * Values null and undefined count as not given.
 * @param {Record<string, any>} given
 * @returns {[Record<string, any>, Record<string, any>]}
 * @throws {ParameterError} for unknown names, duplicates, and parameters that the export fixes or only Python has
 */
export function split(given) {
  const used = {};
  for (const [name, value] of Object.entries(given)) {
    const ours = ALIASES[name] ?? name;
    checkKnown(ours, name);
    if (value === null || value === undefined) continue;
    if (Object.hasOwn(used, ours)) {
      throw new ParameterError(`${ours} is given twice, also as ${name}; give it once.`);
    }
    used[ours] = value;
  }
  const whole = {};
  for (const [name, known] of Object.entries(REQUEST_PARAMETERS)) {
    whole[name] = Object.hasOwn(used, name) ? known.parse(name, used[name]) : known.default;
    delete used[name];
  }
  return [used, whole];
}

function checkKnown(ours, name) {
  if (FIXED_BY_THE_EXPORT.includes(ours)) {
    throw new ParameterError(`${ours} is built into the graph, so no request can change it; export the model again.`);
  }
  if (PYTHON_ONLY.includes(ours)) {
    throw new ParameterError(`${name} is available in Python only; leave it out, or use \`topw serve\`.`);
  }
  if (!Object.hasOwn(PARAMETERS, ours) && !Object.hasOwn(REQUEST_PARAMETERS, ours)) {
    const known = [...Object.keys(PARAMETERS), ...Object.keys(REQUEST_PARAMETERS)].sort();
    throw new ParameterError(`unknown parameter ${show(name)}: known are ${known.join(", ")}.`);
  }
}

/**
 * The checked value of a parameter for each row; undefined where a list has null.
 * @param {string} name
 * @param {any} value one for all rows, or a list of one per row
 * @param {number} rows
 * @returns {any[]}
 */
export function spread(name, value, rows) {
  const { parse, depth } = PARAMETERS[name];
  if (!isPerRow(value, depth)) return new Array(rows).fill(parse(name, value));
  const values = [...value];
  if (values.length !== rows) {
    throw new ParameterError(
      `${name} has ${values.length} values for ${rows} prompts; give one value for all or one for each.`,
    );
  }
  return values.map((each) => (each === null || each === undefined ? undefined : parse(name, each)));
}

function isPerRow(value, depth) {
  let level = value;
  for (let below = 0; below < depth; below++) {
    if (!isList(level)) return false;
    const inner = [...level].filter((each) => isList(each) && each.length);
    if (!inner.length) return false;
    [level] = inner;
  }
  return isList(level);
}

/** @returns {string[]} the names of all rules, for menus */
export const ruleNames = () => [...RULES.keys()];
