// Reads the model's generation_config.json. Supported settings become parameters; others that affect tokens are noted.

import { ParameterError, show } from "./errors.js";
import { ALIASES, PARAMETERS, isList } from "./parameters.js";
import { RULES, RULE_PARAMETERS } from "./rules.js";

export const FILE = "generation_config.json";

const NOT_FROM_A_FILE = ["seed", "ignore_eos", "preset", "bad_words", "allowed_token_ids"];

// Settings that have no effect on the drawn tokens.
const SILENT = new Set(
  (
    "transformers_version trust_remote_code top_w bos_token_id decoder_start_token_id use_cache cache_implementation " +
    "cache_config return_legacy_cache prefill_chunk_size output_attentions output_hidden_states output_scores " +
    "output_logits return_dict_in_generate is_assistant num_assistant_tokens num_assistant_tokens_schedule " +
    "assistant_confidence_threshold assistant_lookbehind target_lookbehind max_matching_ngram_size compile_config " +
    "disable_compile low_memory early_stopping length_penalty renormalize_logits"
  ).split(" "),
);

// Setting -> values that disable it.
const OFF = {
  top_p: [1],
  top_k: [0, -1],
  min_p: [0],
  top_h: [0],
  typical_p: [1],
  epsilon_cutoff: [0],
  eta_cutoff: [0],
  num_return_sequences: [1],
  num_beams: [1],
  num_beam_groups: [1],
  diversity_penalty: [0],
  encoder_repetition_penalty: [1],
  encoder_no_repeat_ngram_size: [0],
  guidance_scale: [1],
};

/**
 * The parameters that the model's files state, without token ids outside the vocabulary. EOS ids that
 * generation_config.json lacks come from config.json.
 * @param {Record<string, any>} stated generation_config.json
 * @param {Record<string, any>} config config.json
 * @param {number} vocabSize
 * @returns {{defaults: Record<string, any>, notes: string[]}}
 * @throws {ParameterError} naming the file, for an invalid parameter
 */
export function modelDefaults(stated, config, vocabSize) {
  const { defaults, ignored } = readSettings(stated);
  defaults.eos_token_id ??= eosFromConfig(config);
  for (const name of ["eos_token_id", "stop_token_ids", "suppress_tokens"]) {
    defaults[name] = (defaults[name] ?? []).filter((token) => token < vocabSize);
  }
  defaults.bad_words_ids = (defaults.bad_words_ids ?? []).filter((word) => Math.max(...word) < vocabSize);
  const notes = ignored.length
    ? [`${FILE} sets ${ignored.join(", ")}, which has no effect here: name a rule to use its parameters.`]
    : [];
  return { defaults, notes };
}

/** The BOS id of generation_config.json, else of config.json; undefined if neither has one. */
export function bosToken(stated, config) {
  return [stated, ...configAndText(config)].map((each) => each.bos_token_id).find((id) => Number.isInteger(id));
}

function readSettings(stated) {
  const ofRule = RULES.has(stated.rule) ? ["rule", ...RULES.get(stated.rule).values.map((each) => each.name)] : [];
  const defaults = {};
  const ignored = [];
  for (const [key, value] of Object.entries(stated)) {
    if (value === null) continue;
    const ours = ALIASES[key] ?? key;
    const known = Object.hasOwn(PARAMETERS, ours) && !NOT_FROM_A_FILE.includes(ours);
    if (known && (!RULE_PARAMETERS.includes(key) || ofRule.includes(key))) {
      defaults[ours] = parseSetting(ours, value);
    } else if (!hasNoEffect(key, value)) {
      ignored.push(`${key}=${show(value)}`);
    }
  }
  return { defaults, ignored: ignored.sort() };
}

function parseSetting(name, value) {
  try {
    return PARAMETERS[name].parse(name, value);
  } catch (error) {
    if (error instanceof ParameterError) throw new ParameterError(`${FILE}: ${error.message}`);
    throw error;
  }
}

function hasNoEffect(name, value) {
  return SILENT.has(name) || name.startsWith("_") || value === false || (OFF[name] ?? []).includes(value);
}

function eosFromConfig(config) {
  for (const each of configAndText(config)) {
    const id = each.eos_token_id;
    if (id !== null && id !== undefined) return parseSetting("eos_token_id", isList(id) ? id : [id]);
  }
  return [];
}

function configAndText(config) {
  const text = config.text_config;
  return typeof text === "object" && text !== null ? [config, text] : [config];
}
