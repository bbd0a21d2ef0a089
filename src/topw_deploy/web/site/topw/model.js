// `TopWModel`: an exported model under onnxruntime for JavaScript.

import { checkSession, takesRaggedBatches } from "./cache.js";
import {
  GenerationError,
  ManifestError,
  ParameterError,
  PromptError,
  TokenizerError,
  TopWError,
  show,
} from "./errors.js";
import { FILE, bosToken, modelDefaults } from "./generation_config.js";
import { holdHalfAsBits } from "./half.js";
import { Generation, greedyFeeds } from "./loop.js";
import { MANIFEST_NAME, MOST_MANIFEST, isObject, parseManifest } from "./manifest.js";
import { isList, splitParameters } from "./parameters.js";
import { resolveRequests } from "./request.js";
import { Row, resultOf } from "./row.js";
import { Tokenizer } from "./tokenizer.js";
import { dataFiles } from "./weights.js";

const SAMPLED = ["next_token", "logprob", "kept", "certified"];
const MOST_TEXT = 2 ** 28; // bytes of tokenizer.json; published ones have up to 35 MB
const MOST_JSON = 2 ** 24; // of other JSON files; published ones have up to 2 MB
const NO_MEMORY = /alloc|memory|^Aborted\(/i; // in messages of onnxruntime and WebAssembly

/**
 * A piece of streamed text: whole characters of one row, the tokens drawn since the row's previous piece, and in the last
 * piece of a row its result.
 * @typedef {{text: string, row: number, tokens: import("./row.js").Drawn[],
 *   result: import("./row.js").GenerationResult | null}} Piece
 *
 * An exported folder, from which files are read.
 * @typedef {object} Folder
 * @property {(name: string, most: number) => Promise<Uint8Array>} read returns the bytes of a file; of a file with more
 *   than `most` bytes, any larger number of bytes
 * @property {((name: string) => string) | undefined} path returns the path of a file, if onnxruntime can open files
 * @property {((files: Map<string, number>) => Promise<void>) | undefined} check throws ManifestError unless the folder
 *   holds these files, with these sizes, and nothing that must not be opened
 */

/** A language model with its sampler inside its ONNX graph. Open one with `TopWModel.open`. */
export class TopWModel {
  #ort;
  #session;
  #tokenizer;
  #bos;
  #queue = Promise.resolve();

  /**
   * Opens an exported folder.
   * @param {Folder} folder see `folderAt` and, for Node, examples/node
   * @param {object} options
   * @param {any} options.ort onnxruntime-web's or onnxruntime-node's module
   * @param {any} options.Tokenizer the class of @huggingface/tokenizers
   * @param {object} [options.sessionOptions] of onnxruntime's InferenceSession.create
   * @param {number} [options.maxLength] maximum tokens of a sequence, with the prompt
   * @returns {Promise<TopWModel>}
   * @throws {ManifestError | TokenizerError | ParameterError | GenerationError} the last if memory is short
   */
  static async open(folder, { ort, Tokenizer: Library, sessionOptions = {}, maxLength }) {
    const started = performance.now();
    const stated = await folder.read(MANIFEST_NAME, MOST_MANIFEST);
    if (stated.byteLength > MOST_MANIFEST) {
      throw new ManifestError(
        `${MANIFEST_NAME} is larger than ${MOST_MANIFEST} bytes, so it is not a manifest; export the model again.`,
      );
    }
    const manifest = parseManifest(decodeUtf8(MANIFEST_NAME, stated));
    await folder.check?.(manifest.files);
    const files = new ListedFiles(folder, manifest);
    const model = new TopWModel();
    model.manifest = manifest;
    model.maxLength = checkMaxLength(maxLength, manifest.decoder.contextLength);
    model.#ort = ort;
    model.#tokenizer = await files.tokenizer(Library);
    const [generation, config] = [await files.json(FILE), await files.json("config.json")];
    const { defaults, notes } = modelDefaults(generation, config, manifest.sampler.vocabSize);
    /** Parameters from generation_config.json. */
    model.defaults = defaults;
    /** Sentences about settings in the model's files that have no effect here. */
    model.notes = notes;
    model.#bos = bosToken(generation, config) ?? model.#tokenizer.idOf("bos_token");
    model.#session = await files.session(ort, sessionOptions);
    model.loadSeconds = (performance.now() - started) / 1000;
    return model;
  }

  /**
   * Continues `prompt`. Returns one result, or a list for a batch or `num_return_sequences` > 1.
   * @param {string | number[] | string[] | number[][]} prompt text, token ids, or a batch of either
   * @param {Record<string, any>} [parameters] by Python's names; a list gives one value per prompt
   * @param {{signal?: AbortSignal, pause?: () => Promise<void>}} [options] as of `stream`
   * @returns {Promise<import("./row.js").GenerationResult | import("./row.js").GenerationResult[]>}
   */
  async generate(prompt, parameters = {}, options = {}) {
    const results = [];
    for await (const { row, result } of this.stream(prompt, parameters, options)) {
      if (result !== null) results[row] = result;
    }
    return isBatch(prompt) || results.length > 1 ? results : results[0];
  }

  /**
   * Like `generate`, but returns pieces. Checks parameters at once.
   * @param {string | number[] | string[] | number[][]} prompt
   * @param {Record<string, any>} [parameters]
   * @param {object} [options]
   * @param {AbortSignal} [options.signal] ends the rows with the finish reason "cancelled", at the latest after the
   *   current run of the graph
   * @param {() => Promise<void>} [options.pause] awaited before each run of the graph, of which a long prompt takes
   *   several; lets other events of the thread happen
   * @returns {AsyncGenerator<Piece>}
   * @throws {ParameterError | PromptError | GenerationError}
   */
  stream(prompt, parameters = {}, options = {}) {
    if (this.#session === null) throw new GenerationError("the model is closed; open it again with TopWModel.open.");
    const [named, whole] = splitParameters(parameters);
    const given = this.#withBadWords(named);
    const prompts = this.#prompts(prompt, whole.add_special_tokens);
    const { manifest } = this;
    if (!takesRaggedBatches(manifest.decoder) && new Set(prompts.map((each) => each.length)).size > 1) {
      throw new PromptError(
        `this decoder cannot pad, but the prompts of the batch have ${prompts.map((each) => each.length).join(", ")} ` +
          "tokens; generate from them one by one, or group those of equal length.",
      );
    }
    const requests = resolveRequests(manifest, this.defaults, prompts, given, whole.num_return_sequences, this.maxLength);
    return this.#pieces(requests, whole.skip_special_tokens, options);
  }

  /** Token ids of a text. */
  encode(text, addSpecialTokens = true) {
    return this.#tokenizer.encode(text, addSpecialTokens);
  }

  /** The text of token ids. */
  decode(ids, skipSpecialTokens = true) {
    return this.#tokenizer.decode([...ids], skipSpecialTokens);
  }

  /** Frees the session. */
  async close() {
    const session = this.#session;
    this.#session = null;
    await session?.release();
  }

  async *#pieces(requests, skipSpecial, { signal, pause }) {
    const started = performance.now();
    let prefilled = started;
    const rows = requests.map((each, index) => new Row(index, each, this.#tokenizer.newDecoder(each.prompt, skipSpecial)));
    const piece = (row, text) => {
      const times = { loadSeconds: this.loadSeconds, started, prefilled };
      const result = row.finishReason === null ? null : resultOf(row, times);
      return { text, row: row.index, tokens: row.newTokens(), result };
    };
    const before = async () => {
      await pause?.();
      signal?.throwIfAborted();
    };
    const generation = new Generation(this.#graph(before), this.manifest, rows);
    for (const row of rows.filter((each) => each.finishReason !== null)) yield piece(row, "");
    while (generation.active.length) {
      const changed = await generation.advance().catch((error) => {
        if (!signal?.aborted || error !== signal.reason) throw error;
        return generation.active.map((row) => [row, ""]);
      });
      if (generation.step === 1) prefilled = performance.now();
      if (signal?.aborted) {
        for (const row of generation.active) changed.find(([each]) => each === row)[1] += row.interrupt("cancelled");
        generation.active = [];
      }
      for (const [row, text] of changed) {
        if (text || row.finishReason !== null) yield piece(row, text);
      }
    }
  }

  #graph(before) {
    const { decoder, inputs, outputs } = this.manifest;
    const sampled = outputs.includes("mass") ? [...SAMPLED, "mass"] : SAMPLED;
    const wanted = [...sampled, ...decoder.states.map((state) => state.present)];
    return {
      ort: this.#ort,
      decoder,
      inputs: new Set(inputs.keys()),
      run: async (feeds) => {
        await before();
        return this.#run(feeds, wanted);
      },
      greedy: (batch) => greedyFeeds(this.#ort, this.manifest, batch),
    };
  }

  /** Runs the graph after all earlier runs have ended, because onnxruntime-web allows one run at a time. */
  #run(feeds, wanted) {
    const run = this.#queue.then(async () => {
      if (this.#session === null) throw new GenerationError("the model was closed while it generated.");
      try {
        return await this.#session.run(feeds, wanted);
      } catch (error) {
        throw new GenerationError(`onnxruntime cannot run the graph (${shortMessage(error)}).`);
      }
    });
    this.#queue = run.catch(() => {});
    return run;
  }

  #prompts(prompt, addSpecialTokens) {
    const batch = isBatch(prompt) ? [...prompt] : [prompt];
    return batch.map((each) => {
      if (typeof each !== "string" && !isList(each)) {
        throw new PromptError(`the prompt is ${show(each)}, but must be a text, token ids, or a list of either.`);
      }
      const ids = typeof each === "string" ? this.encode(each, addSpecialTokens) : [...each].map(Number);
      return ids.length || this.#bos === undefined ? ids : [this.#bos];
    });
  }

  /** Replaces `bad_words` by `bad_words_ids`: the tokens of each word at the start of a text, and after a space. */
  #withBadWords({ bad_words: words, ...others }) {
    if (words === undefined) return others;
    if (others.bad_words_ids !== undefined) {
      throw new ParameterError("bad_words and bad_words_ids are both given; give one of them.");
    }
    const perRow = isList(words) && [...words].some(isList);
    const ids = perRow
      ? words.map((each) => (each === null ? null : this.#tokenizeWords(each)))
      : this.#tokenizeWords(words);
    return { ...others, bad_words_ids: ids };
  }

  #tokenizeWords(words) {
    const list = typeof words === "string" ? [words] : words;
    if (!isList(list) || !list.every((word) => typeof word === "string" && word)) {
      throw new ParameterError(`bad_words is ${show(words)}, but must be a non-empty string or a list of them.`);
    }
    const found = new Map();
    for (const word of list) {
      const bare = word.replace(/^ +/, "");
      for (const text of bare ? [bare, ` ${bare}`] : [word]) {
        const ids = this.encode(text, false);
        if (!ids.length) throw new ParameterError(`bad_words has ${show(word)}, which has no tokens; remove it.`);
        found.set(ids.join(), ids);
      }
    }
    return [...found.values()];
  }
}

const shortMessage = (error) => String(error.message ?? error).slice(0, 300);
const isBatch = (prompt) => Array.isArray(prompt) && prompt.some((each) => typeof each === "string" || isList(each));

function checkMaxLength(given, context) {
  if (given === undefined) return context;
  if (!Number.isInteger(given) || given < 1 || given > context) {
    throw new ParameterError(`maxLength is ${show(given)}, but must be an integer in [1, ${context}], the model's context.`);
  }
  return given;
}

/** The text of a file. Throws ManifestError if it is not UTF-8. */
function decodeUtf8(name, data) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
  } catch {
    throw new ManifestError(`${name} is not UTF-8; export or copy the folder again.`);
  }
}

/** Reads the files that the manifest lists. Throws ManifestError for a file that has not the stated size. */
class ListedFiles {
  constructor(folder, manifest) {
    this.folder = folder;
    this.manifest = manifest;
  }

  async read(name) {
    const size = this.manifest.files.get(name);
    const data = await this.folder.read(name, size);
    if (data.byteLength !== size) {
      const found = data.byteLength > size ? "more" : `only ${data.byteLength}`;
      throw new ManifestError(
        `${name} should have ${size} bytes by the manifest, but has ${found}; reload the page, or copy or export the ` +
          "folder again.",
      );
    }
    return data;
  }

  /** The object in a JSON file; {} if the export does not have the file. */
  async json(name, most = MOST_JSON) {
    const size = this.manifest.files.get(name);
    if (size === undefined) return {};
    if (size > most) {
      throw new ManifestError(`${name} has ${size} bytes, but may have at most ${most}; do not use this folder.`);
    }
    const text = decodeUtf8(name, await this.read(name));
    let data;
    try {
      data = JSON.parse(text);
    } catch (error) {
      throw new ManifestError(`${name} is not JSON (${shortMessage(error)}); export or copy the folder again.`);
    }
    if (!isObject(data)) throw new ManifestError(`${name} holds ${show(data)}, not an object; export it again.`);
    return data;
  }

  async tokenizer(Library) {
    if (!this.manifest.files.has("tokenizer.json")) {
      throw new TokenizerError("the export has no tokenizer.json; export the model again from a folder with a tokenizer.");
    }
    const config = { ...(await this.json("special_tokens_map.json")), ...(await this.json("tokenizer_config.json")) };
    return new Tokenizer(Library, await this.json("tokenizer.json", MOST_TEXT), config);
  }

  async session(ort, options) {
    const { folder, manifest } = this;
    let session;
    try {
      if (folder.path !== undefined) {
        if (manifest.decoder.states.some(({ dtype }) => dtype === "float16")) holdHalfAsBits(ort);
        session = await ort.InferenceSession.create(folder.path("model.onnx"), options);
      } else {
        const graph = await this.read("model.onnx");
        const names = [...dataFiles(graph)].filter((name) => manifest.files.has(name));
        const externalData = await Promise.all(names.map(async (path) => ({ path, data: await this.read(path) })));
        const opened = externalData.length ? { ...options, externalData } : options;
        session = await ort.InferenceSession.create(graph, opened);
      }
    } catch (error) {
      if (error instanceof TopWError) throw error;
      if (NO_MEMORY.test(error.message ?? error)) {
        throw new GenerationError(
          `the model does not fit into memory (${shortMessage(error)}); close other pages, or use a smaller model.`,
        );
      }
      throw new ManifestError(
        `onnxruntime cannot open model.onnx (${shortMessage(error)}); check the folder with \`topw verify\`, or export the ` +
          "model again.",
      );
    }
    checkSession(manifest, session);
    return session;
  }
}
