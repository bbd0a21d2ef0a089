// Opens the headless Chromium that `make browser` installed. TOPW_BROWSER is its folder.
import { createRequire } from "node:module";
import path from "node:path";

const folder = process.env.TOPW_BROWSER;
const require = createRequire(path.join(folder, "package.json"));

/** flags: more of Chromium's. */
export async function openBrowser(flags = []) {
  const puppeteer = require("puppeteer-core");
  return puppeteer.launch({
    executablePath: path.join(folder, "chromium"),
    headless: "shell",
    args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", ...flags],
  });
}
