// Opens the headless Chromium that `make browser` installed, and checks pages. TOPW_BROWSER is its folder.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

const folder = process.env.TOPW_BROWSER;
const require = createRequire(path.join(folder, "package.json"));

/** Milliseconds after which a wait is a hang; what pages are waited for takes a few seconds, at most. */
export const HANG = 240_000;

/** flags: further flags of Chromium. */
export async function openBrowser(flags = []) {
  const puppeteer = require("puppeteer-core");
  return puppeteer.launch({
    executablePath: path.join(folder, "chromium"),
    headless: "shell",
    protocolTimeout: HANG,
    args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", ...flags],
  });
}

/**
 * What axe-core finds in a page: {violations: [{rule, help, impact, places: selectors}], passed: the rules that checked
 * something and found nothing wrong}. All its rules count, also those for best practice and the experimental ones, but
 * not those of WCAG's level AAA.
 */
export async function auditPage(page) {
  await page.evaluate(readFileSync(require.resolve("axe-core/axe.min.js"), "utf8"));
  return page.evaluate(async () => {
    const wanted = window.axe.getRules().filter((rule) => !rule.tags.includes("wcag2aaa"));
    const rules = Object.fromEntries(wanted.map((rule) => [rule.ruleId, { enabled: true }]));
    const { violations, passes } = await window.axe.run(document, { rules });
    const told = ({ id, help, impact, nodes }) => {
      return { rule: id, help, impact, places: nodes.slice(0, 5).map((node) => node.target.join(" ")) };
    };
    return { violations: violations.map(told), passed: passes.map((rule) => rule.id) };
  });
}
