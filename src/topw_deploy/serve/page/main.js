// Puts the page together.
const crop = new Crop();
const sides = ["A", "B"].map((side, place) => ({
  settings: new Settings(side, place === 0 ? "lively" : ""),
  answer: new Answer(side, (answer, token, soon) => crop.choose(answer, token, soon)),
}));
const state = {
  models: [],
  running: null, // { abort, forgotten: whether its answers are no longer wanted }
  asked: null, // the text that the last answers follow
  retry: 0, // a timer
  long: false, // whether the user chose a length
};
const CHAT_TOKENS = 256;
const MOST_TOKENS = 1024; // on the slider
const SEEDS = 1e6; // so that the field shows all digits

function several() {
  return byId("compare").checked;
}

function chat() {
  return byId("mode-chat").checked;
}

function used() {
  return several() ? sides : sides.slice(0, 1);
}

function model() {
  return state.models.find((each) => each.id === byId("model").value);
}

function askForKey() {
  if (sessionStorage.getItem(KEY)) show("The server does not accept this key. Give another one.");
  byId("key-form").hidden = false;
  byId("key").focus();
}

// Ask for the models, and for a key if that is refused. Keeps the answers if their model is still there.
async function start() {
  clearTimeout(state.retry);
  byId("go").disabled = byId("again").disabled = true;
  if (document.documentElement.dataset.keys === "1" && !sessionStorage.getItem(KEY)) {
    askForKey();
    return;
  }
  try {
    state.models = (await callJson("v1/models")).data;
  } catch (error) {
    show(error.message);
    if (error.status === 401) askForKey();
    if (error.status === 503 || error.status === 0) state.retry = setTimeout(start, 2000);
    return;
  }
  show();
  byId("key-form").hidden = true;
  byId("go").disabled = false;
  byId("again").disabled = state.asked === null;
  const before = byId("model").value;
  byId("model").replaceChildren(...state.models.map((each) => el("option", { value: each.id }, each.id)));
  if (state.models.some((each) => each.id === before)) {
    byId("model").value = before;
    fit();
  } else {
    chosen();
  }
}

// Another model was chosen.
function chosen() {
  fit();
  mode();
  arrange();
}

// Offer what the model can do.
function fit() {
  const { topw, max_model_len } = model();
  byId("mode-chat").disabled = !topw.chat;
  byId("no-chat").hidden = topw.chat;
  byId("max-tokens").max = max_model_len;
  byId("max-tokens-slider").max = Math.min(max_model_len, MOST_TOKENS);
  if (chat() && !topw.chat) document.querySelector("input[value=prompt]").checked = true;
  for (const { settings } of sides) settings.use(model());
}

function mode() {
  byId("prompt-label").textContent = chat() ? "Your message" : "Text to continue";
  byId("go").textContent = chat() ? "Send" : "Generate";
  byId("keys").textContent = `${chat() ? "Enter sends, Shift+Enter starts a line" : "Ctrl+Enter generates"}, Escape stops.`;
  byId("new-chat").hidden = !chat();
  const text = byId("prompt"), length = byId("max-tokens");
  const example = text.defaultValue;
  if (chat() && text.value === example) text.value = "";
  else if (!chat() && !text.value) text.value = example;
  if (!state.long) length.value = Math.min(chat() ? CHAT_TOKENS : length.defaultValue, length.max || Infinity);
  byId("max-tokens-slider").value = length.value;
  forget();
}

function forget() {
  if (state.running) {
    state.running.forgotten = true;
    state.running.abort.abort();
  }
  for (const { answer } of sides) {
    answer.turns = [];
    answer.clear();
  }
  state.asked = null;
  byId("again").disabled = true;
  crop.clear();
}

// Show one side or both. The second one joins a chat where the first one is.
function arrange() {
  const [first, second] = sides.map(({ answer }) => answer);
  if (several() && chat() && !state.running && first.turns.length !== second.turns.length) {
    second.clear();
    second.turns = first.turns;
    second.before = first.before;
    second.tell(second.turns);
  }
  const places = used();
  byId("settings").replaceChildren(...places.map(({ settings }) => settings.element));
  byId("columns").replaceChildren(...places.map(({ answer }) => answer.element));
  for (const { settings, answer } of places) {
    settings.label(several());
    answer.several = several();
    if (!answer.tokens.length) answer.name(several() ? `Answer ${settings.side}` : "");
  }
  byId("answers-title").textContent = several() ? "Answers" : "Answer";
}

function request({ settings }, text, turns) {
  const shared = {
    model: byId("model").value, seed: Number(byId("seed").value), max_tokens: Number(byId("max-tokens").value),
    stream: true, stream_options: { include_usage: true }, return_token_ids: true,
  };
  const asked = chat() ? { messages: [...turns, { role: "user", content: text }] } : { prompt: text };
  return { ...asked, ...shared, ...settings.request() };
}

// text: the prompt, or a chat's message. instead: whether the answers replace the last ones.
async function generate(text, instead = false) {
  let bodies;
  try {
    if (chat() && !text.trim()) throw new Error("The message is empty; write one.");
    bodies = used().map((side) => request(side, text, instead ? side.answer.before : side.answer.turns));
  } catch (error) {
    show(error.message);
    return;
  }
  show();
  crop.clear();
  state.asked = text;
  if (chat() && byId("prompt").value === text) byId("prompt").value = "";
  const run = state.running = { abort: new AbortController(), forgotten: false };
  working(true);
  const announcer = new Announcer(3);
  announcer.say("Generating.");
  const url = chat() ? "v1/chat/completions" : "v1/completions";
  const answers = used().map((side, place) => answered(side, url, bodies[place], run, place ? null : announcer));
  reveal(byId("answers"), 0);
  const ended = await Promise.allSettled(answers);
  state.running = null;
  working(false);
  const failed = ended.find((each) => each.status === "rejected");
  if (failed) {
    announcer.say();
    refused(failed.reason, text);
  } else if (!run.forgotten) {
    if (used().every(({ answer }) => !answer.tokens.length)) withdraw(text);
    announcer.say(run.abort.signal.aborted ? "Stopped." : "Done. Choose a token of the answer to see how it was chosen.");
  }
}

// A message without answers goes back to where it was written.
function withdraw(text) {
  if (!chat()) return;
  for (const { answer } of used()) answer.turns = answer.before;
  byId("prompt").value ||= text;
}

// The server may have other keys or models than before.
async function refused(error, text) {
  withdraw(text);
  if (error.code === "model_not_found") await start();
  const full = chat() && error.code === "context_length_exceeded";
  show(full ? `The chat is full: start a new one, or write less. (${error.message})` : error.message);
  if (error.status === 401) askForKey();
}

async function answered({ settings, answer }, url, body, run, announcer) {
  answer.clear();
  answer.model = model();
  answer.name(settings.name(several()));
  if (body.messages) {
    answer.before = body.messages.slice(0, -1);
    answer.tell(body.messages);
  }
  try {
    await answer.run(url, body, run.abort.signal, announcer);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
  if (run.forgotten) answer.clear();
  else if (body.messages) answer.turns = [...body.messages, { role: "assistant", content: answer.drawn }];
}

// The last answer again, with another seed.
function again() {
  newSeed();
  generate(chat() ? state.asked : byId("prompt").value, true);
}

function newSeed() {
  byId("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] % SEEDS;
}

// Of two buttons, the one that can be used takes the other's focus.
function working(yes) {
  const [from, to] = yes ? [byId("go"), byId("stop")] : [byId("stop"), byId("go")];
  const moves = document.activeElement === from || document.activeElement === byId("again");
  to.disabled = false;
  byId("again").disabled = yes || state.asked === null;
  if (moves) to.focus();
  from.disabled = true;
  byId("columns").setAttribute("aria-busy", String(yes));
}

function stop() {
  if (state.running) state.running.abort.abort();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!byId("go").disabled) generate(byId("prompt").value);
});
byId("ask").addEventListener("invalid", (event) => unfold(event.target), true);
byId("prompt").addEventListener("keydown", (event) => {
  const sends = event.ctrlKey || event.metaKey || chat() && !event.shiftKey && !matchMedia("(pointer: coarse)").matches;
  if (event.key !== "Enter" || !sends || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
byId("stop").addEventListener("click", stop);
byId("again").addEventListener("click", again);
byId("new-chat").addEventListener("click", () => {
  forget();
  arrange();
  byId("prompt").focus();
});
byId("new-seed").addEventListener("click", newSeed);
for (const [from, to] of [["max-tokens", "max-tokens-slider"], ["max-tokens-slider", "max-tokens"]]) {
  byId(from).addEventListener("input", () => {
    byId(to).value = byId(from).value;
    state.long = true;
  });
}
byId("compare").addEventListener("change", arrange);
byId("model").addEventListener("change", chosen);
for (const button of document.querySelectorAll("input[name=mode]")) {
  button.addEventListener("change", () => {
    mode();
    arrange();
  });
}
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  if (!/^[\x20-\x7e\xa1-\xff]+$/.test(key)) {
    show("This cannot be a key: it is empty, or has characters that HTTP does not carry. Copy it again.");
    byId("key").focus();
    return;
  }
  sessionStorage.setItem(KEY, key);
  start();
});
start();
