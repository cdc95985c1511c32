"""Services of portal.accounts: the only code that writes people, departments, roles and tokens."""

from portal.accounts.services.departments import (
    department_close,
    department_close_effects,
    department_create,
    department_move,
    department_rename,
    department_reopen,
    department_update,
)
from portal.accounts.services.first import FirstSignIn, first_admin_create, first_administrator_create
from portal.accounts.services.roles import role_grant, role_withdraw
from portal.accounts.services.tokens import token_create, token_revoke, token_rotate
from portal.accounts.services.users import (
    password_change,
    password_reset,
    preferences_save,
    user_create,
    user_reactivate,
    user_suspend,
    user_update,
)

__all__ = [
    "FirstSignIn",
    "department_close",
    "department_close_effects",
    "department_create",
    "department_move",
    "department_rename",
    "department_reopen",
    "department_update",
    "first_admin_create",
    "first_administrator_create",
    "password_change",
    "password_reset",
    "preferences_save",
    "role_grant",
    "role_withdraw",
    "token_create",
    "token_revoke",
    "token_rotate",
    "user_create",
    "user_reactivate",
    "user_suspend",
    "user_update",
]
