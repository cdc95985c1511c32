"""Pages of telemetry sources: what is fetched from where, how that went, a dry run, the form. For administrators."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from monitoring.models import MetricSource
from monitoring.selectors.sources import source_cards, source_state, sources_listed
from monitoring.services.source_check import Look, source_check
from monitoring.services.sources import credential_name, source_hasten, source_save
from monitoring.web.source_words import CODES, MATCHES, PROBLEMS, code_word, counted
from pool.models import Cluster
from pool.services.credentials import credential_names
from portal.accounts.middleware import policy_of_request
from portal.kernel.errors import DomainError, Invalid
from portal.ops.actor import actor_of
from portal.ops.selectors import history_of
from quotas.web.forms import ServiceForm

PER_PAGE = 50
MOST_ROWS = 50
NAMES = ("name", "kind", "url", "query", "auth", "username", "every_s", "active")


class SourceForm(ServiceForm):
    """A source; the service checks. The secret is written only: an empty one keeps what is there."""

    name = forms.CharField(label=gettext_lazy("Name"), widget=forms.TextInput(attrs={"maxlength": "80"}))
    cluster = forms.ChoiceField(
        label=gettext_lazy("Cluster"), help_text=gettext_lazy("Whose cards it tells of.")
    )
    kind = forms.ChoiceField(label=gettext_lazy("Kind"), choices=MetricSource.Kind.choices)
    url = forms.CharField(
        label=gettext_lazy("Address"),
        help_text=gettext_lazy(
            "An exporter: the address of its metrics; with {node} or {address} in it, one for each node of the "
            "cluster. Prometheus: the server’s address, without /api."
        ),
        widget=forms.TextInput(
            attrs={
                "maxlength": "500",
                "class": "mono",
                "placeholder": "http://{address}:9400/metrics",
                "spellcheck": "false",
            }
        ),
    )
    query = forms.CharField(
        label=gettext_lazy("Query"),
        required=False,
        help_text=gettext_lazy(
            "Prometheus only. Empty: all series of dcgm-exporter and nvidia_gpu_exporter there."
        ),
        widget=forms.TextInput(attrs={"maxlength": "500", "class": "mono", "spellcheck": "false"}),
    )
    auth = forms.ChoiceField(label=gettext_lazy("Sign-in"), choices=MetricSource.Auth.choices)
    username = forms.CharField(
        label=gettext_lazy("Name for the sign-in"),
        required=False,
        widget=forms.TextInput(attrs={"maxlength": "120", "autocomplete": "off"}),
    )
    secret = forms.CharField(
        label=gettext_lazy("Token or password"),
        required=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password", "maxlength": "4096"}),
    )
    every_s = forms.CharField(
        label=gettext_lazy("Fetched every"), widget=forms.TextInput(attrs={"inputmode": "numeric"})
    )
    active = forms.BooleanField(
        label=gettext_lazy("Fetch it"),
        required=False,
        help_text=gettext_lazy("Off: a dry run still shows what would be matched."),
    )

    def __init__(self, *args: Any, fixed: Cluster | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["cluster"]
        assert isinstance(field, forms.ChoiceField)
        if fixed is not None:
            del self.fields["cluster"]  # a source stays with its cluster
        else:
            field.choices = list(Cluster.objects.order_by("name", "id").values_list("code", "name"))

    def values(self) -> dict[str, Any]:
        """What was typed, the seconds as a number where they are one."""
        out: dict[str, Any] = {name: self.typed(name) for name in NAMES}
        every = out["every_s"]
        out["every_s"] = int(every) if every.isdecimal() and len(every) < 9 else 0
        return out | {"active": bool(out["active"])}


def _administrator(request: HttpRequest) -> None:
    policy = policy_of_request(request)
    policy.require(policy.administers_pool)


def _source(uid: UUID) -> MetricSource:
    found = sources_listed().filter(uid=uid).first()
    if found is None:
        raise Http404
    return found


@login_required
@require_safe
def sources(request: HttpRequest) -> HttpResponse:
    """``/sources/``: all sources, with when each answered well last, what it covers, and what is wrong."""
    _administrator(request)
    page = Paginator(sources_listed(), PER_PAGE).get_page(request.GET.get("page"))
    rows = [
        {
            "source": row,
            "state": source_state(row),
            "word": code_word(row.last_code),
            "problems": counted(row.last_facts.get("problems"), PROBLEMS),
        }
        for row in page.object_list
    ]
    return render(request, "monitoring/sources.html", {"page": page, "rows": rows})


@login_required
@require_safe
def source(request: HttpRequest, uid: UUID) -> HttpResponse:
    """``/sources/<uid>/``: one source."""
    _administrator(request)
    return _detail(request, _source(uid))


def _detail(request: HttpRequest, row: MetricSource, look: Look | None = None) -> HttpResponse:
    cards = source_cards(row)
    count = cards.count()
    context: dict[str, Any] = {
        "source": row,
        "state": source_state(row),
        "word": code_word(row.last_code),
        "codes": counted(row.last_facts.get("codes"), CODES),
        "problems": counted(row.last_facts.get("problems"), PROBLEMS),
        "credential": credential_names(cluster=row.cluster).get(credential_name(row)),
        "cards": cards[:MOST_ROWS],
        "card_count": count,
        "cards_more": max(0, count - MOST_ROWS),
        "history": history_of(row.uid, 12),
    }
    if look is not None:
        context |= {
            "look": look,
            "look_word": code_word(look.code),
            "look_codes": counted(look.codes, CODES),
            "look_problems": counted(look.problems, PROBLEMS),
            "look_states": [(MATCHES[state], n) for state, n in look.states.items()],
            "matches": [(match, MATCHES[match.state]) for match in look.matches[:MOST_ROWS]],
            "matches_more": max(0, len(look.matches) - MOST_ROWS),
        }
    return render(request, "monitoring/source.html", context)


@login_required
@require_POST
def source_act(request: HttpRequest, uid: UUID, act: str) -> HttpResponse:
    """Dry run (answers with the page), fetch now, switch on or off."""
    _administrator(request)
    row = _source(uid)
    if act == "check":
        return _detail(request, row, source_check(acting_user=actor_of(request), source=row))
    if act == "fetch":
        source_hasten(acting_user=actor_of(request), source=row)
        messages.success(request, _("It is fetched within seconds."))
    else:
        saved = source_save(
            acting_user=actor_of(request), cluster=row.cluster, values={"active": act == "on"}, source=row
        )
        said = (
            _("%(name)s is fetched from now on.") if act == "on" else _("%(name)s is not fetched any more.")
        )
        messages.success(request, said % {"name": saved.name})
    return redirect("monitoring:source", uid=row.uid)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def source_edit(request: HttpRequest, uid: UUID | None = None) -> HttpResponse:
    """``/sources/new/`` and ``/sources/<uid>/change/``: the form; what was typed stays where something is wrong."""
    _administrator(request)
    row = _source(uid) if uid is not None else None
    fixed = row.cluster if row is not None else None
    start = row or MetricSource(every_s=15, active=False, auth=MetricSource.Auth.NONE)
    form = SourceForm(
        request.POST if request.method == "POST" else None,
        fixed=fixed,
        initial={name: getattr(start, name) for name in NAMES},
    )
    status = 200
    if request.method == "POST":
        try:
            saved = _save(request, row, form)
            messages.success(request, _("%(name)s is kept.") % {"name": saved.name})
            return redirect("monitoring:source", uid=saved.uid)
        except DomainError as error:
            if error.status == 403:
                raise
            form.take(error)
            status = error.status
    context = {"source": row, "form": form, "kept": row is not None and row.auth != MetricSource.Auth.NONE}
    return render(request, "monitoring/source_form.html", context, status=status)


def _save(request: HttpRequest, row: MetricSource | None, form: SourceForm) -> MetricSource:
    if row is not None:
        cluster = row.cluster
    else:
        found = Cluster.objects.filter(code=form.typed("cluster")).first()
        if found is None:
            raise Invalid.field("cluster", _("There is no such cluster."))
        cluster = found
    seen = request.POST.get("seen", "")
    return source_save(
        acting_user=actor_of(request),
        cluster=cluster,
        values=form.values(),
        secret=form.typed("secret") or None,
        source=row,
        version=int(seen) if seen.isdecimal() else None,
    )
