// Opens sites in the headless Chromium: VISITS, a JSON list. Each has `site`, a folder; `cut` or `hold`, a file as in
// serve_folder.mjs; `stop`, whether to press Stop while it loads; `flags` of Chromium.
// Prints for each what the page says when it has loaded or failed to, and which buttons can be pressed.
import { readFileSync } from "node:fs";

import { openBrowser } from "../browser/open_browser.mjs";
import { serveFolder } from "../browser/serve_folder.mjs";

const found = [];
for (const visit of JSON.parse(readFileSync(process.argv[2], "utf-8"))) {
  const server = await serveFolder(visit.site, visit);
  const browser = await openBrowser(visit.flags);
  try {
    const page = await browser.newPage();
    await page.goto(server.address);
    if (visit.stop) {
      await page.waitForFunction(() => document.getElementById("loading").value > 0);
      await page.click("#stop");
    }
    await page.waitForFunction(() => document.getElementById("loading").hidden, { timeout: 60000 });
    found.push({
      status: await page.$eval("#status", (element) => element.textContent),
      buttons: await page.$$eval("button:enabled", (all) => all.map((each) => each.id)),
    });
  } finally {
    await browser.close();
    server.close();
  }
}
console.log(JSON.stringify(found));
