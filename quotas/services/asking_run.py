"""What a request runs, as asked: command or image, environment, checkpoint hook, health check."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.utils.translation import gettext as _

from portal.kernel.addresses import literal, may_be_called
from quotas.models import CapacityRequest, GpuFlavour
from quotas.services.reader import Reader

CUDA = re.compile(r"^\d{1,2}\.\d{1,2}$")
NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@:-]*")
RESERVED = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "LD_PRELOAD", "LD_LIBRARY_PATH"),
    *("HOME", "USER", "LOGNAME", "SHELL", "PWD"),
)
RESERVED_PREFIXES = ("GPUPOOL_", "CUDA_MPS_", "CUDA_DEVICE_MEMORY_", "CUDA_DEVICE_SM_")
"""What the pool sets itself: devices, limits, who and where it runs."""
CATCHABLE = {one.name for one in signals.Signals} - {"SIGKILL", "SIGSTOP"}
"""Signals that a program may take as its sign to write a checkpoint."""
HEALTH_KINDS = ["http", "tcp", "command"]


def read_run(r: Reader, draft: bool) -> None:
    """Command, image or hold; environment, checkpoint hook, health check; the CUDA that it needs."""
    kind = r.choice("run_kind", list(CapacityRequest.RUN_KINDS_ASKED), "command")
    needs = {
        "command": _("Say what to run, or choose a hold."),
        "image": _("Name the container image."),
    }
    r.text("command", 20_000, needed=needs["command"] if kind == "command" and not draft else None)
    image = r.text("image", 300, needed=needs["image"] if kind == "image" and not draft else None)
    if image and re.search(r"\s", image):
        r.wrong("image", _("An image name has no blanks."))
    elif image and not IMAGE.fullmatch(image):
        r.wrong(
            "image",
            _("An image name begins with a letter or digit; it has letters, digits and . _ / @ : - only."),
        )
    cuda = r.text("cuda_min", 16)
    if cuda and not CUDA.fullmatch(cuda):
        r.wrong("cuda_min", _("A CUDA version is needed here, for example 12.4."))
    _cuda_exists(r, cuda)
    environment = r.values.get("environment") or {}
    if not isinstance(environment, Mapping) or len(environment) > 100:
        r.wrong("environment", _("Names and values, at most 100."))
        environment = {}
    for name, value in environment.items():
        ours = str(name) in RESERVED or str(name).startswith(RESERVED_PREFIXES)
        if not NAME.fullmatch(str(name)) or ours or not isinstance(value, str | int | float):
            r.wrong("environment", _("{name} cannot be set.").format(name=str(name)[:60]))
    r.out["environment"] = {str(k): str(v)[:4000] for k, v in environment.items()}
    _checkpoint(r)
    _health(r)


def _cuda_exists(r: Reader, cuda: str) -> None:
    """Refuse a CUDA version that no node of the chosen flavour can run (where the pool has told what they
    can).
    """
    flavour: GpuFlavour | None = r.out.get("flavour")
    capacity = getattr(flavour, "capacity", None)
    if flavour is None or (
        not cuda
        or capacity is None
        or not capacity.cuda_max
        or any(p["pointer"] == "cuda_min" for p in r.problems)
    ):
        return
    if version(cuda) > version(capacity.cuda_max):
        r.wrong(
            "cuda_min",
            _("The drivers on nodes of {name} run CUDA up to {most}; {cuda} is asked.").format(
                name=flavour.name, most=capacity.cuda_max, cuda=cuda
            ),
        )


def version(text: str) -> tuple[int, ...]:
    """A dotted version as numbers, to compare."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _checkpoint(r: Reader) -> None:
    sent = r.values.get("checkpoint")
    sent = {} if sent in (None, "") else sent
    if not isinstance(sent, Mapping) or set(sent) - {"signal", "command", "url", "seconds"}:
        r.wrong("checkpoint", _("A signal, command or URL, and the seconds it needs."))
        r.out["checkpoint"] = {}
        return
    inner = Reader(sent)
    out: dict[str, Any] = {name: inner.text(name, 2000) for name in ("command", "url")}
    signal = inner.text("signal", 16).upper()
    if signal and signal not in CATCHABLE:
        inner.wrong("signal", _("A signal that a program can take is needed here, for example SIGUSR1."))
    if out["url"] and not _web_address(out["url"]):
        inner.wrong("url", _("An address of the form https://host/path is needed here."))
    elif out["url"] and not _may_be_called(out["url"]):
        inner.wrong("url", _("This address is not a public one, nor one that an administrator allowed."))
    out |= {"signal": signal, "seconds": inner.whole("seconds", 120, 1, 3600)}
    for problem in inner.problems:
        r.wrong("checkpoint", problem["detail"])
    hooked = any(out[name] for name in ("signal", "command", "url"))
    r.out["checkpoint"] = {key: value for key, value in out.items() if value} if hooked else {}


def _web_address(text: str) -> bool:
    """An http address with a host and nobody's name in it."""
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and not parts.username
            and parts.port != 0
        )
    except ValueError:
        return False


def _may_be_called(url: str) -> bool:
    """Whether an address that stands there as numbers may be called; names are looked up at the call."""
    address = literal(urlsplit(url).hostname or "")
    return not address or may_be_called(address, address, settings.GPUPOOL_HOOK_ALLOW)


def _health(r: Reader) -> None:
    """How one sees that a replica serves: an HTTP path, a TCP port, or a command; how often, and after how
    many failures in a row it counts as down.
    """
    r.out["health"] = {}
    keys = {"kind", "port", "path", "command", "every_s", "failures"}
    inner = r.part("health", keys, _("kind, port, path or command, every_s, failures are known here."))
    if inner is None:
        return
    kind = inner.choice("kind", HEALTH_KINDS, "http")
    port = inner.whole("port", None, 1, 65535)
    path = inner.text("path", 300)
    command = inner.text("command", 2000)
    if kind == "command" and not command:
        inner.wrong("command", _("Say which command to run; it ends with 0 where all is well."))
    if kind != "command" and port is None:
        inner.wrong("port", _("A port is needed here."))
    if kind == "http" and path and not path.startswith("/"):
        inner.wrong("path", _("A path begins with /."))
    inner.whole("every_s", 15, 1, 3600)
    inner.whole("failures", 3, 1, 100)
    r.take("health", inner)
    kept: dict[str, Any] = {"kind": kind, "every_s": inner.out["every_s"], "failures": inner.out["failures"]}
    if kind == "command":
        kept["command"] = command
    else:
        kept["port"] = port
    if kind == "http":
        kept["path"] = path or "/"
    r.out["health"] = kept
