// Tensors of float16 in onnxruntime-node.

/**
 * Makes onnxruntime hold float16 in a Uint16Array. Where JavaScript has Float16Array (Node 24), onnxruntime prefers it, but
 * the binding of onnxruntime-node 1.30 cannot read it. Call this before the first tensor is made, which decides.
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
