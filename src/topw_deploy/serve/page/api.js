// Calls this server. The API key is stored in the tab's session storage, and sent to this server only.
const KEY = "topw-key";
const UNREACHABLE = "The server cannot be reached. Check that it runs, then try again.";
const BROKEN_OFF = "The connection broke before the answer was complete. Try again.";

// A request that failed. status: 0 if the server did not answer, or failed in the middle of a stream.
class RequestError extends Error {
  constructor(status, error) {
    super(error.message || `the server answered with status ${status}`);
    this.status = status;
    this.code = error.code;
  }
}

function authorization() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Calls the server: GET without a body, else POST. Throws a RequestError unless the server answers with success.
async function call(path, body, signal) {
  const method = body === undefined ? "GET" : "POST";
  const extra = body === undefined ? {} : { "Content-Type": "application/json" };
  const text = body === undefined ? undefined : JSON.stringify(body);
  const request = fetch(path, { method, headers: { ...authorization(), ...extra }, body: text, signal });
  const answer = await request.catch((error) => throwLost(error, UNREACHABLE));
  if (answer.ok) return answer;
  let error = {};
  try {
    error = (await answer.json()).error || {};
  } catch {
    // not JSON: too many connections, or a proxy's page
  }
  throw new RequestError(answer.status, error);
}

async function callJson(path, body, signal) {
  return (await call(path, body, signal)).json();
}

// Throws an abort by the user as it is, and any other error as a RequestError with `message`.
function throwLost(error, message) {
  throw error.name === "AbortError" ? error : new RequestError(0, { message });
}

// Yields the data of a stream's events, as objects. Throws an error that the server sends as a RequestError.
async function* events(path, body, signal) {
  const answer = await call(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (let ended = false; ;) {
    const { value, done } = await reader.read().catch((error) => throwLost(error, BROKEN_OFF));
    if (done && ended) return;
    if (done) throw new RequestError(0, { message: BROKEN_OFF });
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      ended ||= line === "data: [DONE]";
      if (!line.startsWith("data: ") || ended) continue;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new RequestError(0, data.error);
      yield data;
    }
  }
}
