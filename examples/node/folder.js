// Reads an exported folder from the disk. Opens only regular files, never links, and reads no more than it must.

import { constants } from "node:fs";
import { lstat, open, readdir, stat } from "node:fs/promises";
import path from "node:path";

import { MANIFEST_NAME, ManifestError } from "../../src/topw_deploy/web/site/topw/index.js";

// Non-blocking: opening a named pipe returns at once. Windows has neither flag.
const READ = constants.O_RDONLY | (constants.O_NOFOLLOW ?? 0) | (constants.O_NONBLOCK ?? 0);
const KINDS = {
  isSymbolicLink: "a symbolic link",
  isDirectory: "a folder",
  isFIFO: "a named pipe",
  isSocket: "a socket",
  isCharacterDevice: "a device",
  isBlockDevice: "a device",
};

/**
 * @param {string} folder may be a link
 * @returns {import("../../src/topw_deploy/web/site/topw/model.js").Folder}
 */
export function folderOnDisk(folder) {
  return {
    read: (name, most) => told(folder, name, () => readBounded(folder, name, most)),
    // onnxruntime-node opens files, with their external data
    path: (name) => path.join(folder, name),
    async check(files) {
      for (const [name, size] of files) await told(folder, name, () => checkListed(folder, name, size));
      await told(folder, ".", () => refuseSpecialFiles(folder));
    },
  };
}

/** The file, or `most` + 1 bytes of a larger one. */
async function readBounded(folder, name, most) {
  await regular(folder, name);
  const file = await open(path.join(folder, name), READ);
  try {
    const about = await file.stat(); // of the open file, which nobody can swap any more
    if (!about.isFile()) throw new ManifestError(refusal(folder, name, about));
    const data = new Uint8Array(Math.min(about.size, most + 1));
    let place = 0;
    while (place < data.length) {
      const { bytesRead } = await file.read(data, place, data.length - place);
      if (!bytesRead) break; // cut short meanwhile
      place += bytesRead;
    }
    return data.subarray(0, place);
  } finally {
    await file.close();
  }
}

async function checkListed(folder, name, size) {
  const about = await regular(folder, name);
  if (about.size !== size) {
    throw new ManifestError(
      `${name} has ${about.size} bytes, the manifest says ${size}: it was changed or cut short; export or copy the ` +
        "folder again.",
    );
  }
}

/** What lstat says of a regular file. Throws ManifestError for anything else, and for a link on the way to it. */
async function regular(folder, name) {
  let place = folder;
  let about;
  const parts = name.split("/");
  for (const [index, part] of parts.entries()) {
    place = path.join(place, part);
    about = await lstat(place);
    const fits = index < parts.length - 1 ? about.isDirectory() : about.isFile();
    if (!fits) throw new ManifestError(refusal(folder, name, about));
  }
  return about;
}

/** A graph can name any file as weights, and some versions of onnxruntime open any kind. */
async function refuseSpecialFiles(folder) {
  for (const entry of await readdir(folder, { withFileTypes: true })) {
    const place = path.join(folder, entry.name);
    if (entry.isDirectory()) {
      await refuseSpecialFiles(place);
      continue;
    }
    const about = entry.isFile() ? entry : await stat(place).catch(() => null); // null: a link to nothing
    if (about !== null && !about.isFile() && !about.isDirectory()) {
      const kind = entry.isSymbolicLink() ? `a link to ${kindOf(about)}` : kindOf(about);
      throw new ManifestError(
        `${place} is ${kind}, and a model folder holds regular files only; remove it, or copy the folder's files ` +
          "elsewhere.",
      );
    }
  }
}

function refusal(folder, name, about) {
  if (about.isSymbolicLink()) {
    return `${name} in ${folder} is reached through a symbolic link; copy the file itself there.`;
  }
  return `${name} in ${folder} is ${kindOf(about)}, not a regular file; export or copy the folder again.`;
}

function kindOf(about) {
  return Object.entries(KINDS).find(([holds]) => about[holds]())?.[1] ?? "a special file";
}

/** Says errors of the system in a sentence. */
async function told(folder, name, act) {
  try {
    return await act();
  } catch (error) {
    if (error instanceof ManifestError) throw error;
    const place = path.join(folder, name);
    if (error.code === "ENOENT" && name === MANIFEST_NAME) {
      throw new ManifestError(`${folder} has no ${MANIFEST_NAME}: it is not a finished export; run topw-export.`);
    }
    throw new ManifestError(`${place} cannot be read (${error.code ?? error.message}); export or copy the folder again.`);
  }
}
