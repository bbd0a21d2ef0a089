// Finds the files that hold a graph's weights.

const LONGEST = 4096; // bytes of a path; a hostile graph may state longer ones at many places

// The beginning of the ONNX StringStringEntryProto that names a file, up to the length of the name.
const LOCATION = new TextEncoder().encode("\n\u0008location\u0012");

/**
 * The files outside `graph` that hold its weights.
 * @param {Uint8Array} graph an ONNX file
 * @returns {Set<string>} their paths, beside the graph
 */
export function dataFiles(graph) {
  const found = new Set();
  for (let at = graph.indexOf(LOCATION[0]); at >= 0; at = graph.indexOf(LOCATION[0], at + 1)) {
    if (LOCATION.every((byte, place) => graph[at + place] === byte)) found.add(textAt(graph, at + LOCATION.length));
  }
  return found;
}

/** The text at `at`, which begins with its length as a varint. */
function textAt(bytes, at) {
  let length = 0;
  let shift = 0;
  for (let more = true; more && shift < 32; at++, shift += 7) {
    length += (bytes[at] & 127) * 2 ** shift;
    more = bytes[at] > 127;
  }
  return new TextDecoder().decode(bytes.subarray(at, at + Math.min(length, LONGEST)));
}
