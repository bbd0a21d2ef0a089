// Drives the page of `topw serve` as its users do. Arguments: its address, a key, a folder for screenshots.
// Prints what it saw as one line of JSON; tests/serve/test_page_browser.py judges it.
import path from "node:path";
import { HANG, auditPage, openBrowser } from "./open_browser.mjs";

const [address, key, folder] = process.argv.slice(2);
const NAMED = ["button", "textbox", "combobox", "slider", "spinbutton", "checkbox", "radio", "link"];
const seen = { errors: [], outside: [], unnamed: [], audits: {} };
let refusing = false; // whether requests should fail now, which the console reports

const browser = await openBrowser();
try {
  const page = await browser.newPage();
  watch(page);
  page.setDefaultTimeout(HANG);
  await page.setViewport({ width: 1280, height: 900 });
  await page.goto(address);
  await enterKey(page);
  await keyboardOnly(page);
  await checkNames(page);
  await inspectToken(page);
  await sideBySide(page);
  await stopAnswers(page);
  await fillForm(page);
  await moveSliders(page);
  await viewOnPhone(page);
  await checkColours(page);
  await chat(page);
  await loseServer(page);
} finally {
  await browser.close();
}
console.log(JSON.stringify(seen));

function watch(page) {
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("console", (message) => {
    if (!refusing && ["error", "warn"].includes(message.type())) seen.errors.push(message.text());
  });
  page.on("request", (request) => {
    if (!request.url().startsWith(address) && !request.url().startsWith("data:")) seen.outside.push(request.url());
  });
}

async function takeScreenshot(page, name) {
  if (folder) await page.screenshot({ path: path.join(folder, `${name}.png`), fullPage: name !== "desktop" });
}

function text(page, selector) {
  return page.$eval(selector, (node) => node.textContent);
}

async function waitForAnswer(page) {
  await page.waitForFunction(() => {
    const facts = document.querySelector(".facts").textContent;
    return document.getElementById("stop").disabled && /token/.test(facts);
  });
}

async function waitForExplanation(page, words = ".lead") {
  await page.waitForSelector(`#crop-body:not([aria-busy]) ${words}`);
}

// What axe-core finds wrong, with every group of the form open.
async function audit(page, name) {
  const folds = await page.$$("details:not([open])");
  for (const fold of folds) await fold.evaluate((one) => (one.open = true));
  seen.audits[name] = await auditPage(page);
  for (const fold of folds) await fold.evaluate((one) => (one.open = false));
}

function waitForProblem(page) {
  return page.waitForSelector("#problem:not([hidden])").then((node) => node.evaluate((words) => words.textContent));
}

// The key is asked for until it is right, and kept in the tab.
async function enterKey(page) {
  seen.asks = await page.$eval("#key-form", (form) => !form.hidden);
  seen.wrong = [];
  refusing = true;
  for (const wrong of ["sk-\u201cpage\u201d", "sk-other"]) {
    await page.type("#key", wrong);
    await page.keyboard.press("Enter");
    await page.waitForFunction((last) => {
      const words = document.getElementById("problem");
      return !words.hidden && words.textContent !== last;
    }, {}, seen.wrong.at(-1)?.[0]);
    seen.wrong.push([await waitForProblem(page), await page.evaluate(() => document.activeElement.id)]);
  }
  refusing = false;
  await audit(page, "key");
  await page.type("#key", key);
  await page.keyboard.press("Enter");
  await page.waitForSelector("#go:not(:disabled)");
  seen.stored = await page.evaluate(() => [Object.keys(sessionStorage), Object.keys(localStorage), document.cookie]);
}

// Write, generate, go to the answer and look at two tokens, with keys alone.
async function keyboardOnly(page) {
  await page.evaluate(() => {
    window.announced = [];
    const watcher = new MutationObserver(() => window.announced.push(document.getElementById("announce").textContent));
    watcher.observe(document.getElementById("announce"), { childList: true, characterData: true, subtree: true });
  });
  await tabTo(page, "prompt");
  await page.keyboard.down("Control");
  await page.keyboard.press("a");
  await page.keyboard.up("Control");
  await page.keyboard.type("class Path");
  await page.keyboard.down("Control");
  await page.keyboard.press("Enter");
  await page.keyboard.up("Control");
  await waitForAnswer(page);
  seen.focusStays = await page.evaluate(() => document.activeElement.id);
  await tabTo(page, null, "token");
  await page.keyboard.press("ArrowRight");
  await waitForExplanation(page);
  seen.arrow = await page.evaluate(() => [document.activeElement.dataset.place, document.activeElement.ariaPressed]);
  await page.keyboard.press("End");
  await page.waitForFunction(() => document.querySelector("#crop-body .crop-head").textContent.includes("48 of 48"));
  seen.announced = await page.evaluate(() => window.announced.length);
  seen.tokens = await page.$$eval(".token", (all) => all.length);
  seen.text = await text(page, ".text");
  seen.classes = await page.$$eval(".token", (all) => [...new Set(all.map((one) => one.className))]);
}

async function tabTo(page, id, kind) {
  for (let presses = 0; presses < 60; presses++) {
    const there = await page.evaluate((id, kind) => {
      const active = document.activeElement;
      return id ? active.id === id : active.classList.contains(kind);
    }, id, kind);
    if (there) return;
    await page.keyboard.press("Tab");
  }
  throw new Error(`Tab never reached ${id || kind}`);
}

// Every control has a name.
async function checkNames(page) {
  const check = (node) => {
    if (NAMED.includes(node.role) && !node.name) seen.unnamed.push(node);
    (node.children || []).forEach(check);
  };
  const tree = await page.accessibility.snapshot();
  check(tree);
  seen.duplicates = await page.$$eval("[id]", (all) => all.length - new Set(all.map((one) => one.id)).size);
}

// A click explains a token at which distances decided.
async function inspectToken(page) {
  await page.click(".token.geo");
  await waitForExplanation(page);
  await page.waitForSelector("#crop svg circle");
  seen.drawn = await page.$$eval("tr.drawn", (rows) => rows.map((row) => row.className));
  seen.lead = await text(page, ".lead");
  seen.rules = await page.$$eval("#crop tbody th", (all) => all.slice(0, 5).map((one) => one.textContent));
  seen.axes = await page.$$eval("svg .axis", (all) => all.map((one) => one.textContent));
  seen.shown = await page.$$eval(".tokens tbody tr", (rows) => rows.length);
  await audit(page, "desktop");
  await takeScreenshot(page, "desktop");
  await takeScreenshot(page, "whole");
}

// The same seed under two settings.
async function sideBySide(page) {
  await page.click("#compare");
  await page.click("#go");
  await waitForAnswer(page);
  await page.waitForFunction(() => document.querySelectorAll(".facts")[1].textContent.includes("seed"));
  seen.titles = await page.$$eval(".answer h3", (all) => all.map((one) => one.textContent));
  seen.seeds = await page.$$eval(".facts", (all) => all.map((one) => one.textContent.match(/seed \d+/)[0]));
  seen.texts = await page.$$eval(".text", (all) => all.map((one) => one.textContent));
  await (await page.$$(".answer"))[1].$eval(".token", (token) => token.click());
  await waitForExplanation(page);
  seen.certified = await text(page, ".lead");
  await audit(page, "compare");
  await takeScreenshot(page, "compare");
  await page.click("#compare");
}

// By the button, and by the Escape key. The network is too slow for the rest of the answer: 400 chunks of about 500
// bytes would take minutes.
async function stopAnswers(page) {
  await page.$eval("#max-tokens", (field) => (field.value = 400));
  await page.emulateNetworkConditions({ download: 1000, upload: -1, latency: 0 });
  await page.select("#preset-A", "lively");
  seen.stopped = [];
  for (const stop of [() => page.click("#stop"), () => page.keyboard.press("Escape")]) {
    await page.click("#go");
    await page.waitForSelector(".token");
    await stop();
    await waitForAnswer(page);
    seen.stopped.push(await text(page, ".facts"));
  }
  await page.emulateNetworkConditions(null);
  await page.$eval("#max-tokens", (field) => (field.value = 24));
  await page.click("#go");
  await waitForAnswer(page);
}

// Each number of every rule has a slider, which moves it.
async function moveSliders(page) {
  seen.sliders = await page.evaluate(() => {
    const found = {};
    const choose = (rule) => {
      const select = document.getElementById("rule-A");
      select.value = rule;
      select.dispatchEvent(new Event("change"));
    };
    for (const rule of [...document.getElementById("rule-A").options].map((option) => option.value)) {
      choose(rule);
      found[rule] = [...document.querySelectorAll("#settings .pair")].filter((pair) => {
        const [range, number] = pair.children;
        range.value = range.max;
        range.dispatchEvent(new Event("input"));
        return number.value === range.max;
      }).length;
    }
    choose("top_w");
    document.getElementById("preset-A").dispatchEvent(new Event("change")); // which resets Top-W's
    return found;
  });
}

// Every field of the form reaches the request, and an answer under all of them can be explained.
async function fillForm(page) {
  const sent = [];
  const note = (request) => request.url().endsWith("v1/completions") && sent.push(JSON.parse(request.postData()));
  page.on("request", note);
  const value = (id) => page.$eval(`#${id}`, (field) => field.value);
  const beta = () => page.$eval("#beta-A", (field) => [field.value, Number(field.previousSibling.value)]);
  const reads = async (id, text) => {
    await page.focus(`#${id}`);
    await page.keyboard.down("Control");
    await page.keyboard.press("a");
    await page.keyboard.up("Control");
    await page.keyboard.type(text);
  };
  await page.click("#settings details > summary");
  await page.select("#preset-A", "creative");
  await reads("temperature-A", "2");
  seen.creative = await beta();
  await page.select("#preset-A", "lively");
  const raw = Number(await value("geom_scale-A"));
  await page.select("#geom_unit-A", "median");
  const perMedian = Number(await value("geom_scale-A"));
  await page.select("#geom_unit-A", "raw");
  seen.scales = [raw, perMedian, Number(await value("geom_scale-A"))];
  await page.select("#geom_unit-A", "median");
  await reads("beta-A", "2x");
  await page.click("#settings details > summary"); // a wrong field is shown again
  await page.click("#go");
  seen.badBeta = [await waitForProblem(page), await page.evaluate(() => document.activeElement.id)];
  await reads("beta-A", "1.5 + .5*T");
  await reads("temperature-A", "1.5");
  seen.beta = await beta();
  const summaries = await page.$$("#settings details > summary");
  for (const summary of summaries.slice(-2)) {
    await summary.focus();
    await page.keyboard.press("Enter");
  }
  await reads("min_tokens-A", "6");
  await page.$eval("#no_repeat_ngram_size-A", (field) => field.previousSibling.focus());
  for (let presses = 0; presses < 3; presses++) await page.keyboard.press("ArrowRight");
  await reads("stop-A", "zz\\nz\nqq\\\\");
  await page.focus("#max-tokens-slider");
  await page.keyboard.press("ArrowRight");
  seen.length = [await value("max-tokens"), await value("max-tokens-slider")];
  await page.click("#go");
  await waitForAnswer(page);
  seen.sent = sent.at(-1);
  seen.limited = await text(page, ".answer h3");
  await page.click(".token");
  await waitForExplanation(page);
  await page.select("#preset-A", "");
  await page.select("#preset-A", "lively"); // which resets Top-W's
  seen.reset = await page.$eval("#geom_unit-A", (field) => field.value);
  for (const id of ["min_tokens-A", "no_repeat_ngram_size-A"]) await reads(id, "0");
  await reads("stop-A", " ");
  await page.keyboard.press("Backspace");
  page.off("request", note);
}

async function viewOnPhone(page) {
  await page.setViewport({ width: 360, height: 800 });
  await page.click(".token.geo");
  await waitForExplanation(page);
  await page.waitForSelector("#crop svg circle");
  seen.inSight = await page.$eval("#crop-title", (title) => title.getBoundingClientRect().top < innerHeight);
  await audit(page, "phone");
  await takeScreenshot(page, "phone");
  seen.widths = [];
  for (const width of [360, 640]) { // 640: a window of 1280 at 200 %
    await page.setViewport({ width, height: 800 });
    seen.widths.push(await page.evaluate(() => document.documentElement.scrollWidth));
  }
  await page.setViewport({ width: 1280, height: 900 });
}

// Colours in both schemes, and no motion where none is wanted.
async function checkColours(page) {
  seen.contrast = {};
  for (const scheme of ["light", "dark"]) {
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
    seen.contrast[scheme] = await page.evaluate(contrasts);
  }
  await audit(page, "dark");
  await takeScreenshot(page, "dark");
  await page.emulateMediaFeatures([{ name: "prefers-reduced-motion", value: "reduce" }]);
  seen.motion = await page.$eval(".token", (token) => getComputedStyle(token).transitionDuration);
}

// The lowest contrast of the pairs of colours in use (WCAG 2, section 1.4.3).
function contrasts() {
  const style = getComputedStyle(document.documentElement);
  const probe = document.body.appendChild(document.createElement("i"));
  const luminance = (name) => {
    probe.style.color = style.getPropertyValue(name);
    const parts = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const inks = ["--text", "--muted", "--blue", "--orange", "--green"];
  const pairs = [...inks.flatMap((name) => [[name, "--bg"], [name, "--soft"]]), ["--text", "--sure"], ["--text", "--geo"], ["--muted", "--sure"], ["--muted", "--geo"],
    ["--on", "--blue"]];
  const found = { text: Math.min(...pairs.map(([a, b]) => ratio(a, b))), control: ratio("--control", "--bg") };
  probe.remove();
  return found;
}

// A chat of two turns with a model that was exported without logits; the second answer twice.
async function chat(page) {
  const send = async (words) => {
    await page.type("#prompt", words);
    await page.keyboard.press("Enter");
    await waitForAnswer(page);
    return page.$$eval(".turn", (all) => all.map((one) => one.textContent));
  };
  await page.select("#model", "chat");
  await page.$eval("#prompt", (field) => (field.value = ""));
  await page.click("#mode-chat");
  await page.$eval("#max-tokens", (field) => (field.value = 8));
  seen.turns = [await send("Hi")];
  await page.click(".token");
  await waitForExplanation(page, "pre");
  seen.without = await text(page, "#crop-body");
  await audit(page, "chat");
  await takeScreenshot(page, "chat");
  seen.turns.push(await send("Yo"));
  await page.$eval("#seed", (field) => (field.value = 2));
  await page.click("#again");
  await waitForAnswer(page);
  seen.turns.push(await page.$$eval(".turn", (all) => all.map((one) => one.textContent)));
  seen.again = await page.$eval("#seed", (field) => field.value);
}

// The server cannot be reached: what the user wrote stays.
async function loseServer(page) {
  refusing = true;
  await page.setOfflineMode(true);
  await page.type("#prompt", "Still there?");
  await page.keyboard.press("Enter");
  seen.away = [await waitForProblem(page), await page.$eval("#prompt", (field) => field.value)];
  await page.setOfflineMode(false);
  refusing = false;
  await page.select("#model", "demo");
  const note = await page.$eval("#no-chat", (words) => words.hidden);
  seen.noChat = [await page.$eval("#mode-chat", (button) => button.disabled), note];
}
