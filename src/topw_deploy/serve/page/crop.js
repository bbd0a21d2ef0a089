// Explains one token of an answer: what was kept, what distances changed, and what other rules would have kept.
const SHORT = { top_w: "Top-W", without_distances: "no distances", top_p: "top-p", min_p: "min-p", top_h: "Top-H" };
const titled = (label) => label.replace(/^[a-z_]+/, (rule) => SHORT[rule] || rule.replaceAll("_", "-"));

class Crop {
  constructor() {
    this.body = byId("crop-body");
    this.inspections = new Map(); // of the shown answers, by side and place
    this.abort = null;
    this.timer = null;
  }

  clear() {
    this.inspections.clear();
    clearTimeout(this.timer);
    if (this.abort) this.abort.abort();
    this.body.replaceChildren(el("p", { class: "muted" }, "Choose a token of the answer to see what else could have been drawn."));
  }

  // Explains the token at `place`. soon: wait until the user stops moving between tokens.
  choose(answer, place, soon = false) {
    if (!answer.tokens.length) return;
    answer.markChosen(place);
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      await this.load(answer, place);
      if (!soon) scrollIntoSight(byId("crop"), 0.5);
    }, soon ? 250 : 0);
  }

  // Shows the explanation, from the server if it is not known yet.
  async load(answer, place) {
    if (this.abort) this.abort.abort();
    this.abort = new AbortController();
    const key = `${answer.side}/${place}`;
    if (!answer.model.topw.logits) {
      this.draw(answer, place, el("div", {}, ...this.withoutLogits(answer, place)));
      return;
    }
    try {
      this.body.setAttribute("aria-busy", "true");
      if (!this.inspections.has(key)) this.inspections.set(key, await this.inspect(answer, place, this.abort.signal));
      this.draw(answer, place, this.explanation(answer, place, this.inspections.get(key)));
    } catch (error) {
      if (error.name === "AbortError") return;
      this.draw(answer, place, el("div", {}, el("p", {}, error.message), this.factsList(answer, place)));
    } finally {
      this.body.removeAttribute("aria-busy");
    }
  }

  inspect(answer, place, signal) {
    const { prompt, messages, stream, stream_options, return_token_ids, max_tokens, ...sampling } = answer.request;
    const tokens = answer.tokens.slice(0, place + 1);
    const body = { ...sampling, prompt_token_ids: answer.prompt, token_ids: tokens, position: place };
    return callJson("topw/inspect", body, signal);
  }

  draw(answer, place, content) {
    const moveButton = (label, other) => {
      const disabled = answer.tokens[other] === undefined;
      const button = el("button", { type: "button", class: "plain", disabled }, label);
      button.addEventListener("click", () => {
        this.focusedLabel = label;
        this.choose(answer, other);
      });
      return button;
    };
    const buttons = [moveButton("← Token before", place - 1), moveButton("Token after →", place + 1)];
    const where = `Token ${place + 1} of ${answer.tokens.length}${answer.isCompared ? `, answer ${answer.side}` : ""}`;
    const row = el("div", { class: "row" }, ...buttons);
    this.body.replaceChildren(el("div", { class: "crop-head" }, el("p", { class: "muted" }, where), row), content);
    const wanted = buttons.find((button) => button.textContent === this.focusedLabel && !button.disabled);
    this.focusedLabel = null;
    if (wanted) wanted.focus();
    const lead = content.querySelector(".lead");
    if (lead) byId("announce").textContent = lead.textContent;
  }

  // Shown for a model without logits.
  withoutLogits(answer, place) {
    const words = "This model was exported without logits, so what else the sampler could choose from is unknown. "
      + "Export it again to see it:";
    return [el("p", { class: "lead" }, words), el("pre", {}, el("code", {}, "topw-export MODEL OUT --with-logits")),
      this.factsList(answer, place)];
  }

  // The facts about the token that the answer itself has.
  factsList(answer, place) {
    const facts = answer.samplerFacts;
    if (!facts) return el("p", { class: "muted" }, "The answer was stopped, so the sampler's counts are unknown.");
    const rows = [["tokens kept", facts.kept[place].toLocaleString("en")],
      ["drawn with probability", percent(Math.exp(facts.logprobs[place]))], ["token id", answer.tokens[place]],
      ["seed, position", `${facts.seed}, ${answer.prompt.length + place}`]];
    if (facts.rule === "top_w") rows.splice(1, 0, ["certified", facts.certified[place] ? "yes" : "no"]);
    return el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
  }

  explanation(answer, place, found) {
    const drawing = plot(found);
    const note = found.distances_unavailable ? el("p", { class: "muted" }, found.distances_unavailable) : null;
    const why = found.metric === "uniform" ? "Under this export's metric, uniform, all tokens are equally far apart"
      : "Fewer than three tokens were in question";
    const side = drawing || el("p", { class: "muted" }, `${why}, so there is no map of their distances.`);
    const two = el("div", { class: "two" }, this.setsTable(found), side);
    return el("div", {}, this.summary(found), note, this.differenceNote(answer, place, found), two, this.tokensTable(found));
  }

  // The step in two or three sentences.
  summary(found) {
    const { token } = found;
    const set = found.sets.find((each) => each.name === (found.rule === "top_w" ? "top_w" : "chosen"));
    const name = found.rule === "top_w" ? "Top-W" : titled(set.label);
    const parts = [];
    if (set) {
      const chance = found.tokens.find((each) => each.id === token.id).drawn_with;
      const held = percent(set.probability);
      parts.push(`${name} kept ${countWithUnit(set.kept, "token")}, ${held} of the probability, and drew `, tokenCode(token.text),
        set.kept === 1 ? ". " : ` with a chance of ${percent(chance)} (the model's rank ${token.rank}). `);
    }
    if (found.rule === "top_w" && set) parts.push(this.geometrySentence(found));
    return el("p", { class: "lead" }, ...parts);
  }

  geometrySentence(found) {
    if (found.certified) return "The step is certified: no distance between tokens could have changed the set.";
    if (!found.added && !found.dropped) return "Distances between tokens were weighed, but changed nothing.";
    const words = [];
    if (found.dropped) words.push(`dropped ${countWithUnit(found.dropped, "token")}`);
    if (found.added) words.push(`added ${countWithUnit(found.added, "token")}`);
    const plain = found.sets.find((each) => each.name === "without_distances");
    return `Distances between tokens ${words.join(" and ")}: without them it would have kept ${plain.kept}.`;
  }

  // A note if the recomputed step and the answer have different sets; else null.
  differenceNote(answer, place, found) {
    const facts = answer.samplerFacts;
    const set = found.sets.find((each) => each.name === (found.rule === "top_w" ? "top_w" : "chosen"));
    const other = facts && set && facts.kept[place] !== set.kept;
    if (found.token.kept !== false && !other) return null;
    return el("p", { class: "muted" }, "Recomputing the step gave another set than the stream's"
      + (other ? ` (${facts.kept[place]} tokens)` : "") + ": a near tie, which rounding decided.");
  }

  setsTable(found) {
    const used = found.rule === "top_w" ? "top_w" : "chosen";
    const rows = found.sets.map((set) => el("tr", { class: set.name === used ? "kept" : null },
      el("th", { scope: "row" }, titled(set.label) + (set.name === "chosen" ? " (used)" : "")),
      el("td", {}, set.kept.toLocaleString("en")), el("td", {}, percent(set.probability)), bar(set.probability)));
    const columns = el("tr", {}, ...headCells(["rule", "tokens", "probability"]), el("td", {}));
    return el("div", { class: "wide" }, el("table", {}, el("caption", {}, "What each rule would keep here"),
      el("thead", {}, columns), el("tbody", {}, ...rows)));
  }

  tokensTable(found) {
    const rules = found.sets.filter((set) => set.name !== "without_distances");
    const most = found.tokens[0].probability;
    const isDrawn = (token) => token.id === found.token.id;
    const rows = [...found.tokens.filter(isDrawn), ...found.tokens.filter((token) => !isDrawn(token))].map((token) => {
      const drawn = isDrawn(token);
      const classes = [drawn && "drawn", token.drawn_with > 0 && "kept", token.change === "dropped" && "dropped"];
      const cells = rules.map((set) => el("td", {}, token.sets.includes(set.name)
        ? el("span", { class: "yes" }, "●", el("span", { class: "hidden" }, "kept"))
        : el("span", { class: "no" }, "–", el("span", { class: "hidden" }, "not kept"))));
      return el("tr", { class: classes.filter(Boolean).join(" ") },
        el("th", { scope: "row" }, tokenCode(token.text), drawn ? tag("drawn", "drawn") : null,
          token.change ? tag(token.change, `${token.change} by distance`) : null),
        el("td", {}, percent(token.probability)), bar(token.probability / most), ...cells,
        el("td", { class: "wide-only" }, token.distance === null ? "–" : token.distance.toPrecision(3)));
    });
    const names = rules.map((set) => (set.name === "chosen" ? set.label : SHORT[set.name]));
    const columns = el("tr", {}, ...headCells(["token", "probability"]), el("td", {}), ...headCells(names),
      el("th", { scope: "col", class: "wide-only" }, "distance to kept"));
    const rest = `${countWithUnit(found.rest.tokens, "other token")} hold ${percent(found.rest.probability)} of the `
      + "probability. The distance is that to the nearest other token that was kept.";
    const table = el("table", {}, el("caption", {}, "The drawn token, then the likeliest ones, at this temperature"),
      el("thead", {}, columns), el("tbody", {}, ...rows));
    return el("div", { class: "tokens" },
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Likely tokens, scrollable" }, table),
      el("p", { class: "note" }, rest));
  }
}

function headCells(names) {
  return names.map((name) => el("th", { scope: "col" }, name));
}

function tag(look, text) {
  return el("span", { class: `tag ${look}` }, text);
}

function bar(share) {
  const inner = el("span");
  inner.style.width = `${(100 * share).toFixed(1)}%`;
  return el("td", { class: "bar", "aria-hidden": "true" }, inner);
}
