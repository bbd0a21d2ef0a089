// The parameters of requests: names, checks, and lists with a value per row. Names and defaults are those of the Python
// package.

import { ParameterError, show } from "./errors.js";
import { TOP_W_NAMES, TOP_W_RANGES, betaCoefficients, checkPreset } from "./presets.js";
import { RULE_OF_VALUE, checkRule } from "./rules.js";

const IN_FLOAT32 = "in float32 too, which holds magnitudes from 1.4e-45 to 3.4e+38";
const SEEDS = 1n << 64n;

/** Name in vLLM, OpenAI's API or the authors' code -> name in this project. */
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
  "speculate",
  "generation_config",
  "streamer",
  "stopping_criteria",
];

function parseInteger(name, value, low, high = Infinity) {
  const whole = typeof value === "bigint" ? Number(value) : value;
  if (!Number.isSafeInteger(whole) || whole < low || whole >= high) {
    const bound = high === Infinity ? `>= ${low}` : `in [${low}, ${high})`;
    throw new ParameterError(`${name} is ${show(value)}, but must be an integer ${bound}.`);
  }
  return whole;
}

const atLeast = (low) => (name, value) => parseInteger(name, value, low);

function parseReal(name, value, holds, bound) {
  const number = typeof value === "number" ? value : NaN;
  if (!holds(number) || !holds(Math.fround(number))) {
    const wanted = holds(number) ? `${bound} ${IN_FLOAT32}` : bound;
    throw new ParameterError(`${name} is ${show(value)}, but must be ${wanted}.`);
  }
  return number;
}

function parseFlag(name, value) {
  if (typeof value !== "boolean") {
    throw new ParameterError(`${name} is ${show(value)}, but must be true or false.`);
  }
  return value;
}

const parsePositive = (name, value) => parseReal(name, value, (x) => x > 0 && x < Infinity, "a finite number > 0");
const parseFinite = (name, value) => parseReal(name, value, Number.isFinite, "a finite number");
const parseTopW = (name, value) => parseReal(name, value, ...TOP_W_RANGES[name]);

function parseBeta(name, value) {
  if (typeof value !== "string") return parseTopW(name, value);
  const [constant, slope] = betaCoefficients(value);
  return slope ? value.trim() : parseTopW(name, constant);
}

function parseRuleValue(name, value) {
  const stated = RULE_OF_VALUE.get(name).values.find((each) => each.name === name);
  return parseReal(name, value, (x) => Number.isFinite(x) && stated.holds(x), stated.bound);
}

function parseSeed(name, value) {
  const whole = typeof value === "bigint" ? value : Number.isSafeInteger(value) ? BigInt(value) : -1n;
  if (whole < 0n || whole >= SEEDS) {
    throw new ParameterError(
      `${name} is ${show(value)}, but must be an integer in [0, 2^64), as a BigInt from 2^53 on.`,
    );
  }
  return whole;
}

const parseIds = (name, value) => (isList(value) ? [...value] : [value]).map((each) => parseInteger(name, each, 0));

function parseSomeIds(name, value) {
  const found = parseIds(name, value);
  if (!found.length) throw new ParameterError(`${name} is empty, but must have at least one token id.`);
  return found;
}

function parseIdLists(name, value) {
  if (!isList(value) || !value.every((each) => isList(each) && each.length)) {
    throw new ParameterError(`${name} is ${show(value)}, but must be a list of non-empty lists of token ids.`);
  }
  return value.map((each) => parseIds(name, each));
}

function parseStrings(name, value) {
  const values = typeof value === "string" ? [value] : value;
  if (!isList(values) || !values.every((each) => typeof each === "string" && each)) {
    throw new ParameterError(`${name} is ${show(value)}, but must be a non-empty string or a list of them.`);
  }
  return [...values];
}

function parseBiases(name, value) {
  const isObject = typeof value === "object" && value !== null && !isList(value);
  if (!isObject) throw new ParameterError(`${name} is ${show(value)}, but must map token ids to numbers.`);
  const found = new Map();
  for (const [token, bias] of value instanceof Map ? value : Object.entries(value)) {
    const digits = typeof token === "string" && /^[0-9]+$/.test(token);
    const key = parseInteger(`a token id of ${name}`, digits ? Number(token) : token, 0);
    if (found.has(key)) throw new ParameterError(`${name} names the token id ${key} twice; give it one bias.`);
    const bound = "a number below infinity (-inf bans the token)";
    found.set(key, parseReal(`${name}[${key}]`, bias, (x) => x < Infinity, bound));
  }
  return found;
}

/** @returns {boolean} whether `value` is an array or a typed array */
export function isList(value) {
  return Array.isArray(value) || (ArrayBuffer.isView(value) && !(value instanceof DataView));
}

const parameter = (parse, usual, depth = 0) => ({ parse, default: usual, depth });

/**
 * Parameters of a row: name -> {parse(name, value), default, depth}.
 * `depth` is the number of nested lists in one row's value. A value with one more level has one value per row.
 */
export const PARAMETERS = {
  max_new_tokens: parameter(atLeast(1), 256),
  max_length: parameter(atLeast(1)),
  min_new_tokens: parameter(atLeast(0), 0),
  min_length: parameter(atLeast(0), 0),
  do_sample: parameter(parseFlag),
  eos_token_id: parameter(parseIds, [], 1),
  pad_token_id: parameter(atLeast(0)),
  ignore_eos: parameter(parseFlag, false),
  stop_token_ids: parameter(parseIds, [], 1),
  stop_strings: parameter(parseStrings, [], 1),
  repetition_penalty: parameter(parsePositive, 1),
  presence_penalty: parameter(parseFinite, 0),
  frequency_penalty: parameter(parseFinite, 0),
  logit_bias: parameter(parseBiases, new Map()),
  suppress_tokens: parameter(parseIds, [], 1),
  allowed_token_ids: parameter(parseSomeIds, [], 1),
  bad_words_ids: parameter(parseIdLists, [], 2),
  bad_words: parameter(parseStrings, [], 1),
  no_repeat_ngram_size: parameter(atLeast(0), 0),
  seed: parameter(parseSeed),
  preset: parameter((_name, value) => checkPreset(value)),
  ...Object.fromEntries(TOP_W_NAMES.map((name) => [name, parameter(parseTopW)])),
  beta: parameter(parseBeta),
  geom_unit: parameter(parseUnit),
  rule: parameter((_name, value) => checkRule(value)),
  ...Object.fromEntries([...RULE_OF_VALUE.keys()].map((name) => [name, parameter(parseRuleValue)])),
};

/** Parameters of a whole request, in the same form. */
export const REQUEST_PARAMETERS = {
  num_return_sequences: parameter(atLeast(1), 1),
  skip_special_tokens: parameter(parseFlag, true),
  add_special_tokens: parameter(parseFlag, true),
};

function parseUnit(name, value) {
  if (value !== "raw" && value !== "median") {
    throw new ParameterError(`${name} is ${show(value)}, but must be one of raw, median.`);
  }
  return value;
}

/**
 * Splits a request's parameters. The values null and undefined count as not given.
 * @param {Record<string, any>} given
 * @returns {[Record<string, any>, Record<string, any>]} those of rows, not checked; those of the whole request, with their
 *   defaults
 * @throws {ParameterError} for unknown names, duplicates, and parameters that the export fixes or only Python has
 */
export function splitParameters(given) {
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
 * The checked value of a parameter for each row; undefined for a row whose value is null.
 * @param {string} name
 * @param {any} value one for all rows, or a list of one per row
 * @param {number} rows
 * @returns {any[]}
 */
export function valuesPerRow(name, value, rows) {
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
