"""A model whose own code takes `*args, **kwargs` gets the positions and caches of the forward behind it.

The verification compares prompts, padded batches and steps with the model in torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, Mamba2Config, PreTrainedConfig

from tests.support.tiny_models import COMMON, export, write_checkpoint
from topw_deploy.errors import VerificationError

pytestmark = pytest.mark.slow

SQUASHED = "        found.logits = found.logits.tanh() * 3 + self.get_input_embeddings().weight[:, 0] * 2"
PASSED_ON = f"""    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
{SQUASHED}
        return found
"""
NAMED = PASSED_ON.replace("*args, **kwargs", "input_ids=None, **kwargs", 1).replace("*args", "input_ids=input_ids")
MASKED = f"""    def forward(self, *args, **kwargs):
        mask = kwargs.pop("attention_mask", None)
        found = super().forward(*args, attention_mask=mask, **kwargs)
{SQUASHED}
        return found
"""
WITHIN = f"""    base_model_prefix = "inner"
    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.inner = Base(config)
        self.post_init()
    def forward(self, *args, **kwargs):
        found = self.inner(*args, **kwargs)
{SQUASHED}
        return found
"""
NEEDS_MASK = f"""    def forward(self, *args, **kwargs):
        last = kwargs["attention_mask"][:, -1:, None]
        found = super().forward(*args, **kwargs)
{SQUASHED}
        found.logits = found.logits * last
        return found
"""
COUNTS_TOKENS = NEEDS_MASK.replace("[:, -1:, None]", ".sum()")
LLAMA, GPT2 = (
    LlamaConfig(**COMMON),
    GPT2Config(vocab_size=COMMON["vocab_size"], n_embd=32, n_layer=2, n_head=4, n_positions=256),
)
MAMBA = Mamba2Config(
    **{name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}, num_heads=4, head_dim=16,
    n_groups=1, state_size=8, chunk_size=8,
)  # fmt: skip


def write_own_code(folder: Path, config: PreTrainedConfig, forward: str) -> None:
    """A checkpoint of a class OwnForCausalLM, which derives from the one of `config`, with this forward."""
    write_checkpoint(folder, config)
    path = folder / "config.json"
    data: dict[str, Any] = json.loads(path.read_text())
    (base,) = data["architectures"]
    of_config, name = type(config).__name__, f"Own{base}"
    (folder / "configuration_own.py").write_text(
        f"from transformers import {of_config}\nclass OwnConfig({of_config}):\n    model_type = 'own'\n"
    )
    within = "PreTrainedModel, GenerationMixin" if forward is WITHIN else "Base"
    (folder / "modeling_own.py").write_text(
        f"from transformers import GenerationMixin, PreTrainedModel, {base} as Base\n"
        f"from .configuration_own import OwnConfig\n"
        f"class {name}({within}):\n    config_class = OwnConfig\n{forward}"
    )
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": f"modeling_own.{name}"}
    path.write_text(json.dumps({**data, "model_type": "own", "auto_map": own, "architectures": [name]}))


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "forward"),
    [
        (LLAMA, PASSED_ON),
        (LLAMA, NAMED),
        (LLAMA, MASKED),
        (LLAMA, NEEDS_MASK),
        (LLAMA, WITHIN),
        (GPT2, PASSED_ON),
        (MAMBA, PASSED_ON),
    ],
    ids=["passed on", "named ids", "mask", "mask needed", "model within", "gpt2", "mamba"],
)
def test_own_code_with_any_arguments_is_exported_as_it_runs(
    config: PreTrainedConfig, forward: str, tmp_path: Path
) -> None:
    source = tmp_path / f"own_{tmp_path.name}"  # transformers imports code under the name of its folder
    write_own_code(source, config, forward)
    export(source, tmp_path / "out", trust_remote_code=True, verify=True)


@pytest.mark.long
def test_own_code_that_depends_on_the_length_of_the_mask_is_refused(tmp_path: Path) -> None:
    """The reference gets the whole mask, as transformers passes it; a graph has only that of the new tokens."""
    source = tmp_path / f"own_{tmp_path.name}"
    write_own_code(source, LLAMA, COUNTS_TOKENS)
    with pytest.raises(VerificationError, match="logits"):
        export(source, tmp_path / "out", trust_remote_code=True, verify=True)
