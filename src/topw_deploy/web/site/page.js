// The page: sends the fields to worker.js, which runs the model, and shows the streamed text and its figures.

import { PRESETS, presetParameters } from "./topw/presets.js";
import { RULES } from "./topw/rules.js";

const INTEGERS = ["max_new_tokens", "no_repeat_ngram_size", "top_k", "top_h_pool"];
const find = (id) => document.getElementById(id);
const form = find("form");
const worker = new Worker("worker.js", { type: "module" });

/** @type {{token_id: number, kept: number, certified: boolean, logprob: number, text: string}[]} */
let drawn = [];
let started = 0; // performance.now() at the first token
let model = null; // the worker's description of the model, once it is open

fillMenus();
form.addEventListener("submit", generate);
form.elements.rule.addEventListener("change", showValues);
form.elements.preset.addEventListener("change", showDefaults);
find("stop").addEventListener("click", stop);
worker.onmessage = ({ data }) => HANDLERS[data.type](data);
worker.onerror = ({ message }) => fail(`The worker failed: ${message || "it could not be loaded"}; reload the page.`);

const HANDLERS = {
  progress({ bytes, total }) {
    find("loading").value = total ? Math.min(1, bytes / total) : 0;
  },
  ready(about) {
    model = about;
    const { notes, rule, rules, maxLength, threads } = about;
    fillRules(rules);
    form.elements.rule.value = rule;
    showValues();
    showDefaults();
    find("loading").hidden = true;
    setRunning(false);
    const state = `Ready: ${threads} ${threads === 1 ? "thread" : "threads"}, at most ${maxLength} tokens.`;
    showStatus([state, ...notes].join(" "));
  },
  piece({ piece: { text, tokens, result } }) {
    if (drawn.length === 0) started = performance.now(); // its time is that of the prompt
    drawn.push(...tokens);
    addText(text, tokens);
    addRows(tokens);
    showFigures();
    if (result !== null) finish(result);
  },
  done() {
    setRunning(false);
  },
  error({ name, message }) {
    fail(`${name}: ${message}`);
  },
};

function fillMenus() {
  const names = Object.keys(PRESETS).filter((name) => name !== "released"); // an export's own defaults, if it has them
  for (const name of names) form.elements.preset.append(new Option(name));
  form.elements.preset.value = "lively";
  fillRules([...RULES.keys()]);
  showValues();
}

function fillRules(names) {
  form.elements.rule.replaceChildren(...names.map((name) => new Option(name)));
}

/** Shows the defaults in empty fields. */
function showDefaults() {
  const preset = form.elements.preset.value;
  find("preset-text").textContent = preset ? `${preset}: ${PRESETS[preset]}.` : "";
  if (model === null) return;
  const values = preset ? presetParameters(preset, model.metric, model.hiddenSize) : {};
  for (const [name, value] of Object.entries({ ...model.defaults, ...values })) {
    const shown = typeof value === "number" ? Number(value.toPrecision(4)) : value;
    if (form.elements[name]) form.elements[name].placeholder = shown;
  }
}

/** Shows a field for each parameter of the chosen rule. */
function showValues() {
  const fields = RULES.get(form.elements.rule.value).values.map(({ name, bound, default: usual }) => {
    const label = document.createElement("label");
    const input = Object.assign(document.createElement("input"), { name, placeholder: usual ?? bound, autocomplete: "off" });
    label.append(`${name} `, input);
    return label;
  });
  find("values").replaceChildren(...fields);
}

function generate(event) {
  event.preventDefault();
  if (find("generate").disabled) return;
  const prompt = find("prompt").value;
  drawn = [];
  find("table").replaceChildren();
  find("plot").replaceChildren();
  const given = Object.assign(document.createElement("span"), { className: "given", textContent: prompt });
  find("text").replaceChildren(given);
  showFigures();
  showStatus("Generating…");
  setRunning(true);
  try {
    worker.postMessage({ type: "generate", prompt, parameters: readParameters() });
  } catch (error) {
    HANDLERS.error(error);
  }
}

/** Stops the text, or the loading of the model. */
function stop() {
  if (model !== null) return worker.postMessage({ type: "stop" });
  worker.terminate();
  fail("Loading was stopped; reload the page to load the model.");
}

function fail(text) {
  find("loading").hidden = true;
  setRunning(false);
  showStatus(text);
  find("status").className = "error";
}

/** The parameters in the fields that are filled in, by their names. */
function readParameters() {
  const found = {};
  for (const { name, value } of form.elements) {
    const text = name ? value.trim() : "";
    if (text) found[name] = name === "stop_strings" ? value : parseField(name, text);
  }
  return found;
}

function parseField(name, text) {
  if (name === "preset" || name === "rule") return text;
  if (name === "seed") {
    if (/^[0-9]{1,20}$/.test(text)) return BigInt(text);
    throw new Error(`seed is "${text}", but must be an integer in [0, 2^64).`);
  }
  const number = Number(text);
  if (Number.isFinite(number) && (!INTEGERS.includes(name) || Number.isInteger(number))) return number;
  if (name === "beta") return text; // it may depend on the temperature
  throw new Error(`${name} is "${text}", but must be ${INTEGERS.includes(name) ? "an integer" : "a number"}.`);
}

/** The colour of a piece of text or of a bar: "one", "sure", or "geo", as in the legend. */
function colourOf(tokens) {
  if (tokens.some(({ certified }) => !certified)) return "geo";
  return tokens.some(({ kept }) => kept > 1) ? "sure" : "one";
}

function addText(text, tokens) {
  if (!text) return;
  const span = document.createElement("span");
  span.textContent = text;
  span.className = `token ${colourOf(tokens)}`;
  span.title = tokens.map(({ kept, certified }) => `kept ${kept}${certified ? ", certified" : ""}`).join("; ");
  find("text").append(span);
}

function addRows(tokens) {
  const before = drawn.length - tokens.length;
  tokens.forEach(({ text, logprob, kept, certified }, place) => {
    const number = before + place + 1;
    const sure = drawn.slice(0, number).filter((each) => each.certified).length;
    const share = `${((100 * sure) / number).toFixed(0)} %`;
    const row = document.createElement("tr");
    for (const value of [number, JSON.stringify(text), Math.exp(logprob).toFixed(3), kept, certified ? "yes" : "no", share]) {
      row.append(Object.assign(document.createElement("td"), { textContent: value }));
    }
    find("table").append(row);
  });
}

function showFigures() {
  const count = drawn.length;
  const seconds = (performance.now() - started) / 1000;
  const mean = drawn.reduce((sum, { kept }) => sum + kept, 0) / count;
  const sure = drawn.filter(({ certified }) => certified).length;
  find("tokens").textContent = count;
  find("speed").textContent = count > 1 && seconds > 0 ? ((count - 1) / seconds).toFixed(1) : "–";
  find("kept").textContent = count ? mean.toFixed(1) : "–";
  find("certified").textContent = count ? `${((100 * sure) / count).toFixed(0)} %` : "–";
  if (!count) find("seed").textContent = "–";
}

/** Draws a bar per token: the size of its crop, on a logarithmic scale. */
function showPlot() {
  const most = Math.log2(1 + Math.max(1, ...drawn.map(({ kept }) => kept)));
  const width = 600 / Math.max(drawn.length, 1);
  const bars = drawn.map((token, place) => {
    const height = (78 * Math.log2(1 + token.kept)) / most;
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const attributes = { x: place * width, y: 80 - height, width: Math.max(width * 0.8, 0.5), height };
    for (const [name, value] of Object.entries(attributes)) bar.setAttribute(name, value);
    bar.setAttribute("class", colourOf([token]));
    return bar;
  });
  find("plot").replaceChildren(...bars);
}

function finish({ finish_reason: reason, seed, timings, token_ids: ids }) {
  const { decode_seconds: seconds, decode_steps: steps } = timings;
  find("speed").textContent = steps && seconds ? (steps / seconds).toFixed(1) : "–";
  find("seed").textContent = String(seed);
  showPlot();
  const reasons = { stop: "the text ended", length: "the limit was reached", cancelled: "stopped" };
  showStatus(`Done: ${ids.length} ${ids.length === 1 ? "token" : "tokens"}, ${reasons[reason]}.`);
}

function setRunning(running) {
  find("generate").disabled = running || model === null;
  find("stop").disabled = !running;
}

function showStatus(text) {
  find("status").textContent = text;
  find("status").className = "";
}
