"""Top-W as a `custom_generate` of transformers: `model.generate(..., custom_generate=<this repository>)`."""

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.parameters import ALIASES
from topw_deploy.sampling.processor import Choices, TopWLogitsProcessor

OWN = {"preset", "geom_unit", "median_distance", *Choices.__annotations__, *ALIASES}


def generate(model, generation_config=None, logits_processor=None, **kwargs):
    """`model.generate` with Top-W as its only truncation.

    Takes Top-W's parameters (lam, beta, temperature, ...; docs/contract/graph.md, section 1) and every other argument
    of `generate`. `temperature` applies to the draw and the crop, or only to the draw if `selection_temperature` is
    given.
    """
    own = {name: kwargs.pop(name) for name in OWN & kwargs.keys() if kwargs[name] is not None}
    config = generation_config if generation_config is not None else model.generation_config
    own.setdefault("temperature", config.temperature if config.temperature is not None else 1.0)
    topw = TopWLogitsProcessor(model, **own)
    arguments = {"temperature": own["temperature"], **topw.generate_arguments()}
    for name in arguments.keys() & kwargs.keys():
        if kwargs[name] != arguments[name]:
            raise ParameterError(f"{name} is {kwargs[name]!r}, but Top-W needs {arguments[name]!r}; leave it out.")
    arguments["logits_processor"] = [*(logits_processor or []), topw]  # Top-W comes after the other processors
    return model.generate(generation_config=generation_config, **(kwargs | arguments))
