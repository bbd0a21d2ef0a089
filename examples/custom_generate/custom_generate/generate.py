"""Top-W, or another sampling rule, as a `custom_generate` of transformers:
`model.generate(..., custom_generate=<this repository>)`."""

from topw_deploy.errors import ParameterError
from topw_deploy.processors import Choices, RuleLogitsProcessor, TopWLogitsProcessor
from topw_deploy.sampling import ALIASES
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES, TOP_W

OWN = {"preset", "neighbour_bound", "geom_unit", "median_distance", *Choices.__annotations__, *ALIASES}


def generate(model, generation_config=None, logits_processor=None, rule=None, **kwargs):
    """`model.generate` with Top-W, or the rule named `rule`, as its only truncation.

    Takes Top-W's parameters (lam, beta, temperature, ...; docs/contract/graph.md, section 1) or those of `rule`
    (docs/contract/rules.md), and every other argument of `generate`. `temperature` applies to the draw and the crop, or
    only to the draw if `selection_temperature` is given.
    """
    other = rule not in (None, TOP_W.name)
    names = OWN | set(RULE_PARAMETER_NAMES) if other else OWN
    own = {name: kwargs.pop(name) for name in names & kwargs.keys() if kwargs[name] is not None}
    config = generation_config if generation_config is not None else model.generation_config
    own.setdefault("temperature", config.temperature if config.temperature is not None else 1.0)
    crop = RuleLogitsProcessor(rule=rule, **own) if other else TopWLogitsProcessor(model, **own)
    arguments = {"temperature": own["temperature"], **crop.generate_arguments()}
    for name in arguments.keys() & kwargs.keys():
        if kwargs[name] != arguments[name]:
            raise ParameterError(
                f"{name} is {kwargs[name]!r}, but {crop.label} needs {arguments[name]!r}; leave it out."
            )
    arguments["logits_processor"] = [*(logits_processor or []), crop]  # the crop comes after the other processors
    return model.generate(generation_config=generation_config, **(kwargs | arguments))
