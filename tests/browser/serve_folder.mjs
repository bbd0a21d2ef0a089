// Serves a folder on a free port of this machine.
import { createReadStream, readFileSync, statSync } from "node:fs";
import { createServer } from "node:http";
import path from "node:path";

export const TYPES = {
  ".html": "text/html",
  ".js": "text/javascript",
  ".mjs": "text/javascript",
  ".css": "text/css",
  ".json": "application/json",
  ".wasm": "application/wasm",
};

/**
 * Returns {address, close}. headers: of every answer; cut: a file whose answers break off in the middle; hold: one whose
 * answers stop there and stay open.
 */
export async function serveFolder(folder, { headers = {}, cut, hold } = {}) {
  const server = createServer((request, response) => {
    const name = path.join(folder, path.normalize(new URL(request.url, "http://site/").pathname));
    const real = name.endsWith("/") ? `${name}index.html` : name;
    const inside = path.relative(folder, real);
    try {
      response.setHeader("Content-Length", statSync(real).size);
    } catch {
      response.writeHead(404).end();
      return;
    }
    response.setHeader("Content-Type", TYPES[path.extname(real)] ?? "application/octet-stream");
    for (const [header, value] of Object.entries(headers)) response.setHeader(header, value);
    if (inside === cut || inside === hold) {
      const data = readFileSync(real);
      response.write(data.subarray(0, data.length / 2), () => inside === cut && response.destroy());
      return;
    }
    createReadStream(real).pipe(response);
  });
  await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
  const close = () => {
    server.close();
    server.closeAllConnections();
  };
  return { address: `http://127.0.0.1:${server.address().port}/`, close };
}
