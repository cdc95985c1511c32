"""Models of portal.accounts."""

from portal.accounts.models.department import Department, DepartmentName
from portal.accounts.models.role import Role, RoleBinding
from portal.accounts.models.token import ApiToken
from portal.accounts.models.user import User

__all__ = ["ApiToken", "Department", "DepartmentName", "Role", "RoleBinding", "User"]
