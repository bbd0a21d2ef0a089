const SHOWN_PROMPT = [400, 8]; // most characters and lines of a prompt that are shown before its answer

// The answer of one side: streams it, shows its tokens, and lets the user move between the tokens.
class Answer {
  // choose: called with (answer, place) when a token is chosen.
  constructor(side, choose) {
    this.side = side;
    this.choose = choose;
    this.turns = []; // of the chat, with the answer
    this.before = []; // of the chat, before the last message
    this.title = el("h3", { id: `answer-${side}` });
    this.facts = el("p", { class: "facts" });
    this.history = el("div", { class: "history", role: "region", "aria-label": `Chat before answer ${side}`, tabindex: 0 });
    this.text = el("div", { class: "text", role: "group", "aria-labelledby": `answer-${side}` });
    this.copy = el("button", { type: "button", class: "plain", disabled: true }, "Copy text");
    this.copy.addEventListener("click", () => this.copyText());
    const top = el("div", { class: "crop-head" }, el("div", {}, this.title, this.facts), this.copy);
    this.element = el("article", { class: "answer" }, top, this.history, this.text);
    this.text.addEventListener("click", (event) => this.chooseAt(event.target));
    this.text.addEventListener("keydown", (event) => this.moveByKey(event));
    this.clear();
  }

  clear() {
    this.tokens = []; // ids
    this.spans = [];
    this.prompt = [];
    this.samplerFacts = null; // the field `topw` of the answer's end
    this.drawn = "";
    this.began = 0; // when its first text arrived, in milliseconds
    this.copy.disabled = true;
    this.text.replaceChildren();
    this.facts.textContent = "";
    this.name("");
    this.showTurns([]);
  }

  name(title) {
    this.title.textContent = title;
    this.title.hidden = !title;
  }

  // Shows the turns of a chat that precede the answer.
  showTurns(turns) {
    const words = turns.map(({ role, content }) => el("p", { class: "turn" }, el("b", {}, `${role}:`), ` ${content}`));
    this.history.replaceChildren(...words);
    this.history.hidden = !words.length;
    this.history.scrollTop = this.history.scrollHeight;
  }

  // Requests the answer and appends its tokens; call `clear` first. Throws a RequestError.
  async run(url, body, signal, announcer) {
    this.request = body;
    if (typeof body.prompt === "string") this.text.append(el("span", { class: "given" }, endOfPrompt(body.prompt)));
    this.facts.textContent = "…";
    try {
      for await (const chunk of events(url, body, signal)) {
        const choice = chunk.choices[0];
        if (!choice) continue;
        this.prompt = chunk.prompt_token_ids || choice.prompt_token_ids || this.prompt;
        const text = choice.delta ? choice.delta.content || "" : choice.text;
        this.drawn += text;
        this.last = performance.now();
        this.began ||= this.last;
        this.addTokens(choice.token_ids || [], text);
        if (announcer) announcer.add(text);
        if (choice.topw) this.finish(choice);
      }
    } finally {
      const reached = this.tokens.length ? `stopped after ${countWithUnit(this.tokens.length, "token")}` : "no token";
      if (!this.samplerFacts) this.facts.textContent = reached;
      this.copy.disabled = !this.drawn;
      if (this.spans.length) this.spans[0].tabIndex = 0;
    }
  }

  // Appends tokens. Text that several tokens make, such as a character of several bytes, belongs to the last of them.
  addTokens(ids, text) {
    if (!ids.length && text && this.spans.length) this.spans.at(-1).append(text);
    ids.forEach((id, place) => {
      const own = place === ids.length - 1 ? text : "";
      const span = el("span", { class: "token", role: "button", tabindex: -1, "aria-pressed": "false" });
      span.dataset.place = this.tokens.length;
      span.append(...tokenNodes(own, place < ids.length - 1));
      this.tokens.push(id);
      this.spans.push(span);
      this.text.append(span);
    });
  }

  finish(choice) {
    const facts = choice.topw;
    this.samplerFacts = facts;
    this.spans.forEach((span, place) => {
      const kept = facts.kept[place];
      const sure = facts.certified[place];
      if (facts.rule === "top_w" && kept > 1) span.classList.add(sure ? "sure" : "geo");
      const words = facts.rule !== "top_w" || kept === 1 ? "" : sure ? ", certified" : ", distances decided";
      span.setAttribute("aria-label", `${withVisibleSpaces(span.textContent)}, token ${place + 1}, ${kept} kept${words}`);
    });
    const share = facts.rule === "top_w" ? `, ${percent(facts.certified_share)} certified` : "";
    const mean = facts.kept_mean === null ? "" : `, ${facts.kept_mean.toFixed(1)} kept on average`;
    const why = choice.finish_reason === "length" ? "length reached" : "ended by itself";
    const seconds = (this.last - this.began) / 1000;
    const speed = seconds ? `, ${((this.tokens.length - 1) / seconds).toFixed(0)} a second` : "";
    this.facts.textContent = `${countWithUnit(this.tokens.length, "token")}${speed}${mean}${share}, seed ${facts.seed}, ${why}`;
  }

  // The place of the first token that distances decided, or else of the one with most kept tokens; -1 without any.
  mostInteresting() {
    const { kept, certified, rule } = this.samplerFacts || { kept: [] };
    const decided = rule === "top_w" ? kept.findIndex((count, place) => count > 1 && !certified[place]) : -1;
    return decided < 0 ? kept.indexOf(Math.max(...kept)) : decided;
  }

  chooseAt(target) {
    const span = target.closest(".token");
    if (span) this.choose(this, Number(span.dataset.place));
  }

  // Arrow keys move between tokens, as in a toolbar. The Tab key stops only once in an answer.
  moveByKey(event) {
    const span = event.target.closest(".token");
    if (!span) return;
    const place = Number(span.dataset.place);
    const last = this.spans.length - 1;
    const goal = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: last }[event.key];
    if (goal !== undefined) {
      event.preventDefault();
      this.focus(Math.min(Math.max(goal, 0), last));
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.choose(this, place);
    }
  }

  focus(place) {
    this.spans.forEach((span) => (span.tabIndex = -1));
    this.spans[place].tabIndex = 0;
    this.spans[place].focus();
    this.choose(this, place, true);
  }

  markChosen(place) {
    this.spans.forEach((span, other) => {
      span.setAttribute("aria-pressed", String(other === place));
      span.tabIndex = other === place ? 0 : -1;
    });
  }

  // Browsers offer no clipboard to pages that were loaded over plain HTTP from another machine.
  async copyText() {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(this.drawn);
    } else {
      const area = document.body.appendChild(el("textarea", {}, this.drawn));
      area.select();
      document.execCommand("copy");
      area.remove();
      this.copy.focus();
    }
    byId("announce").textContent = "Copied.";
  }
}

// The end of a prompt, with a mark if its beginning is left out, so that the answer stays in sight.
function endOfPrompt(prompt) {
  const [characters, lines] = SHOWN_PROMPT;
  const end = prompt.slice(-characters).split("\n").slice(-lines).join("\n");
  return end === prompt ? prompt : `…${end}`;
}

// A token's text as nodes. Line ends, tokens without text and parts of a character (`part`) get a mark to click on.
function tokenNodes(text, part) {
  if (part) return [el("span", { class: "mark" }, "·")];
  if (text === "") return [el("span", { class: "mark" }, "∎")];
  const nodes = [];
  for (const line of text.split(/(\n)/)) {
    if (line === "\n") nodes.push(el("span", { class: "mark", "aria-hidden": "true" }, "↵"), "\n");
    else if (line) nodes.push(line);
  }
  return nodes;
}
