// Top-W's parameters, their intervals and presets (docs/contract/graph.md, sections 1 and 2).

import { ParameterError, show } from "./errors.js";

/** A lower temperature draws the largest logit: 1e-5 in float32. */
export const GREEDY_BELOW = 9.999999747378752e-6;

const notNegative = [(x) => x >= 0 && x < Infinity, "a finite number >= 0"];

/** Name -> [whether a number is in the interval, the interval in words]. */
export const TOP_W_RANGES = {
  lam: notNegative,
  beta: notNegative,
  temperature: notNegative,
  selection_temperature: notNegative,
  init_top_p: [(x) => x > 0 && x <= 1, "in (0, 1]"],
  geom_scale: [Number.isFinite, "finite"],
};

/** The six parameters of Top-W. */
export const TOP_W_NAMES = Object.keys(TOP_W_RANGES);

const PAPER = { lam: 2.2, beta: 2.8, temperature: 1, selection_temperature: 0, init_top_p: 0.999, geom_scale: 1 };
const LIVELY = { ...PAPER, lam: 1, beta: 4, selection_temperature: 1, init_top_p: 0.3 };
const LIVELY_DISTANCE = 1.5; // geom_scale times the typical distance

/** Name -> description in one line. */
export const PRESETS = {
  paper: "the paper's parameters, which keep few tokens",
  released: "the authors' released code: paper with geom_scale 0.6, for exports with the metric cosine",
  creative: "the paper's creative setting: paper with beta 1.5+1.5*T, T the temperature",
  lively: "parameters at which token geometry decides most crops",
};

/**
 * @param {unknown} name
 * @returns {string} `name`
 * @throws {ParameterError} if it is not a preset
 */
export function checkPreset(name) {
  if (typeof name !== "string" || !Object.hasOwn(PRESETS, name)) {
    throw new ParameterError(`preset is ${show(name)}, but must be one of ${Object.keys(PRESETS).join(", ")}.`);
  }
  return name;
}

/**
 * The six parameters of a preset; a beta that depends on the temperature is text.
 * @param {string} name
 * @param {string} metric of the export
 * @param {number | null} width of the embeddings
 * @returns {Record<string, number | string>}
 * @throws {ParameterError} if the preset needs another metric
 */
export function presetParameters(name, metric, width) {
  if (name === "released") {
    if (metric === "cosine") return { ...PAPER, geom_scale: 0.6 };
    throw new ParameterError(
      `preset is "released", which needs the metric cosine, but this model has ${metric}; export it with --preset released.`,
    );
  }
  if (name === "lively") return { ...LIVELY, geom_scale: LIVELY_DISTANCE / typicalDistance(metric, width) };
  return name === "creative" ? { ...PAPER, beta: "1.5+1.5*T" } : { ...PAPER };
}

/** The distance of two tokens whose features are uncorrelated. */
function typicalDistance(metric, width) {
  if (metric === "mahalanobis") return Math.sqrt(2 * width);
  return metric === "unit" ? Math.sqrt(2) : 1;
}

const NUMBER = String.raw`(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?`;
const CONSTANT = new RegExp(`^(${NUMBER})$`);
const LINEAR = new RegExp(`^(?:(${NUMBER})\\s*([+-])\\s*)?(${NUMBER})\\s*\\*\\s*T$`);
const LONGEST = 80; // characters
const LARGEST = 3.4028234663852886e38; // float32

/**
 * [a, b] of a beta that is a + b T at the temperature T.
 * @param {string} text "A", "B*T", "A+B*T" or "A-B*T"
 * @returns {[number, number]}
 * @throws {ParameterError} for any other text
 */
export function betaCoefficients(text) {
  const stripped = text.length <= LONGEST ? text.trim() : "";
  const constant = CONSTANT.exec(stripped);
  const linear = LINEAR.exec(stripped);
  let pair = [Infinity, Infinity];
  if (constant) pair = [Number(constant[1]), 0];
  else if (linear) pair = [Number(linear[1] ?? 0), Number(linear[3]) * (linear[2] === "-" ? -1 : 1)];
  if (!pair.every(Number.isFinite)) {
    throw new ParameterError(
      `beta is ${show(text)}, but must be a finite number >= 0, or A+B*T, A-B*T or B*T with such numbers A and B and ` +
        "the temperature T, for example 1.5+1.5*T.",
    );
  }
  return pair;
}

/**
 * The six parameters of a row, checked, with beta as a number at the row's temperature.
 * @param {Record<string, number | string>} values
 * @returns {Record<string, number>}
 * @throws {ParameterError}
 */
export function topWParameters(values) {
  const found = { ...values };
  if (typeof found.beta === "string") {
    const temperature = found.temperature < GREEDY_BELOW ? 0 : found.temperature;
    const [a, b] = betaCoefficients(found.beta);
    found.beta = a + b * temperature;
    if (!(found.beta >= 0 && found.beta <= LARGEST)) {
      throw new ParameterError(
        `beta is ${show(values.beta)}, ${found.beta} at temperature ${temperature}, but must be a finite number >= 0, ` +
          "in float32 too; change it or the temperature.",
      );
    }
  }
  return found;
}
