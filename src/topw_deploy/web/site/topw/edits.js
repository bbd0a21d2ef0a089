// Penalties, biases and bans as sparse logit edits, and masks of allowed tokens (docs/contract/graph.md, section 6).

import { ParameterError } from "./errors.js";

const FIRST_SLOTS = 16;
const LARGEST = 3.4028234663852886e38; // float32
const WORD_BITS = 32;

/** The edit inputs of a batch, each [batch, slots]. In each step, call `prepare`, run, then `add` for each drawn token. */
export class Edits {
  /**
   * @param {import("./request.js").RowRequest[]} requests
   * @param {number | null} fixed the graph's fixed number of slots, or null
   * @throws {ParameterError} if a row needs more than the fixed number
   */
  constructor(requests, fixed) {
    this.batch = requests.length;
    this.fixed = fixed;
    this.rows = new Map();
    this.#allocate(fixed ?? 0);
    requests.forEach((request, index) => {
      if (!wantsEdits(request)) return;
      if (this.slots === 0 && fixed === null) this.grow();
      this.rows.set(index, new RowEdits(this, index, request));
    });
  }

  /** Writes the next step's bans. */
  prepare() {
    for (const row of this.rows.values()) row.prepare();
  }

  /** Adds a row's drawn token. */
  add(index, token) {
    this.rows.get(index)?.add(token);
  }

  /** Removes a row's edits. If no row has edits, the inputs have no slots, which costs least. */
  clear(index) {
    if (!this.rows.delete(index)) return;
    if (this.rows.size === 0 && this.fixed === null) {
      this.#allocate(0);
      return;
    }
    const [start, end] = [index * this.slots, (index + 1) * this.slots];
    this.ids.fill(-1n, start, end);
    this.penalty.fill(1, start, end);
    this.bias.fill(0, start, end);
  }

  grow() {
    if (this.fixed !== null) {
      throw new ParameterError(
        `the request edits more than ${this.fixed} tokens, the maximum this graph was exported with; use fewer ` +
          "penalties, biases or bans, or export with more slots.",
      );
    }
    const { slots, ids, penalty, bias } = this;
    this.#allocate(Math.max(2 * slots, FIRST_SLOTS));
    for (let row = 0; row < this.batch; row++) {
      this.ids.set(ids.subarray(row * slots, (row + 1) * slots), row * this.slots);
      this.penalty.set(penalty.subarray(row * slots, (row + 1) * slots), row * this.slots);
      this.bias.set(bias.subarray(row * slots, (row + 1) * slots), row * this.slots);
    }
  }

  #allocate(slots) {
    this.slots = slots;
    this.ids = new BigInt64Array(this.batch * slots).fill(-1n);
    this.penalty = new Float32Array(this.batch * slots).fill(1);
    this.bias = new Float32Array(this.batch * slots);
  }
}

function wantsEdits(row) {
  return (
    row.repetitionPenalty !== 1 ||
    row.presencePenalty !== 0 ||
    row.frequencyPenalty !== 0 ||
    row.logitBias.size > 0 ||
    row.suppressed.length > 0 ||
    row.badWords.length > 0 ||
    row.ngramSize > 0 ||
    (row.minNewTokens > 0 && row.eos.size > 0)
  );
}

/** The edits of a row: permanent ones, and bans for a single step. */
class RowEdits {
  constructor(edits, index, request) {
    this.edits = edits;
    this.index = index;
    this.request = request;
    this.slotOf = new Map(); // token -> slot
    this.banned = []; // [slot, permanent bias]
    this.history = [...request.prompt];
    this.drawn = new Set();
    this.steps = 0;
    this.followers = new Map(); // the first n - 1 tokens of an n-gram, joined -> its last tokens
    for (let end = request.ngramSize; request.ngramSize && end <= request.prompt.length; end++) this.#remember(end);
    // Never ban EOS, so that generation can end.
    const words = request.badWords.filter((word) => word.length > 1 || !request.eos.has(word[0]));
    this.words = words.filter((word) => word.length > 1);
    this.#writePermanent(words.filter((word) => word.length === 1).map(([token]) => token));
  }

  prepare() {
    for (const [slot, permanent] of this.banned) this.edits.bias[this.#indexOf(slot)] = permanent;
    this.banned = [];
    for (const token of this.#bans()) {
      const slot = this.#slot(token);
      this.banned.push([slot, this.edits.bias[this.#indexOf(slot)]]);
      this.edits.bias[this.#indexOf(slot)] = -Infinity;
    }
  }

  add(token) {
    const { repetitionPenalty, presencePenalty, frequencyPenalty, ngramSize } = this.request;
    this.history.push(token);
    this.steps += 1;
    if (repetitionPenalty !== 1) this.#penalize(token);
    if (presencePenalty || frequencyPenalty) {
      const first = !this.drawn.has(token);
      this.drawn.add(token);
      this.#addBias(token, -frequencyPenalty - (first ? presencePenalty : 0));
    }
    if (ngramSize) this.#remember(this.history.length);
  }

  #writePermanent(bannedWords) {
    const { repetitionPenalty, prompt, logitBias, suppressed } = this.request;
    if (repetitionPenalty !== 1) new Set(prompt).forEach((token) => this.#penalize(token));
    for (const [token, bias] of logitBias) {
      const slot = this.#slot(token);
      this.edits.bias[this.#indexOf(slot)] = bias;
    }
    for (const token of [...suppressed, ...bannedWords]) {
      const slot = this.#slot(token);
      this.edits.bias[this.#indexOf(slot)] = -Infinity;
    }
  }

  #penalize(token) {
    const slot = this.#slot(token); // may allocate new arrays
    this.edits.penalty[this.#indexOf(slot)] = this.request.repetitionPenalty;
  }

  #bans() {
    const { minNewTokens, eos, ngramSize } = this.request;
    const banned = new Set(this.steps < minNewTokens ? eos : []);
    for (const word of this.words) {
      const before = this.history.slice(1 - word.length);
      if (before.length === word.length - 1 && before.every((token, place) => token === word[place])) {
        banned.add(word.at(-1));
      }
    }
    if (ngramSize) {
      const tail = this.history.slice(Math.max(0, this.history.length - ngramSize + 1));
      for (const token of this.followers.get(tail.join()) ?? []) banned.add(token);
    }
    return banned;
  }

  #remember(end) {
    const size = this.request.ngramSize;
    if (end < size) return;
    const key = this.history.slice(end - size, end - 1).join();
    if (!this.followers.has(key)) this.followers.set(key, new Set());
    this.followers.get(key).add(this.history[end - 1]);
  }

  #addBias(token, amount) {
    const index = this.#indexOf(this.#slot(token));
    // Clamp the bias: only bans may be infinite.
    this.edits.bias[index] = Math.min(Math.max(this.edits.bias[index] + amount, -LARGEST), LARGEST);
  }

  #indexOf(slot) {
    return this.index * this.edits.slots + slot;
  }

  #slot(token) {
    let slot = this.slotOf.get(token);
    if (slot === undefined) {
      slot = this.slotOf.size;
      this.slotOf.set(token, slot);
      while (slot >= this.edits.slots) this.edits.grow();
      this.edits.ids[this.#indexOf(slot)] = BigInt(token);
    }
    return slot;
  }
}

/** A batch's masks of allowed tokens: the input `allowed`, int32 [batch, 0] or [batch, words]. */
export class AllowedMasks {
  /**
   * @param {import("./request.js").RowRequest[]} requests
   * @param {number} vocabSize
   * @param {boolean} always whether the graph takes all words in every run
   */
  constructor(requests, vocabSize, always) {
    this.batch = requests.length;
    this.words = Math.ceil(vocabSize / WORD_BITS);
    this.alwaysWhole = always;
    this.masks = new Int32Array(this.batch * this.words).fill(-1);
    this.masked = new Set();
    requests.forEach(({ allowed }, index) => {
      if (!allowed.length) return;
      const row = this.masks.subarray(index * this.words, (index + 1) * this.words).fill(0);
      for (const token of allowed) row[token >>> 5] |= 1 << (token & 31);
      this.masked.add(index);
    });
  }

  /** Removes a row's mask. */
  clear(index) {
    if (this.masked.delete(index)) this.masks.fill(-1, index * this.words, (index + 1) * this.words);
  }

  /** [the array, its number of columns]; without columns if no row has a mask and the graph allows that. */
  get input() {
    return this.alwaysWhole || this.masked.size ? [this.masks, this.words] : [new Int32Array(0), 0];
  }
}
