// Key-value buffers of the forms `static` and `shared`: one tensor per state, [batch, ...shape].

import { STATE_TYPES } from "./manifest.js";

const ROUND = 64; // lengths are rounded up to a multiple of this number of tokens
const GROWTH = 32; // in a graph with a buffer step, buffers grow by at least 1 / GROWTH

/**
 * The states of `batch` rows with room for `length` tokens.
 *
 * onnxruntime for browsers ignores preallocated outputs, so every run returns new tensors, which become the next run's
 * inputs. That copies the buffers, so they are short at first and grow.
 */
export class Buffers {
  /**
   * @param {any} ort onnxruntime's module
   * @param {import("./manifest.js").Decoder} decoder
   * @param {number} batch
   * @param {number} tokens maximum number of tokens of a row
   * @param {number} first number of tokens for which the buffers have room at first
   */
  constructor(ort, decoder, batch, tokens, first) {
    this.ort = ort;
    this.decoder = decoder;
    this.batch = batch;
    const most = Math.max(tokens, decoder.bufferLeast);
    this.capacity = Math.min(roundUp(most, ROUND), Math.max(decoder.contextLength, most));
    this.length = Math.min(roundUp(Math.max(first, decoder.bufferLeast), this.#step), this.capacity);
    this.tensors = decoder.states.map((state) => this.#tensor(state, batch, this.length));
  }

  /** The states as inputs of a run over the rows from `first` to `end` - 1. */
  feeds(first = 0, end = this.batch) {
    const whole = first === 0 && end === this.batch;
    const found = {};
    this.decoder.states.forEach((state, index) => {
      const tensor = this.tensors[index];
      found[state.past] = whole ? tensor : this.#rows(state, tensor, first, end);
    });
    return found;
  }

  /** Stores the states that a run over the rows from `first` to `end` - 1 returned. */
  store(outputs, first = 0, end = this.batch) {
    this.decoder.states.forEach((state, index) => {
      const present = outputs[state.present];
      if (first === 0 && end === this.batch) this.tensors[index] = present;
      else this.tensors[index].data.set(present.data, (first * this.tensors[index].data.length) / this.batch);
    });
  }

  /** Lengthens the buffers, with zeros, to hold at least `tokens` tokens per row. */
  makeRoom(tokens) {
    if (tokens <= this.length) return;
    const wanted = this.decoder.bufferStep ? tokens + Math.floor(tokens / GROWTH) : tokens;
    const length = Math.min(roundUp(wanted, this.#step), this.capacity);
    this.tensors = this.tensors.map((old, index) => {
      const state = this.decoder.states[index];
      if (!state.grows) return old;
      const wider = this.#tensor(state, this.batch, length);
      const axis = state.shape.indexOf(0);
      const size = product(state.shape.slice(axis + 1)); // of a token
      const parts = this.batch * product(state.shape.slice(0, axis));
      for (let part = 0; part < parts; part++) {
        const begin = part * this.length * size;
        wider.data.set(old.data.subarray(begin, begin + this.length * size), part * length * size);
      }
      return wider;
    });
    this.length = length;
  }

  get #step() {
    return this.decoder.bufferStep || ROUND;
  }

  #tensor(state, batch, length) {
    return newState(this.ort, state, batch, length);
  }

  #rows(state, tensor, first, end) {
    const size = tensor.data.length / this.batch;
    const dims = [end - first, ...tensor.dims.slice(1)];
    return new this.ort.Tensor(STATE_TYPES[state.dtype].type, tensor.data.slice(first * size, end * size), dims);
  }
}

/** A tensor of zeros for a state, with room for `length` tokens. */
export function newState(ort, state, batch, length) {
  const dims = [batch, ...state.shape.map((size) => (size === 0 ? length : size))];
  const { type, Array } = STATE_TYPES[state.dtype];
  return new ort.Tensor(type, new Array(product(dims)), dims);
}

const product = (sizes) => sizes.reduce((a, b) => a * b, 1);
const roundUp = (value, multiple) => Math.ceil(value / multiple) * multiple;
