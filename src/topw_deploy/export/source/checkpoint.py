"""Load Hugging Face checkpoints into torch, with weights that stay in their files until they are needed.

While transformers loads a model, it renames, stacks, splits, transposes and casts tensors. Unread tensors record these
operations, so that the model is complete without reading its weights.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_any, tree_leaves, tree_map
from transformers import AutoModelForCausalLM, PreTrainedModel

from topw_deploy.errors import SourceError, TopWError, UnsupportedModelError, VerificationError, one_line
from topw_deploy.export.source.accounting import INPUT_SCALES, LoadedCheckpoint, account
from topw_deploy.export.source.files import (
    NUMPY_TYPES,
    EncodedWeight,
    StoredTensor,
    gguf_path,
    stored_tensors,
    unread_files_notices,
)
from topw_deploy.export.source.quantised import QuantisedCheckpoint
from topw_deploy.export.source.text_decoder import (
    Composite,
    allow_missing_packages,
    class_notices,
    context_length,
    has_rotary_sections,
    load_config,
    parts_left_out,
    replaced,
    rope_notices,
    silence_transformers,
    text_decoder,
)
from topw_deploy.manifest import SourceTensors

_SAME_VALUES = {"aten::alias", "aten::detach", "aten::_to_copy", "aten::clone"}
_COMPARED_TOKENS = 24
# Maximum difference of logits, relative to the largest logit: the two models may only differ in the order of sums.
_LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SAMPLE_TEXT = """The quick brown fox jumps over the lazy dog. In 1815 the treaty was signed; 3.14159 is near pi.
def add(a, b):
    return a + b
Wir fahren morgen nach München. Où est la bibliothèque? 東京は日本の首都です。
"""


class UnreadTensor(torch.Tensor):
    """A CPU tensor that loads its data on demand and does not cache it.

    file: the weight in the file, if this tensor has its elements in the same order, cast at most once; else None.
    sources: the names of all weights that its values come from.
    """

    _like: torch.Tensor
    _make: Callable[[], torch.Tensor]
    file: StoredTensor | EncodedWeight | None
    sources: frozenset[str]

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        make: Callable[[], torch.Tensor],
        file: StoredTensor | EncodedWeight | None,
        sources: frozenset[str],
    ) -> UnreadTensor:
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu"), requires_grad=False
        )
        made._like, made._make, made.file, made.sources = like, make, file, sources
        return made

    @classmethod
    def of(cls, stored: StoredTensor | EncodedWeight, name: str = "") -> UnreadTensor:
        """Return the tensor of a weight in a file."""
        like = torch.empty(stored.shape, dtype=_torch_type(stored), device="meta")
        return cls(like, partial(read_part, stored, ...), stored, frozenset({name}))

    def values(self) -> torch.Tensor:
        """Load the data: map the file copy-on-write, and compute the recorded operations."""
        return self._make()

    def __repr__(self, **_settings: Any) -> str:  # type: ignore[override]
        return f"UnreadTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} would change weights that are not read")

        def compute(part: Any = ...) -> Any:
            values, settings = tree_map(_read, (args, kwargs))
            made = func(*values, **settings)
            return made if part is ... else made[part]

        if all(str(result.type) not in ("Tensor", "List[Tensor]", "Tensor[]") for result in func._schema.returns):
            return compute()  # a comparison, or a conversion to a number, needs the values
        metas, settings = tree_map(_meta, (args, kwargs))
        shapes = func(*metas, **settings)
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, UnreadTensor)]
        sources = frozenset().union(*(value.sources for value in given))
        if isinstance(shapes, torch.Tensor):
            return cls(shapes, compute, args[0].file if _keeps_order(func, args, kwargs) else None, sources)
        return [cls(shape, partial(compute, index), None, sources) for index, shape in enumerate(shapes)]


def _is_unread(value: object) -> bool:
    return isinstance(value, UnreadTensor)


def _read(value: Any) -> Any:
    """The loaded values of an unread tensor; any other value as it is."""
    return value.values() if isinstance(value, UnreadTensor) else value


def _meta(value: Any) -> Any:
    """The same tensor or device on `meta`, where only shapes are computed; any other value as it is."""
    if isinstance(value, UnreadTensor):
        return value._like
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _keeps_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation's result has the stored elements in their order, cast at most once."""
    first = args[0]
    if func._schema.name not in _SAME_VALUES or not _is_unread(first) or tree_any(_is_unread, (args[1:], kwargs)):
        return False
    return first.file is not None and (
        first.dtype == _torch_type(first.file) or kwargs.get("dtype") in (None, first.dtype)
    )


def read_part(stored: StoredTensor | EncodedWeight, index: Any) -> torch.Tensor:
    """Return the values of a weight in a file at a NumPy index."""
    if isinstance(stored, EncodedWeight):
        return torch.from_numpy(stored.read(index))
    index = torch.from_numpy(index) if isinstance(index, np.ndarray) else index
    if stored.nbytes == 0:
        return torch.empty(stored.shape, dtype=_torch_type(stored))[index]
    raw = stored.array("c").reshape(-1).view(np.uint8)  # copy-on-write, because torch warns about read-only arrays
    return torch.from_numpy(raw).view(_torch_type(stored)).view(stored.shape)[index]


def _torch_type(stored: StoredTensor | EncodedWeight) -> torch.dtype:
    if isinstance(stored, EncodedWeight):
        return torch.float32
    found: torch.dtype = getattr(torch, NUMPY_TYPES[stored.dtype].name)
    return found


@contextlib.contextmanager
def load_during_calls(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block, each module loads its unread parameters before a call, and drops them afterwards.

    A module that has a convolution also loads the parameters of its children: such mixers use their children's weights
    without calling them.
    """
    handles: list[Any] = []
    loaded: set[torch.nn.Module] = set()
    for module in model.modules():  # parents first
        has_convolution = any(isinstance(child, torch.nn.Conv1d) for child in module.children())
        parts = {module, *(module.children() if has_convolution else ())} - loaded
        unread = [
            (part._parameters, name, value)
            for part in parts
            for name, value in part._parameters.items()
            if isinstance(value, UnreadTensor)
        ]
        loaded |= parts
        if unread:
            handles.append(module.register_forward_pre_hook(partial(_fill, unread, True)))
            handles.append(module.register_forward_hook(partial(_fill, unread, False), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _fill(unread: list[tuple[dict[str, Any], str, UnreadTensor]], load: bool, *_call: Any) -> None:
    """Load parameters, or put the unread ones back. unread: (a module's parameters, a name in them, the value)."""
    for parameters, name, value in unread:
        parameters[name] = torch.nn.Parameter(value.values(), requires_grad=False) if load else value


def load_reference(
    folder: Path, dtype: str, *, num_hidden_layers: int | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a causal LM, or the text decoder of a composite model, on the CPU, in evaluation mode.

    dtype: name of the torch dtype to load, such as "float16".
    num_hidden_layers: load only the first layers; None loads all.
    trust_remote_code: run the model's own Python code.
    Raises UnsupportedModelError for unknown architectures, SourceError for weights that are damaged, missing or not
    read, and VerificationError if a text decoder differs from its composite model on text.
    """
    model, composite, _, _ = _load_model(folder, dtype, num_hidden_layers, trust_remote_code, unread=False)
    if composite is None:
        return model
    decoder = text_decoder(composite, model)
    _check_equal_on_text(composite, model, decoder)
    return decoder


def load_unread(
    folder: Path, dtype: str, *, num_hidden_layers: int | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, list[str], SourceTensors]:
    """Load the model with weights left in their files, or in memory if the model's code needs their values.

    Returns (model, notices for the user, what became of the tensors). See load_reference for the arguments and errors.
    """
    try:
        model, composite, notices, used = _load_model(folder, dtype, num_hidden_layers, trust_remote_code, unread=True)
    except _LoadError as error:  # the model's code may need values
        model, composite, notices, used = _load_model(folder, dtype, num_hidden_layers, trust_remote_code, unread=False)
        notices.append(f"all weights were read into memory, because they could not be left in their files: {error}")
    scales = [tensors for tensors in used.ignored if tensors.rule == INPUT_SCALES]
    if scales:
        count = sum(tensors.count for tensors in scales)
        notices.append(f"the export ignores {count} scales of activations or cache (first: {scales[0].names})")
    notices += class_notices(folder, model, trust_remote_code=trust_remote_code)
    notices += rope_notices(model.config)
    if composite is None:
        return model, notices, used
    parts = ", ".join(parts_left_out(composite, model)) or "nothing"
    notices.append(f"only the text decoder of {type(model).__name__} was exported; left out: {parts}")
    if has_rotary_sections(composite.text):
        notices.append(
            "the rotary sections of this model (M-RoPE) have equal positions in text, so the graph takes one position "
            "a token"
        )
    return text_decoder(composite, model), notices, used


class _LoadError(SourceError):
    """transformers failed to load a model."""


def _load_model(
    folder: Path, dtype: str, num_hidden_layers: int | None, trust_remote_code: bool, *, unread: bool
) -> tuple[PreTrainedModel, Composite | None, list[str], SourceTensors]:
    config = load_config(folder, num_hidden_layers, trust_remote_code=trust_remote_code)
    settings = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    quantised = QuantisedCheckpoint.of(folder)
    composite = Composite.of(config)
    notices = [] if gguf_path(folder) is not None else unread_files_notices(folder)
    stored = quantised.tensors if quantised is not None else stored_tensors(folder)
    used, unread_names = None, set[str]()
    with silence_transformers(), _record_unread_names(unread_names):
        try:
            if composite is not None or unread or quantised is not None:
                model, info, used = _assemble_model(stored, config, composite, settings, unread=unread)
            else:
                model, info = AutoModelForCausalLM.from_pretrained(
                    folder,
                    config=config,
                    output_loading_info=True,
                    local_files_only=True,
                    ignore_mismatched_sizes=True,
                    **settings,
                )
        except TopWError:
            raise
        except Exception as error:  # foreign models and damaged files can raise anything
            raise _LoadError(f"the model in {folder} cannot be loaded ({_cause(error)}); check its files.") from error
    not_taken = set(stored).difference(*used.values()) if used is not None else set()
    if used is None:
        stored, used, not_taken = _match_names(stored, model, unread_names)
    for name, found, wanted in sorted(info["mismatched_keys"]):
        module, _, end = name.rpartition(".")
        parts = [each for each in not_taken if each != name and each.startswith(f"{module}.") and end in each]
        made = f", made of {len(parts)} tensors as {min(parts)}," if parts else ""
        raise SourceError(
            f"{name}{made} has the shape {list(found)} in {folder}, but its config.json makes it {list(wanted)}; "
            "correct the configuration, or fetch the weights that belong to it."
        )
    loaded = LoadedCheckpoint(
        stored,
        {} if quantised is None else quantised.parts,
        used,
        not_taken,
        sorted(info["missing_keys"]),
        {name for name, value in model.named_parameters() if value.is_floating_point() and name in used},
        () if composite is None else _towers(composite, model),
        getattr(model, "all_tied_weights_keys", {}),
        getattr(model, "_keys_to_ignore_on_load_unexpected", None) or (),
        config.get_text_config(decoder=True),
        quantised is not None,
        num_hidden_layers is not None,
    )
    return model.eval(), composite, notices, account(loaded, folder, type(model).__name__, notices)


def _record_unread_names(names: set[str]) -> contextlib.AbstractContextManager[None]:
    """Inside the block, add to `names` the model's names of all tensors that it does not take.

    transformers' loading information omits those that the model's classes ignore.
    """
    adjust = PreTrainedModel._adjust_missing_and_unexpected_keys

    def record(model: PreTrainedModel, loading_info: Any) -> None:
        names.update(loading_info.unexpected_keys)
        adjust(model, loading_info)

    return replaced((PreTrainedModel, "_adjust_missing_and_unexpected_keys", record))


def _match_names(
    stored: Mapping[str, StoredTensor | EncodedWeight], model: PreTrainedModel, unread: set[str]
) -> tuple[dict[str, StoredTensor | EncodedWeight], dict[str, frozenset[str]], set[str]]:
    """Match the names of a checkpoint with those of the model, which can add or drop the base model's prefix.

    unread: the model's names of tensors that it did not take. One that matches none becomes a tensor without values.
    Returns (tensors by name, parameter -> names of its tensors, names of tensors that were not taken).
    """
    prefix = f"{model.base_model_prefix}."
    variants = {each: name for name in stored for each in (prefix + name, name.removeprefix(prefix))}
    names = variants | {name: name for name in stored}
    not_taken = {names.get(name, name) for name in unread}
    renamed = {name: StoredTensor(Path(), 0, "F32", (), 0) for name in not_taken - set(stored)}
    parameters = {name for name, _ in model.named_parameters() if names.get(name, name) not in not_taken}
    used = {name: frozenset({names[name]}) for name in parameters if name in names}
    return {**stored, **renamed}, used, not_taken


def _cause(error: Exception) -> str:
    """Return why transformers could not load a model, naming the first weight that it could not convert, if any."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        failed = getattr(frame.f_locals.get("loading_info"), "conversion_errors", {})
        if failed:
            name, reason = min(failed.items())
            *_, summary, _ = ["", *filter(None, reason.splitlines())]  # the last line only repeats the name
            return f"{name} cannot be made from the checkpoint's tensors: {one_line(summary or reason)}"
    return ("transformers does not know this value of config.json: " * isinstance(error, KeyError)) + one_line(error)


def _towers(composite: Composite, model: PreTrainedModel) -> tuple[str, ...]:
    """The prefixes of the parameters that do not belong to the text decoder."""
    return tuple(f"{part}." for part in parts_left_out(composite, model))


def _assemble_model(
    stored: Mapping[str, Any], config: Any, composite: Composite | None, settings: dict[str, Any], *, unread: bool
) -> tuple[PreTrainedModel, dict[str, Any], dict[str, frozenset[str]]]:
    """Load the model from a state_dict of unread tensors, which transformers takes only without a folder.

    A composite model is loaded whole, but without `unread` only the values of its text decoder are read.
    Returns (model, transformers' loading information, parameter -> the names in `stored` that its values come from).
    """
    tensors: dict[str, torch.Tensor] = {name: UnreadTensor.of(tensor, name) for name, tensor in stored.items()}
    if composite is not None:
        kind = composite.model
    else:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, **settings)
        kind, config = type(empty), empty.config
    with allow_missing_packages():
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=settings["dtype"],
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _scale_activations(model, tensors, settings["dtype"])
    towers = () if composite is None else _towers(composite, model)
    info["missing_keys"] = [name for name in info["missing_keys"] if not name.startswith(towers)]
    held = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    used = {name: value.sources for name, value in held if isinstance(value, UnreadTensor)}
    for module in model.modules():  # models change buffers in place, and they are small
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(buffer, UnreadTensor):
                setattr(module, name, buffer.values().clone())
    if not unread:
        read: dict[int, torch.nn.Parameter] = {}  # a shared parameter is read once, so that it stays shared
        for name, value in list(model.named_parameters(remove_duplicate=False)):
            if isinstance(value, UnreadTensor) and not name.startswith(towers):
                if id(value) not in read:
                    read[id(value)] = torch.nn.Parameter(value.values().clone(), requires_grad=False)
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._parameters[leaf] = read[id(value)]
    return model, info, used


class _ScaledActivation(torch.nn.Module):
    """An activation whose output is divided by `scales`, with which AWQ multiplied the next layer's weight."""

    def __init__(self, activation: torch.nn.Module, scales: torch.Tensor) -> None:
        super().__init__()
        self.activation, self.scales = activation, torch.nn.Parameter(scales, requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # [batch, sequence, intermediate]
        scaled: torch.Tensor = self.activation(inputs) / self.scales
        return scaled


def _scale_activations(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Apply AWQ's `NAME.scales` to each activation `NAME` of `model`, for which transformers finds no parameter."""
    modules = dict(model.named_modules())
    for name, scales in tensors.items():
        path = name.removesuffix(".scales")
        found = next((place for place in (path, f"{model.base_model_prefix}.{path}") if place in modules), "")
        if name.endswith(".act.scales") and found and not list(modules[found].parameters()):
            model.set_submodule(found, _ScaledActivation(modules[found], scales.to(dtype)))


def _check_equal_on_text(composite: Composite, loaded: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raises VerificationError unless `loaded` and its text decoder give equal logits for text."""
    ids = torch.tensor([_text_token_ids(composite)])
    with torch.no_grad(), load_during_calls(loaded):  # reads only the weights that text needs
        expected, found = (model(input_ids=ids).logits.float() for model in (loaded, decoder))
    bound = _LARGEST_DIFFERENCE[decoder.dtype] * max(1.0, float(expected.abs().max()))
    difference = float((expected - found).abs().max())
    if not difference <= bound:
        raise VerificationError(
            f"the text decoder of {type(loaded).__name__} differs from the whole model on text by {difference:.2g} in "
            f"logits, but rounding explains at most {bound:.2g}; report this model."
        )


def _text_token_ids(composite: Composite) -> list[int]:
    """Token ids evenly spread over the vocabulary, except placeholders of images and other inputs."""
    parts = [composite.config, *(getattr(composite.config, name, None) for name in composite.config.sub_configs)]
    fields = [(name, value) for part in parts if part is not None for name, value in vars(part).items()]
    numbers = [(name, value) for name, value in fields if isinstance(value, int) and not isinstance(value, bool)]
    special = {value for name, value in numbers if name.endswith(("_token_id", "_token_index", "_token"))}
    end = min([composite.text.vocab_size, *(value for name, value in numbers if name == "vocab_offset" and value > 0)])
    spread = dict.fromkeys(int(place) for place in torch.linspace(0, end - 1, _COMPARED_TOKENS + len(special)))
    return [token for token in spread if token not in special][:_COMPARED_TOKENS] or [0]


def overflow_notice(model: PreTrainedModel, folder: Path) -> str:
    """Run a float16 `model` on samples: ids spread over the vocabulary, and text if `folder` has a tokenizer.

    Returns which modules gave infinity or NaN, as a sentence for the user. Raises UnsupportedModelError for a model
    that does not run in float16.
    """
    vocab = model.config.get_text_config(decoder=True).vocab_size
    length = min(64, context_length(model.config))
    batches = [torch.linspace(0, vocab - 1, length).long()]
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_SAMPLE_TEXT).ids
        batches.append(torch.tensor([number for number in ids if number < vocab][:length]))
    names: dict[str, None] = {}

    def watch(name: str, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else (output,)
        floats = (tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_floating_point())
        if not all(torch.isfinite(tensor).all() for tensor in floats):
            names.setdefault(name)

    modules = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_hook(partial(watch, name)) for name, module in modules]
    try:
        with load_during_calls(model), torch.no_grad():
            for batch in batches:
                if len(batch):
                    model(input_ids=batch[None], use_cache=False)
    except RuntimeError as error:  # such as for float32 weights that the model keeps for precision
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run in float16 in transformers ({one_line(error)}); use --dtype fp32 or "
            "bf16."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if not names:
        return "no activation exceeded float16's range on the sample text"
    return (
        f"activations exceed float16's range on the sample text in {len(names)} modules (first: {next(iter(names))}): "
        "the export may return NaN; use --dtype fp32 or bf16"
    )
