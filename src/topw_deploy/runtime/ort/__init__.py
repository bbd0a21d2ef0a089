"""Sessions of onnxruntime: how one is opened and checked, and how runs get their inputs and outputs."""
