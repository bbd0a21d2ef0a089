// llama.cpp's logits for tokens after each other. Arguments: a JSON list of [GGUF file, token ids, file to write], each
// of whose last becomes float32 [tokens, vocabulary]. TOPW_BROWSER is the folder of npm's packages, of which one has
// llama.cpp's libraries and a small module over them.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

const libraries = path.join(process.env.TOPW_BROWSER, "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64");
const llama = createRequire(import.meta.url)(path.join(libraries, "llama-addon.node"));
llama.setLoggerLogLevel(0);
llama.loadBackends(libraries);
await llama.init();

for (const [file, ids, output] of JSON.parse(readFileSync(process.argv[2], "utf8"))) {
  const model = new llama.AddonModel(file, { gpuLayers: 0, addonExports: llama });
  if (!(await model.init())) throw new Error(`llama.cpp cannot load ${file}`);
  const context = new llama.AddonContext(model, { contextSize: 256, batchSize: 256, sequences: 1, threads: 1 });
  if (!(await context.init())) throw new Error(`llama.cpp cannot make a context for ${file}`);
  context.initBatch(ids.length);
  const places = context.addToBatch(0, 0, Uint32Array.from(ids), Uint32Array.from(ids.keys()));
  await context.decodeBatch();
  const sampler = new llama.AddonSampler(model);
  sampler.applyConfig({ temperature: 0 });
  const rows = [];
  for (const place of places) {
    const pairs = (await context.sampleToken(place, sampler, false, false, true))[3];
    const row = new Float32Array(pairs.length / 2);
    for (let index = 0; index < pairs.length; index += 2) row[pairs[index]] = pairs[index + 1];
    rows.push(Buffer.from(row.buffer));
  }
  writeFileSync(output, Buffer.concat(rows));
  await context.dispose();
  await model.dispose();
}
console.log("null");
process.exit(0);
