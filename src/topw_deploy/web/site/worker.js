// Opens the model and generates, away from the page's thread.

import { TopWModel, folderAt } from "./topw/index.js";
import { loadLibraries } from "./libraries.js";

const PAUSE_INTERVAL = 30; // milliseconds of work after which waiting messages are handled
const ERROR_LEVEL = 3; // onnxruntime's level for errors; below it, some operators warn in every step
const site = new URL("./", import.meta.url);

let model = null;
let lastPause = 0; // performance.now()
let running = null; // the AbortController of the generation in progress

const post = (type, values) => self.postMessage({ type, ...values });
const fail = (error) => post("error", { name: error.name ?? "Error", message: String(error.message ?? error) });

self.onmessage = ({ data: { type, prompt, parameters } }) => {
  if (type === "generate") generate(prompt, parameters).catch(fail);
  if (type === "stop") running?.abort();
};

open().catch(fail);

async function open() {
  const about = await readAbout();
  post("progress", { bytes: 0, total: about.bytes });
  const libraries = await loadLibraries(about.libraries, site);
  const folder = folderAt(new URL("model/", site), (bytes) => post("progress", { bytes, total: about.bytes }));
  model = await TopWModel.open(folder, { ...libraries, sessionOptions: { logSeverityLevel: ERROR_LEVEL } });
  post("ready", {
    notes: model.notes,
    defaults: { ...model.manifest.defaults, ...numbersOf(model.defaults) },
    rule: model.defaults.rule ?? "top_w",
    rules: model.manifest.sampler.rules,
    metric: model.manifest.sampler.metric,
    hiddenSize: model.manifest.sampler.hiddenSize,
    maxLength: model.maxLength,
    threads: libraries.ort.env.wasm.numThreads,
  });
}

async function readAbout() {
  let problem;
  try {
    const response = await fetch(new URL("topw_site.json", site));
    if (response.ok) return await response.json();
    problem = `status ${response.status}`;
  } catch (error) {
    problem = error.message;
  }
  throw new Error(`topw_site.json cannot be read (${problem}); reload the page, or write the site again.`);
}

async function generate(prompt, parameters) {
  running = new AbortController();
  try {
    for await (const piece of model.stream(prompt, parameters, { signal: running.signal, pause })) {
      post("piece", { piece: { ...piece, tokens: piece.tokens.map(withText) } });
    }
  } finally {
    running = null;
  }
  post("done", {});
}

const withText = (token) => ({ ...token, text: model.decode([token.token_id], false) });

function numbersOf(values) {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => typeof value === "number"));
}

/** Handles waiting messages, such as the one to stop. */
async function pause() {
  if (performance.now() - lastPause < PAUSE_INTERVAL) return;
  await nextTask();
  lastPause = performance.now();
}

/** Ends the task, so that the next message is handled. A timer would wait for at least 4 ms. */
function nextTask() {
  return new Promise((done) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      done();
    };
    port2.postMessage(null);
  });
}
