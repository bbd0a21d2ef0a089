"""Any request or configuration succeeds or raises one of the package's errors."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.prepared import prepare
from tests.support.toy_model import VOCAB
from topw_deploy.errors import ParameterError, PromptError, TokenizerError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.chat import ChatTemplate
from topw_deploy.runtime.parameters import PARAMETERS
from topw_deploy.runtime.prepare import Limits, Preparer
from topw_deploy.runtime.sequence import Sequence
from topw_deploy.runtime.tokenizer import Tokenizer

LIMITS = Limits(context_length=64, vocab_size=VOCAB)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, VOCAB + 3),
    st.integers(),
    st.just(10**400),  # too large for a float
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=2),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.integers(-1, 9), st.text(max_size=2)), inner, max_size=2),
    ),
    max_leaves=6,
)
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
NAMES = st.sampled_from(list(PARAMETERS))


@pytest.mark.slow
@given(request=st.dictionaries(NAMES, VALUES, max_size=3), rows=st.integers(1, 3))
def test_any_request_is_resolved_or_refused(request: dict[str, Any], rows: int) -> None:
    check_resolved(request, rows)


@given(request=st.dictionaries(NAMES, VALUES, max_size=2), config=st.dictionaries(NAMES, VALUES, max_size=3))
def test_any_request_with_a_generation_config_is_resolved_or_refused(
    request: dict[str, Any], config: dict[str, Any]
) -> None:
    check_resolved({**request, "generation_config": config}, rows=1)


def check_resolved(request: dict[str, Any], rows: int) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = prepare(request, [[1, 2]] * rows, limits=LIMITS)
    except (ParameterError, PromptError):
        return
    assert len(found) % rows == 0
    for row in found:
        check_sane(row)


def check_sane(sequence: Sequence) -> None:
    row = sequence.params
    assert row.prompt_logprobs is not None or row.budget
    assert 0 <= row.budget <= LIMITS.context_length - 2
    assert 0 < row.repetition_penalty < math.inf
    assert all(0 <= token < VOCAB for token in (*row.eos_token_ids, row.pad_token_id, *row.logit_bias))
    assert all(bias < math.inf for bias in row.logit_bias.values())
    assert all(row.stop_strings)
    assert 0 <= row.seed < 2**64


class FakeFolder:
    """A folder with only a generation_config.json."""

    def __init__(self, config: dict[str, Any], model: TopWModel) -> None:
        self.config, self.manifest, self.path = config, model.manifest, model.path

    def read_json(self, name: str) -> dict[str, Any]:
        return self.config if name == "generation_config.json" else {}


@pytest.mark.slow
def test_any_generation_config_is_read_or_refused(model: TopWModel) -> None:
    tokenizer: Tokenizer = model.tokenizer

    @given(config=st.dictionaries(st.one_of(NAMES, st.text(max_size=4), st.just("top_k")), VALUES, max_size=4))
    def check(config: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                preparer = Preparer(FakeFolder(config, model), tokenizer, LIMITS)  # type: ignore[arg-type]
                check_sane(preparer.prepare([1, 2], {})[0])
            except ParameterError:
                return

    check()


@given(source=st.text(alphabet="{}%#ab ._-|'\"()[]+if endfor", max_size=40), content=VALUES)
def test_any_template_renders_or_is_refused(source: str, content: Any) -> None:
    try:
        text = ChatTemplate(source, {}).render([{"role": "user", "content": content}])
    except (TokenizerError, PromptError):
        return
    assert isinstance(text, str)


def test_any_prompt_becomes_rows_or_is_refused(model: TopWModel) -> None:
    @given(prompt=VALUES, inputs=st.dictionaries(st.sampled_from(INPUTS), VALUES, max_size=2))
    def check(prompt: Any, inputs: dict[str, Any]) -> None:
        try:
            rows = model.prepare(prompt, **inputs)
        except PromptError:
            return
        assert all(row.prompt for row in rows)

    check()
