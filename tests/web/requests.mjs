// Runs generate.js's library in Node: FOLDER REQUESTS. Prints a list with, per request, the results or an error.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

import { folderOnDisk } from "../../examples/node/folder.js";
import { TopWError, TopWModel } from "../../src/topw_deploy/web/site/topw/index.js";
import { answer, parseRequests } from "./values.mjs";

const require = createRequire(path.join(process.env.TOPW_BROWSER, "package.json"));
const ort = require("onnxruntime-node");
const { Tokenizer } = require("@huggingface/tokenizers");

const [folder, requests] = process.argv.slice(2);
const sessionOptions = { intraOpNumThreads: 1, logSeverityLevel: 3 };
let model = null;
const found = [];
for (const request of parseRequests(readFileSync(requests, "utf-8"))) {
  try {
    model ??= await TopWModel.open(folderOnDisk(folder), { ort, Tokenizer, sessionOptions });
    found.push(await answer(model, request));
  } catch (error) {
    if (!(error instanceof TopWError)) throw error;
    found.push({ error: error.name, message: error.message });
  }
}
console.log(JSON.stringify(found));
