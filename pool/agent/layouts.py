"""An order to split a card: refused while work of the pool runs on it, carried out by a child process (``mig``)."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from pool.agent.collector import self_command, self_environment
from pool.agent.nvml import utc_now
from pool.agent.telemetry import event

if TYPE_CHECKING:
    from pool.agent.jobs import Jobs

SECONDS = 120.0


async def carry_out(message: dict[str, Any], jobs: Jobs) -> dict[str, Any]:
    """The event that tells how it went: ``layout_done`` or ``layout_failed`` with a code."""
    uuid = str(message.get("gpu_uuid") or "")
    order = {"gpu_uuid": uuid, "profiles": message.get("profiles") or []}
    if any(uuid in job.gpu_uuids for job in jobs.active()):
        answer = _failed("work of the pool runs on it", "card_in_use")
    else:
        answer = await _answer(self_command("_layout", json.dumps(order)))
    facts = {name: str(answer.get(name) or "")[:500] for name in ("code", "detail")}
    facts["task"] = str(message.get("task") or "")
    return event("layout_done" if answer.get("ok") else "layout_failed", utc_now(), uuid, facts)


def _failed(detail: str, code: str = "layout_failed") -> dict[str, Any]:
    return {"ok": False, "code": code, "detail": detail}


async def _answer(command: list[str]) -> dict[str, Any]:
    """The JSON object that the child prints; one that crashes or hangs is an answer too."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=self_environment(),
        start_new_session=True,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), SECONDS)
        found = json.loads(out.decode("utf-8"))
        return found if isinstance(found, dict) else _failed("no answer")
    except asyncio.TimeoutError:
        process.kill()
        return _failed(f"no answer within {SECONDS:g} s")
    except ValueError:
        return _failed(f"ended with {process.returncode}")
