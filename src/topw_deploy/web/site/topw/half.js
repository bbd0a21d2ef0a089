// float16 under onnxruntime-node.

/**
 * Makes `ort` hold float16 in a Uint16Array. It prefers a Float16Array where JavaScript has one (Node 24), of which the
 * binding of onnxruntime-node 1.30 reads no bytes. Its first tensor decides, so call this before.
 * @param {any} ort onnxruntime-node's module
 */
export function holdHalfAsBits(ort) {
  const own = Object.getOwnPropertyDescriptor(globalThis, "Float16Array");
  if (own === undefined) return;
  delete globalThis.Float16Array;
  try {
    new ort.Tensor("int32", new Int32Array(1), [1]);
  } finally {
    Object.defineProperty(globalThis, "Float16Array", own);
  }
}
