// Requests and results as JSON. An integer beyond 2^53 is written {"big": "..."}.

/** The requests of a JSON text. */
export function parseRequests(text) {
  return JSON.parse(text, (_, value) => (value !== null && typeof value === "object" && "big" in value ? BigInt(value.big) : value));
}

/** The results of a request: {prompt, parameters} generates, {texts} encodes and decodes. */
export async function answer(model, { prompt, parameters = {}, texts }) {
  if (texts !== undefined) {
    const ids = texts.map((text) => model.encode(text));
    return { ids, decoded: ids.map((each) => model.decode(each)) };
  }
  const pieces = [];
  const results = [];
  for await (const { row, text, result } of model.stream(prompt, parameters)) {
    pieces[row] = (pieces[row] ?? "") + text;
    if (result !== null) results[row] = result;
  }
  return results.map((result, row) => ({ ...result, seed: String(result.seed), streamed: pieces[row] }));
}
