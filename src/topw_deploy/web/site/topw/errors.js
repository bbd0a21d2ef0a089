// Errors for the user. Each message names the value, the bound and the next step.

/** Base of intentional errors. */
export class TopWError extends Error {
  /** @param {string} message */
  constructor(message) {
    super(message);
    this.name = new.target.label;
  }

  static label = "TopWError";
}

/** A parameter is unknown, has the wrong type or is out of range. */
export class ParameterError extends TopWError {
  static label = "ParameterError";
}

/** The manifest is missing, malformed, too new, or does not match its files. */
export class ManifestError extends TopWError {
  static label = "ManifestError";
}

/** The tokenizer is missing or unusable. */
export class TokenizerError extends TopWError {
  static label = "TokenizerError";
}

/** The prompt is empty without a BOS token, has unknown ids, or exceeds the context. */
export class PromptError extends TopWError {
  static label = "PromptError";
}

/** Generation failed. */
export class GenerationError extends TopWError {
  static label = "GenerationError";
}

/** Logits contain NaN or +infinity, or no finite value after edits; the message names the row. */
export class LogitsError extends GenerationError {
  static label = "LogitsError";
}

/**
 * A shortened form of a value, for messages.
 * @param {unknown} value
 * @returns {string}
 */
export function show(value) {
  let text;
  try {
    text = typeof value === "bigint" ? String(value) : (JSON.stringify(value) ?? String(value));
  } catch {
    text = `a ${typeof value}`;
  }
  if (typeof value === "number") text = String(value); // JSON has no NaN
  return text.length <= 60 ? text : `${text.slice(0, 57)}...`;
}
