// FOLDER REQUEST: generates once under onnxruntime-node and prints the timings.
import { createRequire } from "node:module";
import path from "node:path";

import { folderOnDisk } from "../../examples/node/folder.js";
import { TopWModel } from "../../src/topw_deploy/web/site/topw/index.js";

const require = createRequire(path.join(process.env.TOPW_BROWSER, "package.json"));
const [folder, request] = process.argv.slice(2);
const { prompt, parameters } = JSON.parse(request);
const model = await TopWModel.open(folderOnDisk(folder), {
  ort: require("onnxruntime-node"),
  Tokenizer: require("@huggingface/tokenizers").Tokenizer,
  sessionOptions: { intraOpNumThreads: 1, logSeverityLevel: 3 },
});
await model.generate(prompt, { ...parameters, max_new_tokens: 4 }); // warm
const { token_ids: ids, timings } = await model.generate(prompt, parameters);
console.log(JSON.stringify({ token_ids: ids, timings }));
