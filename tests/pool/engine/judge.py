"""How a result of a case is compared with what the case expects: values to 1e-6, victims by class, outcomes of
clusters, and whether their end state can be at all. The case files' own schema says the same in words.
"""

from __future__ import annotations

import collections
import json
from typing import Any

Case = dict[str, Any]


def same(want: Any, got: Any, path: str = "") -> str | None:
    """First difference between two JSON values as text, or None."""
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return f"{path}: wanted an object, got {got!r}"
        for key, value in want.items():
            if key not in got:
                return f"{path}/{key}: missing"
            diff = same(value, got[key], f"{path}/{key}")
            if diff:
                return diff
        return None
    if isinstance(want, bool) or isinstance(got, bool):
        return None if want is got else f"{path}: wanted {want!r}, got {got!r}"
    if isinstance(want, (int, float)) and isinstance(got, (int, float)):
        return None if abs(want - got) <= 1e-6 * max(1, abs(want)) else f"{path}: wanted {want}, got {got}"
    return None if want == got else f"{path}: wanted {want!r}, got {got!r}"


def victim_class(job: Case) -> str:
    return json.dumps(
        [job["queue"], job.get("priority", 0), job.get("admitted_at"), job["usage"]], sort_keys=True
    )


LIVE = {"kept", "moved", "placed", "stuck"}
OUTCOMES = LIVE | {"preempted", "waiting", "gone"}
AMPLE_CPU_MILLI, AMPLE_MEMORY = 20_000, 20_000_000_000


def impossible(case: Case, result: Case) -> str | None:
    """Why the end state of a `cluster` result cannot be, or None."""
    nodes, got = {node["id"]: node for node in case["nodes"]}, result.get("pods")
    if not isinstance(got, dict):
        return "/pods: missing"
    names = {f"{w['id']}/{i}" for w in case["workloads"] for i in range(1, len(w["pods"]) + 1)}
    if set(got) != names:
        return f"/pods: wanted an entry for each of {sorted(names)}, got {sorted(got)}"
    devices, gpu_memory, used = collections.Counter(), collections.Counter(), collections.Counter()
    for job in case["workloads"]:
        live = []
        for i, pod in enumerate(job["pods"], 1):
            name, entry = f"{job['id']}/{i}", got[f"{job['id']}/{i}"]
            outcome = entry.get("outcome")
            if outcome not in OUTCOMES:
                return f"/pods/{name}: outcome {outcome!r}"
            if outcome not in LIVE:
                continue
            node = nodes.get(entry.get("node"))
            if node is None:
                return f"/pods/{name}: node {entry.get('node')!r} does not exist"
            if outcome == "kept" and pod.get("node") not in (None, node["id"]):
                return f"/pods/{name}: kept on {pod['node']} but now on {node['id']}"
            if outcome != "stuck":
                live.append(node)
            gpus, held = pod.get("gpu", 0), entry.get("devices") or []
            if len(held) != (1 if 0 < gpus < 1 or (not gpus and pod.get("gpu_memory")) else int(gpus)) or len(
                set(map(str, held))
            ) != len(held):
                return f"/pods/{name}: asks {gpus} GPU, holds devices {held}"
            for device in held:
                devices[node["id"], str(device)] += min(gpus, 1)
                gpu_memory[node["id"], str(device)] += pod.get("gpu_memory", 0)
            for profile, count in (pod.get("mig") or {}).items():
                used[node["id"], "mig", profile] += count
            used[node["id"], "cpu"] += pod.get("cpu_milli", 0)
            used[node["id"], "memory"] += pod.get("memory", 0)
        said = result.get("workloads", {}).get(job["id"], {}).get("outcome")
        if said not in (None, "stuck") and (said in LIVE) != bool(live):
            return f"/workloads/{job['id']}: said {said}, {len(live)} pods live"
        if live and len(live) < job["min_pods"]:
            return f"/workloads/{job['id']}: {len(live)} pods live, gang needs {job['min_pods']}"
        level = (job.get("topology") or {}).get("required")
        if (
            live
            and level
            and any(got[f"{job['id']}/{i}"]["outcome"] == "placed" for i in range(1, len(job["pods"]) + 1))
        ):
            paths = set()
            for node in live:
                domain = node.get("domain") or {}
                path = [(key, domain[key]) for key in sorted(domain) if key <= level]
                paths.add(tuple(path) if level in domain else None)
            if len(paths) != 1 or None in paths:
                return f"/workloads/{job['id']}: not within one {level}"
    for node in nodes.values():
        mine = {device: share for (owner, device), share in devices.items() if owner == node["id"] and share}
        if len(mine) > node["gpus"]:
            return f"{node['id']}: {len(mine)} devices used of {node['gpus']}"
        if any(share > 1 + 1e-6 for share in mine.values()):
            return f"{node['id']}: a device over one whole {mine}"
        if any(
            amount > node.get("gpu_memory", 100) + 1e-6
            for (owner, _), amount in gpu_memory.items()
            if owner == node["id"]
        ):
            return f"{node['id']}: GPU memory exceeded"
        for (owner, what, *rest), amount in used.items():
            limit = {
                "cpu": node.get("cpu_milli", AMPLE_CPU_MILLI),
                "memory": node.get("memory", AMPLE_MEMORY),
            }.get(what)
            limit = (node.get("mig") or {}).get(rest[0], 0) if what == "mig" else limit
            if owner == node["id"] and amount > limit:
                return f"{node['id']}: {what} {' '.join(rest)} {amount} of {limit}"
    return None


def judge(case: Case, result: Case) -> str | None:
    """The first difference as text, or None."""
    try:
        return _judge(case, result)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        return f"malformed result: {error!r}"


def _judge(case: Case, result: Case) -> str | None:
    kind, want = case["kind"], case["expected"]
    if kind == "available":
        diff = same({key: want[key] for key in ("available", "max_possible") if key in want}, result)
        if diff or not case.get("probes"):
            return diff
        wanted, given = [p["fits"] for p in case["probes"]], result.get("probes")
        if not isinstance(given, list) or len(given) != len(wanted):
            return f"/probes: wanted {wanted}, got {given!r}"
        return next(
            (
                f"/probes/{i}: wanted {w}, got {g!r}"
                for i, (w, g) in enumerate(zip(wanted, given, strict=True))
                if w is not g
            ),
            None,
        )
    if kind == "division" and set(result.get("share", {})) != set(want["share"]):
        return f"/share: queues {sorted(result.get('share', {}))}"
    if kind == "queue_level":
        jobs = {job["id"]: job for job in case["running"]}
        got = result.get("victims")
        if got is None or any(v["id"] not in jobs for v in got) or len({v["id"] for v in got}) != len(got):
            return f"/victims: {got!r}"
        wanted = collections.Counter(victim_class(jobs[v["id"]]) for v in want["victims"])
        given = collections.Counter(victim_class(jobs[v["id"]]) for v in got)
        return (
            None
            if wanted == given
            else f"/victims: wanted {[v['id'] for v in want['victims']]}, got {[v['id'] for v in got]}"
        )
    if kind == "cluster":
        for level in ("workloads", "pods"):
            for name, outcome in want.get(level, {}).items():
                got = result.get(level, {}).get(name, {}).get("outcome")
                if (
                    got == "moved"
                    and outcome["outcome"] == "kept"
                    and "consolidation" in case.get("tags", ())
                ):
                    continue
                if got != outcome["outcome"]:
                    return f"/{level}/{name}: wanted {outcome['outcome']}, got {got}"
        return impossible(case, result)
    if kind == "level_fairshare":
        return same({"level_fs": want["level_fs"]}, result)
    if kind == "loop_guard":
        if result.get("settled") is not True:
            return f"/settled: {result.get('settled')!r}"
        count, most = result.get("evictions"), want["max_evictions"]
        return (
            None
            if type(count) is int and 0 <= count <= most
            else f"/evictions: at most {most}, got {count!r}"
        )
    if kind == "admission_order":
        wanted, given = (
            {key: sorted(r.get(key) or []) for key in ("admitted", "waiting")} for r in (want, result)
        )
        return same(wanted, given)
    if kind == "queueing":
        return same(want["admitted"], result.get("admitted"), "/admitted")
    return same(want, result)
