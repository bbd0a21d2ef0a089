// Calls this server. The key lives in the tab's session storage and goes nowhere else.
const KEY = "topw-key";
const AWAY = "The server cannot be reached. Check that it runs, then try again.";
const CUT = "The connection broke before the answer was complete. Try again.";

// status: 0 if the server did not answer, or failed amid a stream.
class Refused extends Error {
  constructor(status, error) {
    super(error.message || `the server answered with status ${status}`);
    this.status = status;
    this.code = error.code;
  }
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function call(path, body, signal) {
  const method = body === undefined ? "GET" : "POST";
  const extra = body === undefined ? {} : { "Content-Type": "application/json" };
  const text = body === undefined ? undefined : JSON.stringify(body);
  const request = fetch(path, { method, headers: { ...headers(), ...extra }, body: text, signal });
  const answer = await request.catch((error) => lost(error, AWAY));
  if (answer.ok) return answer;
  let error = {};
  try {
    error = (await answer.json()).error || {};
  } catch {
    // not JSON: too many connections, or a proxy's page
  }
  throw new Refused(answer.status, error);
}

async function callJson(path, body, signal) {
  return (await call(path, body, signal)).json();
}

// Throws the user's own abort as it is, and anything else in plain words.
function lost(error, message) {
  throw error.name === "AbortError" ? error : new Refused(0, { message });
}

// The data of a stream's events, as objects. Throws what the server sends as an error.
async function* events(path, body, signal) {
  const answer = await call(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (let ended = false; ;) {
    const { value, done } = await reader.read().catch((error) => lost(error, CUT));
    if (done && ended) return;
    if (done) throw new Refused(0, { message: CUT });
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      ended ||= line === "data: [DONE]";
      if (!line.startsWith("data: ") || ended) continue;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new Refused(0, data.error);
      yield data;
    }
  }
}
