"""A cluster's settings: what an administrator decided about it, checked once and read everywhere.

Pure. Never secrets: kubeconfig and token are credentials of the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pool.executors.kubernetes.names import SpecError, image_checked

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_PATH = re.compile(r"/[A-Za-z0-9._/-]{1,200}")
COMMON = frozenset({"active"})
"""Settings that clusters of all kinds have."""
VOLUME_KINDS = ("claim", "nfs")


@dataclass(frozen=True)
class Volume:
    """Storage that every pod gets at `path`: a claim of its namespace, or an NFS export (`server:/path`). Never a
    folder of the node: that would be the node's to lose."""

    name: str
    kind: str
    source: str
    path: str
    read_only: bool = True


@dataclass(frozen=True)
class Options:
    """``server``, ``ca``: where to call and by which authority, used with the credential `token`; a `kubeconfig` has
    its own. ``default_image`` runs commands and holds that name no image. ``run_as``: the user of containers; with
    ``allow_root`` images may decide.
    """

    server: str = ""
    ca: str = ""
    namespace_prefix: str = "gpupool"
    create_namespaces: bool = True
    default_image: str = ""
    registries: tuple[str, ...] = ()
    registry_logins: tuple[str, ...] = ()
    run_as: int = 10000
    allow_root: bool = False
    tolerations: tuple[str, ...] = ()
    scheduler: str = ""
    priority_class: str = ""
    volumes: tuple[Volume, ...] = ()


def options_of(settings: Mapping[str, Any]) -> Options:
    """Read them; `settings_wrong` names the first that is unknown or not as it must be."""
    known = {item.name: item for item in fields(Options)}
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name in COMMON:
            continue
        if name not in known:
            raise SpecError("settings_wrong", f"unknown setting {name!r}")
        values[name] = _checked(name, value)
    if values.get("server") and not str(values["server"]).startswith("https://"):
        raise SpecError("settings_wrong", "server: an https address")
    if values.get("default_image"):
        image_checked(values["default_image"])
    return Options(**values)


def problems_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with each setting, by its name; empty where all is well."""
    out: dict[str, str] = {}
    for name, value in settings.items():
        try:
            options_of({name: value})
        except SpecError as error:
            out[name] = error.detail
    return out


def _checked(name: str, value: Any) -> Any:
    default = getattr(Options(), name)
    if name == "volumes":
        return tuple(_volume(item) for item in _listed(name, value))
    if isinstance(default, tuple):
        items = tuple(_listed(name, value))
        if not all(isinstance(item, str) and item for item in items):
            raise SpecError("settings_wrong", f"{name}: a list of words")
        return items
    right = type(value) is type(default)  # a bool is no number here
    if not right or (name == "run_as" and not 1 <= value <= 2**31 - 1):
        raise SpecError("settings_wrong", f"{name}: {type(default).__name__} expected")
    if name == "namespace_prefix" and (not _NAME.fullmatch(value) or len(value) > 30):
        raise SpecError("settings_wrong", "namespace_prefix: lower case letters, digits and -, at most 30")
    return value


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise SpecError("settings_wrong", f"{name}: a list expected")
    return list(value)


def _volume(item: Any) -> Volume:
    if not isinstance(item, Mapping) or not set(item) <= {"name", "kind", "source", "path", "read_only"}:
        raise SpecError("settings_wrong", "volumes: name, kind, source, path, read_only")
    made = Volume(**{"read_only": True, **item})
    good = (
        _NAME.fullmatch(str(made.name))
        and made.kind in VOLUME_KINDS
        and _PATH.fullmatch(str(made.path))
        and made.path not in ("/work", "/dev/shm")
        and isinstance(made.source, str)
        and isinstance(made.read_only, bool)
    )
    if made.kind == "nfs":
        good = good and re.fullmatch(r"[A-Za-z0-9.-]+:/[A-Za-z0-9._/-]*", made.source) is not None
    else:
        good = good and _NAME.fullmatch(made.source) is not None
    if not good:
        raise SpecError("settings_wrong", f"volume {item!r} is not as it must be"[:200])
    return made
