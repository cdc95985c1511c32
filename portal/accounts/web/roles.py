"""Pages about roles and tokens."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods, require_safe

from portal.accounts.models import ApiToken, Role
from portal.accounts.policy import Policy
from portal.accounts.selectors.people import sees_people
from portal.accounts.selectors.roles import (
    ROLE_STATES,
    TOKEN_STATES,
    bindings_list,
    tokens_in_state,
    tokens_visible,
)
from portal.accounts.services import token_create, token_revoke, token_rotate
from portal.accounts.web.common import PER_PAGE, choice, policy_required, section_tabs
from portal.accounts.web.forms import TokenForm, department_choices, department_named, take_errors
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of


@login_required
@require_safe
@policy_required
def roles(request: HttpRequest, policy: Policy) -> HttpResponse:
    """``/roles/``: every binding, with its time."""
    tabs = section_tabs(policy, "roles")
    department = department_named(policy.tree, request.GET.get("department", ""))
    rows = bindings_list(
        policy,
        role=choice(request, "role", Role.values),
        state=choice(request, "state", ROLE_STATES, "valid"),
        department_id=department.pk if department is not None else None,
    )
    scope = sees_people(policy)
    context = {
        "tabs": tabs,
        "page": Paginator(rows, PER_PAGE).get_page(request.GET.get("page")),
        "roles": Role.choices,
        "departments": department_choices(policy.tree, None, None if scope.everything else set(scope.ids)),
        "may_change": policy.administers_people,
        "now": now(),
    }
    return render(request, "accounts/roles.html", context)


@login_required
@require_safe
@policy_required
def all_tokens(request: HttpRequest, policy: Policy) -> HttpResponse:
    """``/tokens/``: everybody's tokens, for administrators and auditors."""
    policy.require(policy.administers_people or policy.audits)
    state = choice(request, "state", TOKEN_STATES, "valid")
    rows = tokens_in_state(tokens_visible(policy), state)
    context = {
        "tabs": section_tabs(policy, "tokens"),
        "page": Paginator(rows, PER_PAGE).get_page(request.GET.get("page")),
        "state": state,
        "may_change": policy.administers_people,
        "now": now(),
    }
    return render(request, "accounts/all_tokens.html", context)


@sensitive_variables("value")
@login_required
@require_http_methods(["GET", "HEAD", "POST"])
@policy_required
def tokens(request: HttpRequest, policy: Policy) -> HttpResponse:
    """``/accounts/tokens/``: one's own tokens; a new one's value is shown in the answer to its making only."""
    form = TokenForm(request.POST or None)
    value, made = "", None
    if request.method == "POST" and form.is_valid():
        data = form.cleaned_data
        try:
            made, value = token_create(
                acting_user=actor_of(request),
                user=request.user,  # type: ignore[arg-type]
                name=data["name"],
                scopes=data["scopes"],
                expires_at=now() + timedelta(days=data["days"]),
            )
        except DomainError as error:
            take_errors(form, error)
        else:
            form = TokenForm()
    return _own_tokens(request, policy, form, made, value)


def _own_tokens(
    request: HttpRequest, policy: Policy, form: TokenForm, made: ApiToken | None = None, value: str = ""
) -> HttpResponse:
    rows: Any = tokens_in_state(tokens_visible(policy).filter(user_id=request.user.pk), "all")
    context = {"form": form, "tokens": rows[:PER_PAGE], "made": made, "value": value, "now": now()}
    response = render(request, "accounts/tokens.html", context, status=400 if form.is_bound else 200)
    if value:
        response["Cache-Control"] = "no-store"
    return response


def _token(policy: Policy, uid: UUID) -> ApiToken:
    found = tokens_visible(policy).filter(uid=uid).first()
    if found is None:
        raise Http404
    return found


@login_required
@require_http_methods(["POST"])
@policy_required
def token_end(request: HttpRequest, policy: Policy, uid: UUID) -> HttpResponse:
    """Revoke one's own token, or anothers' as administrator of people."""
    token = _token(policy, uid)
    token_revoke(acting_user=actor_of(request), token=token)
    messages.success(request, _("Token revoked; it stopped at once."))
    if token.user_id == request.user.pk:
        return redirect("accounts:tokens")
    return redirect("accounts:person", uid=token.user.uid)


@sensitive_variables("value")
@login_required
@require_http_methods(["POST"])
@policy_required
def token_renew(request: HttpRequest, policy: Policy, uid: UUID) -> HttpResponse:
    """Rotate one's own token; the new value is shown once."""
    token = _token(policy, uid)
    if token.user_id != request.user.pk:
        raise Http404
    made, value = token_rotate(acting_user=actor_of(request), token=token)
    return _own_tokens(request, policy, TokenForm(), made, value)
