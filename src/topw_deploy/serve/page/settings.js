// The settings of one side: a preset, a rule, and a slider with a number for each parameter.
const RULES = JSON.parse(byId("rules").textContent);
const TEMPERATURES = ["temperature", "selection_temperature"];

// name: [what it does, least, most on the slider, step]
const TOP_W = {
  temperature: ["Flattens the probabilities of the draw. 0: always the likeliest.", 0, 3, 0.05],
  lam: ["Weight of the entropy: higher keeps fewer tokens.", 0, 5, 0.05],
  beta: ["Weight of the probability kept: higher keeps more tokens.", 0, 8, 0.05],
  selection_temperature: ["Temperature for choosing the set. 0: as temperature.", 0, 3, 0.05],
  init_top_p: ["Probability of the set that the search starts from.", 0.01, 1, 0.001],
  geom_scale: ["Weight of the distances between tokens. 0: none.", 0, 2, 0.0001],
};
const PENALTIES = {
  repetition_penalty: ["Above 1: tokens of the text so far get less likely.", 0.5, 2, 0.01],
  presence_penalty: ["Above 0: tokens that were drawn get less likely.", -2, 2, 0.05],
  frequency_penalty: ["As presence_penalty, for each time that they were drawn.", -2, 2, 0.05],
};

// Of the other rules' parameters: [least, most on the slider, step]
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
    this.model = null;
    this.fields = {};
    this.changed = new Set();
    this.body = el("div");
    this.summary = el("summary");
    const open = matchMedia("(min-width: 52rem)").matches; // a phone shows the answer sooner
    this.element = el("details", { class: "setting", open }, this.summary, this.body);
  }

  // model: an entry of /v1/models. Keeps what the user changed.
  use(model) {
    this.model = model;
    this.render();
  }

  name(several) {
    const preset = this.preset ? ` ${this.preset}` : ", the export's defaults";
    const first = this.rule === "top_w" ? `Top-W${preset}` : this.rule.replaceAll("_", "-");
    const words = [...this.changed].filter((name) => this.fields[name]).map((name) => `${name} ${this.number(name)}`);
    return (several ? `${this.side}: ` : "") + [first, ...words].join(", ");
  }

  number(name) {
    return this.fields[name].value.trim();
  }

  label(several) {
    this.several = several;
    this.summary.textContent = several ? `Settings ${this.side}` : "Settings";
  }

  // The fields of a request. Only what differs from the preset is sent.
  request() {
    const found = { temperature: this.parsed("temperature") };
    if (this.rule !== "top_w") {
      found.rule = this.rule;
      for (const value of this.values()) found[value.name] = this.parsed(value.name);
    } else {
      if (this.model.topw.rule !== "top_w") found.rule = "top_w";
      if (this.preset) found.preset = this.preset;
    }
    for (const name of [...Object.keys(TOP_W), ...Object.keys(PENALTIES)]) {
      if (this.changed.has(name) && this.fields[name]) found[name] = this.parsed(name);
    }
    return found;
  }

  parsed(name) {
    const number = Number(this.number(name));
    if (this.number(name) === "" || !Number.isFinite(number)) {
      unfold(this.fields[name]);
      this.fields[name].focus();
      throw new Error(`${name} has no number; give one.`);
    }
    return number;
  }

  values() {
    const rule = RULES.find((each) => each.name === this.rule);
    return rule ? rule.values : [];
  }

  defaults() {
    const { defaults, presets } = this.model.topw;
    return this.preset ? presets[this.preset] : defaults;
  }

  // A default as a number: a beta such as "1.5+1.5*T" depends on the temperature.
  standard(name) {
    const own = this.values().find((each) => each.name === name);
    const value = own ? own.value : { ...this.model.topw.penalties, ...this.defaults() }[name];
    if (typeof value !== "string") return value;
    const [constant, slope] = value.split("+").map(parseFloat);
    return constant + slope * Number(this.fields.temperature ? this.number("temperature") : 1);
  }

  render() {
    const kept = Object.fromEntries([...this.changed].map((name) => [name, this.fields[name] && this.number(name)]));
    this.fields = {};
    const own = this.values().map(({ name, bound }) => [name, [`${bound}.`, ...RANGES[name]]]);
    const names = this.rule === "top_w" ? Object.keys(TOP_W) : TEMPERATURES;
    const shown = [...own, ...names.map((name) => [name, TOP_W[name]])];
    const known = [...shown.map(([name]) => name), ...Object.keys(PENALTIES)];
    this.changed = new Set([...this.changed].filter((name) => known.includes(name)));
    this.body.replaceChildren(this.choice("preset", "Preset"), this.choice("rule", "Sampling rule"));
    if (this.rule !== "top_w") this.body.firstChild.hidden = true;
    const sliders = (of) => of.map(([name, about]) => this.slider(name, about, kept[name]));
    this.body.append(...sliders(shown));
    const open = this.penalties ? this.penalties.open : false;
    this.penalties = el("details", { open }, el("summary", {}, "Penalties"), ...sliders(Object.entries(PENALTIES)));
    this.body.append(this.penalties);
    this.label(this.several);
  }

  choice(name, label) {
    const id = `${name}-${this.side}`;
    const options = name === "preset"
      ? [["", "the export's defaults"], ...Object.keys(this.model.topw.presets).map((each) => [each, each])]
      : [["top_w", "Top-W"], ...RULES.map((rule) => [rule.name, rule.name.replaceAll("_", "-")])];
    const select = el("select", { id }, ...options.map(([value, text]) => el("option", { value }, text)));
    select.value = this[name];
    select.addEventListener("change", () => {
      this[name] = select.value;
      if (name === "preset") for (const changed of Object.keys(TOP_W)) this.changed.delete(changed);
      this.render();
      byId(id).focus();
    });
    return el("div", { class: "field" }, el("label", { for: id }, label), select);
  }

  slider(name, [note, least, most, step], kept) {
    const id = `${name}-${this.side}`;
    const start = kept || Number(this.standard(name).toPrecision(4));
    const number = el("input", { id, type: "number", step: "any", value: start, "aria-describedby": `${id}-note` });
    const label = { "aria-label": `${name}, slider` };
    const range = el("input", { type: "range", min: least, max: most, step, value: start, ...label });
    this.fields[name] = number;
    const change = (from, to) => from.addEventListener("input", () => {
      to.value = from.value;
      this.changed.add(name);
      if (name === "temperature") this.follow(range);
    });
    change(number, range);
    change(range, number);
    return el("div", { class: "field" }, el("label", { for: id }, name), el("div", { class: "pair" }, range, number),
      el("p", { class: "note", id: `${id}-note` }, note));
  }

  // A beta that depends on the temperature moves with it.
  follow() {
    if (!this.fields.beta || this.changed.has("beta") || typeof this.defaults().beta !== "string") return;
    const beta = Number(this.standard("beta").toPrecision(4));
    this.fields.beta.value = beta;
    this.fields.beta.parentElement.querySelector("input[type=range]").value = beta;
  }
}

// Open whatever hides a field.
function unfold(field) {
  for (let box = field.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
}
