"""onnxruntime sessions: opening, checks, and bindings of inputs and outputs."""
