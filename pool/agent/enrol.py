"""Enrolment: a one-time code becomes this node's own token."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

from pool.agent import VERSION, config, facts
from pool.agent.ws import tls_context


class EnrolError(Exception):
    """The installation said no, or could not be reached."""


def enrol(
    state_dir: str, url: str, code: str, ca_file: str | None = None, settings: config.Config | None = None
) -> config.Config:
    """Exchange ``code`` at ``url`` (a path prefix is kept) and keep the token in the state folder (0600)."""
    config.prepare(state_dir)
    url = url.rstrip("/")
    body = {
        "code": code.strip(),
        "hostname": facts.hostname(),
        "machine_id": facts.machine_id(state_dir),
        "agent_version": VERSION,
        "facts": facts.machine(),
    }
    request = urllib.request.Request(
        url + "/agent/enrol/",
        data=json.dumps(body).encode("utf-8"),
        headers={"Content-Type": "application/json", "User-Agent": f"gpupool-agent/{VERSION}"},
        method="POST",
    )
    context = tls_context(ca_file) if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as response:
            answer: dict[str, Any] = json.loads(response.read().decode("utf-8"))
    except urllib.error.HTTPError as error:
        try:
            detail = json.loads(error.read().decode("utf-8", "replace")).get("detail")
        except ValueError:
            detail = None
        raise EnrolError(f"{url} refused the code: {detail or error.reason} (HTTP {error.code})") from error
    except (OSError, ValueError) as error:
        raise EnrolError(f"cannot reach {url}: {error}") from error
    result = settings or config.Config()
    result.url = url
    result.ws_url = str(answer["ws_url"])
    result.token = str(answer["token"])
    result.node_uid = str(answer["node_uid"])
    result.ca_file = os.path.abspath(ca_file) if ca_file else None
    config.save(state_dir, result)
    return result
