"""Pages about people: the list, one person with roles, tokens and history, and what administrators do there."""

from __future__ import annotations

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

from portal.accounts.effects import Effect, held_milli, person_effects
from portal.accounts.models import Role, RoleBinding, User
from portal.accounts.policy import Policy
from portal.accounts.selectors.people import people_list, people_visible, sees_people
from portal.accounts.selectors.roles import tokens_in_state, tokens_visible
from portal.accounts.services import (
    password_reset,
    role_grant,
    role_withdraw,
    user_create,
    user_reactivate,
    user_suspend,
    user_update,
)
from portal.accounts.services.common import temporary_password
from portal.accounts.web.common import PER_PAGE, choice, policy_required, section_tabs
from portal.accounts.web.forms import (
    PersonForm,
    ReasonForm,
    RoleForm,
    SuspendForm,
    department_choices,
    department_named,
    take_errors,
)
from portal.kernel.clock import now
from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of
from portal.ops.selectors import history_of

SORTS = ("name", "-name", "username", "-username", "last_login", "-last_login")


@login_required
@require_safe
@policy_required
def people(request: HttpRequest, policy: Policy) -> HttpResponse:
    """``/people/``: who may do what, until when."""
    department = department_named(policy.tree, request.GET.get("department", ""))
    rows = people_list(
        policy,
        search=request.GET.get("q", "").strip()[:100],
        department_id=department.pk if department is not None else None,
        role=choice(request, "role", Role.values),
        state=choice(request, "state", ("active", "suspended")),
        sort=choice(request, "sort", SORTS) or "name",
    )
    page = Paginator(rows, PER_PAGE).get_page(request.GET.get("page"))
    held = held_milli([person.pk for person in page])
    scope = sees_people(policy)
    context = {
        "page": page,
        "rows": [(person, None if held is None else held.get(person.pk, 0)) for person in page],
        "knows_held": held is not None,
        "tabs": section_tabs(policy, "people"),
        "departments": department_choices(policy.tree, None, None if scope.everything else set(scope.ids)),
        "roles": Role.choices,
        "may_change": policy.administers_people,
        "now": now(),
    }
    return render(request, "accounts/people.html", context)


@sensitive_variables("password")
@login_required
@require_http_methods(["GET", "HEAD", "POST"])
@policy_required
def person_new(request: HttpRequest, policy: Policy) -> HttpResponse:
    """``/people/new/``: a person with a temporary password, shown once."""
    policy.require(policy.administers_people)
    form = PersonForm(
        request.POST or None, tree=policy.tree, new=True, initial={"language": request.LANGUAGE_CODE}
    )
    if request.method == "POST" and form.is_valid():
        password = temporary_password()
        try:
            user = user_create(acting_user=actor_of(request), password=password, **form.cleaned_data)
        except DomainError as error:
            take_errors(form, error)
        else:
            return _password_once(request, user, password, made=True)
    status = 400 if form.is_bound else 200
    return render(request, "accounts/person_new.html", {"form": form}, status=status)


@sensitive_variables("password")
def _password_once(request: HttpRequest, user: User, password: str, *, made: bool) -> HttpResponse:
    """The only page that shows a temporary password; nothing keeps it."""
    response = render(
        request, "accounts/password_once.html", {"person": user, "password": password, "made": made}
    )
    response["Cache-Control"] = "no-store"
    return response


def _forms(request: HttpRequest, person: User, policy: Policy, act: str) -> dict[str, Any]:
    """The forms of the person's page; the one of `act` is bound to what was posted."""
    data: Any = {act: request.POST} if request.method == "POST" else {}
    fields = ("display_name", "email", "system_account", "language")
    start: dict[str, Any] = {name: getattr(person, name) for name in fields}
    start["language"] = start["language"] or request.LANGUAGE_CODE
    if person.home_department is not None:
        start["home_department"] = person.home_department.code
    return {
        "edit": PersonForm(data.get("edit"), tree=policy.tree, initial=start, prefix="edit"),
        "roles": RoleForm(data.get("roles"), tree=policy.tree, prefix="role"),
        "suspend": SuspendForm(data.get("suspend"), prefix="suspend", initial={"leases": "end"}),
    }


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
@policy_required
def person(request: HttpRequest, policy: Policy, uid: UUID, act: str = "") -> HttpResponse:
    """``/people/<uid>/`` and, by POST, ``…/edit/``, ``…/roles/``, ``…/suspend/``, ``…/reactivate/``."""
    found = people_visible(policy).filter(uid=uid).first()
    if found is None or not (sees_people(policy) or found.pk == request.user.pk):
        raise Http404
    if act and request.method != "POST":
        return redirect("accounts:person", uid=uid)
    if act:
        policy.require(policy.administers_people)
    forms = _forms(request, found, policy, act)
    form = forms.get(act)
    if act and (form is None or form.is_valid()):
        try:
            done = _carry_out(request, found, act, form)
        except DomainError as error:
            if form is None:
                raise
            take_errors(form, error)
        else:
            messages.success(request, done)
            return redirect("accounts:person", uid=uid)
    bindings = (
        RoleBinding.objects.filter(user=found).select_related("department").order_by("-valid_from", "-id")
    )
    moment = now()
    context = {
        "person": found,
        "forms": forms,
        "open": {act: True} if act else {},
        "bindings": [b for b in bindings if b.valid_to is None or b.valid_to > moment],
        "ended": [b for b in bindings if b.valid_to is not None and b.valid_to <= moment][:20],
        "tokens": tokens_in_state(tokens_visible(policy).filter(user=found), "all")[:20],
        "history": history_of([found.uid, *(b.uid for b in bindings)], 12),
        "department": policy.tree.path(found.home_department_id) if found.home_department_id else "",
        "held": (held_milli([found.pk]) or {}).get(found.pk),
        "may_change": policy.administers_people,
        "now": moment,
    }
    return render(request, "accounts/person.html", context, status=400 if act else 200)


@login_required
@require_safe
@policy_required
def effects(request: HttpRequest, policy: Policy, uid: UUID) -> HttpResponse:
    """What a suspension would touch: fetched when its dialog opens."""
    policy.require(policy.administers_people)
    found = people_visible(policy).filter(uid=uid).first()
    if found is None:
        raise Http404
    tokens = tokens_in_state(tokens_visible(policy).filter(user=found), "valid").count()
    rows = [Effect(_("Tokens"), tokens), *person_effects("suspend", [found.pk])]
    return render(request, "accounts/_effects.html", {"effects": rows})


def _carry_out(request: HttpRequest, person: User, act: str, form: Any) -> str:
    """Call the service behind `act`; returns what to say."""
    acting = actor_of(request)
    if act == "edit":
        user_update(acting_user=acting, user=person, **form.cleaned_data)
        return _("Saved.")
    if act == "roles":
        data = form.cleaned_data
        role_grant(
            acting_user=acting, user=person, role=data["role"], department=data["department"], **form.span()
        )
        return _("Role bound.")
    if act == "suspend":
        user_suspend(acting_user=acting, user=person, **form.cleaned_data)
        return _("Suspended: signed out everywhere, tokens revoked.")
    if act == "reactivate":
        user_reactivate(acting_user=acting, user=person)
        return _("Active again. Tokens stay revoked.")
    raise Http404


@sensitive_variables("value")
@login_required
@require_http_methods(["POST"])
@policy_required
def person_password(request: HttpRequest, policy: Policy, uid: UUID) -> HttpResponse:
    """Give a temporary password and show it once."""
    policy.require(policy.administers_people)
    found = people_visible(policy).filter(uid=uid).first()
    if found is None:
        raise Http404
    user, value = password_reset(acting_user=actor_of(request), user=found)
    return _password_once(request, user, value, made=False)


@login_required
@require_http_methods(["POST"])
@policy_required
def role_end(request: HttpRequest, policy: Policy, uid: UUID) -> HttpResponse:
    """End one binding; back to the page it was asked from."""
    policy.require(policy.administers_people)
    binding = RoleBinding.objects.select_related("user").filter(uid=uid).first()
    if binding is None:
        raise Http404
    form = ReasonForm(request.POST)
    reason = form.cleaned_data["reason"] if form.is_valid() else ""
    role_withdraw(acting_user=actor_of(request), binding=binding, reason=reason)
    messages.success(request, _("Role ended."))
    if request.POST.get("back") == "roles":
        return redirect("accounts:roles")
    return redirect("accounts:person", uid=binding.user.uid)
