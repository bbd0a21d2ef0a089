// Takes the picture for page.py. Arguments: the server's address, the file to write.
import { openBrowser } from "../../tests/browser/open_browser.mjs";

const [address, file] = process.argv.slice(2);
const browser = await openBrowser();
try {
  const page = await browser.newPage();
  await page.setViewport({ width: 1280, height: 900 });
  await page.goto(address);
  await page.waitForSelector("#go:not(:disabled)");
  await page.click("#mode-chat");
  await page.select("#preset-A", "lively");
  await page.$eval("#prompt", (field) => (field.value = "Write the first lines of a fairy tale."));
  await page.click("#go");
  await page.waitForFunction(() => document.querySelector(".facts").textContent.includes("seed"));
  await page.click(".token.geo");
  await page.waitForSelector("#crop svg circle");
  await page.evaluate(() => document.activeElement.blur());
  await page.screenshot({ path: file, fullPage: true });
} finally {
  await browser.close();
}
console.log("{}");
