// The settings of one side: a preset, a rule, and for each parameter a field with a slider.
const RULES = JSON.parse(byId("rules").textContent);
const TEMPERATURES = ["temperature", "selection_temperature"];

// name: [what it does, least, most on the slider, step]
const TOP_W = {
  temperature: ["Flattens the probabilities of the draw. 0: always the likeliest.", 0, 3, 0.05],
  lam: ["Weight of the entropy: higher keeps fewer tokens.", 0, 5, 0.05],
  beta: ["Weight of the probability kept: higher keeps more tokens. A number, or text such as 1.5+1.5*T with the "
    + "temperature T.", 0, 8, 0.05],
  selection_temperature: ["Temperature for choosing the set. 0: as temperature.", 0, 3, 0.05],
  init_top_p: ["Probability of the set that the search starts from.", 0.01, 1, 0.001],
  geom_scale: ["Weight of the distances between tokens. 0: none.", 0, 2, 0.0001],
};
const PER_MEDIAN = ["Weight of the distances, per median distance. 0: none.", 0, 4, 0.01];
const UNITS = [["raw", "the metric's own unit"], ["median", "the median distance of likely tokens"]];
const PENALTIES = {
  repetition_penalty: ["Above 1: tokens of the text so far get less likely.", 0.5, 2, 0.01],
  presence_penalty: ["Above 0: tokens that were drawn get less likely.", -2, 2, 0.05],
  frequency_penalty: ["As presence_penalty, for each time that they were drawn.", -2, 2, 0.05],
};
const LIMITS = {
  min_tokens: ["Before this many tokens, neither the model nor a stop text ends the answer.", 0, 200, 1],
  no_repeat_ngram_size: ["So many tokens in a row do not occur twice. 0: off.", 0, 10, 1],
};
const STOP = "One text per line, \\n for a line end. The answer ends before the first one that occurs.";

// Parameter of another rule: [least, most on the slider, step]
const RANGES = {
  top_k: [1, 200, 1], top_p: [0.01, 1, 0.01], min_p: [0, 1, 0.01], top_h: [0.01, 1, 0.01], top_h_pool: [1, 500, 1],
  typical_p: [0.01, 0.99, 0.01], epsilon_cutoff: [0.0001, 0.02, 0.0001], eta_cutoff: [0.0001, 0.02, 0.0001],
  top_n_sigma: [0, 5, 0.05], min_k_tau: [0, 10, 0.1],
};

class Settings {
  constructor(side, preset) {
    this.side = side;
    this.preset = preset;
    this.rule = "top_w";
    this.unit = "raw"; // of geom_scale
    this.model = null;
    this.fields = {}; // inputs by name
    this.ranges = {}; // sliders by name
    this.changed = new Set(); // names of the parameters that the user changed
    this.groups = {}; // elements that fold, by name
    this.title = el("h2");
    this.first = el("div"); // the preset and the temperature
    this.body = el("div");
    const more = el("details", {}, el("summary", {}, "More settings"), this.body);
    this.element = el("div", { class: "setting" }, this.title, this.first, more);
  }

  // Shows the settings of a model, an entry of /v1/models. Keeps what the user changed.
  setModel(model) {
    this.model = model;
    if (this.unit === "median" && model.topw.median_distance === null) this.reset("geom_scale");
    this.render();
  }

  // Forgets what the user changed. With the number of geom_scale, its unit is reset.
  reset(...names) {
    for (const name of names) this.changed.delete(name);
    if (names.includes("geom_scale")) this.unit = "raw";
  }

  name(several) {
    const preset = this.preset ? ` ${this.preset}` : ", the export's defaults";
    const first = this.rule === "top_w" ? `Top-W${preset}` : this.rule.replaceAll("_", "-");
    const words = [...this.changed].filter((name) => this.fields[name]).map((name) => this.inWords(name));
    return (several ? `${this.side}: ` : "") + [first, ...words].join(", ");
  }

  // A changed parameter in words.
  inWords(name) {
    if (name === "stop") return `stop ${this.stopTexts().map((text) => JSON.stringify(text)).join(" ") || "off"}`;
    const unit = name === "geom_scale" && this.unit === "median" ? " per median distance" : "";
    return `${name} ${this.fieldText(name)}${unit}`;
  }

  fieldText(name) {
    return this.fields[name].value.trim();
  }

  label(several) {
    this.isCompared = several;
    this.title.textContent = `Settings ${this.side}`;
    this.title.hidden = !several;
  }

  // The fields of a request: the temperature, the rule or preset, and what the user changed.
  request() {
    const found = { temperature: this.parseField("temperature") };
    if (this.rule !== "top_w") {
      found.rule = this.rule;
      for (const value of this.ruleValues()) found[value.name] = this.parseField(value.name);
    } else {
      if (this.model.topw.rule !== "top_w") found.rule = "top_w";
      if (this.preset) found.preset = this.preset;
    }
    for (const name of [...Object.keys(TOP_W), ...Object.keys(PENALTIES), ...Object.keys(LIMITS)]) {
      if (this.changed.has(name) && this.fields[name]) found[name] = this.parseField(name);
    }
    if ("geom_scale" in found && this.unit !== "raw") found.geom_unit = this.unit;
    if (this.changed.has("stop")) found.stop = this.stopTexts();
    return found;
  }

  // The value of a field: a number, or the text of a beta that depends on the temperature. Throws an Error.
  parseField(name) {
    const written = this.fieldText(name);
    const number = Number(written);
    if (written !== "" && Number.isFinite(number)) return number;
    if (name === "beta" && linearTerms(written)) return written;
    openGroups(this.fields[name]);
    this.fields[name].focus();
    throw new Error(name === "beta" ? `beta is ${JSON.stringify(written)}; give a number, or A+B*T with two numbers `
      + "and the temperature T, such as 1.5+1.5*T." : `${name} has no number; give one.`);
  }

  stopTexts() {
    const lines = this.fields.stop.value.split("\n").filter((line) => line !== "");
    return lines.map((line) => line.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t" })[letter] || "\\"));
  }

  ruleValues() {
    const rule = RULES.find((each) => each.name === this.rule);
    return rule ? rule.values : [];
  }

  // The value of the rule, the preset or the export.
  defaultOf(name) {
    const own = this.ruleValues().find((each) => each.name === name);
    if (own) return own.value;
    const { defaults, presets, penalties, limits, median_distance: median } = this.model.topw;
    const value = { ...penalties, ...limits, ...(this.preset ? presets[this.preset] : defaults) }[name];
    return name === "geom_scale" && this.unit === "median" ? value * median : value;
  }

  render() {
    const given = [...this.changed].filter((name) => this.fields[name]);
    const kept = Object.fromEntries(given.map((name) => [name, this.fields[name].value]));
    this.fields = {};
    this.ranges = {};
    const own = this.ruleValues().map(({ name, bound }) => [name, [`${bound}.`, ...RANGES[name]]]);
    const names = this.rule === "top_w" ? Object.keys(TOP_W) : TEMPERATURES;
    const shown = [...own, ...names.map((name) => [name, this.describe(name)])];
    const known = [...shown.map(([name]) => name), ...Object.keys(PENALTIES), ...Object.keys(LIMITS), "stop"];
    this.reset(...[...this.changed].filter((name) => !known.includes(name)));
    const sliders = (of) => of.map(([name, about]) => this.sliderField(name, about, kept[name]));
    const isHeat = ([name]) => name === "temperature";
    this.first.replaceChildren(this.choiceField("preset", "Preset"), ...sliders(shown.filter(isHeat)));
    if (this.rule !== "top_w") this.first.firstChild.hidden = true;
    const others = sliders(shown.filter((each) => !isHeat(each)));
    this.body.replaceChildren(this.choiceField("rule", "Sampling rule"), ...others);
    if (this.rule === "top_w") this.body.append(this.unitField());
    this.body.append(this.group("Penalties", sliders(Object.entries(PENALTIES))),
      this.group("Limits", [...sliders(Object.entries(LIMITS)), this.stopField(kept.stop)]));
    this.label(this.isCompared);
  }

  describe(name) {
    return name === "geom_scale" && this.unit === "median" ? PER_MEDIAN : TOP_W[name];
  }

  // A group of fields that folds; open if it was open before.
  group(name, fields) {
    const open = Boolean(this.groups[name] && this.groups[name].open);
    this.groups[name] = el("details", { open }, el("summary", {}, name), ...fields);
    return this.groups[name];
  }

  choiceField(name, label) {
    const options = name === "preset"
      ? [["", "the export's defaults"], ...Object.keys(this.model.topw.presets).map((each) => [each, each])]
      : [["top_w", "Top-W"], ...RULES.map((rule) => [rule.name, rule.name.replaceAll("_", "-")])];
    return this.selectField(name, label, options, this[name], (value) => {
      this[name] = value;
      if (name === "preset") this.reset(...Object.keys(TOP_W));
    });
  }

  // The menu with the unit of geom_scale. Another unit converts the number, so that the request means the same.
  unitField() {
    const median = this.model.topw.median_distance;
    const field = this.selectField("geom_unit", "geom_unit", UNITS, this.unit, (unit) => {
      const scale = this.parseField("geom_scale") * (unit === "median" ? median : 1 / median);
      this.fields.geom_scale.value = roundToFour(scale);
      this.changed.add("geom_scale");
      this.unit = unit;
    });
    if (median === null) {
      field.querySelector("option[value=median]").disabled = true;
      const id = `geom_unit-${this.side}-note`;
      field.lastChild.setAttribute("aria-describedby", id);
      field.append(el("p", { class: "note", id }, "This export's verification measured no median distance."));
    }
    return field;
  }

  // A menu. act: called with the chosen value; if it throws, the choice is undone.
  selectField(name, label, options, value, act) {
    const id = `${name}-${this.side}`;
    const select = el("select", { id }, ...options.map(([value, text]) => el("option", { value }, text)));
    select.value = value;
    select.addEventListener("change", () => {
      try {
        act(select.value);
      } catch (error) {
        select.value = value;
        showProblem(error.message);
        return;
      }
      this.render();
      byId(id).focus();
    });
    return el("div", { class: "field" }, el("label", { for: id }, label), select);
  }

  sliderField(name, [note, least, most, step], kept) {
    const id = `${name}-${this.side}`;
    const standard = this.defaultOf(name);
    const start = kept || (typeof standard === "string" ? standard : roundToFour(standard));
    const kind = name === "beta" ? { type: "text", autocapitalize: "off", spellcheck: "false" }
      : { type: "number", step: "any" };
    const field = el("input", { id, ...kind, value: start, "aria-describedby": `${id}-note` });
    const range = el("input", { type: "range", min: least, max: most, step, "aria-label": `${name}, slider` });
    this.fields[name] = field;
    this.ranges[name] = range;
    this.moveSlider(name);
    for (const [from, to] of [[field, () => this.moveSlider(name)], [range, () => (field.value = range.value)]]) {
      from.addEventListener("input", () => {
        this.changed.add(name);
        to();
        if (name === "temperature") this.moveSlider("beta");
      });
    }
    return el("div", { class: "field" }, el("label", { for: id }, name), el("div", { class: "pair" }, range, field),
      el("p", { class: "note", id: `${id}-note` }, note));
  }

  // Moves a slider to the number of its field. A beta such as "1.5+1.5*T" depends on the temperature.
  moveSlider(name) {
    if (!this.fields[name]) return;
    const written = this.fieldText(name);
    const terms = linearTerms(written);
    this.ranges[name].value = terms ? terms[0] + terms[1] * Number(this.fieldText("temperature")) : written;
  }

  stopField(kept) {
    const id = `stop-${this.side}`;
    const note = { "aria-describedby": `${id}-note` };
    const field = el("textarea", { id, rows: 2, spellcheck: "false", autocapitalize: "off", ...note });
    field.value = kept === undefined ? this.defaultOf("stop").map(escapeStop).join("\n") : kept;
    field.addEventListener("input", () => this.changed.add("stop"));
    this.fields.stop = field;
    return el("div", { class: "field" }, el("label", { for: id }, "stop"), field,
      el("p", { class: "note", id: `${id}-note` }, STOP));
  }
}

function roundToFour(number) {
  return Number(number.toPrecision(4));
}

function escapeStop(text) {
  return text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll("\t", "\\t");
}

// [a, b] of a text such as "a+b*T"; null for any other text.
function linearTerms(text) {
  const number = "((?:\\d+\\.?\\d*|\\.\\d+)(?:[eE][+-]?\\d+)?)";
  const found = new RegExp(`^(?:${number}\\s*([+-])\\s*)?${number}\\s*\\*\\s*T$`).exec(text);
  return found && [Number(found[1] || 0), Number(found[3]) * (found[2] === "-" ? -1 : 1)];
}

// Opens the groups that hide a field.
function openGroups(field) {
  for (let box = field.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
}
