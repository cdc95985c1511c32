"""A stand-in kubelet for a control plane without nodes: its nodes are there, pods bound to them run as processes of
this machine, their output is served as a kubelet serves it, and their end is written to their status.

It is driven by ``step``: one look at all pods, and whatever that asks for. What a real one also does (devices, images,
volumes, probes) it leaves out; images whose name contains `missing` cannot be pulled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from pool.executors.kubernetes.connection import Connection, Problem
from tests.pool.executors.kubernetes_plane import Plane


def stamp(moment: datetime | None = None) -> str:
    """A time as the API wants it."""
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Run:
    """A pod's process and what it wrote: (time, line) each."""

    process: subprocess.Popen[bytes]
    started: datetime
    lines: list[tuple[datetime, bytes]] = field(default_factory=list)
    reader: threading.Thread | None = None
    asked_at: float | None = None
    forced: int | None = None


class Kubelet:
    """All nodes of a test. ``connection`` is an administrator's."""

    def __init__(self, plane: Plane, connection: Connection) -> None:
        self.api = connection
        self.runs: dict[str, Run] = {}
        self.nodes: set[str] = set()
        kubelet = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802 - the library's name
                kubelet._serve(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        certificate, key = plane.authority.pair(plane.folder, f"kubelet-{self.server.server_port}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    # -- nodes -------------------------------------------------------------------------------------------------

    def node(
        self, name: str, resources: dict[str, int], labels: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """A node that is ready, with these resources besides CPU, memory and pods."""
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        }
        self.api.create("/api/v1/nodes", body)
        self.nodes.add(name)
        return self.status(name, resources)

    def status(self, name: str, resources: dict[str, int], ready: bool = True) -> dict[str, Any]:
        """Write the node's status."""
        amounts = {"cpu": "32", "memory": "256Gi", "pods": "110"}
        amounts |= {resource: str(count) for resource, count in resources.items()}
        status = {
            "capacity": amounts,
            "allocatable": amounts,
            "addresses": [
                {"type": "InternalIP", "address": "127.0.0.1"},
                {"type": "Hostname", "address": name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.server.server_port}},
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True" if ready else "False",
                    "reason": "KubeletReady" if ready else "KubeletNotReady",
                    "lastHeartbeatTime": stamp(),
                    "lastTransitionTime": stamp(),
                }
            ],
        }
        return self.api.patch(f"/api/v1/nodes/{name}/status", {"status": status})

    # -- pods --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One look at all pods, and what it asks for."""
        pods = self.api.get("/api/v1/pods").get("items") or []
        here = {}
        for pod in pods:
            if (pod["spec"].get("nodeName") or "") in self.nodes:
                here[pod["metadata"]["uid"]] = pod
        for uid, run in list(self.runs.items()):
            if uid not in here:
                self._kill(run, signal.SIGKILL)
                del self.runs[uid]
        for uid, pod in here.items():
            with contextlib.suppress(Problem):  # it went or changed at this moment: the next step sees it
                self._pod(uid, pod)

    def _pod(self, uid: str, pod: dict[str, Any]) -> None:
        run = self.runs.get(uid)
        phase = (pod.get("status") or {}).get("phase")
        ending = pod["metadata"].get("deletionTimestamp")
        if run is None:
            if ending:
                self._remove(pod)
            elif phase == "Pending":
                self._begin(uid, pod)
            return
        if ending:
            self._end(pod, run)
        if run.process.poll() is not None and phase == "Running":
            if run.reader is not None:
                run.reader.join(5)
            self._ended(pod, run)
        if ending and run.process.poll() is not None:
            self._remove(pod)

    def _begin(self, uid: str, pod: dict[str, Any]) -> None:
        container = pod["spec"]["containers"][0]
        if "missing" in container["image"]:
            waiting = {
                "reason": "ErrImagePull",
                "message": f"{container['image']}: manifest unknown: not found",
            }
            self._write(pod, "Pending", {"waiting": waiting})
            return
        command = [word.replace("$$", "$") for word in container.get("command") or ["true"]]
        variables = {
            one["name"]: (one.get("value") or "").replace("$$", "$") for one in container.get("env") or []
        }
        process = subprocess.Popen(
            command,
            env={"PATH": os.environ["PATH"], **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        run = self.runs[uid] = Run(process, datetime.now(UTC))
        run.reader = threading.Thread(target=self._read, args=(run,), daemon=True)
        run.reader.start()
        self._write(pod, "Running", {"running": {"startedAt": stamp(run.started)}})

    def _read(self, run: Run) -> None:
        assert run.process.stdout is not None
        for line in run.process.stdout:
            run.lines.append((datetime.now(UTC), line))

    def _end(self, pod: dict[str, Any], run: Run) -> None:
        grace = pod["metadata"].get("deletionGracePeriodSeconds") or 0
        if run.asked_at is None:
            run.asked_at = time.monotonic()
            self._kill(run, signal.SIGTERM)
        if time.monotonic() - run.asked_at >= grace:
            self._kill(run, signal.SIGKILL)
            run.process.wait(5)

    def _ended(self, pod: dict[str, Any], run: Run) -> None:
        code = run.forced if run.forced is not None else run.process.returncode
        code = code if code >= 0 else 128 - code
        state = {
            "terminated": {
                "exitCode": code,
                "reason": "Completed" if code == 0 else "Error",
                "startedAt": stamp(run.started),
                "finishedAt": stamp(),
            }
        }
        self._write(pod, "Succeeded" if code == 0 else "Failed", state)

    def _write(self, pod: dict[str, Any], phase: str, state: dict[str, Any]) -> None:
        container = pod["spec"]["containers"][0]
        row = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": "running" in state,
            "restartCount": 0,
            "state": state,
        }
        status = {"phase": phase, "containerStatuses": [row]}
        if "running" in state:
            status["podIP"] = "127.0.0.1"
            status["startTime"] = state["running"]["startedAt"]
        self.api.patch(f"{_path(pod)}/status", {"status": status})

    def _remove(self, pod: dict[str, Any]) -> None:
        self.api.delete(_path(pod), 0, uid=pod["metadata"]["uid"])
        self.runs.pop(pod["metadata"]["uid"], None)

    def _kill(self, run: Run, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, number)

    def finish(self, uid: str, code: int) -> None:
        """The pod's process ends with this exit code."""
        run = self.runs[uid]
        run.forced = code
        self._kill(run, signal.SIGKILL)
        run.process.wait(5)

    # -- output ------------------------------------------------------------------------------------------------

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        asked = urlparse(request.path)
        parts = asked.path.strip("/").split("/")
        query = {name: values[0] for name, values in parse_qs(asked.query).items()}
        if parts[0] != "containerLogs" or len(parts) != 4:
            request.send_error(404)
            return
        pod = self.api.get(f"/api/v1/namespaces/{parts[1]}/pods/{parts[2]}")
        run = self.runs.get(pod["metadata"]["uid"])
        since = query.get("sinceTime", "")
        body = b""
        for at, line in run.lines if run is not None else ():
            if at.strftime("%Y-%m-%dT%H:%M:%SZ") >= since:
                body += at.strftime("%Y-%m-%dT%H:%M:%S.%f000Z ").encode() if "timestamps" in query else b""
                body += line
        request.send_response(200)
        request.send_header("Content-Type", "text/plain")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def clear(self) -> None:
        """End every process."""
        for run in self.runs.values():
            self._kill(run, signal.SIGKILL)
            run.process.wait(5)
        self.runs.clear()

    def close(self) -> None:
        """End everything of it."""
        self.clear()
        self.server.shutdown()
        self.server.server_close()


def _path(pod: dict[str, Any]) -> str:
    meta = pod["metadata"]
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
