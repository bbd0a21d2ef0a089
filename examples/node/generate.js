// node generate.js MODEL [PROMPT ...] [--NAME VALUE ...] [--json]
//
// Streams the text that the exported model MODEL writes behind PROMPT. NAME is a parameter of the Python package's
// `generate`, such as --seed, --preset, --temperature or --top-p; underscores and hyphens mean the same.

import { Tokenizer } from "@huggingface/tokenizers";
import * as ort from "onnxruntime-node";

import { folderOnDisk } from "./folder.js";
import { PARAMETERS, REQUEST_PARAMETERS, TopWError, TopWModel } from "../../src/topw_deploy/web/site/topw/index.js";

const TEXTS = ["preset", "rule", "geom_unit", "beta", "bad_words"];
const USAGE = "node generate.js MODEL [PROMPT ...] [--threads N] [--json] [--seed N] [--preset NAME] [--NAME VALUE ...]";

try {
  await main(process.argv.slice(2));
} catch (error) {
  if (!(error instanceof TopWError)) throw error;
  console.error(`Error: ${error.message}`);
  process.exitCode = 1;
}

async function main(words) {
  const { positional, parameters, threads, json, help } = read(words);
  const [folder, ...prompts] = positional;
  if (folder === undefined || help) {
    console.error(`Usage: ${USAGE}`);
    process.exitCode = help ? 0 : 2;
    return;
  }
  const sessionOptions = { intraOpNumThreads: threads, logSeverityLevel: 3 };
  const model = await TopWModel.open(folderOnDisk(folder), { ort, Tokenizer, sessionOptions });
  model.notes.forEach((note) => console.error(`Note: ${note}`));
  const prompt = prompts.length > 1 ? prompts : (prompts[0] ?? "");
  if (json) {
    const found = await model.generate(prompt, parameters);
    for (const result of Array.isArray(found) ? found : [found]) console.log(asJson(result));
  } else {
    for await (const piece of model.stream(prompt, parameters)) {
      if (prompts.length > 1 && piece.text) process.stdout.write(`\n[${piece.row}] `);
      process.stdout.write(piece.text);
    }
    process.stdout.write("\n");
  }
  await model.close();
}

/** A line of JSON, with the seed as an integer of any size. */
function asJson(result) {
  return JSON.stringify(result, (_, value) => (typeof value === "bigint" ? `#${value}#` : value)).replace(
    /"#([0-9]+)#"/,
    "$1",
  );
}

function read(words) {
  const found = { positional: [], parameters: {}, threads: 0, json: false, help: false };
  for (let place = 0; place < words.length; place++) {
    const word = words[place];
    if (!word.startsWith("--")) found.positional.push(word);
    else if (word === "--json") found.json = true;
    else if (word === "--help") found.help = true;
    else if (word === "--threads") found.threads = Number(words[++place]);
    else {
      const name = word.slice(2).replaceAll("-", "_");
      found.parameters[name] = valueOf(name, words[++place]);
    }
  }
  return found;
}

/** Numbers, lists and objects are written as JSON; a seed may have 64 bits. */
function valueOf(name, text) {
  if (text === undefined) throw new TopWError(`--${name} has no value; give one behind it.`);
  if (name === "seed" && /^[0-9]+$/.test(text)) return BigInt(text);
  const isText = TEXTS.includes(name) || name === "stop" || name === "stop_strings";
  const known = Object.hasOwn(PARAMETERS, name) || Object.hasOwn(REQUEST_PARAMETERS, name);
  try {
    if (!isText || /^[[{"]/.test(text)) return JSON.parse(text);
  } catch {
    if (known) throw new TopWError(`--${name} is ${text}, but must be a number, or a list or an object as JSON.`);
  }
  return name === "beta" && Number.isFinite(Number(text)) ? Number(text) : text;
}
