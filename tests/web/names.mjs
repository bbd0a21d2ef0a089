// Prints the names, defaults, rules and presets of the JavaScript library: JSON.
import { ALIASES, PARAMETERS, REQUEST_PARAMETERS } from "../../src/topw_deploy/web/site/topw/parameters.js";
import { PRESETS, presetParameters } from "../../src/topw_deploy/web/site/topw/presets.js";
import { RULES } from "../../src/topw_deploy/web/site/topw/rules.js";

const plain = (value) => (value instanceof Map ? Object.fromEntries(value) : (value ?? null));
const defaults = (parameters) =>
  Object.fromEntries(Object.entries(parameters).map(([name, { default: usual, depth }]) => [name, [plain(usual), depth]]));
const presets = Object.keys(PRESETS).map((name) => [
  name,
  (name === "released" ? ["cosine"] : ["mahalanobis", "unit", "cosine", "uniform"]).map((metric) => presetParameters(name, metric, 256)),
]);
console.log(
  JSON.stringify({
    rows: defaults(PARAMETERS),
    requests: defaults(REQUEST_PARAMETERS),
    aliases: ALIASES,
    rules: [...RULES.values()].map(({ code, name, values }) => [code, name, values.map((each) => [each.name, each.default])]),
    presets: Object.fromEntries(presets),
  }),
);
