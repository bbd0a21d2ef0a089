// Prints the words and uniform numbers of the triples in the file of the first argument: JSON, integers as texts.
import { readFileSync } from "node:fs";
import { uniform, word } from "../../src/topw_deploy/web/site/topw/random.js";

const triples = JSON.parse(readFileSync(process.argv[2], "utf-8")).map((triple) => triple.map(BigInt));
const words = triples.map((triple) => String(word(...triple)));
console.log(JSON.stringify({ words, uniforms: triples.map((triple) => uniform(...triple)) }));
