"""Who acts: a person through some door, or the system itself. Handed to every service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django.http import HttpRequest


@dataclass(frozen=True)
class Actor:
    """`user` is None for the system; `via` is page, api, token, agent, task or command.

    `token_owner_id` names the owner where a token acts, so that "never decided by the requester or a token
    of theirs" can be held.
    """

    user: Any | None = None
    via: str = "task"
    request_id: str = ""
    address: str | None = None
    token_uid: str | None = None
    system_name: str = "system"

    @property
    def user_id(self) -> int | None:
        """Primary key of the person, None for the system."""
        return self.user.pk if self.user is not None else None

    @property
    def name(self) -> str:
        """The name kept in the audit trail."""
        return self.user.get_full_name() if self.user is not None else self.system_name

    @property
    def is_system(self) -> bool:
        """Whether the installation itself acts (a task, an agent's report)."""
        return self.user is None


SYSTEM = Actor()


def system(name: str, via: str = "task") -> Actor:
    """The installation acting under a name that explains itself, e.g. `scheduler`."""
    return Actor(via=via, system_name=name)


def actor_of(request: HttpRequest) -> Actor:
    """The actor behind a page or API request (middleware has set `request_id`)."""
    token = getattr(request, "auth", None)
    if token is not None:
        via = "token"
    else:
        via = "api" if request.path_info.startswith("/api/") else "page"
    return Actor(
        user=request.user,
        via=via,
        request_id=getattr(request, "request_id", ""),
        address=request.META.get("REMOTE_ADDR") or None,
        token_uid=str(token.uid) if token is not None and hasattr(token, "uid") else None,
    )
