"""What a node's machine fetches and says before it has a socket: the agent's file, the installer, enrolment.

No person is signed in here: the program is public (it holds no secret), and enrolment is let in by its code
alone.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.urls import path, reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST, require_safe

from pool.agent.build import build
from pool.client import build as client_build
from pool.selectors.agents import token_check
from pool.services.enrolment import enrolment_redeem
from pool.services.uploads import upload_bytes, upload_for_node
from portal.kernel.errors import DomainError
from portal.kernel.streaming import streamed_bytes

MAX_BODY = 64 * 1024

INSTALL = """\
#!/bin/sh
# Installs the GPU pool's node agent. Usage: sh install.sh CODE [job account]
set -eu
URL={url}
CODE="${{1:?give the one-time code}}"
ACCOUNT="${{2:-}}"
STATE=/var/lib/gpupool-agent
[ "$(id -u)" = 0 ] || {{ echo "run this as root" >&2; exit 1; }}
PYTHON="$(command -v python3)" || {{ echo "python3 (3.8 or newer) is needed" >&2; exit 1; }}
mkdir -p /opt/gpupool "$STATE"
curl -fsS -o /opt/gpupool/agent.pyz.new "$URL/agent/agent.pyz"
echo "{sha256}  /opt/gpupool/agent.pyz.new" | sha256sum -c --quiet -
mv /opt/gpupool/agent.pyz.new /opt/gpupool/agent.pyz
set -- enrol "$CODE" --url "$URL"
[ -z "$ACCOUNT" ] || set -- "$@" --job-account "$ACCOUNT"
"$PYTHON" /opt/gpupool/agent.pyz --state "$STATE" "$@"
"$PYTHON" /opt/gpupool/agent.pyz --state "$STATE" systemd-unit > /etc/systemd/system/gpupool-agent.service
systemctl daemon-reload
systemctl enable --now gpupool-agent.service
echo "the agent runs: systemctl status gpupool-agent"
"""


@lru_cache(maxsize=1)
def agent_file() -> tuple[bytes, str]:
    """The zipapp and its SHA-256, built once a process from this version's own source."""
    data = build()
    return data, hashlib.sha256(data).hexdigest()


@require_safe
def agent_pyz(request: HttpRequest) -> HttpResponse:
    """The agent as one file."""
    return _program(request, "agent.pyz", *agent_file())


@require_safe
def install_sh(request: HttpRequest) -> HttpResponse:
    """A shell script that fetches the agent, checks it, enrols and starts it under systemd."""
    text = INSTALL.format(url=shlex.quote(settings.GPUPOOL_BASE_URL), sha256=agent_file()[1])
    return HttpResponse(text, content_type="text/x-shellscript; charset=utf-8")


@lru_cache(maxsize=1)
def client_file() -> tuple[bytes, str]:
    """The program for people's own machines and its SHA-256, built once a process."""
    data = client_build.build()
    return data, hashlib.sha256(data).hexdigest()


@require_safe
def client_pyz(request: HttpRequest) -> HttpResponse:
    """`gpupool` as one file."""
    return _program(request, "gpupool", *client_file())


def _program(request: HttpRequest, name: str, data: bytes, digest: str) -> HttpResponse:
    """A zipapp to be kept under `name`; who has it already is told so."""
    if request.headers.get("If-None-Match") == f'"{digest}"':
        return HttpResponse(status=304)
    answer = HttpResponse(data, content_type="application/zip")
    answer["Content-Disposition"] = f'attachment; filename="{name}"'
    answer["ETag"] = f'"{digest}"'
    return answer


@never_cache
@require_safe
def upload(request: HttpRequest, uid: UUID) -> HttpResponseBase:
    """The folder that a person sent, for the node that is to run it."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    answer = token_check(token.strip() if scheme.lower() == "bearer" else "")
    if answer.code or answer.node_id is None:
        return _problem(401, answer.code or "token_unknown", "A node's token is needed.")
    found = upload_for_node(node_id=answer.node_id, uid=str(uid))
    if found is None:
        return _problem(404, "not_found", "There is no such folder for this node.")
    return streamed_bytes(request, upload_bytes(found), found.size)


def _problem(status: int, code: str, detail: Any) -> JsonResponse:
    body = {
        "type": f"urn:gpupool:error:{code}",
        "title": code.replace("_", " "),
        "status": status,
        "code": code,
        "detail": str(detail),
    }
    return JsonResponse(body, status=status, content_type="application/problem+json")


@csrf_exempt
@never_cache
@require_POST
def enrol(request: HttpRequest) -> HttpResponse:
    """Exchange a one-time code for the node's token."""
    if len(request.body) > MAX_BODY:
        return _problem(413, "too_large", "The body is too large.")
    try:
        body = json.loads(request.body)
        code, hostname = str(body["code"]), str(body["hostname"])
        machine_id, facts = str(body.get("machine_id") or ""), dict(body.get("facts") or {})
    except (ValueError, TypeError, KeyError, AttributeError):
        return _problem(400, "invalid", "A JSON object with code and hostname is needed.")
    try:
        done = enrolment_redeem(
            code=code,
            hostname=hostname,
            machine_id=machine_id,
            facts=facts,
            address=request.META.get("REMOTE_ADDR"),
        )
    except DomainError as error:
        return _problem(error.status, error.code, error.detail)
    base, socket = addresses(request)
    return JsonResponse(
        {"node_uid": str(done.node.uid), "token": done.token, "base_url": base, "ws_url": socket}
    )


def addresses(request: HttpRequest) -> tuple[str, str]:
    """(base, socket) as this very machine reached them: an inner address works where the public one may
    not."""
    page = request.build_absolute_uri(reverse("pool:agent-enrol"))
    base = page[: -len("/agent/enrol/")]
    return base, "ws" + base[4:] + "/agent/ws/"


urlpatterns = [
    path("agent/enrol/", enrol, name="agent-enrol"),
    path("agent/agent.pyz", agent_pyz, name="agent-file"),
    path("agent/install.sh", install_sh, name="agent-install"),
    path("agent/upload/<uuid:uid>/", upload, name="agent-upload"),
    path("client/gpupool", client_pyz, name="client-file"),
]
