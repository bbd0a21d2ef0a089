// Takes a picture for page.py. Arguments: an address, the file to write. The page is that of `topw serve` or `topw web`.
import { openBrowser } from "../../tests/browser/open_browser.mjs";

const [address, file] = process.argv.slice(2);
const browser = await openBrowser();
try {
  const page = await browser.newPage();
  page.setDefaultTimeout(300000);
  await page.setViewport({ width: 1280, height: 900 });
  await page.goto(address);
  await page.waitForSelector("#go:not(:disabled), #generate:not(:disabled)");
  if (await page.$("#go")) await chat(page);
  else await write(page);
  await page.evaluate(() => document.activeElement.blur());
  const { height } = await (await page.$("body")).boundingBox();
  await page.setViewport({ width: 1280, height: Math.ceil(height) });
  await page.screenshot({ path: file });
} finally {
  await browser.close();
}
console.log("{}");

async function chat(page) {
  await page.click("#mode-chat");
  await page.$eval("#prompt", (field) => (field.value = "Write the first lines of a fairy tale."));
  await page.click("#go");
  await page.waitForSelector("#crop svg circle");
}

async function write(page) {
  await page.type("[name=seed]", "2");
  await page.click("#generate");
  await page.waitForFunction(() => document.getElementById("status").textContent.startsWith("Done"));
}
