"""The pods of a cluster as this process last saw them: listed once, then followed by short watches.

A view may be lost at any time (another process has its own): it only saves listing thousands of pods every second. A
watch resumes where the last one ended; where the server has forgotten that place (410 Gone), or after some minutes in
any case, everything is listed anew. Pods are kept without what nobody here reads.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from pool.executors.kubernetes import names
from pool.executors.kubernetes.connection import Connection, Problem
from pool.executors.kubernetes.nodes import GPU, quantity
from pool.executors.kubernetes.states import DEVICE_ANNOTATION

PODS = "/api/v1/pods"
PAGE = 1000
QUIET_S = 0.1
RELIST_S = 240.0
"""Shorter than the five minutes after which a server may forget where we were."""
GONE = 410
GONE_KEPT = 5000
OURS = (names.ALLOCATION, names.MEMBER, names.MANAGED_BY)


def slim(pod: Mapping[str, Any]) -> dict[str, Any]:
    """A pod with what is read here: `spec` gets its summed requests (`gpus`, `cpu_milli`, `memory_mib`)."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    requests = [(one.get("resources") or {}).get("requests") or {} for one in spec.get("containers") or []]
    limits = [(one.get("resources") or {}).get("limits") or {} for one in spec.get("containers") or []]
    return {
        "metadata": {
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta.get("uid", ""),
            "deletionTimestamp": meta.get("deletionTimestamp"),
            "labels": {name: labels[name] for name in OURS if name in labels},
            "annotations": {DEVICE_ANNOTATION: annotations[DEVICE_ANNOTATION]}
            if DEVICE_ANNOTATION in annotations
            else {},
        },
        "spec": {
            "nodeName": spec.get("nodeName"),
            "securityContext": {"runAsUser": (spec.get("securityContext") or {}).get("runAsUser")},
            "gpus": sum(int(quantity(one[GPU])) for one in limits if GPU in one),
            "cpu_milli": round(sum(quantity(one["cpu"]) for one in requests if "cpu" in one) * 1000),
            "memory_mib": int(sum(quantity(one["memory"]) for one in requests if "memory" in one) // 2**20),
        },
        "status": {
            **{name: status[name] for name in ("phase", "reason", "message", "startTime") if name in status},
            "containerStatuses": [
                {"name": one.get("name"), "state": one.get("state")}
                for one in status.get("containerStatuses") or []
            ],
            "conditions": [
                one
                for one in status.get("conditions") or []
                if one.get("type") in ("PodScheduled", "DisruptionTarget")
            ],
        },
    }


def key_of(pod: Mapping[str, Any]) -> str:
    """``namespace/name``."""
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


class PodView:
    """Pods by ``namespace/name``, and the last of those that went (``gone``): who was seen and is there no more cannot
    still be on its way. ``lists`` and ``resumes`` count how it was kept up to date.
    """

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.gone: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.version = ""
        self.listed_at = float("-inf")
        self.lists = 0
        self.resumes = 0

    def refresh(self, connection: Connection) -> None:
        """Bring it up to date; failures as the connection's."""
        if self.version and time.monotonic() - self.listed_at < RELIST_S:
            try:
                self._resume(connection)
                return
            except Problem as problem:
                if problem.code != GONE:
                    raise
        self.relist(connection)

    def relist(self, connection: Connection) -> None:
        """List everything, in pages of one moment."""
        pods: dict[str, dict[str, Any]] = {}
        query: dict[str, object] = {"limit": PAGE}
        while True:
            page = connection.get(PODS, **query)
            for pod in page.get("items") or []:
                pods[key_of(pod)] = slim(pod)
            more = (page.get("metadata") or {}).get("continue")
            if not more:
                break
            query = {"limit": PAGE, "continue": more}
        for key in self.pods.keys() - pods.keys():
            self._went(key, self.pods[key])
        self.pods = pods
        self.version = str(page["metadata"]["resourceVersion"])
        self.listed_at = time.monotonic()
        self.lists += 1

    def _resume(self, connection: Connection) -> None:
        events = connection.events(
            PODS,
            QUIET_S,
            resourceVersion=self.version,
            allowWatchBookmarks="true",
            timeoutSeconds=30,
        )
        for event in events:
            self.apply(event)
        self.resumes += 1

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one event; ``Problem`` for an error event (410: the place is forgotten)."""
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            self.version = ""
            raise Problem(int(item.get("code") or 500), str(item.get("reason")), str(item.get("message")))
        if kind == "DELETED":
            self.pods.pop(key_of(item), None)
            self._went(key_of(item), slim(item))
        elif kind in ("ADDED", "MODIFIED"):
            self.pods[key_of(item)] = slim(item)
        self.version = str(item["metadata"]["resourceVersion"])

    def _went(self, key: str, pod: dict[str, Any]) -> None:
        if names.ALLOCATION in pod["metadata"]["labels"]:
            self.gone[key] = pod
            while len(self.gone) > GONE_KEPT:
                self.gone.popitem(last=False)
