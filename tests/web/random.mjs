// Prints the words and uniform numbers of the triples in the file of the first argument: JSON, integers as texts.
import { readFileSync } from "node:fs";
import { sequenceSeed, uniform, word } from "../../src/topw_deploy/web/site/topw/random.js";

const triples = JSON.parse(readFileSync(process.argv[2], "utf-8")).map((triple) => triple.map(BigInt));
const words = triples.map((triple) => String(word(...triple)));
const uniforms = triples.map(([seed, low]) => uniform(seed, low));
const seeds = triples.map(([seed, low]) => String(sequenceSeed(seed, Number(low % 2n ** 53n))));
console.log(JSON.stringify({ words, uniforms, seeds }));
