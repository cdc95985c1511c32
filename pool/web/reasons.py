"""The scheduler's reasons in words. Codes and figures come from pool.engine.reasons; texts are made here, in the
reader's language, so that the engine stays pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from portal.kernel.units import from_ms
from portal.web import formats

Figures = Mapping[str, Any]


@dataclass
class Why:
    """One reason: a bold sentence, what more there is to say, sums as rows, nodes with what is free on them, and
    what would change it."""

    code: str
    headline: str
    detail: str = ""
    rows: list[tuple[str, str]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    change: str = ""


def _gpus(milli: Any) -> str:
    """Milli-GPU as GPUs without trailing zeros: 12500 → 12.5."""
    if milli is None:
        return "∞"
    value = int(milli)
    return f"{value / 1000:.3f}".rstrip("0").rstrip(".") if value % 1000 else str(value // 1000)


def _gib(mib: Any) -> str:
    return f"{int(mib or 0) / 1024:.1f}".rstrip("0").rstrip(".")


def _quota(f: Figures) -> Why:
    limit, used, asked = f.get("limit"), f.get("used", 0), f.get("requested", 0)
    level = str(f.get("level", "")) or _("the whole installation")
    sums = {"level": level, "used": _gpus(used), "asked": _gpus(asked), "limit": _gpus(limit)}
    return Why(
        "quota_blocked",
        _("The quota of %(level)s is used up: %(used)s used + %(asked)s asked > %(limit)s.") % sums,
        _("It starts as soon as enough of this department's work ends."),
        [
            (_("Level"), level),
            (_("Used now"), _("%(n)s GPU") % {"n": _gpus(used)}),
            (_("Asked"), _("%(n)s GPU") % {"n": _gpus(asked)}),
            (_("Limit"), _("%(n)s GPU") % {"n": _gpus(limit)}),
        ],
        change=_("A smaller request, the end of other work of the department, or a quota change."),
    )


def _no_node(f: Figures) -> Why:
    need, best = f.get("need_per_node", 0), f.get("best_free_on_one_node", 0)
    sums = {"need": need, "best": best, "flavour": f.get("flavour", ""), "nodes": f.get("need_nodes", 1)}
    many, fitting = int(f.get("need_nodes", 1) or 1), int(f.get("nodes_that_fit", 0) or 0)
    if many > 1:
        headline = _(
            "It needs %(nodes)d nodes with %(need)d free %(flavour)s each; %(fitting)d have that many now."
        ) % {**sums, "fitting": fitting}
        rows = [
            (_("Nodes asked"), str(many)),
            (_("Nodes that fit now"), str(fitting)),
            (_("Nodes missing"), str(max(0, many - fitting))),
        ]
        change = _("Fewer nodes, fewer GPUs per node, another model, or waiting for nodes to empty.")
    else:
        headline = (
            _("It needs %(need)d free %(flavour)s on one node. The most on one node is %(best)d.") % sums
        )
        rows = [
            (_("Asked on one node"), str(need)),
            (_("Most free on one node"), str(best)),
            (_("Missing"), str(max(0, int(need) - int(best)))),
        ]
        change = _("Fewer GPUs per node, another model, or waiting for a node to empty.")
    return Why(
        "no_node_fits",
        headline,
        _where_free(f),
        [*rows, *_outlook(f)],
        [{"name": n.get("node"), "free": n.get("free", 0), "need": need} for n in f.get("nodes", [])][:6],
        change,
    )


def _where_free(f: Figures) -> str:
    """How many are free in all, and that no one node has them where that is so."""
    free, best = int(f.get("free", 0) or 0), int(f.get("best_free_on_one_node", 0) or 0)
    sums = {"free": free, "installed": f.get("installed", 0)}
    if free > best > 0:
        return _("%(free)s of %(installed)s are free, spread over nodes.") % sums
    return _("%(free)s of %(installed)s are free.") % sums


def _outlook(f: Figures) -> list[tuple[str, str]]:
    """What the department may use beside this, and when the next card of the kind comes free, where known."""
    rows: list[tuple[str, str]] = []
    if f.get("may_use_milli") is not None:
        rows.append((_("The department may still use"), _("%(n)s GPU") % {"n": _gpus(f["may_use_milli"])}))
    if f.get("next_release_at") is not None:
        rows.append((_("Next release"), formats.moment(from_ms(f["next_release_at"]))))
    return rows


def _release(f: Figures) -> Why:
    return Why(
        "waiting_for_release",
        _("All %(installed)s GPUs of %(flavour)s that may take work are in use.")
        % {"installed": f.get("installed", 0), "flavour": f.get("flavour", "")},
        _("It needs %(need)s.") % {"need": f.get("need", 0)},
        [(_("Asked"), str(f.get("need", 0))), (_("Free"), str(f.get("free", 0))), *_outlook(f)],
        change=_("Another model that is free, or waiting for a release."),
    )


def _card(f: Figures) -> Why:
    return Why(
        "no_card_fits",
        _("No card of %(flavour)s has %(need)s GPU and %(mib)s GiB free at once.")
        % {
            "flavour": f.get("flavour", ""),
            "need": _gpus(f.get("need_milli", 0)),
            "mib": _gib(f.get("need_mib")),
        },
        rows=[
            (_("Most free on one card"), _("%(n)s GPU") % {"n": _gpus(f.get("best_free_milli", 0))}),
            (_("Most memory free on one card"), f"{_gib(f.get('best_free_mib'))} GiB"),
        ],
        change=_("A smaller share, or less memory."),
    )


def _slice(f: Figures) -> Why:
    return Why(
        "no_slice_free",
        _("No %(profile)s slice is free: %(need)s needed, %(best)s free on one node.")
        % {
            "profile": f.get("profile", ""),
            "need": f.get("need", 0),
            "best": f.get("best_free_on_one_node", 0),
        },
        _("The pool has %(existing)s slices of this profile, %(free)s of them free.")
        % {"existing": f.get("existing", 0), "free": f.get("free", 0)},
        change=_("Another profile, or a layout change by an administrator."),
    )


def _behind(f: Figures) -> Why:
    requests = f.get("requests") or []
    count = len(requests) if isinstance(requests, (list, tuple)) else int(requests or 0)
    return Why(
        "behind",
        ngettext(
            "It would fit, but it would delay %(count)d request before it.",
            "It would fit, but it would delay %(count)d requests before it.",
            count,
        )
        % {"count": count},
        _("Places are kept for larger requests that wait longer."),
        change=_("A shorter duration may fit in before them."),
    )


def _unavailable(f: Figures) -> Why:
    return Why(
        "nodes_unavailable",
        _("All %(nodes)s nodes with %(flavour)s take no work now.")
        % {"nodes": f.get("nodes", 0), "flavour": f.get("flavour", "")},
        _("They are cordoned, in maintenance, lost, or have no agent yet."),
        change=_("Another model, or the administrator's work on these nodes."),
    )


def _host(f: Figures) -> Why:
    return Why(
        "host_short",
        _("The nodes with free GPUs lack processor cores or memory for it."),
        rows=[
            (
                _("Cores needed, most free"),
                f"{_gpus(f.get('need_cpu_milli', 0))}, {_gpus(f.get('best_cpu_milli', 0))}",
            ),
            (
                _("Memory needed, most free"),
                f"{_gib(f.get('need_memory_mib'))} GiB, {_gib(f.get('best_memory_mib'))} GiB",
            ),
        ],
        change=_("Fewer cores or less memory."),
    )


def _simple(code: str, f: Figures) -> Why:
    flavour = str(f.get("flavour", ""))
    table: dict[str, tuple[str, str]] = {
        "not_before": (_("It is to start later; its time has not come."), ""),
        "running_limit": (
            _("Your own limit is reached: %(used)s of your requests run, %(limit)s may.")
            % {k: f.get(k, 0) for k in ("used", "limit")},
            _("The end of other work of yours."),
        ),
        "user_limit": (
            _("Your own limit is reached: %(used)s used + %(requested)s asked > %(limit)s.")
            % {k: _gpus(f.get(k, 0)) for k in ("used", "requested", "limit")},
            _("The end of other work of yours."),
        ),
        "model_absent": (_("The pool has no GPU that it asks for."), _("Another model or requirement.")),
        "memory_too_small": (
            _("%(flavour)s has less memory than asked.") % {"flavour": flavour},
            _("A model with more memory."),
        ),
        "fp8_absent": (_("%(flavour)s has no FP8.") % {"flavour": flavour}, _("A model with FP8.")),
        "nvlink_absent": (_("%(flavour)s has no NVLink.") % {"flavour": flavour}, _("A model with NVLink.")),
        "mig_profile_absent": (
            _("%(flavour)s does not support the profile %(profile)s.")
            % {"flavour": flavour, "profile": f.get("profile", "")},
            _("A profile that the card supports."),
        ),
        "driver_too_old": (
            _("The drivers are too old: %(needed)s needed, the newest is %(newest)s.")
            % {"needed": f.get("needed", ""), "newest": f.get("newest", "")},
            _("An image for an older driver, or a driver upgrade."),
        ),
        "cuda_too_old": (
            _("CUDA is too old on the nodes: %(needed)s needed, the newest is %(newest)s.")
            % {"needed": f.get("needed", ""), "newest": f.get("newest", "")},
            _("An image for an older CUDA, or a driver upgrade."),
        ),
        "other_site": (
            _("Site %(site)s has no such GPUs.") % {"site": f.get("site", "")},
            _("No preference of site."),
        ),
        "larger_than_any_node": (
            _("No node has %(need)s GPUs of %(flavour)s; the largest has %(largest)s.")
            % {"need": f.get("need_per_node", 0), "flavour": flavour, "largest": f.get("largest_node", 0)},
            _("Several nodes with fewer GPUs each."),
        ),
        "too_few_nodes": (
            _("It needs %(need)s such nodes; the pool has %(have)s.")
            % {"need": f.get("need_nodes", 0), "have": f.get("large_enough", 0)},
            _("Fewer nodes."),
        ),
        "split_over_sites": (
            _("A gang stays on one site: it needs %(need)s nodes there, the best site has %(best)s free.")
            % {"need": f.get("need_nodes", 0), "best": f.get("best_in_one_site", 0)},
            _("Fewer nodes, or waiting for a release."),
        ),
        "split_over_domains": (
            _("Its nodes must be close together: it needs %(need)s, the best place has %(best)s free.")
            % {"need": f.get("need_nodes", 0), "best": f.get("best_together", 0)},
            _("Fewer nodes, a wider area, or waiting for a release."),
        ),
        "split_over_fabrics": (
            _(
                "Its nodes must share one network: it needs %(need)s, the best network joins %(best)s that are free."
            )
            % {"need": f.get("need_nodes", 0), "best": f.get("best_together", 0)},
            _("Fewer nodes, another network, or waiting for a release."),
        ),
        "fabric_absent": (_("No node has the network that it asks for."), _("Another network, or none.")),
        "storage_absent": (_("No node has the storage that it asks for."), _("Another kind of storage.")),
        "dataset_absent": (
            _("No node has all its data sets, and they may not be copied."),
            _("Allowing the data to be copied first."),
        ),
        "images_absent": (
            _("None of the nodes with these GPUs runs container images."),
            _("A command without an image, or an administrator who installs podman there."),
        ),
        "outside_domain": (_("The place that it names has no such GPUs."), _("A wider area.")),
        "domain_unknown": (
            _("It is not known which of these nodes are close together."),
            _("A wider area, or the administrator's record of the places."),
        ),
        "cannot_be_judged": (
            _("The scheduler cannot judge this request."),
            _("It is set aside so that others go on; an incident tells the administrators (%(error)s).")
            % {"error": str(f.get("error", ""))[:80]},
        ),
        "refused_on_apply": (
            _("Its place was taken while it was being placed; the next plan looks again."),
            "",
        ),
        "making_room": (_("Work ends on the places kept for it; it starts when they are free."), ""),
        "closed_soon": (
            _("It would still run when its nodes are closed for maintenance."),
            _("A shorter run, or the end of the maintenance."),
        ),
        "starting": (_("A place was found; it starts now."), ""),
        "new": (_("The next plan will judge it, within seconds."), ""),
    }
    headline, change = table.get(code, (_("It waits for its turn."), ""))
    return Why(code, headline, change=change)


_RICH = {
    "quota_blocked": _quota,
    "no_node_fits": _no_node,
    "waiting_for_release": _release,
    "no_card_fits": _card,
    "no_slice_free": _slice,
    "behind": _behind,
    "nodes_unavailable": _unavailable,
    "host_short": _host,
}


def explain(code: str, figures: Figures, flavour_name: str = "") -> Why:
    """Words for a reason code with its figures. They hold the flavour's code; `flavour_name` is what people call it."""
    figures = {**figures, "flavour": flavour_name or figures.get("flavour", "")}
    rich = _RICH.get(code)
    return rich(figures) if rich else _simple(code, figures)


def explain_basis(basis: str, figures: Figures) -> str:
    """What an expected start rests on, or that there is no estimate."""
    if not basis:
        return ""
    table = {
        "lease_ends": _("Basis: when running work ends by its time limit."),
        "releases": _("Basis: when running work ends by its time limit."),
        "reservation": _("Basis: the plan of reservations."),
        "history": _("Basis: how long such requests waited lately, and what stands before it."),
    }
    return table.get(basis, _("Basis: the plan of the scheduler."))
