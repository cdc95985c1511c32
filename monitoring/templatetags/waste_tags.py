"""`{% load waste_tags %}`: findings in words."""

from __future__ import annotations

from typing import Any

from django import template

from monitoring.models import Finding
from monitoring.web import finding_words

register = template.Library()


@register.filter
def evidence_words(finding: Finding) -> str:
    """The evidence in one sentence."""
    return finding_words.evidence_words(finding.kind, finding.rule, finding.evidence)


@register.filter
def advice_words(finding: Finding) -> str:
    """What would help."""
    return finding_words.advice_words(finding.kind, finding.rule, finding.evidence)


@register.filter
def act_words(act: str, kind: str) -> str:
    """The verb on a button."""
    return finding_words.act_words(act, kind)


@register.filter
def kind_icon(kind: str) -> str:
    """The icon of a kind."""
    return finding_words.ICONS.get(kind, "waste")


@register.filter
def per_mille(value: int) -> str:
    """Per mille as percent."""
    return finding_words.percent_words(value)


@register.filter
def top_of(values: list[int]) -> float:
    """The scale of a spark: its highest value, at least 1."""
    return float(max([1, *values]))


@register.filter
def at_key(mapping: dict[Any, Any], key: Any) -> Any:
    """A value of a mapping; None where it has none."""
    return mapping.get(key)
