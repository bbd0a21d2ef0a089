// Connects the parts of the page: the form, the answers of one or two sides, and the explanation of a token.
const crop = new Crop();
const sides = ["A", "B"].map((side, place) => ({
  settings: new Settings(side, place === 0 ? "lively" : ""),
  answer: new Answer(side, (answer, token, soon) => crop.choose(answer, token, soon)),
}));
const state = {
  models: [],
  running: null, // { abort, forgotten: whether its answers are no longer wanted }
  lastText: null, // the prompt or message of the last answers
  retry: 0, // timer of the next attempt to reach the server
  lengthChosen: false, // whether the user chose a length
};
const CHAT_TOKENS = 256;
const MOST_TOKENS = 1024; // on the slider
const SEEDS = 1e6; // so that the field shows all digits

function isComparing() {
  return byId("compare").checked;
}

function isChat() {
  return byId("mode-chat").checked;
}

function shownSides() {
  return isComparing() ? sides : sides.slice(0, 1);
}

function chosenModel() {
  return state.models.find((each) => each.id === byId("model").value);
}

function askForKey() {
  if (sessionStorage.getItem(KEY)) showProblem("The server does not accept this key. Give another one.");
  byId("key-form").hidden = false;
  byId("key").focus();
}

// Asks the server for its models, and the user for a key if the server refuses. Keeps the answers if their model is
// still served.
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
    showProblem(error.message);
    if (error.status === 401) askForKey();
    if (error.status === 503 || error.status === 0) state.retry = setTimeout(start, 2000);
    return;
  }
  showProblem();
  byId("key-form").hidden = true;
  byId("go").disabled = false;
  byId("again").disabled = state.lastText === null;
  const before = byId("model").value;
  byId("model").replaceChildren(...state.models.map((each) => el("option", { value: each.id }, each.id)));
  if (state.models.some((each) => each.id === before)) {
    byId("model").value = before;
    applyModel();
  } else {
    switchModel();
  }
}

function switchModel() {
  applyModel();
  applyMode();
  arrangeSides();
}

// Offers what the chosen model can do.
function applyModel() {
  const { topw, max_model_len } = chosenModel();
  byId("mode-chat").disabled = !topw.chat;
  byId("no-chat").hidden = topw.chat;
  byId("max-tokens").max = max_model_len;
  byId("max-tokens-slider").max = Math.min(max_model_len, MOST_TOKENS);
  if (isChat() && !topw.chat) document.querySelector("input[value=prompt]").checked = true;
  for (const { settings } of sides) settings.setModel(chosenModel());
}

function applyMode() {
  byId("prompt-label").textContent = isChat() ? "Your message" : "Text to continue";
  byId("go").textContent = isChat() ? "Send" : "Generate";
  byId("keys").textContent = `${isChat() ? "Enter sends, Shift+Enter starts a line" : "Ctrl+Enter generates"}, Escape stops.`;
  byId("new-chat").hidden = !isChat();
  const text = byId("prompt"), length = byId("max-tokens");
  const example = text.defaultValue;
  if (isChat() && text.value === example) text.value = "";
  else if (!isChat() && !text.value) text.value = example;
  if (!state.lengthChosen) length.value = Math.min(isChat() ? CHAT_TOKENS : length.defaultValue, length.max || Infinity);
  byId("max-tokens-slider").value = length.value;
  forgetAnswers();
}

function forgetAnswers() {
  if (state.running) {
    state.running.forgotten = true;
    state.running.abort.abort();
  }
  for (const { answer } of sides) {
    answer.turns = [];
    answer.clear();
  }
  state.lastText = null;
  byId("again").disabled = true;
  crop.clear();
}

// Shows one side or both. In a chat, the second side continues with the turns of the first one.
function arrangeSides() {
  const [first, second] = sides.map(({ answer }) => answer);
  if (isComparing() && isChat() && !state.running && first.turns.length !== second.turns.length) {
    second.clear();
    second.turns = first.turns;
    second.before = first.before;
    second.showTurns(second.turns);
  }
  const places = shownSides();
  byId("settings").replaceChildren(...places.map(({ settings }) => settings.element));
  byId("columns").replaceChildren(...places.map(({ answer }) => answer.element));
  for (const { settings, answer } of places) {
    settings.label(isComparing());
    answer.isCompared = isComparing();
    if (!answer.tokens.length) answer.name(isComparing() ? `Answer ${settings.side}` : "");
  }
  byId("answers-title").textContent = isComparing() ? "Answers" : "Answer";
}

function requestBody({ settings }, text, turns) {
  const shared = {
    model: byId("model").value, seed: Number(byId("seed").value), max_tokens: Number(byId("max-tokens").value),
    stream: true, stream_options: { include_usage: true }, return_token_ids: true,
  };
  const asked = isChat() ? { messages: [...turns, { role: "user", content: text }] } : { prompt: text };
  return { ...asked, ...shared, ...settings.request() };
}

// Generates the answers of the shown sides. text: the prompt, or a chat's message. instead: whether the answers replace
// the last ones.
async function generate(text, instead = false) {
  let bodies;
  try {
    if (isChat() && !text.trim()) throw new Error("The message is empty; write one.");
    bodies = shownSides().map((side) => requestBody(side, text, instead ? side.answer.before : side.answer.turns));
  } catch (error) {
    showProblem(error.message);
    return;
  }
  showProblem();
  crop.clear();
  byId("invite").hidden = true;
  byId("columns").hidden = false;
  state.lastText = text;
  if (isChat() && byId("prompt").value === text) byId("prompt").value = "";
  const run = state.running = { abort: new AbortController(), forgotten: false };
  setWorking(true);
  const announcer = new Announcer(3);
  announcer.say("Generating.");
  const url = isChat() ? "v1/chat/completions" : "v1/completions";
  const answers = shownSides().map((side, place) => streamAnswer(side, url, bodies[place], run, place ? null : announcer));
  scrollIntoSight(byId("answers"), 0);
  const ended = await Promise.allSettled(answers);
  state.running = null;
  setWorking(false);
  const failed = ended.find((each) => each.status === "rejected");
  if (failed) {
    announcer.say();
    showRefusal(failed.reason, text);
  } else if (!run.forgotten) {
    if (shownSides().every(({ answer }) => !answer.tokens.length)) restoreMessage(text);
    announcer.say(run.abort.signal.aborted ? "Stopped." : "Done. Choose a token of the answer to see how it was chosen.");
    const { answer } = shownSides()[0];
    if (answer.model.topw.logits && answer.mostInteresting() >= 0) crop.choose(answer, answer.mostInteresting(), true);
  }
}

// Puts a chat's message that was not answered back into the field.
function restoreMessage(text) {
  if (!isChat()) return;
  for (const { answer } of shownSides()) answer.turns = answer.before;
  byId("prompt").value ||= text;
}

// Shows why a request failed. The server may have other keys or models than before.
async function showRefusal(error, text) {
  restoreMessage(text);
  if (error.code === "model_not_found") await start();
  const full = isChat() && error.code === "context_length_exceeded";
  showProblem(full ? `The chat is full: start a new one, or write less. (${error.message})` : error.message);
  if (error.status === 401) askForKey();
}

async function streamAnswer({ settings, answer }, url, body, run, announcer) {
  answer.clear();
  answer.model = chosenModel();
  answer.name(settings.name(isComparing()));
  if (body.messages) {
    answer.before = body.messages.slice(0, -1);
    answer.showTurns(body.messages);
  }
  try {
    await answer.run(url, body, run.abort.signal, announcer);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
  if (run.forgotten) answer.clear();
  else if (body.messages) answer.turns = [...body.messages, { role: "assistant", content: answer.drawn }];
}

// Generates the last answers again, with another seed.
function generateAgain() {
  setNewSeed();
  generate(isChat() ? state.lastText : byId("prompt").value, true);
}

function setNewSeed() {
  byId("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] % SEEDS;
}

// Enables and disables the buttons. If the disabled button had the focus, the enabled one gets it.
function setWorking(isRunning) {
  const [from, to] = isRunning ? [byId("go"), byId("stop")] : [byId("stop"), byId("go")];
  const moves = document.activeElement === from || document.activeElement === byId("again");
  to.disabled = false;
  byId("again").disabled = isRunning || state.lastText === null;
  if (moves) to.focus({ preventScroll: true }); // the answer stays in sight
  from.disabled = true;
  byId("columns").setAttribute("aria-busy", String(isRunning));
}

function stopAnswers() {
  if (state.running) state.running.abort.abort();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!byId("go").disabled) generate(byId("prompt").value);
});
for (const button of document.querySelectorAll("#invite button")) {
  button.addEventListener("click", () => {
    byId("prompt").value = button.textContent;
    byId("ask").requestSubmit();
  });
}
byId("ask").addEventListener("invalid", (event) => openGroups(event.target), true);
byId("prompt").addEventListener("keydown", (event) => {
  const sends = event.ctrlKey || event.metaKey || isChat() && !event.shiftKey && !matchMedia("(pointer: coarse)").matches;
  if (event.key !== "Enter" || !sends || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stopAnswers());
byId("stop").addEventListener("click", stopAnswers);
byId("again").addEventListener("click", generateAgain);
byId("new-chat").addEventListener("click", () => {
  forgetAnswers();
  arrangeSides();
  byId("prompt").focus();
});
byId("new-seed").addEventListener("click", setNewSeed);
for (const [from, to] of [["max-tokens", "max-tokens-slider"], ["max-tokens-slider", "max-tokens"]]) {
  byId(from).addEventListener("input", () => {
    byId(to).value = byId(from).value;
    state.lengthChosen = true;
  });
}
byId("compare").addEventListener("change", arrangeSides);
byId("model").addEventListener("change", switchModel);
for (const button of document.querySelectorAll("input[name=mode]")) {
  button.addEventListener("change", () => {
    applyMode();
    arrangeSides();
  });
}
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  if (!/^[\x20-\x7e\xa1-\xff]+$/.test(key)) {
    showProblem("This cannot be a key: it is empty, or has characters that HTTP does not carry. Copy it again.");
    byId("key").focus();
    return;
  }
  sessionStorage.setItem(KEY, key);
  start();
});
start();
