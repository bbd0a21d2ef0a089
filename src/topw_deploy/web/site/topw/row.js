// One sequence of a generation: its tokens, text and end.

import { RowText } from "./text.js";

/**
 * One drawn token.
 * @typedef {{token_id: number, logprob: number, kept: number, certified: boolean, mass?: number}} Drawn
 *   logprob: in the crop; kept: size of the crop; certified: whether the crop was proven without geometry;
 *   mass: probability of the crop in the full softmax, if the export has that output
 */

export class Row {
  /**
   * @param {number} index
   * @param {import("./request.js").RowRequest} request
   * @param {import("./text.js").IncrementalDecoder} decoder
   */
  constructor(index, request, decoder) {
    this.index = index;
    this.request = request;
    this.text = new RowText(decoder, request.stopStrings, request.minNewTokens);
    /** @type {Drawn[]} */
    this.drawn = [];
    this.pieces = [];
    /** @type {string | null} */
    this.finishReason = null;
    /** @type {number | string | null} */
    this.stop = null;
    this.shown = 0; // number of tokens in earlier pieces
    this.finishedAt = 0; // performance.now()
  }

  /**
   * Adds a drawn token.
   * @param {Drawn} drawn
   * @returns {string} new text
   */
  addToken(drawn) {
    this.drawn.push(drawn);
    let gained = "";
    if (this.request.eos.has(drawn.token_id)) {
      this.end("stop", drawn.token_id);
    } else {
      gained = this.text.push(drawn.token_id);
      if (this.text.stop !== null) this.end("stop", this.text.stop);
    }
    if (this.finishReason === null && this.drawn.length === this.request.budget) this.end("length");
    return this.#addText(gained + this.#flushAtEnd());
  }

  /** Ends the row before its last token, for a reason such as "cancelled". Returns the text that was held back. */
  interrupt(reason) {
    this.end(reason);
    return this.#addText(this.text.flush());
  }

  end(reason, stop = null) {
    this.finishReason = reason;
    this.stop = stop;
    this.finishedAt = performance.now();
  }

  /** The tokens drawn since the last call. */
  newTokens() {
    const found = this.drawn.slice(this.shown);
    this.shown = this.drawn.length;
    return found;
  }

  #flushAtEnd() {
    if (this.finishReason === null) return "";
    const held = this.text.flush(); // may complete a stop string
    if (this.finishReason !== "stop" && this.text.stop !== null) this.end("stop", this.text.stop);
    return held;
  }

  #addText(text) {
    if (text) this.pieces.push(text);
    return text;
  }
}

/**
 * One generated sequence. Names and meanings are those of Python's GenerationResult.
 * @typedef {object} GenerationResult
 * @property {string} text new text without EOS, cut before a stop string
 * @property {number[]} token_ids all drawn tokens, with EOS and stop strings
 * @property {number[]} logprobs
 * @property {number[]} kept
 * @property {boolean[]} certified
 * @property {number[] | null} mass
 * @property {number} certified_share share of certified tokens; 1 without tokens
 * @property {bigint} seed
 * @property {string} rule
 * @property {string} finish_reason "stop", "length" or "cancelled"
 * @property {number | string | null} stop EOS id or stop string
 * @property {number} prompt_tokens
 * @property {string} sampler "graph", the function in the file
 * @property {{load_seconds: number, prefill_seconds: number, decode_seconds: number, decode_steps: number}} timings
 */

/**
 * The result of an ended row. `started` and `prefilled` are times of performance.now().
 * @param {Row} row
 * @param {{loadSeconds: number, started: number, prefilled: number}} times
 * @returns {GenerationResult}
 */
export function resultOf(row, { loadSeconds, started, prefilled }) {
  const { drawn, request } = row;
  const certified = drawn.map((each) => each.certified);
  return {
    text: row.pieces.join(""),
    token_ids: drawn.map((each) => each.token_id),
    logprobs: drawn.map((each) => each.logprob),
    kept: drawn.map((each) => each.kept),
    certified,
    mass: drawn.every((each) => each.mass !== undefined) ? drawn.map((each) => each.mass) : null,
    certified_share: certified.length ? certified.filter(Boolean).length / certified.length : 1,
    seed: request.seed,
    rule: request.rule.name,
    finish_reason: row.finishReason,
    stop: row.stop,
    prompt_tokens: request.prompt.length,
    sampler: "graph",
    timings: {
      load_seconds: loadSeconds,
      prefill_seconds: (prefilled - started) / 1000,
      decode_seconds: Math.max(0, row.finishedAt - prefilled) / 1000,
      decode_steps: Math.max(0, drawn.length - 1),
    },
  };
}
