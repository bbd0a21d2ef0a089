"""The key-value cache of one generation, in the forms that docs/graph.md section 8 names."""

from __future__ import annotations

from topw_deploy.errors import ManifestError
from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.session import ELEMENT_TYPES, Binding, GraphSession, empty_value


class ConcatCache:
    """`past_key_values.{i}.key|value` in, `present.{i}.key|value` (the past and the new tokens) out.

    Each [batch, kv_heads, tokens, head_dim]. The past of a step is the present of the step before, handed over as
    onnxruntime's own values: no element of it is ever seen by Python or numpy.
    """

    def __init__(self, session: GraphSession, binding: Binding, decoder: DecoderInfo, batch: int) -> None:
        self._binding = binding
        self._tensors: list[tuple[str, str, int]] = []  # past, present, place of the present among the outputs
        for layer in range(decoder.num_layers):
            shape = (batch, decoder.num_kv_heads[layer], 0, decoder.head_dim[layer])
            nothing = empty_value(shape, decoder.kv_dtype, session.device)
            for part in ("key", "value"):
                past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
                binding.bind_value(past, nothing)
                self._tensors.append((past, present, binding.bind_fresh(present)))

    def advance(self) -> None:
        """Make the present of the run that just ended the past of the next one."""
        outputs, bind, fresh = self._binding.outputs, self._binding.bind_value, self._binding.bind_fresh_again
        for past, present, position in self._tensors:
            bind(past, outputs[position])
            fresh(present)


def check_supported(decoder: DecoderInfo, inputs: frozenset[str], outputs: tuple[str, ...]) -> None:
    """ManifestError if this runtime cannot drive the decoder's cache."""
    if decoder.kv_form != "concat":
        raise ManifestError(
            f"the cache has the form {decoder.kv_form!r}, this topw_deploy drives 'concat'; install a newer one."
        )
    if decoder.kv_dtype not in ELEMENT_TYPES:
        raise ManifestError(
            f"the cache has the element type {decoder.kv_dtype!r}, which is not one of {', '.join(ELEMENT_TYPES)}."
        )
    for i in range(decoder.num_layers):
        for part in ("key", "value"):
            for name, there in ((f"past_key_values.{i}.{part}", inputs), (f"present.{i}.{part}", outputs)):
                if name not in there:
                    raise ManifestError(
                        f"the graph has no {name}, but the manifest states {decoder.num_layers} layers; export again."
                    )
