// Opens folders in Node: LIST, a JSON file of {folder, over}, where `over` is "disk" or "http". Prints what each gave:
// the error's class and message, or the text of one token, and the most memory that the process took, in bytes.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

import { folderOnDisk } from "../../examples/node/folder.js";
import { TopWError, TopWModel, folderAt } from "../../src/topw_deploy/web/site/topw/index.js";
import { serveFolder } from "../browser/serve_folder.mjs";

const require = createRequire(path.join(process.env.TOPW_BROWSER, "package.json"));
const ort = require("onnxruntime-node");
const { Tokenizer } = require("@huggingface/tokenizers");
const sessionOptions = { intraOpNumThreads: 1, logSeverityLevel: 4 };

const found = [];
for (const { folder, over } of JSON.parse(readFileSync(process.argv[2], "utf-8"))) {
  const server = over === "http" ? await serveFolder(folder) : null;
  try {
    const place = server ? folderAt(server.address) : folderOnDisk(folder);
    const model = await TopWModel.open(place, { ort, Tokenizer, sessionOptions });
    found.push({ tokens: (await model.generate("a", { max_new_tokens: 1, seed: 1 })).token_ids.length });
    await model.close();
  } catch (error) {
    if (!(error instanceof TopWError)) throw new Error(`${folder}: not a TopWError`, { cause: error });
    found.push({ error: error.name, message: error.message });
  } finally {
    server?.close();
  }
}
// Not maxRSS, which begins with that of the process that started this one.
const most = /^VmHWM:\s*(\d+) kB$/m.exec(readFileSync("/proc/self/status", "utf8"));
console.log(JSON.stringify({ found, memory: 1024 * Number(most[1]) }));
