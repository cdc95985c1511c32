"""The batch script of a member or a gang. Every value from people is quoted; nothing of theirs is ever shell text of
ours but their command, which is one argument of `bash -c`.

The script stays while the command runs, so that a signal to the whole job reaches the command and not only its shell:
the command is a process group of its own, its exit code is the job's, and what it leaves behind in its group has until
the kill. A gang's command runs once a node under `srun`, with the variables that torchrun reads.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from pool.executors.base import TerminalFailure

NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
RESERVED = re.compile(
    r"^(SLURM|SBATCH|SRUN|GPUPOOL|CUDA_VISIBLE_DEVICES$|CUDA_DEVICE_ORDER$|GPU_DEVICE_ORDINAL$|NVIDIA_VISIBLE_DEVICES$"
    r"|ROCR_VISIBLE_DEVICES$|BASH_ENV$|ENV$|IFS$)"
)
ONE_NODE = """\
bash -c {command} &
"""
GANG = """\
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_PORT={port} NNODES="$SLURM_JOB_NUM_NODES" NPROC_PER_NODE={devices}
export WORLD_SIZE="$((SLURM_JOB_NUM_NODES * {devices}))"
export PET_MASTER_ADDR="$MASTER_ADDR" PET_MASTER_PORT="$MASTER_PORT" PET_NNODES="$NNODES"
export PET_NPROC_PER_NODE="$NPROC_PER_NODE" SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}"
srun --kill-on-bad-exit=1 --ntasks-per-node=1 bash -c {command} &
"""
RANKED = 'export NODE_RANK="$SLURM_NODEID" PET_NODE_RANK="$SLURM_NODEID" GPUPOOL_MEMBER="$SLURM_NODEID"\n'
FRAME = """\
#!/bin/bash
{exports}
mkdir -p -- {folder} && cd -- {folder} || {{ echo 'gpupool: the work folder cannot be used' >&2; exit 120; }}
for word in HUP INT TERM USR1 USR2 CONT; do trap : "$word"; done
set -m
{run}child=$!
set +m
while :; do wait "$child"; code=$?; kill -0 "$child" 2>/dev/null || break; done
while kill -0 -- "-$child" 2>/dev/null; do sleep 0.2; done
exit "$code"
"""


@dataclass(frozen=True)
class ScriptOrder:
    """What a script needs to know. ``devices``: cards or instances on each node; ``nodes``: how many nodes."""

    command: str
    folder: str
    environment: Mapping[str, str]
    ours: Mapping[str, str]
    nodes: int = 1
    devices: int = 0
    port: int = 29500
    image: str = ""
    image_runner: str = ""


def batch_script(order: ScriptOrder) -> str:
    """The whole text. Raises `TerminalFailure`: `environment_name`, `environment_reserved`, `command_unusable`."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in _environment(order).items()]
    command = order.command
    if "\0" in command:
        raise TerminalFailure("command_unusable", "the command has a NUL")
    if order.image:
        command = _in_image(order, command)
    if order.nodes > 1:
        run = GANG.format(
            command=shlex.quote(RANKED + command), port=order.port, devices=max(1, order.devices)
        )
    else:
        run = ONE_NODE.format(command=shlex.quote(command))
    return FRAME.format(exports="\n".join(exports), folder=shlex.quote(order.folder), run=run)


def _environment(order: ScriptOrder) -> dict[str, str]:
    out: dict[str, str] = {}
    for name, value in order.environment.items():
        if not NAME.match(name) or "\0" in value:
            raise TerminalFailure("environment_name", f"{name[:60]!r} cannot be set")
        if RESERVED.match(name):
            raise TerminalFailure("environment_reserved", f"{name[:60]} is not for people to set")
        out[name] = value
    return {**out, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **order.ours}


def _in_image(order: ScriptOrder, command: str) -> str:
    if order.image_runner != "apptainer":
        raise TerminalFailure("image_not_supported", "this cluster's settings name nothing that runs images")
    image = order.image if "://" in order.image else f"docker://{order.image}"
    words = ["apptainer", "exec", "--nv", "--", image, "bash", "-c", command]
    return shlex.join(words)
