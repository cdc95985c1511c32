"""What monitoring tells people: hints about a finding, the digest of the week, alerts. Words are made when read."""

from __future__ import annotations

from typing import Any

from django.urls import reverse
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from monitoring.models import AlertRule, Finding
from monitoring.services.alerts import alert_holders
from monitoring.web.finding_words import advice_words, amount_words, list_words
from monitoring.web.source_words import code_word
from monitoring.web.words import ACTIONS
from monitoring.web.xid_words import meaning_words
from pool.models import Allocation
from portal.notify import kinds
from portal.notify.services.notices import notify
from portal.ops.kinds import register_fact
from portal.ops.outbox import subscribe


def _finding(params: kinds.Params) -> kinds.Params:
    kind, rule = str(params.get("what", "")), str(params.get("rule", ""))
    hours, money = amount_words(int(params.get("gpu_ms") or 0), int(params.get("micro") or 0))
    return {
        **params,
        "what": dict(Finding.Kind.choices).get(kind, kind),
        "advice": advice_words(kind, rule, params),
        "hours": hours,
        "money": money,
    }


def _week(params: kinds.Params) -> kinds.Params:
    words = dict(Finding.Kind.choices)
    rows: list[Any] = list(params.get("kinds") or [])
    lines = []
    for kind, gpu_ms, micro, _n in rows:
        hours, money = amount_words(gpu_ms, micro)
        line = {"kind": words.get(kind, kind), "hours": hours, "money": money}
        lines.append(_now("%(kind)s: %(hours)s GPU·h, %(money)s") % line)
    hours, money = amount_words(sum(row[1] for row in rows), sum(row[2] for row in rows))
    n = sum(row[3] for row in rows)
    return {**params, "hours": hours, "money": money, "n": str(n), "lines": list_words(lines)}


kinds.register(
    "monitoring.finding",
    _("%(subject)s: %(what)s"),
    _("%(hours)s GPU·h wasted since %(since)s, %(money)s. %(advice)s"),
    group="taken",
    label=_("My GPUs are used badly"),
    tone="warn",
    icon="waste",
    prepare=_finding,
)
kinds.register(
    "monitoring.waste_week",
    _("Waste in the week from %(first)s: %(hours)s GPU·h, %(money)s"),
    _("%(n)s findings. %(lines)s."),
    group="money",
    label=_("Waste of my departments, each week"),
    icon="waste",
    prepare=_week,
)
kinds.register(
    "monitoring.alert_on_mine",
    _("%(rule)s: %(ref)s"),
    _("An alert rule of the pool fires for %(card)s, which you hold. Look at what runs there."),
    group="job",
    label=_("An alert about my GPUs"),
    tone="warn",
    icon="warn",
)


def _xid(params: kinds.Params) -> kinds.Params:
    effect = str(params.get("effect", ""))
    return {
        **params,
        "meaning": meaning_words(params.get("meaning")),
        "effect": ACTIONS.get(effect, effect),
    }


def threshold_words(said: object) -> object:
    """`above 90` of an alert rule, in the reader's language."""
    direction, _blank, number = str(said).partition(" ")
    words = {"above": _("above %(number)s"), "below": _("below %(number)s")}.get(direction)
    return said if words is None or not number else words % {"number": number.replace("-", "\u2212")}


kinds.register(
    "monitoring.xid_on_mine",
    _("GPU error (XID %(code)s) under %(ref)s"),
    _("%(card)s, %(at)s: %(meaning)s. Here: %(effect)s."),
    group="job",
    label=_("A GPU error on a card that I hold"),
    tone="bad",
    icon="fault",
    prepare=_xid,
)


register_fact("meaning", meaning_words)
register_fact("fetch", code_word)
register_fact("metric", lambda code: dict(AlertRule.Metric.choices).get(str(code), code))
register_fact("threshold", threshold_words)
register_fact("which", lambda names: [str(_("the pool")) if name == "pool" else name for name in names])
register_fact("effect", lambda code: ACTIONS.get(str(code), code))


def alert_opened(payload: dict[str, Any]) -> None:
    """Subscriber of monitoring.alert_opened: the holders of the cards, once per opening, where the rule says so.

    The administrators hear of it by the rule's incident.
    """
    rule = AlertRule.objects.filter(uid=payload.get("rule")).first()
    if rule is None or not rule.tell_holder:
        return
    labels = dict(
        rule.firings.filter(pk__in=[pk for pk, _key in payload["firings"]]).values_list("pk", "label")
    )
    for pk, (holder, uid) in sorted(alert_holders(firings=payload["firings"]).items()):
        allocation = Allocation.objects.get(uid=uid)
        notify(
            user_ids=[holder],
            kind="monitoring.alert_on_mine",
            subject=allocation,
            threshold=f"alert:{pk}",
            params={"rule": rule.name, "ref": allocation.ref, "card": labels.get(pk, "")},
            url=reverse("pool:allocation", args=[uid]),
        )


subscribe("monitoring.alert_opened", "monitoring.notices.alert_opened")
