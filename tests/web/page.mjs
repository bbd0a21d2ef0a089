// Drives a site in the headless Chromium: SITE OPTIONS. OPTIONS is a JSON object:
//   requests: run by a second worker of the site;
//   headers: of every answer of the site;
//   form: fields to fill in before the button is pressed, by their names;
//   twice: press the button again at once; stop: press Stop right behind it, then generate again;
//   cdn: a node_modules from which requests to cdn.jsdelivr.net are answered; without it they fail;
//   broken: a file of the CDN whose answer is changed;
//   pictures: a folder for screenshots.
// Prints the results, what the page shows, what it requested outside, and what the browser complained about.
import { readFileSync } from "node:fs";
import path from "node:path";

import { openBrowser } from "../browser/open_browser.mjs";
import { TYPES, serveFolder } from "../browser/serve_folder.mjs";

const CDN = "https://cdn.jsdelivr.net/npm/";
const [site, file] = process.argv.slice(2);
const options = JSON.parse(readFileSync(file, "utf-8"));
const found = { outside: [], complaints: [] };

const server = await serveFolder(site, { headers: options.headers });
const browser = await openBrowser();
try {
  await drive(await browser.newPage());
} finally {
  await browser.close();
  server.close();
}
console.log(JSON.stringify(found));

async function drive(page) {
  page.on("console", (message) => ["error", "warn"].includes(message.type()) && found.complaints.push(message.text()));
  page.on("pageerror", (error) => found.complaints.push(String(error)));
  await watch(page);
  await page.setViewport(options.viewport ?? { width: 1000, height: 900 });
  await page.goto(server.address);
  await page.waitForFunction(() => document.getElementById("loading").hidden, { timeout: 120000 });
  found.opened = await textOf(page, "status");
  if (!found.opened.startsWith("Ready")) return;
  if (options.form) await fill(page, options.form);
  if (options.requests) found.results = await runInWorker(page, options.requests);
}

/** Answers requests to the CDN, also those of the worker. */
async function watch(page) {
  const session = await page.createCDPSession();
  const answer = async (client) => {
    await client.send("Fetch.enable", { patterns: [{ urlPattern: "https://*" }] });
    client.on("Fetch.requestPaused", async ({ requestId, request: { url } }) => {
      found.outside.push(url);
      if (!options.cdn || !url.startsWith(CDN)) return client.send("Fetch.failRequest", { requestId, errorReason: "Failed" });
      const name = url.slice(CDN.length).replace(/@[0-9][^/]*/, "");
      const data = readFileSync(path.join(options.cdn, name));
      if (options.broken === path.basename(name)) data[data.length - 1] ^= 1;
      const headers = { "Content-Type": TYPES[path.extname(name)], "Access-Control-Allow-Origin": "*" };
      return client.send("Fetch.fulfillRequest", {
        requestId,
        responseCode: 200,
        responseHeaders: Object.entries(headers).map(([header, value]) => ({ name: header, value })),
        body: data.toString("base64"),
      });
    });
  };
  await answer(session);
  page.on("workercreated", (worker) => answer(worker.client).catch(() => {}));
}

function textOf(page, id) {
  return page.$eval(`#${id}`, (element) => element.textContent);
}

function waitForEnd(page) {
  return page.waitForFunction(() => /Done|Error/.test(document.getElementById("status").textContent), { timeout: 120000 });
}

async function fill(page, fields) {
  await page.$$eval("details", (all) => all.forEach((each) => (each.open = true)));
  for (const [name, value] of Object.entries(fields)) {
    const selector = name === "prompt" ? "#prompt" : `[name="${name}"]`;
    if ((await page.$eval(selector, (element) => element.tagName)) === "SELECT") await page.select(selector, value);
    else {
      await page.$eval(selector, (element) => (element.value = ""));
      await page.type(selector, value);
    }
  }
  if (options.stop) {
    await page.evaluate(() => ["generate", "stop"].forEach((id) => document.getElementById(id).click()));
    await waitForEnd(page);
    found.stopped = await textOf(page, "status");
  }
  await page.click("#generate");
  if (options.twice) {
    await page.evaluate(() => {
      document.getElementById("generate").click();
      document.getElementById("form").requestSubmit();
    });
  }
  await waitForEnd(page);
  found.page = {};
  for (const id of ["status", "text", "tokens", "kept", "certified", "seed"]) found.page[id] = await textOf(page, id);
  found.page.table = await page.$$eval("#table tr", (rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent)));
  found.page.unlabelled = await page.$$eval("button, input, select, textarea", (all) =>
    all.filter((each) => !each.labels?.length && !each.textContent.trim()).map((each) => each.outerHTML),
  );
  if (options.pictures) await takePictures(page);
}

async function takePictures(page) {
  await page.screenshot({ path: path.join(options.pictures, "wide.png"), fullPage: true });
  await page.setViewport({ width: 390, height: 800, deviceScaleFactor: 2 });
  await page.screenshot({ path: path.join(options.pictures, "phone.png"), fullPage: true });
  found.overflow = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
}

/** Runs requests in a second worker of the site. Returns the results of each, or its error. */
async function runInWorker(page, requests) {
  return page.evaluate(async (text) => {
    const worker = new Worker("worker.js", { type: "module" });
    const next = (wanted) =>
      new Promise((found) => {
        worker.onmessage = ({ data }) => wanted(data) && found(data);
      });
    await next(({ type }) => type === "ready");
    const revive = (_, value) => (value !== null && typeof value === "object" && "big" in value ? BigInt(value.big) : value);
    const answers = [];
    for (const request of JSON.parse(text, revive)) {
      const results = [];
      worker.postMessage({ type: "generate", parameters: {}, ...request });
      const last = await next(({ type, piece }) => {
        if (type === "piece" && piece.result !== null) results[piece.row] = { ...piece.result, seed: String(piece.result.seed) };
        return type === "done" || type === "error";
      });
      answers.push(last.type === "error" ? { error: last.name, message: last.message } : results);
    }
    worker.terminate();
    return answers;
  }, JSON.stringify(requests));
}
