const GIVEN = [400, 8]; // characters and lines of a prompt before its answer

// One side's answer: streams it, shows its tokens, and lets the user move between them.
class Answer {
  // choose: called with (answer, place) when a token is chosen.
  constructor(side, choose) {
    this.side = side;
    this.choose = choose;
    this.turns = []; // of a chat
    this.before = []; // those before the last question
    this.title = el("h3", { id: `answer-${side}` });
    this.facts = el("p", { class: "facts" });
    this.history = el("div", { class: "history", role: "region", "aria-label": `Chat before answer ${side}`, tabindex: 0 });
    this.text = el("div", { class: "text", role: "group", "aria-labelledby": `answer-${side}` });
    this.copy = el("button", { type: "button", class: "plain", disabled: true }, "Copy text");
    this.copy.addEventListener("click", () => this.copied());
    const top = el("div", { class: "crop-head" }, el("div", {}, this.title, this.facts), this.copy);
    this.element = el("article", { class: "answer" }, top, this.history, this.text);
    this.text.addEventListener("click", (event) => this.chosen(event.target));
    this.text.addEventListener("keydown", (event) => this.moved(event));
    this.clear();
  }

  clear() {
    this.tokens = []; // ids
    this.spans = [];
    this.prompt = [];
    this.facts_of = null; // the sampler's, of each token
    this.drawn = "";
    this.copy.disabled = true;
    this.text.replaceChildren();
    this.facts.textContent = "Nothing yet.";
    this.name("");
    this.tell([]);
  }

  name(title) {
    this.title.textContent = title;
    this.title.hidden = !title;
  }

  // Show the turns of a chat that precede the answer.
  tell(turns) {
    const words = turns.map(({ role, content }) => el("p", { class: "turn" }, el("b", {}, `${role}:`), ` ${content}`));
    this.history.replaceChildren(...words);
    this.history.hidden = !words.length;
    this.history.scrollTop = this.history.scrollHeight;
  }

  // Append the answer to `body`; call `clear` first. Throws what the server refuses.
  async run(url, body, signal, announcer) {
    this.request = body;
    if (typeof body.prompt === "string") this.text.append(el("span", { class: "given" }, ending(body.prompt)));
    this.facts.textContent = "…";
    try {
      for await (const chunk of events(url, body, signal)) {
        const choice = chunk.choices[0];
        if (!choice) continue;
        this.prompt = chunk.prompt_token_ids || choice.prompt_token_ids || this.prompt;
        const text = choice.delta ? choice.delta.content || "" : choice.text;
        this.drawn += text;
        this.add(choice.token_ids || [], text);
        if (announcer) announcer.add(text);
        if (choice.topw) this.finish(choice);
      }
    } finally {
      const reached = this.tokens.length ? `stopped after ${count(this.tokens.length, "token")}` : "no token";
      if (!this.facts_of) this.facts.textContent = reached;
      this.copy.disabled = !this.drawn;
      if (this.spans.length) this.spans[0].tabIndex = 0;
    }
  }

  // A text of several tokens, such as a character of several bytes, belongs to the last of them.
  add(ids, text) {
    if (!ids.length && text && this.spans.length) this.spans.at(-1).append(text);
    ids.forEach((id, place) => {
      const own = place === ids.length - 1 ? text : "";
      const span = el("span", { class: "token", role: "button", tabindex: -1, "aria-pressed": "false" });
      span.dataset.place = this.tokens.length;
      span.append(...marked(own, place < ids.length - 1));
      this.tokens.push(id);
      this.spans.push(span);
      this.text.append(span);
    });
  }

  finish(choice) {
    const facts = choice.topw;
    this.facts_of = facts;
    this.spans.forEach((span, place) => {
      const kept = facts.kept[place];
      const sure = facts.certified[place];
      if (facts.rule === "top_w" && kept > 1) span.classList.add(sure ? "sure" : "geo");
      const words = facts.rule !== "top_w" || kept === 1 ? "" : sure ? ", certified" : ", distances decided";
      span.setAttribute("aria-label", `${visible(span.textContent)}, token ${place + 1}, ${kept} kept${words}`);
    });
    const share = facts.rule === "top_w" ? `, ${percent(facts.certified_share)} certified` : "";
    const mean = facts.kept_mean === null ? "" : `, ${facts.kept_mean.toFixed(1)} kept on average`;
    const why = choice.finish_reason === "length" ? "length reached" : "ended by itself";
    this.facts.textContent = `${count(this.tokens.length, "token")}${mean}${share}, seed ${facts.seed}, ${why}`;
  }

  chosen(target) {
    const span = target.closest(".token");
    if (span) this.choose(this, Number(span.dataset.place));
  }

  // Arrow keys move between tokens, as in a toolbar: the answer is one stop of the Tab key.
  moved(event) {
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

  press(place) {
    this.spans.forEach((span, other) => {
      span.setAttribute("aria-pressed", String(other === place));
      span.tabIndex = other === place ? 0 : -1;
    });
  }

  // Browsers have no clipboard on pages that came over plain HTTP from another machine.
  async copied() {
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

// The end of a long prompt, so that the answer stays in sight.
function ending(prompt) {
  const [characters, lines] = GIVEN;
  const end = prompt.slice(-characters).split("\n").slice(-lines).join("\n");
  return end === prompt ? prompt : `…${end}`;
}

// A token's text as nodes. Line ends and parts of characters get a mark, so that there is something to choose.
function marked(text, part) {
  if (part) return [el("span", { class: "mark" }, "·")];
  if (text === "") return [el("span", { class: "mark" }, "∎")];
  const nodes = [];
  for (const line of text.split(/(\n)/)) {
    if (line === "\n") nodes.push(el("span", { class: "mark", "aria-hidden": "true" }, "↵"), "\n");
    else if (line) nodes.push(line);
  }
  return nodes;
}
