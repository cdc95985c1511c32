"""Pages of notices: the list behind the bell, preferences, webhooks."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from portal.accounts.web.forms import DepartmentField, take_errors
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.notify import kinds
from portal.notify.models import Channel, Notification, Preference, WebhookEndpoint
from portal.notify.selectors import own_notices, unread_count
from portal.notify.services import (
    mark_all_read,
    mark_read,
    preferences_save,
    webhook_create,
    webhook_test,
    webhook_update,
)
from portal.notify.texts import words_of
from portal.ops.actor import actor_of

PER_PAGE = 50
SHOWS = ("all", "unread", "urgent")


@login_required
@require_safe
def notices(request: HttpRequest) -> HttpResponse:
    """``/notices/``: newest first, today apart; ``?show=unread`` or ``urgent``."""
    user_id: int = request.user.pk  # type: ignore[assignment]
    show = request.GET.get("show", "all")
    show = show if show in SHOWS else "all"
    rows = own_notices(user_id, show).prefetch_related("deliveries")
    page = Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))
    today = timezone.localtime(now()).date()
    groups: list[dict[str, Any]] = [
        {"title": _("Today"), "items": []},
        {"title": _("Earlier"), "items": []},
    ]
    for notice in page:
        sent = [d for d in notice.deliveries.all() if d.sent_at is not None]
        failed = [d for d in notice.deliveries.all() if d.failed_at is not None]
        earlier = timezone.localtime(notice.created_at).date() != today
        groups[earlier]["items"].append((notice, words_of(notice), sent, failed))
    context = {
        "page": page,
        "groups": [g for g in groups if g["items"]],
        "show": show,
        "unread": unread_count(user_id),
        "tab": "list",
    }
    return render(request, "notify/notices.html", context)


def _own(request: HttpRequest, uid: UUID) -> Notification:
    found = Notification.objects.filter(uid=uid, user_id=request.user.pk).first()
    if found is None:
        raise Http404
    return found


@login_required
@require_POST
def notice_open(request: HttpRequest, uid: UUID) -> HttpResponse:
    """Mark as read and go where it leads."""
    notice = mark_read(acting_user=actor_of(request), notice=_own(request, uid))
    url = notice.url
    if url and request.POST.get("stay") != "1" and url_has_allowed_host_and_scheme(url, {request.get_host()}):
        return redirect(url)
    return redirect("notify:list")


@login_required
@require_POST
def read_all(request: HttpRequest) -> HttpResponse:
    """Mark all as read."""
    mark_all_read(acting_user=actor_of(request))
    return redirect("notify:list")


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def preferences(request: HttpRequest) -> HttpResponse:
    """``/notices/preferences/``: which kinds come by mail. The page always has them; urgent ones always come."""
    known = kinds.known()
    if request.method == "POST":
        on = set(request.POST.getlist("mail"))
        preferences_save(acting_user=actor_of(request), mail_off={k.name for k in known if not k.urgent} - on)
        messages.success(request, _("Preferences saved."))
        return redirect("notify:preferences")
    off = set(
        Preference.objects.filter(user_id=request.user.pk, channel=Channel.MAIL, enabled=False).values_list(
            "kind", flat=True
        )
    )
    groups = [
        {
            "label": label,
            "kinds": [
                {
                    "name": k.name,
                    "label": k.label or k.title,
                    "urgent": k.urgent,
                    "mail": k.urgent or k.name not in off,
                }
                for k in known
                if k.group == group
            ],
        }
        for group, label in kinds.GROUPS.items()
    ]
    policy = request.policy  # type: ignore[attr-defined]
    context = {
        "groups": [g for g in groups if g["kinds"]],
        "mail_on": settings.GPUPOOL_MAIL,
        "unread": unread_count(request.user.pk),  # type: ignore[arg-type]
        "tab": "preferences",
        "endpoints": WebhookEndpoint.objects.filter(active=True)[:20] if policy.administers_pool else [],
        "may_change": policy.administers_pool,
    }
    return render(request, "notify/preferences.html", context)


class WebhookForm(forms.Form):
    """Where notices are posted."""

    name = forms.CharField(label=gettext_lazy("Name"), max_length=80)
    url = forms.CharField(
        label=gettext_lazy("Address"),
        max_length=500,
        widget=forms.URLInput(attrs={"placeholder": "https://"}),
        help_text=gettext_lazy(
            "Each notice is posted as JSON, signed with HMAC-SHA256; redirects are not followed."
        ),
    )
    kinds = forms.MultipleChoiceField(
        label=gettext_lazy("Kinds"),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text=gettext_lazy("None chosen: all."),
    )
    department = DepartmentField(
        label=gettext_lazy("For people of"), required=False, empty=gettext_lazy("The whole installation")
    )
    active = forms.BooleanField(label=gettext_lazy("Switched on"), required=False, initial=True)

    def __init__(self, *args: Any, tree: Any, new: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["kinds"].choices = [(k.name, k.label or k.title) for k in kinds.known()]  # type: ignore[attr-defined]
        self.fields["department"].offer(tree)  # type: ignore[attr-defined]
        if new:
            del self.fields["active"]


@sensitive_variables("secret")
@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def webhooks(request: HttpRequest) -> HttpResponse:
    """``/notices/webhooks/``: for pool administrators; a new one's secret is shown once."""
    policy = request.policy  # type: ignore[attr-defined]
    policy.require(policy.administers_pool)
    form = WebhookForm(request.POST or None, tree=policy.tree, new=True)
    made, secret = None, ""
    if request.method == "POST" and form.is_valid():
        try:
            made = webhook_create(acting_user=actor_of(request), **form.cleaned_data)
        except DomainError as error:
            take_errors(form, error)
        else:
            secret = made.secret
            form = WebhookForm(tree=policy.tree, new=True)
    endpoints = WebhookEndpoint.objects.select_related("department").order_by("-active", "name", "id")
    context = {
        "endpoints": endpoints[:PER_PAGE],
        "form": form,
        "made": made,
        "secret": secret,
        "tab": "webhooks",
        "unread": unread_count(request.user.pk),  # type: ignore[arg-type]
        "may_change": True,
    }
    response = render(request, "notify/webhooks.html", context, status=400 if form.is_bound else 200)
    if secret:
        response["Cache-Control"] = "no-store"
    return response


def _endpoint(request: HttpRequest, uid: UUID) -> WebhookEndpoint:
    policy = request.policy  # type: ignore[attr-defined]
    policy.require(policy.administers_pool)
    found = WebhookEndpoint.objects.select_related("department").filter(uid=uid).first()
    if found is None:
        raise Http404
    return found


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def webhook(request: HttpRequest, uid: UUID) -> HttpResponse:
    """``/notices/webhooks/<uid>/``: change one."""
    found = _endpoint(request, uid)
    policy = request.policy  # type: ignore[attr-defined]
    start = {
        "name": found.name,
        "url": found.url,
        "kinds": found.kinds,
        "department": found.department.code if found.department is not None else "",
        "active": found.active,
    }
    form = WebhookForm(request.POST or None, tree=policy.tree, initial=start)
    if request.method == "POST" and form.is_valid():
        try:
            webhook_update(acting_user=actor_of(request), endpoint=found, **form.cleaned_data)
        except DomainError as error:
            take_errors(form, error)
        else:
            messages.success(request, _("Saved."))
            return redirect("notify:webhooks")
    context = {"endpoint": found, "form": form}
    return render(request, "notify/webhook.html", context, status=400 if form.is_bound else 200)


@login_required
@require_POST
def webhook_try(request: HttpRequest, uid: UUID) -> HttpResponse:
    """Post a signed test message now."""
    answer = webhook_test(acting_user=actor_of(request), endpoint=_endpoint(request, uid))
    if answer.ok:
        messages.success(request, _("The other side took it: %(text)s.") % {"text": answer.text})
    else:
        messages.error(request, _("It was not taken: %(text)s.") % {"text": answer.text})
    return redirect("notify:webhooks")
