"""The kept sets of a batch under rules other than Top-W: from 64 candidates, or from the sorted row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.rules import RULES, RULES_BY_CODE, TOP_W, Rule, RuleParameters
from topw_deploy.sampling.torch.certificate import CANDIDATES
from topw_deploy.sampling.torch.crop import CropStage, TensorCrop, check_logits, padded_ids
from topw_deploy.sampling.torch.largest import Largest, largest_logits
from topw_deploy.sampling.torch.rows import ParameterColumns, read_parameters
from topw_deploy.sampling.torch.rules.best_tokens import BestTokens
from topw_deploy.sampling.torch.rules.keep import KEEP_BY_RULE

_BLOCK = 64  # block size for `largest_logits`
Temperature = float | Tensor


@torch.no_grad()
def rule_rows(
    logits: Tensor,
    rule: RuleParameters | tuple[Tensor, Tensor],
    temperature: Temperature = 1.0,
    selection_temperature: Temperature = 0.0,
) -> TensorCrop:
    """Choose the kept sets of rows [B, V]: those of `rules.kept_set`, except where rounding decides.

    logits: any floating type, cast to float32; -inf bans a token.
    rule: one rule for all rows, or the graph's two inputs: codes, integers [B], and values [B, 2].
    temperature, selection_temperature: numbers for all rows, or tensors [B]; as in `TopWParameters`.

    A row's stage is CANDIDATES (64 logits proved the crop), POOL (the row was sorted), GREEDY or INVALID. A row is
    INVALID also if its code is unknown or its values are out of range. Rows are independent.

    Raises ParameterError for wrong shapes, numbers out of range, and the rule top_w, which `crop_rows` computes.
    """
    check_logits(logits)
    row_logits = logits.to(torch.float32)
    given = {"temperature": temperature, "selection_temperature": selection_temperature}
    rows = read_parameters(given, len(logits), logits.device)
    if isinstance(rule, RuleParameters):
        return _crop_by_one_rule(row_logits, rows, rule.chosen, rule.values)
    codes, values = rule
    if codes.shape != (len(logits),) or values.shape != (len(logits), 2) or codes.is_floating_point():
        raise ParameterError(
            f"the rule codes are {tuple(codes.shape)} and the values {tuple(values.shape)}, but must be integers "
            f"[{len(logits)}] and numbers [{len(logits)}, 2]."
        )
    return _crop_by_row_rules(row_logits, rows, codes.tolist(), values.to(torch.float32).tolist())


def _crop_by_row_rules(
    logits: Tensor, rows: ParameterColumns, codes: list[int], values: list[list[float]]
) -> TensorCrop:
    groups: dict[tuple[int, float, float], list[int]] = {}
    for row, (code, (v0, v1)) in enumerate(zip(codes, values, strict=True)):
        rule = RULES_BY_CODE.get(code)
        usable = rule is not None and rule.accepts((v0, v1))
        groups.setdefault((code, v0, v1) if usable else (-1, 0.0, 0.0), []).append(row)
    if TOP_W.code in codes:
        raise ParameterError("the rule of a row is top_w; give its rows to crop_rows.", "rule")
    parts = []
    for (code, v0, v1), members in groups.items():
        at = torch.tensor(members, device=logits.device)
        rule = RULES_BY_CODE.get(code)
        own = rows.of_rows(at)
        if rule is None:  # any rule will do for rows that are out of range
            own, rule = replace(own, in_range=torch.zeros_like(own.in_range)), RULES["none"]
        parts.append((at, _crop_by_one_rule(logits[at], own, rule, (v0, v1))))
    return _join_groups(parts)


def _join_groups(parts: list[tuple[Tensor, TensorCrop]]) -> TensorCrop:
    """The crop of the whole batch, from the crops of its groups and the indices of their rows."""
    order = torch.cat([at for at, _ in parts]).argsort()
    width = max(crop.ids.shape[1] for _, crop in parts)
    names = ("kept", "certified", "invalid", "stage", "distances", "distances_avoided")
    columns: dict[str, Any] = {name: torch.cat([getattr(crop, name) for _, crop in parts])[order] for name in names}
    return replace(
        parts[0][1],
        ids=torch.cat([padded_ids(crop.ids, width) for _, crop in parts])[order],
        any_invalid=any(crop.any_invalid for _, crop in parts),
        **columns,
    )


def _crop_by_one_rule(logits: Tensor, rows: ParameterColumns, rule: Rule, values: tuple[float, float]) -> TensorCrop:
    if rule is TOP_W:
        raise ParameterError("the rule is top_w; crop_rows computes it.", "rule")
    found = largest_logits(logits, min(CANDIDATES, logits.shape[1]), _BLOCK, any_last=True)
    valid = (found.top.abs() < torch.inf) & rows.in_range
    keep, ids, settled = _keep_from_list(logits, found, rows, rule, values)
    if found.ids.shape[1] < logits.shape[1]:  # `largest_logits` leaves ties with the last candidate undefined
        settled = settled & _keeps_only_above_last(found, keep)
    none = torch.zeros_like(valid[:, 0], dtype=torch.int64)
    crop = TensorCrop(
        ids=ids,
        kept=(keep.sum(1) * valid[:, 0]).to(torch.int32),
        certified=valid[:, 0],
        invalid=~valid[:, 0],
        stage=torch.where(valid, CropStage.CANDIDATES - rows.greedy.to(torch.int8), int(CropStage.INVALID))[:, 0],
        distances=none,
        distances_avoided=none,
        vocab=logits.shape[1],
        any_invalid=not bool(valid.all()),
    )
    left = (valid & ~settled)[:, 0].nonzero()[:, 0]
    return _settle_by_sorting(crop, left, logits[left], rows.of_rows(left), rule, values) if len(left) else crop


def _keep_from_list(
    logits: Tensor, found: Largest, rows: ParameterColumns, rule: Rule, values: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the rule to the list `found` of the rows' largest logits.

    Returns (kept places bool [R, m], ids with the kept ones first [R, m], settled bool [R, 1]); see `keep`.
    """
    listed = BestTokens(logits, found, rows.selection)
    keep, settled = KEEP_BY_RULE[rule.name](listed, *values)
    keep = torch.where(rows.greedy, listed.places == 0, keep & listed.finite)
    ids = found.ids
    if rule.name == "typical":  # not a prefix
        ids = ids.gather(1, keep.to(torch.uint8).argsort(dim=1, descending=True, stable=True))
    return keep, ids, settled | rows.greedy


def _keeps_only_above_last(found: Largest, keep: Tensor) -> Tensor:
    """Whether every kept token has a larger logit than the list's last token, or that token is banned; bool [R, 1]."""
    last = found.logits[:, -1:]
    lowest = torch.where(keep, found.logits, torch.inf).amin(1, keepdim=True)
    return (lowest > last) | (last == -torch.inf)


def _settle_by_sorting(
    crop: TensorCrop, left: Tensor, logits: Tensor, rows: ParameterColumns, rule: Rule, values: tuple[float, float]
) -> TensorCrop:
    """Settle the rows `left`, whose logits are [R, V], by sorting them."""
    ordered, order = torch.sort(logits, dim=1, descending=True, stable=True)
    keep, ids, _ = _keep_from_list(logits, Largest(ordered, order, ordered[:, :1]), rows, rule, values)
    kept = keep.sum(1)
    stage = torch.where(rows.greedy, int(CropStage.GREEDY), int(CropStage.POOL))
    return crop.with_rows(
        left,
        ids[:, : int(kept.max())],
        kept=kept,
        certified=~keep[:, CANDIDATES:].any(1),
        stage=stage.expand(len(left), 1)[:, 0],
    )
