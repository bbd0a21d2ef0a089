"""Write a model without weights for onnxruntime-genai, which cannot sample without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_OPSET, _IR_VERSION, _CONTEXT = 18, 9, 64


def write_model(folder: Path, vocab: int, threads: int) -> Path:
    """Write a one-layer decoder of width 1 whose logits are 0 to a new folder. Returns the folder.

    vocab: width of the logits.
    threads: number of threads of the session.
    """
    import onnx

    folder.mkdir()
    onnx.save(_decoder(vocab), folder / "model.onnx")
    (folder / "genai_config.json").write_text(json.dumps(_configuration(vocab, threads), indent=2), encoding="utf-8")
    return folder


def _decoder(vocab: int) -> Any:
    """The ONNX model. The keys and values of a token are its id, so that the cache has the right shapes."""
    from onnx import TensorProto, helper, numpy_helper

    def tensor(name: str, kind: int, *shape: str | int) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    nodes = [
        helper.make_node("Shape", ["input_ids"], ["shape"]),
        helper.make_node("Concat", ["shape", "vocab"], ["wide"], axis=0),
        helper.make_node("Expand", ["zero", "wide"], ["logits"]),
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["numbers", "axes"], ["new"]),
    ]
    past, present = [], []
    for part in ("key", "value"):
        before, after = f"past_key_values.0.{part}", f"present.0.{part}"
        nodes.append(helper.make_node("Concat", [before, "new"], [after], axis=2))
        past.append(tensor(before, TensorProto.FLOAT, "batch", 1, "past", 1))
        present.append(tensor(after, TensorProto.FLOAT, "batch", 1, "total", 1))
    ids = tensor("input_ids", TensorProto.INT64, "batch", "new")
    mask = tensor("attention_mask", TensorProto.INT64, "batch", "total")
    constants = {"vocab": np.array([vocab]), "axes": np.array([1, 3]), "zero": np.zeros(1, np.float32)}
    graph = helper.make_graph(
        nodes,
        "zero_logits",
        [ids, mask, *past],
        [tensor("logits", TensorProto.FLOAT, "batch", "new", vocab), *present],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)


def _configuration(vocab: int, threads: int) -> dict[str, Any]:
    decoder = {
        "session_options": {"intra_op_num_threads": threads, "provider_options": []},
        "filename": "model.onnx",
        **dict.fromkeys(
            ("head_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 1
        ),
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    model = {
        "type": "llama",
        "vocab_size": vocab,
        "context_length": _CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": vocab - 1,
        "pad_token_id": 0,
        "decoder": decoder,
    }
    return {"model": model, "search": {"max_length": _CONTEXT, "past_present_share_buffer": False}}
