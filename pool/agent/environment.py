"""The environment that a job sees. Built from nothing: the agent's own variables never reach a job."""

from __future__ import annotations

import os
import re
from typing import Any

from pool.agent.accounts import Account
from pool.agent.procs import MARKER

NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OURS = frozenset(
    ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "LD_PRELOAD", "LD_LIBRARY_PATH")
)
OUR_PREFIXES = ("CUDA_MPS_", "CUDA_DEVICE_MEMORY_", "CUDA_DEVICE_SM_")
PASSED_ON = ("LANG", "LC_ALL", "LC_CTYPE", "TZ")


def decides(name: str) -> bool:
    """Whether a variable would change which devices, limits or code the job gets: the pool's to set alone."""
    return name in OURS or name.startswith(OUR_PREFIXES)


def device_variables(spec: dict[str, Any]) -> dict[str, str]:
    """Which devices CUDA may see. MIG instances replace their card; without devices CUDA sees none."""
    devices = [str(uuid) for uuid in spec.get("mig_uuids") or spec.get("gpu_uuids") or []]
    result = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    if not devices:
        result["NVIDIA_VISIBLE_DEVICES"] = "void"
    charge = spec.get("charge_milli")
    if devices and not spec.get("mig_uuids") and charge and 0 < int(charge) < 1000:
        # MPS clients read these; without a daemon on the node (``mps``) they have no effect.
        result["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(max(1, -(-int(charge) // 10)))
        limit = spec.get("gpu_mem_limit_mib")
        if limit:
            result["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(
                f"{number}={int(limit)}M" for number in range(len(devices))
            )
    return result


def rendezvous_variables(spec: dict[str, Any]) -> dict[str, str]:
    """What torchrun and its likes need to form a gang; empty for a job of one node."""
    meeting = spec.get("rendezvous")
    if not meeting:
        return {}
    nodes, local = int(meeting.get("nnodes") or 1), int(meeting.get("nproc") or 1)
    address, port = str(meeting.get("master_addr") or ""), str(meeting.get("master_port") or 29500)
    rank = str(meeting.get("node_rank") or 0)
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "NNODES": str(nodes),
        "NODE_RANK": rank,
        "NPROC_PER_NODE": str(local),
        "WORLD_SIZE": str(nodes * local),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": port,
        "PET_NNODES": str(nodes),
        "PET_NODE_RANK": rank,
        "PET_NPROC_PER_NODE": str(local),
    }


def build(
    spec: dict[str, Any],
    account: Account,
    allocation: str,
    member: int,
    work_dir: str,
    more: dict[str, str] | None = None,
) -> dict[str, str]:
    """The whole environment. What the person set stands, except for the names that decide device and
    identity."""
    result = {
        "PATH": os.environ.get("PATH") or DEFAULT_PATH if not account.switch else DEFAULT_PATH,
        "LANG": "C.UTF-8",
    }
    result.update({name: os.environ[name] for name in PASSED_ON if os.environ.get(name)})
    for name, value in (spec.get("env") or {}).items():
        if NAME.match(str(name)) and "\0" not in str(value) and not decides(str(name)):
            result[str(name)] = str(value)
    result.update(
        {
            "HOME": account.home,
            "USER": account.name,
            "LOGNAME": account.name,
            "SHELL": account.shell,
            "PWD": work_dir,
            "GPUPOOL_ALLOCATION": allocation,
            "GPUPOOL_MEMBER": str(member),
            "GPUPOOL_WORKDIR": work_dir,
            "GPUPOOL_USER": str(spec.get("user") or ""),
            "GPUPOOL_GPU_UUIDS": ",".join(str(uuid) for uuid in spec.get("gpu_uuids") or []),
            "GPUPOOL_CHARGE_MILLI": str(spec.get("charge_milli") or 0),
            MARKER: f"{allocation}/{member}",
        }
    )
    result.update(rendezvous_variables(spec))
    result.update(device_variables(spec))
    result.update(more or {})
    return result
