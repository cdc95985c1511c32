"""The simulated fleet: three sites, a dozen nodes, 64 cards of six models, MIG and NVLink among them.

`nodes()` gives what each agent would report; the same reports stand in the fleet file of `demo_agents`.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

_NAMESPACE = uuid.UUID("6f0e5b1e-6a52-5f3e-9a51-2f8a1f0c7d11")
DRIVER, CUDA = "550.127.08", "12.4"


@dataclass(frozen=True)
class Model:
    """A card model: its NVML name, MiB, power limit, and NVLinks (0: none)."""

    code: str
    name: str
    memory_mib: int
    watts: int
    nvlinks: int


H800 = Model("h800-80gb", "NVIDIA H800", 81559, 700, 8)
A100 = Model("a100-80gb", "NVIDIA A100-SXM4-80GB", 81920, 400, 12)
H20 = Model("h20-96gb", "NVIDIA H20", 97871, 500, 18)
L40S = Model("l40s-48gb", "NVIDIA L40S", 46068, 350, 0)
L20 = Model("l20-48gb", "NVIDIA L20", 46068, 275, 0)
A30 = Model("a30-24gb", "NVIDIA A30", 24576, 165, 0)

# site, node, model, cards, indexes split by MIG
LAYOUT: tuple[tuple[str, str, Model, int, tuple[int, ...]], ...] = (
    ("shanghai", "sh-h800-01", H800, 8, ()),
    ("shanghai", "sh-h800-02", H800, 8, ()),
    ("shanghai", "sh-l20-01", L20, 4, ()),
    ("shanghai", "sh-l20-02", L20, 4, ()),
    ("beijing", "bj-a100-01", A100, 8, ()),
    ("beijing", "bj-a100-02", A100, 8, (6, 7)),
    ("beijing", "bj-a30-01", A30, 4, (2, 3)),
    ("beijing", "bj-a30-02", A30, 4, ()),
    ("hangzhou", "hz-h20-01", H20, 4, ()),
    ("hangzhou", "hz-h20-02", H20, 4, ()),
    ("hangzhou", "hz-l40s-01", L40S, 4, ()),
    ("hangzhou", "hz-l40s-02", L40S, 4, ()),
)
# Cards that show something: no data, an XID
BEHAVIOUR: dict[tuple[str, int], dict[str, Any]] = {
    ("sh-l20-02", 3): {"behaviour": "no_data"},
    ("bj-a30-02", 3): {"behaviour": "xid", "xid": 63},
}
# A card on which somebody works without a lease
FOREIGN = ("bj-a30-02", 2)
# Slices of a split card: (profile, start, size in memory slots, MiB)
SPLITS: dict[str, tuple[tuple[str, int, int, int], ...]] = {
    "a100-80gb": (("3g.40gb", 0, 4, 40192), ("2g.20gb", 4, 2, 19968), ("1g.10gb", 6, 1, 9728)),
    "a30-24gb": (("2g.12gb", 0, 2, 11971), ("1g.6gb", 2, 1, 5949), ("1g.6gb", 3, 1, 5949)),
}


def _id(*parts: object) -> str:
    return str(uuid.uuid5(_NAMESPACE, "/".join(str(p) for p in parts)))


def gpu_uuid(node: str, index: int) -> str:
    """The made-up UUID of a card: the same in every demo."""
    return f"GPU-{_id(node, index)}"


def _card(node: str, model: Model, index: int, count: int, split: bool) -> dict[str, Any]:
    uid = gpu_uuid(node, index)
    slices = [
        {
            "uuid": f"MIG-{_id(node, index, start)}",
            "profile": profile,
            "gi": number + 1,
            "ci": 0,
            "start": start,
            "size": size,
            "memory_mib": mib,
        }
        for number, (profile, start, size, mib) in enumerate(SPLITS[model.code] if split else ())
    ]
    peers = [gpu_uuid(node, other) for other in range(count) if other != index]
    return {
        "uuid": uid,
        "index": index,
        "name": model.name,
        "memory_mib": model.memory_mib,
        "power_limit_mw": model.watts * 1000,
        "pci_bus_id": f"00000000:{0x1B + 0x10 * index:02X}:00.0",
        "serial": f"SIM{uuid.UUID(uid[4:]).int % 10**10:010d}",
        "minor": index,
        "nvlink": {"links": model.nvlinks, "peers": peers} if model.nvlinks else None,
        "pcie": {"gen": 5 if model in (H800, H20) else 4, "width": 16},
        "mig": {"capable": model.code in SPLITS or model in (H800, H20), "enabled": split, "slices": slices},
    }


def nodes() -> list[dict[str, Any]]:
    """Nodes as the fleet file has them, without their tokens; `site` and `model` are ours."""
    out = []
    for number, (site, name, model, count, split) in enumerate(LAYOUT):
        big = count == 8
        out.append(
            {
                "name": name,
                "site": site,
                "model": model.code,
                "machine_id": _id("machine", name).replace("-", ""),
                "hostname": name,
                "os": "Ubuntu 22.04.5 LTS",
                "kernel": "5.15.0-122-generic",
                "cpu_model": "Intel Xeon Platinum 8480+" if big else "AMD EPYC 9354",
                "cpu_milli": 192_000 if big else 64_000,
                "memory_mib": 2_063_000 if big else 515_000,
                "driver": DRIVER,
                "cuda": CUDA,
                "gpus": [_card(name, model, i, count, i in split) for i in range(count)],
                "number": number,
            }
        )
    return out


def hello_of(node: dict[str, Any], now: str) -> dict[str, Any]:
    """The introduction that the node's agent will make, so that the fleet is there before the agents are."""
    facts = {k: node[k] for k in ("os", "kernel", "cpu_model", "cpu_milli", "memory_mib", "driver", "cuda")}
    return {
        "t": "hello",
        "v": 1,
        "agent_version": "simulated",
        "boot_id": f"simulated-{node['name']}",
        "hostname": node["hostname"],
        "machine_id": node["machine_id"],
        "now": now,
        "run_as": {"root": True, "user": "root"},
        "facts": {**facts, "nvml": {"ok": True, "reason": None}, "simulated": True},
        "gpus": node["gpus"],
        "jobs": [],
    }


def fleet_file(found: list[dict[str, Any]], tokens: dict[str, str]) -> dict[str, Any]:
    """The content of the fleet file (it holds tokens: write it with mode 0600)."""
    rows = []
    for node in found:
        gpus = [{**gpu, **BEHAVIOUR.get((node["name"], gpu["index"]), {})} for gpu in node["gpus"]]
        rows.append({**node, "token": tokens[node["name"]], "gpus": gpus, "jobs": []})
    return {"nodes": rows}
