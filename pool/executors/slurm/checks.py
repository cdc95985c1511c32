"""What a check of a Slurm cluster looks at. Each finding is (code, ok, detail); nothing is changed."""

from __future__ import annotations

import os

from pool.executors.base import ExecutorFailure, TerminalFailure
from pool.executors.slurm.limits import accounts_missing
from pool.executors.slurm.orders import unknown_types
from pool.executors.slurm.settings import SlurmSettings
from pool.executors.slurm.transport import SlurmTransport
from pool.models import Cluster

Finding = tuple[str, bool, str]
OLDEST = (21, 8)


def cluster_check(cluster: Cluster, transport: SlurmTransport, settings: SlurmSettings) -> list[Finding]:
    """From what everything rests on to what only some work needs."""
    try:
        version = transport.version()
        nodes = transport.nodes()
    except ExecutorFailure as error:
        return [(error.code, False, error.detail)]
    out: list[Finding] = [
        ("controller_answers", True, f"Slurm {version[0]}.{version[1]:02d}"),
        ("version_known", version >= OLDEST, f"{version[0]}.{version[1]:02d}"),
    ]
    mine = [node for node in nodes if not settings.partition or settings.partition in node.partitions]
    if settings.partition:
        out.append(("partition_there", bool(mine), settings.partition))
    out.append(("nodes_with_gpus", any(node.gres for node in mine), str(sum(bool(n.gres) for n in mine))))
    unknown = sorted({kind for node in mine for kind in unknown_types(node, settings)})
    out.append(("gpu_types_known", not unknown, ", ".join(unknown)))
    out.append(_folder(settings))
    try:
        missing = accounts_missing(cluster, transport.associations(), settings)
        out.append(("accounts_there", not missing, ", ".join(missing)))
    except TerminalFailure as error:
        # Without accounting nothing but the comparison of books and the push of limits is lost.
        out.append(("accounting_kept", error.code == "no_accounting", error.detail))
    except ExecutorFailure as error:
        out.append((error.code, False, error.detail))
    if settings.submit_as == "person":
        out.append(("may_submit_for_others", os.geteuid() == 0 or bool(settings.ssh_host), ""))
    return out


def _folder(settings: SlurmSettings) -> Finding:
    usable = (
        bool(settings.folder)
        and os.path.isdir(settings.folder)
        and os.access(settings.folder, os.W_OK | os.X_OK)
    )
    return ("folder_usable", usable, settings.folder)
