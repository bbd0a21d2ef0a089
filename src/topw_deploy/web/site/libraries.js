// Loads onnxruntime-web and the tokenizer library: from this site, or from a CDN with their hashes checked.

/**
 * @typedef {{url: string, integrity?: string}} File integrity: the hash to check; without it, no hash is checked
 * @typedef {{onnxruntime: {script: File, wasm: File}, tokenizers: {script: File}}} Libraries
 */

const ADVICE = "check the connection and reload the page, or write the site again.";
// A WebAssembly module with a function type that returns a v128.
const SIMD_MODULE = Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123);

/**
 * Loads the libraries, and sets onnxruntime's number of threads.
 * @param {Libraries} libraries those of topw_site.json
 * @param {URL} site
 * @returns {Promise<{ort: any, Tokenizer: any}>}
 * @throws {Error} for a browser without WebAssembly or its SIMD, and for a library that cannot be loaded
 */
export async function loadLibraries({ onnxruntime, tokenizers }, site) {
  if (!globalThis.WebAssembly?.validate(SIMD_MODULE)) {
    throw new Error("this browser has no WebAssembly with SIMD, which the model needs; use a current browser.");
  }
  const [ort, { Tokenizer }] = await Promise.all([
    importScript(onnxruntime.script, site),
    importScript(tokenizers.script, site),
  ]);
  ort.env.wasm.wasmBinary = await fetchFile(onnxruntime.wasm, site);
  // Threads share memory, which browsers allow only on pages with the headers for cross-origin isolation.
  ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
  ort.env.logLevel = "error";
  return { ort, Tokenizer };
}

async function importScript(file, site) {
  if (!file.integrity) {
    return import(new URL(file.url, site).href).catch((error) => {
      throw new Error(`${file.url} cannot be loaded (${error.message}); ${ADVICE}`);
    });
  }
  const script = await fetchFile(file, site);
  const address = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  return import(address); // the URL is not revoked, because threads open it again
}

/** Fetches a file. Returns its bytes. */
async function fetchFile({ url, integrity }, site) {
  const what = `${url} cannot be fetched${integrity ? ` with the hash ${integrity}` : ""}`;
  let response;
  try {
    response = await fetch(new URL(url, site), { integrity, credentials: integrity ? "omit" : "same-origin" });
    if (response.ok) return await response.arrayBuffer();
  } catch (error) {
    throw new Error(`${what} (${error.message}); ${ADVICE}`);
  }
  throw new Error(`${what} (status ${response.status}); ${ADVICE}`);
}
