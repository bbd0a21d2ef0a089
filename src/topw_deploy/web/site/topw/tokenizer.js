// Converts between texts and token ids by a JavaScript library that reads the folder's tokenizer.json.

import { PromptError, TokenizerError } from "./errors.js";
import { IncrementalDecoder } from "./text.js";

const BYTE_TOKEN = /^<0x([0-9A-Fa-f]{2})>$/; // SentencePiece
const NOTHING = new Uint8Array(0);

/** Converts text to token ids and back. */
export class Tokenizer {
  #raw;
  #special;
  #byteLevel;
  #byteFallback;

  /**
   * @param {any} Library the class Tokenizer of @huggingface/tokenizers
   * @param {any} json contents of tokenizer.json
   * @param {Record<string, any>} config tokenizer_config.json and special_tokens_map.json together
   * @throws {TokenizerError}
   */
  constructor(Library, json, config) {
    try {
      // As in Python's library, only tokenizer.json states how texts are split and joined.
      this.#raw = new Library(json, { clean_up_tokenization_spaces: false });
    } catch (error) {
      throw new TokenizerError(`tokenizer.json cannot be read (${error.message}); export the model again.`);
    }
    const added = Array.isArray(json.added_tokens) ? json.added_tokens : [];
    this.#special = new Set(added.filter((token) => token.special).map((token) => token.id));
    const kinds = typesIn(json.decoder);
    this.#byteLevel = kinds.has("ByteLevel");
    this.#byteFallback = kinds.has("ByteFallback");
    this.config = config;
  }

  /**
   * @param {string} text
   * @param {boolean} addSpecialTokens
   * @returns {number[]}
   * @throws {PromptError} for half of a surrogate pair
   */
  encode(text, addSpecialTokens) {
    if (/\p{Surrogate}/u.test(text)) {
      throw new PromptError("the prompt has half of a surrogate pair, so it is not valid Unicode; repair it.");
    }
    return this.#raw.encode(text, { add_special_tokens: addSpecialTokens }).ids;
  }

  /**
   * @param {number[]} ids unknown ones give no text
   * @param {boolean} skipSpecialTokens
   * @returns {string}
   */
  decode(ids, skipSpecialTokens = true) {
    const known = ids.filter((id) => this.#spelling(id) !== undefined);
    const shown = skipSpecialTokens ? known.filter((id) => !this.#special.has(id)) : known;
    return shown.length ? this.#raw.decode(shown, { skip_special_tokens: false }) : "";
  }

  /** A decoder for the tokens that are drawn after `prompt`. */
  newDecoder(prompt, skipSpecialTokens) {
    const bytesOf = (token) => this.#bytesOf(token, skipSpecialTokens);
    return new IncrementalDecoder((ids) => this.decode(ids, skipSpecialTokens), prompt, bytesOf);
  }

  /**
   * The id of the token that the configuration gives a role; undefined if there is none.
   * @param {"bos_token"} role
   */
  idOf(role) {
    const stated = this.config[role];
    const text = typeof stated === "object" && stated !== null ? stated.content : stated;
    return typeof text === "string" ? this.#raw.token_to_id(text) : undefined;
  }

  #spelling(token) {
    return this.#raw.id_to_token(token);
  }

  #bytesOf(token, skipSpecial) {
    const text = skipSpecial && this.#special.has(token) ? undefined : this.#spelling(token);
    if (text === undefined) return NOTHING;
    if (this.#byteLevel) return byteLevelBytes(text);
    const found = this.#byteFallback ? BYTE_TOKEN.exec(text) : null;
    return found === null ? null : Uint8Array.of(Number.parseInt(found[1], 16));
  }
}

/** All values of the fields `type` in the description of a decoder. */
function typesIn(state) {
  if (Array.isArray(state)) return new Set(state.flatMap((each) => [...typesIn(each)]));
  if (typeof state !== "object" || state === null) return new Set();
  const own = typeof state.type === "string" ? [state.type] : [];
  return new Set([...own, ...Object.values(state).flatMap((each) => [...typesIn(each)])]);
}

const BYTE_OF = byteAlphabet();

/** The bytes of a byte-level token; those of UTF-8 for any other token. */
function byteLevelBytes(token) {
  const bytes = [...token].map((character) => BYTE_OF.get(character));
  return bytes.includes(undefined) ? new TextEncoder().encode(token) : Uint8Array.from(bytes);
}

/** GPT-2's character -> its byte. A printable byte is its own character; the others have those from U+0100 on. */
function byteAlphabet() {
  const printable = (byte) => (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
  const found = new Map();
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    found.set(String.fromCharCode(printable(byte) ? byte : next++), byte);
  }
  return found;
}
