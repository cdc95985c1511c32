"""Signing in and out, the own password, preferences."""

from __future__ import annotations

from typing import Any

from axes.handlers.proxy import AxesProxyHandler
from axes.helpers import get_cool_off, get_failure_limit
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import LoginView, LogoutView
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views import i18n
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from portal.accounts.models import User
from portal.accounts.services import password_change, preferences_save
from portal.accounts.web.forms import PasswordForm, PreferencesForm, take_errors
from portal.kernel.errors import DomainError
from portal.ops.actor import actor_of

THEME_COOKIE = "gpupool_theme"
YEAR = 31_536_000
FEW_TRIES = 3


class SignIn(LoginView):
    """``/accounts/login/``. A wrong name and a wrong password look alike; after 8 tries there is a pause."""

    template_name = "accounts/login.html"
    redirect_authenticated_user = True

    def form_invalid(self, form: Any) -> HttpResponse:
        """Say how many tries are left once they are few; the lockout itself answers by `locked_out`."""
        left = None
        if settings.AXES_ENABLED:
            credentials = {"username": form.data.get("username", "")}
            failures = AxesProxyHandler.get_failures(self.request, credentials)
            rest = get_failure_limit(self.request, credentials) - failures
            left = rest if 0 < rest <= FEW_TRIES else None
        return self.render_to_response(self.get_context_data(form=form, tries_left=left))


sign_in = sensitive_post_parameters("password")(SignIn.as_view())
sign_out = LogoutView.as_view()


def locked_out(request: HttpRequest, *_rest: Any) -> HttpResponse:
    """Too many wrong tries with this name from this address: 429 until the pause is over."""
    pause = get_cool_off(request)
    seconds = int(pause.total_seconds()) if pause is not None else 900
    if request.path_info.startswith("/api/"):
        response: HttpResponse = JsonResponse(
            {
                "type": "urn:gpupool:error:locked_out",
                "title": "locked out",
                "status": 429,
                "code": "locked_out",
            },
            status=429,
            content_type="application/problem+json",
        )
    else:
        view = SignIn()
        view.setup(request)
        form = view.get_form_class()(request, initial={"username": request.POST.get("username", "")})
        context = view.get_context_data(form=form, locked=True, locked_minutes=max(1, seconds // 60))
        response = render(request, "accounts/login.html", context, status=429)
    response["Retry-After"] = str(seconds)
    return response


@sensitive_post_parameters()
@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def change_password(request: HttpRequest) -> HttpResponse:
    """``/accounts/password/``: also the only page of someone whose first password is still the given one."""
    form = PasswordForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            user = password_change(
                acting_user=actor_of(request),
                user=request.user,  # type: ignore[arg-type]
                old_password=form.cleaned_data["old_password"],
                new_password=form.cleaned_data["password"],
            )
        except DomainError as error:
            take_errors(form, error)
        else:
            update_session_auth_hash(request, user)
            messages.success(request, _("Password changed. Other sessions have ended."))
            return redirect("home")
    status = 400 if form.is_bound else 200
    forced = request.user.must_change_password  # type: ignore[union-attr]
    return render(request, "accounts/password.html", {"form": form, "forced": forced}, status=status)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def profile(request: HttpRequest) -> HttpResponse:
    """``/accounts/profile/``: own language, zone and theme; what the installation knows about oneself."""
    user: User = request.user  # type: ignore[assignment]
    start = {
        "language": user.language or request.LANGUAGE_CODE,
        "time_zone": user.time_zone,
        "theme": request.COOKIES.get(THEME_COOKIE, user.theme),
    }
    form = PreferencesForm(request.POST or None, initial=start)
    if request.method == "POST" and form.is_valid():
        try:
            preferences_save(acting_user=actor_of(request), user=user, **form.cleaned_data)
        except DomainError as error:
            take_errors(form, error)
        else:
            messages.success(request, _("Preferences saved."))
            response = redirect("accounts:profile")
            _cookie(response, settings.LANGUAGE_COOKIE_NAME, form.cleaned_data["language"])
            _cookie(response, THEME_COOKIE, form.cleaned_data["theme"])
            return response
    policy = request.policy  # type: ignore[attr-defined]
    context = {
        "form": form,
        "roles": policy.user.role_bindings.select_related("department").order_by("-valid_from"),
        "department": policy.tree.path(user.home_department_id) if user.home_department_id else "",
    }
    return render(request, "accounts/profile.html", context, status=400 if form.is_bound else 200)


@login_required
@require_POST
def theme(request: HttpRequest) -> HttpResponse:
    """Keep what the switch in the top bar chose, for other browsers too."""
    choice = request.POST.get("theme", "")
    if choice not in User.Theme.values:
        return HttpResponse(status=400)
    preferences_save(acting_user=actor_of(request), user=request.user, theme=choice)  # type: ignore[arg-type]
    return HttpResponse(status=204)


@require_POST
def set_language(request: HttpRequest) -> HttpResponse:
    """Django's switch of language by cookie, which also becomes the signed-in person's preference."""
    response: HttpResponse = i18n.set_language(request)
    choice = request.POST.get("language", "")
    if request.user.is_authenticated and choice in dict(settings.LANGUAGES):
        preferences_save(acting_user=actor_of(request), user=request.user, language=choice)
    return response if isinstance(response, HttpResponseRedirect) else HttpResponse(status=204)


def _cookie(response: HttpResponse, name: str, value: str) -> None:
    response.set_cookie(
        name,
        value,
        max_age=YEAR,
        path=settings.LANGUAGE_COOKIE_PATH,
        secure=settings.SESSION_COOKIE_SECURE,
        samesite="Lax",
    )
