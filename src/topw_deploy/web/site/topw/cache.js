// Feeds prompts and steps to the graph: a class for each form of cache (docs/contract/graph.md, section 8).

import { Buffers, newState } from "./buffers.js";
import { ManifestError } from "./errors.js";

const CHUNK = 1024; // prompt tokens per run, over all rows

/**
 * The parts of the model that a cache uses.
 * @typedef {object} Graph
 * @property {any} ort onnxruntime's module
 * @property {import("./manifest.js").Decoder} decoder
 * @property {Set<string>} inputs
 * @property {(feeds: Record<string, any>) => Promise<Record<string, any>>} run returns the states and the sampler's
 *   outputs
 * @property {(batch: number) => Record<string, any>} greedy the sampler's cheapest inputs, for runs that only fill the
 *   cache
 */

/**
 * A cache with a row per prompt and room for `budgets[row]` more tokens. Call `prefill` once, then `step`.
 * @param {Graph} graph
 * @param {number[][]} prompts
 * @param {number[]} budgets
 */
export function openCache(graph, prompts, budgets) {
  if (graph.decoder.form === "concat") return new ConcatCache(graph, prompts);
  const Form = graph.decoder.form === "static" ? StaticCache : SharedCache;
  return new Form(graph, prompts, budgets);
}

/** Whether the prompts of a batch may differ in length. */
export function takesRaggedBatches({ form, leftPadding, rightPadding }) {
  return { static: true, concat: leftPadding, shared: rightPadding }[form];
}

const int64 = (ort, values, dims) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);

/** An int64 tensor [rows, columns]. All rows have the same length. */
const matrix = (ort, rows) => int64(ort, rows.flat(), [rows.length, rows[0].length]);

const padRow = (row, width, value = 0) => [...row, ...new Array(width - row.length).fill(value)];
const longestLength = (rows) => Math.max(...rows.map((row) => row.length));

/** A chunk: ids[r] are appended to row r, which has starts[r] tokens. @typedef {{ids: number[][], starts: number[]}} Chunk */

/**
 * One buffer per state. Each run feeds at most CHUNK prompt tokens:
 * - of all rows, padded on the right, if they fit into one run or the graph supports ragged chunks;
 * - otherwise of a group of rows, without each row's last token. The final run takes the last tokens of all rows.
 *
 * This is the Python runtime's order of runs, so that both compute the same sums.
 */
class InPlaceCache {
  constructor(graph, prompts, budgets) {
    this.graph = graph;
    this.prompts = prompts;
    this.lengths = prompts.map((prompt) => prompt.length);
    const { decoder } = graph;
    const width = Math.max(...this.lengths);
    this.mostColumns = Math.min(decoder.mostColumns || CHUNK, CHUNK);
    this.columnsPerRun = Math.max(1, Math.min(Math.floor(CHUNK / prompts.length), this.mostColumns));
    const mayPad = this.allowsRaggedRows && !decoder.evicts;
    const inOneRun = width <= this.columnsPerRun && (mayPad || Math.min(...this.lengths) === width);
    const mayRepeat = this.takesRaggedChunks && !decoder.recurs;
    this.readsTogether = prompts.length === 1 || inOneRun || mayRepeat;
    const tokens = Math.max(...prompts.map((prompt, row) => prompt.length + budgets[row]));
    const first = this.readsTogether ? Math.min(width, this.columnsPerRun) : width;
    this.buffers = new Buffers(graph.ort, decoder, prompts.length, tokens, first);
  }

  /** Runs the prompts. `sampler` are the sampler's inputs of the last run, whose outputs are returned. */
  async prefill(sampler) {
    const last = this.readsTogether ? await this.#feedTogether() : await this.#feedInGroups();
    this.buffers.makeRoom(endOf(last));
    const outputs = await this.#run(last, sampler);
    this.written = this.lengths.map((length) => length - 1); // index of each row's last token
    return outputs;
  }

  /**
   * Feeds each row's next token.
   * @param {number[]} tokens one per row
   * @param {number[]} activeRows the rows that have not ended; the others overwrite their last token
   * @param {Record<string, any>} sampler the sampler's inputs
   */
  async step(tokens, activeRows, sampler) {
    this.advance(activeRows);
    this.buffers.makeRoom(Math.max(...this.written) + 1);
    const outputs = await this.graph.run({
      input_ids: matrix(this.graph.ort, tokens.map((token) => [token])),
      ...this.stepFeeds(),
      ...this.buffers.feeds(),
      ...sampler,
    });
    this.buffers.store(outputs);
    return outputs;
  }

  advance(activeRows) {
    for (const row of activeRows) this.written[row] += 1;
  }

  async #run(chunk, sampler) {
    const outputs = await this.graph.run({ ...this.chunkFeeds(chunk), ...this.buffers.feeds(), ...sampler });
    this.buffers.store(outputs);
    return outputs;
  }

  async #feedTogether() {
    const chunks = [...this.#chunks()];
    for (const chunk of chunks.slice(0, -1)) {
      this.buffers.makeRoom(endOf(chunk));
      await this.#run(chunk, this.graph.greedy(this.prompts.length));
    }
    return chunks.at(-1);
  }

  /** The chunks of all prompts. Shorter prompts repeat their last token, so that the last run draws for every row. */
  *#chunks() {
    const width = Math.max(...this.lengths);
    for (let begin = 0; begin < width; begin += this.columnsPerRun) {
      const starts = this.lengths.map((length) => Math.min(begin, length - 1));
      yield { ids: this.prompts.map((prompt, row) => prompt.slice(starts[row], begin + this.columnsPerRun)), starts };
    }
  }

  async #feedInGroups() {
    for (const [first, end] of this.#groups()) {
      let bodies = this.prompts.slice(first, end).map((prompt) => prompt.slice(0, -1));
      if (!this.graph.decoder.recurs) {
        // A row needs at least one token here. The last run overwrites it.
        bodies = bodies.map((body, row) => (body.length ? body : this.prompts[first + row]));
      }
      if (bodies.length > 1) {
        await this.#runRows({ ids: bodies, starts: bodies.map(() => 0) }, first, end);
        continue;
      }
      for (let start = 0; start < bodies[0].length; start += this.mostColumns) {
        const ids = [bodies[0].slice(start, start + this.mostColumns)];
        await this.#runRows({ ids, starts: [start] }, first, end);
      }
    }
    return { ids: this.prompts.map((prompt) => prompt.slice(-1)), starts: this.lengths.map((length) => length - 1) };
  }

  async #runRows(chunk, first, end) {
    const feeds = { ...this.chunkFeeds(chunk), ...this.buffers.feeds(first, end) };
    const outputs = await this.graph.run({ ...feeds, ...this.graph.greedy(end - first) });
    this.buffers.store(outputs, first, end);
  }

  /** Yields [first row, end] of groups that fit into one run, or of single rows. */
  *#groups() {
    let [first, width] = [0, 0];
    for (let row = 0; row < this.prompts.length; row++) {
      const own = Math.max(this.lengths[row] - 1, 1);
      let wider = Math.max(width, own);
      const tooMany = (row - first + 1) * wider > CHUNK || wider > this.mostColumns;
      const otherLength = this.graph.decoder.evicts && this.lengths[row] !== this.lengths[first];
      if (row > first && (tooMany || otherLength)) {
        yield [first, row];
        [first, wider] = [row, own];
      }
      width = wider;
    }
    yield [first, this.prompts.length];
  }
}

const endOf = ({ ids, starts }) => Math.max(...starts) + Math.max(1, longestLength(ids));

/** The form of this project: `write_indices` are the lengths of the rows, `row_lengths` the numbers of new tokens. */
class StaticCache extends InPlaceCache {
  get takesRaggedChunks() {
    return this.graph.decoder.raggedChunks;
  }

  get allowsRaggedRows() {
    return true;
  }

  chunkFeeds({ ids, starts }) {
    const { ort } = this.graph;
    const width = Math.max(1, longestLength(ids));
    return {
      input_ids: matrix(ort, ids.map((row) => padRow(row, width))),
      write_indices: int64(ort, starts, [starts.length]),
      row_lengths: int64(ort, ids.map((row) => row.length), [ids.length]),
      ...this.#totalLength(Math.max(...starts) + width),
    };
  }

  stepFeeds() {
    const { ort } = this.graph;
    return {
      write_indices: int64(ort, this.written, [this.written.length]),
      row_lengths: int64(ort, this.written.map(() => 1), [this.written.length]),
      ...this.#totalLength(this.buffers.length),
    };
  }

  #totalLength(tokens) {
    if (!this.graph.inputs.has("total_sequence_length")) return {};
    return { total_sequence_length: new this.graph.ort.Tensor("int32", Int32Array.of(tokens), [1]) };
  }
}

/**
 * The form of other exporters, such as onnxruntime-genai's builder: an `attention_mask` padded on the right, whose sum
 * is the row's length, and `position_ids` in some graphs. Without `rightPadding`, ended rows advance too.
 */
class SharedCache extends InPlaceCache {
  get takesRaggedChunks() {
    return false;
  }

  get allowsRaggedRows() {
    return false;
  }

  advance(activeRows) {
    const rows = this.graph.decoder.rightPadding ? activeRows : this.written.keys();
    for (const row of rows) this.written[row] += 1;
  }

  /** The mask includes padding, because the operator subtracts all columns to find the past. */
  chunkFeeds({ ids, starts }) {
    const width = Math.max(1, longestLength(ids));
    const positions = starts.map((start) => Array.from({ length: width }, (_, column) => start + column));
    return {
      input_ids: matrix(this.graph.ort, ids.map((row) => padRow(row, width))),
      ...this.#maskFeeds(starts.map((start) => start + width), positions),
    };
  }

  stepFeeds() {
    return this.#maskFeeds(
      this.written.map((place) => place + 1),
      this.written.map((place) => [place]),
    );
  }

  #maskFeeds(ends, positions) {
    const { ort, inputs } = this.graph;
    const width = Math.max(...ends);
    const mask = matrix(ort, ends.map((length) => padRow(new Array(length).fill(1), width)));
    return { attention_mask: mask, ...(inputs.has("position_ids") ? { position_ids: matrix(ort, positions) } : {}) };
  }
}

/**
 * The graph reads the states and returns them with the new tokens appended. Prompts are padded on the left, so that their
 * last tokens share the last column.
 */
class ConcatCache {
  constructor(graph, prompts) {
    this.graph = graph;
    this.lengths = prompts.map((prompt) => prompt.length);
    const { decoder, ort } = graph;
    const [batch, width] = [prompts.length, longestLength(prompts)];
    const mayChunk = decoder.raggedChunks || batch === 1;
    const chunk = mayChunk ? Math.max(1, Math.floor(CHUNK / batch)) : width;
    this.chunk = Math.min(chunk, decoder.mostColumns || chunk);
    const before = prompts.map((prompt) => width - prompt.length);
    this.ids = prompts.map((prompt, row) => [...new Array(before[row]).fill(0), ...prompt]);
    this.mask = prompts.map((prompt, row) => [...new Array(before[row]).fill(0), ...prompt.map(() => 1)]);
    this.positions = prompts.map((prompt, row) => [...new Array(before[row]).fill(0), ...prompt.keys()]);
    this.next = this.lengths.map((length) => length - 1); // position of each row's last token
    this.states = Object.fromEntries(decoder.states.map((state) => [state.past, newState(ort, state, batch, 0)]));
    this.width = width;
  }

  async prefill(sampler) {
    let start = 0;
    for (let stop = this.chunk; stop < this.width; stop += this.chunk) {
      await this.#run(this.#chunk(start, stop), this.graph.greedy(this.ids.length));
      start = stop;
    }
    return this.#run(this.#chunk(start, this.width), sampler);
  }

  async step(tokens, activeRows, sampler) {
    const active = new Set(activeRows);
    // Ended rows do not attend to the tokens that they add, and their positions stay within the context.
    this.mask.forEach((row, index) => row.push(active.has(index) ? 1 : 0));
    for (const row of active) this.next[row] += 1;
    return this.#run(
      { ids: tokens.map((token) => [token]), positions: this.next.map((place) => [place]), mask: this.mask },
      sampler,
    );
  }

  #chunk(start, stop) {
    return {
      ids: this.ids.map((row) => row.slice(start, stop)),
      positions: this.positions.map((row) => row.slice(start, stop)),
      mask: this.mask.map((row) => row.slice(0, stop)),
    };
  }

  async #run({ ids, positions, mask }, sampler) {
    const { ort, inputs, decoder } = this.graph;
    const feeds = { input_ids: matrix(ort, ids), ...this.states, ...sampler };
    if (inputs.has("attention_mask")) feeds.attention_mask = matrix(ort, mask);
    if (inputs.has("position_ids")) feeds.position_ids = matrix(ort, positions);
    const outputs = await this.graph.run(feeds);
    this.states = Object.fromEntries(decoder.states.map((state) => [state.past, outputs[state.present]]));
    return outputs;
  }
}

/**
 * Checks that onnxruntime opened the graph that the manifest describes.
 * @param {import("./manifest.js").Manifest} manifest
 * @param {{inputNames: readonly string[], outputNames: readonly string[]}} session
 * @throws {ManifestError}
 */
export function checkSession(manifest, session) {
  for (const name of manifest.inputs.keys()) {
    if (!session.inputNames.includes(name)) {
      throw new ManifestError(
        `model.onnx has no input ${name} without a default, which onnxruntime for JavaScript cannot set; export the ` +
          "model again, an imported one without --with-logits.",
      );
    }
  }
  for (const name of session.inputNames) {
    if (!manifest.inputs.has(name)) {
      throw new ManifestError(`model.onnx has the input ${name}, which the manifest lacks; export the model again.`);
    }
  }
  for (const name of manifest.outputs) {
    if (!session.outputNames.includes(name)) {
      throw new ManifestError(`model.onnx has no output ${name}, which the manifest lists; export the model again.`);
    }
  }
}
