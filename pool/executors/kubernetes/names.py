"""Names and texts on their way into a manifest: what Kubernetes takes, and nothing that would mean more there.

Pure. What people wrote (commands, images, variables, department codes) ends as data in exactly the field that it is
meant for: names are made here, never taken; values are checked, and `$` is doubled because Kubernetes expands
``$(NAME)`` in commands and variables.
"""

from __future__ import annotations

import hashlib
import re
from uuid import UUID

MANAGED_BY = "app.kubernetes.io/managed-by"
US = "gpu-pool-portal"
ALLOCATION = "gpupool.io/allocation"
MEMBER = "gpupool.io/member"
DEPARTMENT = "gpupool.io/department"
NODE = "gpupool.io/node"
REFERENCE = "gpupool.io/reference"
CORDONED = "gpupool.io/cordoned"
"""Key of the taint that closes a node for this pool's sake, and of the annotation that says why."""

COMMAND_BYTES = 64 * 1024
VALUE_BYTES = 32 * 1024
VARIABLES = 200
IMAGE_CHARS = 255

_LABEL = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:(?P<host>{_HOST})/)?(?P<path>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_OURS = re.compile(
    r"""(?:
      GPUPOOL_.* | KUBERNETES_.* | NVIDIA_.* | CUDA_VISIBLE_DEVICES | CUDA_DEVICE_ORDER | CUDA_MPS_.* | LD_PRELOAD
    | CUDA_DISABLE_CONTROL | CUDA_DEVICE_MEMORY_.* | CUDA_DEVICE_SM_LIMIT | CUDA_OVERSUBSCRIBE | CUDA_TASK_PRIORITY
    | GPU_CORE_UTILIZATION_POLICY | MASTER_ADDR | MASTER_PORT | NODE_RANK | NNODES | NPROC_PER_NODE
    | JOB_COMPLETION_INDEX
    )""",
    re.VERBOSE | re.IGNORECASE,
)
"""Variables that choose devices, limits or who meets whom: set by us, the device plugin or HAMi, and by nobody else."""


class SpecError(ValueError):
    """Work that cannot be put into a manifest: `code` is stable, `detail` explains."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


def namespace_of(department_code: str, prefix: str = "gpupool") -> str:
    """The namespace of a department: its code where that is a name already, else made into one that no other code
    gets (a short hash is added)."""
    plain = re.sub(r"[^a-z0-9]+", "-", department_code.lower()).strip("-")
    room = 63 - len(prefix) - 1
    if plain != department_code or len(plain) > room or not plain:
        mark = hashlib.sha256(department_code.encode()).hexdigest()[:8]
        plain = f"{plain[: room - 9].rstrip('-')}-{mark}".lstrip("-")
    return f"{prefix}-{plain}"


def group_name(uid: UUID) -> str:
    """What all members of an allocation share: the name of its service, and the start of their pods' names."""
    return f"gp-{uid.hex}"


def pod_name(uid: UUID, number: int) -> str:
    """The one name that a member's pod can have: a second start finds it taken."""
    return f"{group_name(uid)}-{number}"


def label_value(text: str) -> str:
    """The text as a label value: what a label cannot hold becomes `-`; at most 63 characters."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.")
    assert _LABEL.fullmatch(plain)
    return plain


def literal(text: str) -> str:
    """The text such that Kubernetes leaves it as it is: it reads `$$` as `$` and expands ``$(NAME)``."""
    return text.replace("$", "$$")


def command_checked(command: str) -> str:
    """A command for a shell. `command_not_possible` for what no process can be given (NUL, too long)."""
    if "\0" in command:
        raise SpecError("command_not_possible", "the command has a NUL character")
    if len(command.encode()) > COMMAND_BYTES:
        raise SpecError("command_not_possible", f"the command is longer than {COMMAND_BYTES} bytes")
    return command


def image_checked(image: str, registries: tuple[str, ...] = ()) -> str:
    """An image reference; with ``registries`` only from these (``host`` or ``host/path``).

    `image_not_possible` where it is no reference, `registry_not_allowed` where it comes from elsewhere.
    """
    found = _IMAGE.fullmatch(image)
    if found is None or len(image) > IMAGE_CHARS:
        raise SpecError("image_not_possible", f"no image reference: {image[:80]!r}")
    host, path = found["host"], found["path"]
    if host is not None and not ("." in host or ":" in host or host == "localhost"):
        host, path = None, f"{host}/{path}"
    full = f"{host or 'docker.io'}/{path}"
    if registries and not any(full == one or full.startswith(one.rstrip("/") + "/") for one in registries):
        raise SpecError(
            "registry_not_allowed", f"images of {host or 'docker.io'} are not allowed on this cluster"
        )
    return image


def variables_checked(variables: dict[str, str]) -> dict[str, str]:
    """A person's variables. `variable_not_possible` for names and values that no process can have,
    `variable_reserved` for those that would override what gives the work its devices."""
    if len(variables) > VARIABLES:
        raise SpecError("variable_not_possible", f"more than {VARIABLES} variables")
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            raise SpecError("variable_not_possible", f"no name of a variable: {name[:80]!r}")
        if _OURS.fullmatch(name):
            raise SpecError("variable_reserved", f"{name} is set by the pool and cannot be changed")
        if "\0" in value or len(value.encode()) > VALUE_BYTES:
            raise SpecError(
                "variable_not_possible", f"the value of {name} is too long or has a NUL character"
            )
    return variables
