// Reads an exported folder over HTTP.

import { GenerationError, ManifestError } from "./errors.js";
import { MANIFEST_NAME } from "./manifest.js";

/**
 * The folder at a URL.
 * @param {string | URL} url ends with "/"
 * @param {(bytes: number) => void} [progress] called with the total number of bytes so far
 * @returns {import("./model.js").Folder}
 */
export function folderAt(url, progress = () => {}) {
  let total = 0;
  const count = (bytes) => progress((total += bytes));
  return {
    async read(name, most) {
      const path = name.split("/").map(encodeURIComponent).join("/");
      const response = await fetch(new URL(path, url)).catch((error) => {
        throw new ManifestError(`${name} cannot be fetched (${error.message}); check the connection, reload the page.`);
      });
      if (!response.ok) {
        throw new ManifestError(
          `${name} cannot be fetched (status ${response.status}); reload the page, or write the site again.`,
        );
      }
      try {
        return await receive(response, most, name === MANIFEST_NAME ? () => {} : count);
      } catch (error) {
        if (error instanceof RangeError) {
          throw new GenerationError(
            `${name} has ${most} bytes, for which this browser has no memory; close other pages, or use a smaller ` +
              "model.",
          );
        }
        throw new ManifestError(`${name} did not arrive completely (${error.message}); reload the page.`);
      }
    },
  };
}

/** The bytes of a response, counted as they arrive. Of a response with more than `most` bytes, any `most` + 1 bytes. */
async function receive(response, most, count) {
  const data = new Uint8Array(most);
  let place = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return data.subarray(0, place);
    if (place + value.length > most) {
      await reader.cancel();
      return new Uint8Array(most + 1); // the caller refuses the length
    }
    data.set(value, place);
    place += value.length;
    count(value.length);
  }
}
