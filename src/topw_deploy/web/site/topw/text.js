// Decodes drawn tokens one by one, and cuts the text at stop strings.

const REPLACEMENT = "\uFFFD"; // stands for invalid or incomplete bytes
const CONTEXT = 6; // number of earlier tokens that are decoded with a new one
const CHARACTER = 4; // a character has at most four bytes in UTF-8, so at most four tokens

/**
 * Decodes tokens one by one.
 *
 * A byte-level token may hold a part of a character, and a SentencePiece token at the start of a text loses its leading
 * space. So each token is decoded together with the last ones that have text, whose text is then removed. Unfinished
 * characters are held back. If the prompt ends inside a character, the text begins with that character, or with U+FFFD.
 */
export class IncrementalDecoder {
  /**
   * @param {(ids: number[]) => string} decode
   * @param {number[]} prompt token ids, for context
   * @param {(token: number) => Uint8Array | null} bytesOf a token's bytes, empty if it gives no text, null if its text
   *   consists of whole characters
   */
  constructor(decode, prompt, bytesOf) {
    this.decode = decode;
    const [unfinished, shown] = unfinishedCharacter(bytesOf, prompt);
    this.ids = unfinished.length ? unfinished : contextTokens(decode, bytesOf, prompt);
    this.start = 0;
    this.read = unfinished.length ? 0 : this.ids.length;
    this.known = unfinished.length ? shown : decode(this.ids).length; // returned characters of the window
    this.prompt = this.ids.length;
  }

  /**
   * Adds a token.
   * @param {number} token
   * @returns {string} the new whole characters
   */
  push(token) {
    this.ids.push(token);
    const text = this.decode(this.ids.slice(this.start));
    if (!text.endsWith(REPLACEMENT)) return this.#newText(text);
    const whole = text.replace(/\uFFFD+$/, ""); // the next tokens may complete a character
    const gained = whole.slice(this.known);
    this.known = Math.max(this.known, whole.length);
    return gained;
  }

  /** @returns {string} the held-back text, with U+FFFD for an unfinished character */
  flush() {
    if (this.ids.length === this.read || this.ids.length === this.prompt) return "";
    return this.#newText(this.decode(this.ids.slice(this.start)));
  }

  #newText(text) {
    const gained = text.slice(this.known);
    if (gained) {
      // Tokens without text, such as special ones, do not move the window.
      this.start = this.read;
      this.read = this.ids.length;
      this.known = this.decode(this.ids.slice(this.start)).length;
    }
    return gained;
  }
}

/** [tokens of an unfinished character at the prompt's end, number of whole characters before it in these tokens] */
function unfinishedCharacter(bytesOf, prompt) {
  const tokens = [];
  const spelled = [];
  for (const token of [...prompt].reverse()) {
    const data = bytesOf(token);
    if (data === null || joinBytes(spelled).length >= CHARACTER) break;
    if (data.length) {
      tokens.unshift(token);
      spelled.unshift(data);
    }
  }
  const pending = pendingBytes(joinBytes(spelled));
  if (!pending) return [[], 0];
  while (joinBytes(spelled.slice(1)).length >= pending) {
    tokens.shift();
    spelled.shift();
  }
  const whole = joinBytes(spelled);
  return [tokens, new TextDecoder("utf-8", { ignoreBOM: true }).decode(whole.subarray(0, whole.length - pending)).length];
}

const joinBytes = (parts) => Uint8Array.from(parts.flatMap((part) => [...part]));

/** Number of bytes at the end of `data` that begin a character and that more bytes would complete. */
function pendingBytes(data) {
  const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  for (let size = 1; size <= Math.min(data.length, CHARACTER - 1); size++) {
    for (let more = 1; more <= CHARACTER - size; more++) {
      for (const last of [0x80, 0xbf]) {
        try {
          const text = strict.decode(Uint8Array.from([...data.subarray(data.length - size), ...new Array(more).fill(last)]));
          if ([...text].length === 1) return size;
        } catch {
          continue; // not UTF-8
        }
      }
    }
  }
  return 0;
}

/** The last tokens of the prompt with text, from the start of a character on. */
function contextTokens(decode, bytesOf, prompt) {
  const most = CONTEXT + CHARACTER - 1;
  const last = [];
  for (let place = prompt.length - 1; place >= 0 && last.length < most; place--) {
    if (bytesOf(prompt[place])?.length !== 0) last.unshift(prompt[place]);
  }
  let found = [];
  for (let size = CONTEXT; size <= most; size++) {
    found = last.slice(-size);
    if (!decode(found).startsWith(REPLACEMENT)) break;
  }
  return found;
}

/** Cuts text at the stop string that ends first; of several that end there, at the longest. */
class StopStrings {
  constructor(stops) {
    this.stops = stops;
    this.held = "";
    this.stop = null;
  }

  /** Adds text. Returns the part of it that cannot belong to a stop string. */
  push(added) {
    if (this.stop !== null || !added) return "";
    const text = this.held + added;
    let best = null;
    for (const stop of this.stops) {
      const start = text.indexOf(stop);
      const end = start + stop.length;
      if (start >= 0 && (best === null || end < best.end || (end === best.end && start < best.start))) {
        best = { start, end, stop };
      }
    }
    if (best !== null) {
      this.stop = best.stop;
      this.held = "";
      return text.slice(0, best.start);
    }
    const cut = text.length - this.#possibleBeginning(text);
    this.held = text.slice(cut);
    return text.slice(0, cut);
  }

  /** Returns the text that was held back. */
  flush() {
    const held = this.held;
    this.held = "";
    return held;
  }

  #possibleBeginning(text) {
    const longest = Math.min(text.length, Math.max(1, ...this.stops.map((stop) => stop.length)) - 1);
    for (let size = longest; size > 0; size--) {
      const end = text.slice(-size);
      if (this.stops.some((stop) => stop.startsWith(end))) return size;
    }
    return 0;
  }
}

/** One row's text, cut at stop strings. */
export class RowText {
  /**
   * @param {IncrementalDecoder} decoder
   * @param {string[]} stops
   * @param {number} guarded number of tokens before which stop strings have no effect
   */
  constructor(decoder, stops, guarded) {
    this.decoder = decoder;
    this.stops = new StopStrings(stops);
    this.guarded = guarded;
  }

  /** The stop string that was found, or null. */
  get stop() {
    return this.stops.stop;
  }

  /** Adds a token. Returns the new text. */
  push(token) {
    const text = this.decoder.push(token);
    if (this.guarded > 1) {
      // The last of these tokens may complete a stop string.
      this.guarded -= 1;
      return text;
    }
    return this.stops.push(text);
  }

  /** Returns the text that was held back, which may complete a stop string. */
  flush() {
    if (this.stop !== null) return "";
    const text = this.stops.push(this.decoder.flush());
    return this.stop !== null ? text : text + this.stops.flush();
  }
}
