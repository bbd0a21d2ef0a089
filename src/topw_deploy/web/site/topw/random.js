// The number that each draw uses (docs/contract/random.md): Philox 4x64-10 of (seed, position).

const WORD = 64n;
const MASK = (1n << WORD) - 1n;
const MULTIPLIERS = [0xd2e7470ee14c6c93n, 0xca5a826395121157n];
const KEY_STEPS = [0x9e3779b97f4a7c15n, 0xbb67ae8584caa73bn];
const ROUNDS = 10;
const FRESH_BITS = 53n; // exact in a double, for JSON
const OF_SEQUENCES = MASK - 1n; // the second word of the counters of derived seeds

/**
 * The first of the four words that Philox 4x64-10 makes of a counter of two words.
 * @param {bigint} seed in [0, 2^64)
 * @param {bigint} low in [0, 2^64)
 * @param {bigint} high in [0, 2^64)
 * @returns {bigint} in [0, 2^64)
 */
export function word(seed, low, high) {
  const counter = low + (high << WORD) + 1n; // 256 bits: the addition carries
  let x0 = counter & MASK;
  let x1 = (counter >> WORD) & MASK;
  let x2 = (counter >> (2n * WORD)) & MASK;
  let x3 = 0n;
  let k0 = seed;
  let k1 = 0n;
  for (let round = 0; round < ROUNDS; round++) {
    const a = MULTIPLIERS[0] * x0;
    const b = MULTIPLIERS[1] * x2;
    [x0, x1, x2, x3] = [(b >> WORD) ^ x1 ^ k0, b & MASK, (a >> WORD) ^ x3 ^ k1, a & MASK];
    k0 = (k0 + KEY_STEPS[0]) & MASK;
    k1 = (k1 + KEY_STEPS[1]) & MASK;
  }
  return x0;
}

/**
 * The uniform number of a draw: the top 24 bits of `word`, exact in float32.
 * @param {bigint} seed in [0, 2^64)
 * @param {number | bigint} position number of tokens before the one drawn
 * @returns {number} in [0, 1)
 */
export function uniform(seed, position) {
  return Number(word(seed, BigInt(position), 0n) >> 40n) * 2 ** -24;
}

/** The seed, a bigint, of sequence `index` (from 0) of a prompt: `seed` for the first one, else one below 2^53. */
export function sequenceSeed(seed, index) {
  return index ? word(seed, BigInt(index), OF_SEQUENCES) >> (WORD - FRESH_BITS) : seed;
}

/** A seed, a bigint below 2^53, from the system's random numbers. */
export function freshSeed() {
  const [value] = globalThis.crypto.getRandomValues(new BigUint64Array(1));
  return value >> (WORD - FRESH_BITS);
}
