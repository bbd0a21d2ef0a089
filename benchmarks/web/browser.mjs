// SITE REQUEST: generates once in the headless Chromium, with one thread, and prints the timings.
import { openBrowser } from "../../tests/browser/open_browser.mjs";
import { serveFolder } from "../../tests/browser/serve_folder.mjs";

const [site, request] = process.argv.slice(2);
const server = await serveFolder(site);
const browser = await openBrowser();
try {
  const page = await browser.newPage();
  page.setDefaultTimeout(600000);
  await page.goto(`${server.address}topw_site.json`);
  const found = await page.evaluate(async (text) => {
    const { prompt, parameters } = JSON.parse(text);
    const worker = new Worker("/worker.js", { type: "module" });
    const answer = (wanted) =>
      new Promise((found, failed) => {
        worker.onmessage = ({ data }) => {
          if (data.type === "error") failed(new Error(data.message));
          else if (wanted(data)) found(data);
        };
      });
    const generate = async (given) => {
      worker.postMessage({ type: "generate", prompt, parameters: given });
      let result = null;
      await answer(({ type, piece }) => {
        if (type === "piece") result = piece.result;
        return type === "done";
      });
      return { token_ids: result.token_ids, timings: result.timings };
    };
    await answer(({ type }) => type === "ready");
    await generate({ ...parameters, max_new_tokens: 4 }); // warm
    return generate(parameters);
  }, request);
  console.log(JSON.stringify(found));
} finally {
  await browser.close();
  server.close();
}
