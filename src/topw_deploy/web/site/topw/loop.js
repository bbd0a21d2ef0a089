// The generation loop: one run of the graph (decoder and sampler) per token.

import { openCache } from "./cache.js";
import { AllowedMasks, Edits } from "./edits.js";
import { LogitsError } from "./errors.js";
import { TOP_W_NAMES } from "./presets.js";
import { uniform } from "./random.js";
import { TOP_W } from "./rules.js";

const GREEDY = { lam: 2.2, beta: 2.8, temperature: 0, selection_temperature: 0, init_top_p: 0.999, geom_scale: 1 };

/** The shape of the sampler's inputs: the fixed number of slots for edits or null, and whether masks are always whole. */
export function samplerShape({ inputs }) {
  const slots = inputs.get("edit_ids")?.[1];
  return { fixedEdits: typeof slots === "number" ? slots : null, alwaysMasked: typeof inputs.get("allowed")?.[1] === "number" };
}

/**
 * The inputs with which the sampler costs least: greedy, without edits and masks.
 * @param {any} ort
 * @param {import("./manifest.js").Manifest} manifest
 * @param {number} batch
 */
export function greedyFeeds(ort, manifest, batch) {
  const { fixedEdits, alwaysMasked } = samplerShape(manifest);
  const slots = fixedEdits ?? 0;
  const words = alwaysMasked ? Math.ceil(manifest.sampler.vocabSize / 32) : 0;
  const float = (values) => new ort.Tensor("float32", values, [batch]);
  return {
    ...Object.fromEntries(TOP_W_NAMES.map((name) => [name, float(new Float32Array(batch).fill(GREEDY[name]))])),
    uniform: float(new Float32Array(batch)),
    edit_ids: new ort.Tensor("int64", new BigInt64Array(batch * slots).fill(-1n), [batch, slots]),
    edit_penalty: new ort.Tensor("float32", new Float32Array(batch * slots).fill(1), [batch, slots]),
    edit_bias: new ort.Tensor("float32", new Float32Array(batch * slots), [batch, slots]),
    allowed: new ort.Tensor("int32", new Int32Array(batch * words).fill(-1), [batch, words]),
    rule: new ort.Tensor("int32", new Int32Array(batch), [batch]),
    rule_values: new ort.Tensor("float32", new Float32Array(batch * 2), [batch, 2]),
  };
}

/** A batch of B rows and the sampler's inputs. Ended rows stay in the batch; they are greedy, which costs least. */
export class Generation {
  /**
   * @param {import("./cache.js").Graph} graph
   * @param {import("./manifest.js").Manifest} manifest
   * @param {import("./row.js").Row[]} rows
   */
  constructor(graph, manifest, rows) {
    this.ort = graph.ort;
    this.rows = rows;
    this.active = [...rows];
    const requests = rows.map((row) => row.request);
    const { fixedEdits, alwaysMasked } = samplerShape(manifest);
    this.edits = new Edits(requests, fixedEdits);
    this.allowed = new AllowedMasks(requests, manifest.sampler.vocabSize, alwaysMasked);
    this.parameters = Object.fromEntries(
      TOP_W_NAMES.map((name) => [name, Float32Array.from(requests, (request) => request.topW[name])]),
    );
    this.rule = Int32Array.from(requests, (request) => request.rule.code);
    this.ruleValues = Float32Array.from(requests.flatMap((request) => request.rule.values));
    this.next = new Array(rows.length).fill(0); // each row's next input, [B]
    this.cache = openCache(
      graph,
      requests.map((request) => request.prompt),
      requests.map((request) => request.budget),
    );
    this.step = 0;
    this.hasMass = manifest.outputs.includes("mass");
    rows.filter((row) => row.request.budget === 0).forEach((row) => {
      row.end("length");
      this.retire(row);
    });
  }

  /**
   * Runs the graph once.
   * @returns {Promise<[import("./row.js").Row, string][]>} the rows that drew a token, with their new text
   * @throws {LogitsError} for invalid logits
   */
  async advance() {
    const activeIndices = this.active.map((row) => row.index);
    const feeds = this.#feeds();
    const { cache, next } = this;
    const outputs = this.step === 0 ? await cache.prefill(feeds) : await cache.step(next, activeIndices, feeds);
    const changed = [...this.active].map((row) => [row, this.#accept(row, outputs)]);
    this.step += 1;
    changed.forEach(([row]) => row.finishReason !== null && this.retire(row));
    return changed;
  }

  retire(row) {
    this.active = this.active.filter((each) => each !== row);
    this.next[row.index] = row.request.pad;
    this.edits.clear(row.index);
    this.allowed.clear(row.index);
    this.parameters.temperature[row.index] = 0;
    this.rule[row.index] = TOP_W.code;
    this.ruleValues.set(TOP_W.values, 2 * row.index);
  }

  #feeds() {
    const { ort, rows } = this;
    const batch = rows.length;
    this.edits.prepare();
    const { ids, penalty, bias, slots } = this.edits;
    const [mask, words] = this.allowed.input;
    const float = (values) => new ort.Tensor("float32", values, [batch]);
    return {
      ...Object.fromEntries(TOP_W_NAMES.map((name) => [name, float(this.parameters[name])])),
      uniform: float(Float32Array.from(rows, (row) => this.#uniform(row))),
      edit_ids: new ort.Tensor("int64", ids, [batch, slots]),
      edit_penalty: new ort.Tensor("float32", penalty, [batch, slots]),
      edit_bias: new ort.Tensor("float32", bias, [batch, slots]),
      allowed: new ort.Tensor("int32", mask, [batch, words]),
      rule: new ort.Tensor("int32", this.rule, [batch]),
      rule_values: new ort.Tensor("float32", this.ruleValues, [batch, 2]),
    };
  }

  #uniform({ finishReason, request: { seed, prompt } }) {
    return finishReason === null ? uniform(seed, prompt.length + this.step) : 0;
  }

  #accept(row, outputs) {
    const { index } = row;
    const token = Number(outputs.next_token.data[index]);
    if (token < 0) {
      throw new LogitsError(
        `row ${index} is invalid at step ${row.drawn.length}: its logits contain NaN or +infinity, or none is finite ` +
          "after the edits and the mask; check the model with `topw verify`, and the penalties, biases and bans.",
      );
    }
    this.edits.add(index, token);
    this.next[index] = token;
    const drawn = {
      token_id: token,
      logprob: outputs.logprob.data[index],
      kept: outputs.kept.data[index],
      certified: Boolean(outputs.certified.data[index]),
    };
    if (this.hasMass) drawn.mass = outputs.mass.data[index];
    return row.addToken(drawn);
  }
}
