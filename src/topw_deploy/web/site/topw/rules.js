// The sampling rules (docs/contract/rules.md): names, codes, parameters and their intervals.

import { ParameterError, show } from "./errors.js";

const MOST_COUNT = 1 << 24; // float32 holds every integer up to this one

/** Number of tokens that a graph sorts unless it sorts all tokens (docs/contract/graph.md, section 8). */
export const LONGEST_LIST = 3840;

/**
 * @typedef {{name: string, holds: (value: number) => boolean, bound: string, default: number | null}} RuleValue
 * @typedef {{code: number, name: string, values: RuleValue[]}} Rule
 * @typedef {{code: number, name: string, values: [number, number]}} RowRule the rule of a row; values in float32
 */

const value = (name, holds, bound, usual = null) => ({ name, holds, bound, default: usual });
const count = (name, usual) =>
  value(name, (x) => Number.isInteger(x) && x >= 1 && x <= MOST_COUNT, `an integer in 1..${MOST_COUNT}`, usual);
const share = (name, usual) => value(name, (x) => x > 0 && x <= 1, "in (0, 1]", usual);
const inside = (name) => value(name, (x) => x > 0 && x < 1, "in (0, 1)");
const notNegative = (name, usual) => value(name, (x) => x >= 0, "a finite number >= 0", usual);

/** Rules by name. @type {Map<string, Rule>} */
export const RULES = new Map(
  [
    ["top_w"],
    ["top_k", count("top_k")],
    ["top_p", share("top_p")],
    ["min_p", value("min_p", (x) => x >= 0 && x <= 1, "in [0, 1]")],
    ["top_h", share("top_h", 0.4), count("top_h_pool", 100)],
    ["typical", inside("typical_p")],
    ["epsilon", inside("epsilon_cutoff")],
    ["eta", inside("eta_cutoff")],
    ["top_n_sigma", notNegative("top_n_sigma", 1)],
    ["p_less"],
    ["min_k", notNegative("min_k_tau", 3)],
    ["none"],
  ].map(([name, ...values], code) => [name, { code, name, values }]),
);

/** Rules by the names of their parameters. @type {Map<string, Rule>} */
export const RULE_OF_VALUE = new Map(
  [...RULES.values()].flatMap((rule) => rule.values.map((each) => [each.name, rule])),
);

/** `rule` and the parameters of all rules. */
export const RULE_PARAMETERS = ["rule", ...RULE_OF_VALUE.keys()];

/** @type {RowRule} */
export const TOP_W = { code: 0, name: "top_w", values: [0, 0] };

/**
 * The rule that a source's parameters name or imply.
 * @param {Record<string, any>} own the source's parameters of RULE_PARAMETERS, at least one
 * @param {(name: string) => any} get returns a value from any source, for a parameter that a rule named in `own` lacks
 * @returns {RowRule}
 * @throws {ParameterError} for parameters of another rule or of two, a missing one, or one outside its interval
 */
export function ruleOf(own, get) {
  const chosen = own.rule === undefined ? implied(own) : RULES.get(own.rule);
  for (const name of Object.keys(own)) {
    const owner = RULE_OF_VALUE.get(name);
    if (owner !== undefined && owner !== chosen) {
      throw new ParameterError(
        `${name} is a parameter of the rule ${owner.name}, but the rule is ${chosen.name}; leave it out, or choose ` +
          `${owner.name}.`,
      );
    }
  }
  const found = chosen.values.map((each) => {
    const given = own[each.name] ?? (own.rule === undefined ? undefined : get(each.name)) ?? each.default;
    if (given === null) {
      throw new ParameterError(`the rule ${chosen.name} has no default; give ${each.name}, ${each.bound}.`);
    }
    return Math.fround(given);
  });
  return { code: chosen.code, name: chosen.name, values: [found[0] ?? 0, found[1] ?? 0] };
}

function implied(own) {
  const names = Object.keys(own);
  const rules = new Map(names.map((name) => [RULE_OF_VALUE.get(name).name, name]));
  if (rules.size > 1) {
    const [first, second] = rules.values();
    throw new ParameterError(
      `${first} and ${second} are parameters of two sampling rules, but a row has one rule; give only one.`,
    );
  }
  return RULE_OF_VALUE.get(names[0]);
}

/**
 * Checks that the graph carries a rule, and sorts enough tokens for its pool.
 * @param {RowRule} rule
 * @param {import("./manifest.js").Sampler} sampler
 * @throws {ParameterError}
 */
export function checkSamplerHasRule({ name, values: [share, pool] }, { rules, sortsAll, vocabSize }) {
  if (!rules.includes(name)) {
    throw new ParameterError(
      `rule is ${name}, but this model carries only ${rules.join(", ")}; export it again with --rules ` +
        `${[...rules, name].join(",")}.`,
    );
  }
  if (name === "top_h" && !sortsAll && share < 1 && pool > LONGEST_LIST && pool < vocabSize) {
    throw new ParameterError(
      `top_h_pool is ${pool}, but this model takes at most ${LONGEST_LIST}, or the whole vocabulary of ${vocabSize}; ` +
        "give such a pool.",
    );
  }
}

/**
 * Checks the name of a rule.
 * @param {unknown} name
 * @returns {string} `name`
 * @throws {ParameterError} for an unknown rule
 */
export function checkRule(name) {
  if (typeof name !== "string" || !RULES.has(name)) {
    throw new ParameterError(`rule is ${show(name)}: known are ${[...RULES.keys()].join(", ")}.`);
  }
  return name;
}
