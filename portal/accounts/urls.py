"""Pages of this room."""

from __future__ import annotations

from typing import Any

from django.urls import path

from portal.accounts.web import departments, imports, people, roles, views

app_name = "accounts"
urlpatterns: list[Any] = [
    path("accounts/login/", views.sign_in, name="login"),
    path("accounts/logout/", views.sign_out, name="logout"),
    path("accounts/password/", views.change_password, name="password_change"),
    path("accounts/profile/", views.profile, name="profile"),
    path("accounts/theme/", views.theme, name="theme"),
    path("accounts/tokens/", roles.tokens, name="tokens"),
    path("accounts/tokens/<uuid:uid>/revoke/", roles.token_end, name="token_revoke"),
    path("accounts/tokens/<uuid:uid>/rotate/", roles.token_renew, name="token_rotate"),
    path("people/", people.people, name="people"),
    path("people/import/<str:kind>/", imports.import_table, name="import"),
    path("people/new/", people.person_new, name="person_new"),
    path("people/<uuid:uid>/", people.person, name="person"),
    path("people/<uuid:uid>/effects/", people.effects, name="person_effects"),
    path("people/<uuid:uid>/edit/", people.person, {"act": "edit"}, name="person_edit"),
    path("people/<uuid:uid>/roles/", people.person, {"act": "roles"}, name="person_role"),
    path("people/<uuid:uid>/suspend/", people.person, {"act": "suspend"}, name="person_suspend"),
    path("people/<uuid:uid>/reactivate/", people.person, {"act": "reactivate"}, name="person_reactivate"),
    path("people/<uuid:uid>/password/", people.person_password, name="person_password"),
    path("roles/", roles.roles, name="roles"),
    path("roles/<uuid:uid>/end/", people.role_end, name="role_end"),
    path("tokens/", roles.all_tokens, name="all_tokens"),
    path("departments/", departments.departments, name="departments"),
    path("departments/new/", departments.department_new, name="department_new"),
    path("departments/<uuid:uid>/", departments.department, name="department"),
    path("departments/<uuid:uid>/effects/<slug:act>/", departments.effects, name="department_effects"),
    path("departments/<uuid:uid>/edit/", departments.department, {"act": "edit"}, name="department_edit"),
    path("departments/<uuid:uid>/move/", departments.department, {"act": "move"}, name="department_move"),
    path("departments/<uuid:uid>/close/", departments.department, {"act": "close"}, name="department_close"),
    path(
        "departments/<uuid:uid>/reopen/", departments.department, {"act": "reopen"}, name="department_reopen"
    ),
]
