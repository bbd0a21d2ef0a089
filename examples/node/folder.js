// Reads an exported folder from the disk.

import { readFile } from "node:fs/promises";
import path from "node:path";

import { ManifestError } from "../../src/topw_deploy/web/site/topw/index.js";

/**
 * @param {string} folder
 * @returns {import("../../src/topw_deploy/web/site/topw/model.js").Folder}
 */
export function folderOnDisk(folder) {
  return {
    async read(name) {
      try {
        return await readFile(path.join(folder, name));
      } catch (error) {
        throw new ManifestError(`${path.join(folder, name)} cannot be read (${error.code}); run topw-export.`);
      }
    },
    path: (name) => path.join(folder, name), // onnxruntime-node opens files, with their external data
  };
}
