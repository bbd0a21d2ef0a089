// Unpacks Chromium into the folder for temporary files, once, so that parallel tests find it whole.
import chromium from "@sparticuz/chromium";

console.log(await chromium.executablePath());
