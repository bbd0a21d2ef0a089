// Resolves every parameter for every row. The first of these that has a parameter counts: the request, its preset (Top-W
// only), the model's generation_config.json, the export's defaults (Top-W only), this library's defaults.

import { ParameterError, PromptError, show } from "./errors.js";
import { PARAMETERS, valuesPerRow } from "./parameters.js";
import { GREEDY_BELOW, TOP_W_NAMES, presetParameters, topWParameters } from "./presets.js";
import { freshSeed, sequenceSeed } from "./random.js";
import { RULE_PARAMETERS, TOP_W, checkSamplerHasRule, ruleOf } from "./rules.js";

/**
 * The prompt and the parameters of one sequence.
 * @typedef {object} RowRequest
 * @property {number[]} prompt token ids, at least one
 * @property {Record<string, number>} topW the six parameters of Top-W
 * @property {import("./rules.js").RowRule} rule
 * @property {number} budget maximum number of new tokens
 * @property {number} minNewTokens number of tokens before which EOS and stop strings have no effect
 * @property {Set<number>} eos ids that end the row
 * @property {number} pad token that the row feeds after its end
 * @property {string[]} stopStrings
 * @property {number} repetitionPenalty
 * @property {number} presencePenalty
 * @property {number} frequencyPenalty
 * @property {Map<number, number>} logitBias
 * @property {number[]} suppressed
 * @property {number[]} allowed the only ids that can be drawn; empty for all
 * @property {number[][]} badWords
 * @property {number} ngramSize
 * @property {bigint} seed
 */

/**
 * One RowRequest per sequence; those of a prompt are adjacent.
 * @param {import("./manifest.js").Manifest} manifest
 * @param {Record<string, any>} model parameters of generation_config.json
 * @param {number[][]} prompts
 * @param {Record<string, any>} given row parameters, one value for all prompts or one for each
 * @param {number} samples
 * @param {number} maxLength maximum tokens of a sequence, with the prompt
 * @returns {RowRequest[]}
 * @throws {ParameterError | PromptError}
 */
export function resolveRequests(manifest, model, prompts, given, samples, maxLength) {
  const columns = Object.entries(given).map(([name, value]) => [name, valuesPerRow(name, value, prompts.length)]);
  const fromModel = withUnitAndPreset(model, manifest);
  return prompts.flatMap((prompt, index) => {
    const own = columns.map(([name, column]) => [name, column[index]]).filter(([, value]) => value !== undefined);
    const sources = new Sources(withUnitAndPreset(Object.fromEntries(own), manifest), fromModel);
    checkPrompt(prompt, manifest, maxLength, prompts.length > 1 ? `prompt ${index}` : "the prompt");
    const seed = sources.get("seed") ?? freshSeed();
    return Array.from({ length: samples }, (_, index) =>
      rowRequest(prompt, sources, manifest, maxLength, sequenceSeed(seed, index)),
    );
  });
}

/** A source's parameters, with those of its preset, and with geom_scale in the metric's own unit. */
function withUnitAndPreset(stated, { sampler, medianDistance }) {
  let found = stated;
  if ((stated.geom_unit ?? "raw") !== "raw") {
    if (stated.geom_scale === undefined) {
      throw new ParameterError(
        `geom_unit is ${show(stated.geom_unit)}, but geom_scale is not given with it; give both together.`,
      );
    }
    if (medianDistance === null) {
      throw new ParameterError(
        "geom_unit is median, but this export has no median distance of likely pairs, which its verification measures; " +
          "export the model again without --no-verify, or give geom_scale with geom_unit raw.",
      );
    }
    const raw = stated.geom_scale / medianDistance;
    if (!Number.isFinite(Math.fround(raw))) {
      throw new ParameterError(
        `geom_scale is ${show(stated.geom_scale)}, ${raw} when divided by the median distance ${medianDistance}, but ` +
          "must be finite in float32.",
      );
    }
    found = { ...stated, geom_scale: raw };
  }
  if (found.preset === undefined) return found;
  return { ...presetParameters(found.preset, sampler.metric, sampler.hiddenSize), ...found };
}

class Sources {
  constructor(request, model) {
    this.request = request;
    this.model = model;
    this.all = [request, model];
  }

  get(name, usual) {
    return this.all.find((source) => source[name] !== undefined)?.[name] ?? usual;
  }

  value(name) {
    return this.get(name, PARAMETERS[name].default);
  }

  ids(name, vocabSize, ids) {
    for (const token of ids) {
      if (token >= vocabSize) {
        throw new ParameterError(`${name} names the token id ${token}, but ids go from 0 to ${vocabSize - 1}.`);
      }
    }
    return ids;
  }
}

function rowRequest(prompt, sources, manifest, maxLength, seed) {
  const value = (name) => sources.value(name);
  const known = (name, ids = value(name)) => sources.ids(name, manifest.sampler.vocabSize, ids);
  const eos = known("eos_token_id");
  const stop = known("stop_token_ids");
  const logitBias = value("logit_bias");
  known("logit_bias", [...logitBias.keys()]);
  known("bad_words_ids", value("bad_words_ids").flat());
  const pad = value("pad_token_id");
  return {
    prompt,
    topW: topWOf(sources, manifest.defaults),
    rule: ruleOfRow(sources, manifest.sampler),
    budget: newTokens(prompt.length, sources, maxLength),
    minNewTokens: Math.max(value("min_new_tokens"), value("min_length") - prompt.length),
    eos: new Set(value("ignore_eos") ? stop : [...eos, ...stop]),
    pad: pad !== undefined && pad < manifest.sampler.vocabSize ? pad : eos.length ? Math.min(...eos) : 0,
    stopStrings: value("stop_strings"),
    repetitionPenalty: value("repetition_penalty"),
    presencePenalty: value("presence_penalty"),
    frequencyPenalty: value("frequency_penalty"),
    logitBias,
    suppressed: known("suppress_tokens"),
    allowed: known("allowed_token_ids"),
    badWords: value("bad_words_ids"),
    ngramSize: value("no_repeat_ngram_size"),
    seed,
  };
}

function topWOf(sources, defaults) {
  const values = Object.fromEntries(TOP_W_NAMES.map((name) => [name, sources.get(name, defaults[name])]));
  for (const source of sources.all) {
    // The first source with do_sample or temperature decides.
    const sampled = source.do_sample;
    if (sampled === false) values.temperature = 0;
    else if (sampled && source === sources.request && values.temperature < GREEDY_BELOW) {
      if (source.temperature !== undefined) {
        throw new ParameterError(
          `do_sample is true, but temperature is ${source.temperature}, which is greedy; give a higher temperature.`,
        );
      }
      values.temperature = 1;
    }
    if (sampled !== undefined || source.temperature !== undefined) break;
  }
  return topWParameters(values);
}

/** The rule of a row: that of the first source that names or implies one. */
function ruleOfRow(sources, sampler) {
  for (const source of sources.all) {
    const own = RULE_PARAMETERS.filter((name) => source[name] !== undefined).map((name) => [name, source[name]]);
    if (own.length) {
      const found = ruleOf(Object.fromEntries(own), (name) => sources.get(name));
      checkSamplerHasRule(found, sampler);
      return found;
    }
  }
  return TOP_W;
}

/** Maximum number of new tokens after a prompt of `prompt` tokens. `most`: maximum tokens of both together. */
function newTokens(prompt, sources, most) {
  if (sources.request.max_new_tokens !== undefined && sources.request.max_length !== undefined) {
    throw new ParameterError("max_new_tokens and max_length are both given; give one of them.");
  }
  let wanted = PARAMETERS.max_new_tokens.default;
  for (const source of sources.all) {
    if (source.max_new_tokens !== undefined) {
      wanted = source.max_new_tokens;
      break;
    }
    if ((source.max_length ?? 0) > prompt) {
      wanted = source.max_length - prompt;
      break;
    }
    if (source.max_length !== undefined && source === sources.request) {
      throw new PromptError(
        `the prompt has ${prompt} tokens, but max_length is ${source.max_length}; raise it.`,
      );
    }
  }
  return Math.min(wanted, most - prompt);
}

function checkPrompt(prompt, { sampler: { vocabSize }, decoder: { contextLength } }, most, which) {
  if (!prompt.length) {
    throw new PromptError(`${which} is empty and the tokenizer has no BOS token to start from; give some text.`);
  }
  if (prompt.length > most) {
    const why =
      prompt.length > contextLength
        ? `the model's context holds ${contextLength}; shorten it.`
        : `but the model was opened with maxLength ${most}; shorten it, or open the model with more.`;
    throw new PromptError(`${which} has ${prompt.length} tokens, ${why}`);
  }
  for (const token of prompt) {
    if (!Number.isSafeInteger(token) || token < 0 || token >= vocabSize) {
      throw new PromptError(`${which} holds the token id ${show(token)}, but ids go from 0 to ${vocabSize - 1}.`);
    }
  }
}
