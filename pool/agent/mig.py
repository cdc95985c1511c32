"""New layouts of cards: MIG mode, GPU instances at their places, one compute instance in each.

Runs in a child process of the agent, as a crash or a hang of the driver's library must not take the agent along. A
layout is whole or not at all: what could not be made is taken back and what was there is made again.
"""

from __future__ import annotations

import json
import sys
from typing import Any

IN_USE = 19
COMPUTE_PROFILES, PROFILES = 9, 18
MOST_INSTANCES = 16


class LayoutError(Exception):
    """The layout was not made; ``code`` is stable."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Card:
    """One card through NVML."""

    def __init__(self, lib: Any, uuid: str) -> None:
        self.lib = lib
        self.handle = lib.nvmlDeviceGetHandleByUUID(uuid.encode())

    def in_use(self) -> bool:
        """Whether any process has the card open."""
        return bool(self.lib.nvmlDeviceGetComputeRunningProcesses_v3(self.handle))

    def enable(self) -> None:
        """MIG mode on, where it is not."""
        if self.lib.nvmlDeviceGetMigMode(self.handle)[0]:
            return
        if self.lib.nvmlDeviceSetMigMode(self.handle, 1) == IN_USE:
            raise LayoutError("card_in_use", "MIG mode cannot change while the card is used")
        if not self.lib.nvmlDeviceGetMigMode(self.handle)[0]:
            raise LayoutError(
                "needs_reset", "MIG mode is pending: the card needs a reset, or the node a reboot"
            )

    def profiles(self) -> dict[str, Any]:
        """Name → profile, as this card has them."""
        found = {}
        for number in range(PROFILES):
            try:
                info = self.lib.nvmlDeviceGetGpuInstanceProfileInfo(self.handle, number)
            except self.lib.NVMLError:
                continue
            name = info.name.decode() if isinstance(info.name, bytes) else str(info.name)
            found[name.replace("MIG ", "").strip()] = info
        return found

    def instances(self, profiles: dict[str, Any]) -> dict[tuple[str, int], Any]:
        """(profile, first memory slot) → GPU instance."""
        found = {}
        for name, info in profiles.items():
            for instance in self._listed(self.lib.nvmlDeviceGetGpuInstances, self.handle, info.id, "Gpu"):
                at = self.lib.nvmlGpuInstanceGetInfo(instance).placement.start
                found[(name, int(at))] = instance
        return found

    def _listed(self, call: Any, of: Any, profile: int, kind: str) -> list[Any]:
        room = (getattr(self.lib, f"c_nvml{kind}Instance_t") * MOST_INSTANCES)()
        count = self.lib.c_uint(0)
        try:
            call(of, profile, room, self.lib.byref(count))
        except self.lib.NVMLError:
            return []
        return [room[number] for number in range(count.value)]

    def destroy(self, instance: Any) -> None:
        """An instance with all that it holds."""
        for number in range(COMPUTE_PROFILES):
            lister = self.lib.nvmlGpuInstanceGetComputeInstances
            for compute in self._listed(lister, instance, number, "Compute"):
                self.lib.nvmlComputeInstanceDestroy(compute)
        self.lib.nvmlGpuInstanceDestroy(instance)

    def create(self, info: Any, start: int) -> Any:
        """An instance at its place with one compute instance of all its slices."""
        placement = self.lib.c_nvmlGpuInstancePlacement_t(start, 0)
        instance = self.lib.nvmlDeviceCreateGpuInstanceWithPlacement(
            self.handle, info.id, self.lib.byref(placement)
        )
        for number in range(COMPUTE_PROFILES):
            try:
                compute = self.lib.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, 0)
            except self.lib.NVMLError:
                continue
            if compute.sliceCount == info.sliceCount:
                self.lib.nvmlGpuInstanceCreateComputeInstance(instance, compute.id)
                return instance
        self.lib.nvmlGpuInstanceDestroy(instance)
        raise LayoutError("layout_failed", "the card has no compute instance of that size")


def apply(lib: Any, uuid: str, wanted: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Give a card exactly these instances; what fits already stays. Returns what it has now.

    Raises ``LayoutError``: ``card_in_use``, ``needs_reset``, ``no_such_profile``, ``layout_failed``.
    """
    card = Card(lib, uuid)
    if card.in_use():
        raise LayoutError("card_in_use", "processes use the card")
    card.enable()
    profiles = card.profiles()
    for name, _start in wanted:
        if name not in profiles:
            raise LayoutError("no_such_profile", f"the card has no profile {name}")
    before = card.instances(profiles)
    gone = [key for key in before if key not in wanted]
    for key in gone:
        card.destroy(before[key])
    made = []
    try:
        for name, start in wanted:
            if (name, start) not in before:
                made.append(card.create(profiles[name], start))
    except (LayoutError, lib.NVMLError) as error:
        for instance in made:
            card.destroy(instance)
        for name, start in gone:
            card.create(profiles[name], start)
        detail = f"{error}; the card has its former layout"
        raise LayoutError(getattr(error, "code", "layout_failed"), detail) from error
    return sorted(card.instances(profiles))


def main(text: str) -> int:
    """Carry out one order (JSON: gpu_uuid, profiles) and print how it went as JSON."""
    from pool.agent import nvml

    order = json.loads(text)
    try:
        lib = nvml.load()
        lib.nvmlInit()
        has = apply(
            lib, str(order["gpu_uuid"]), [(str(name), int(start)) for name, start in order["profiles"]]
        )
        answer: dict[str, Any] = {"ok": True, "code": "", "detail": "", "has": has}
    except LayoutError as error:
        answer = {"ok": False, "code": error.code, "detail": str(error)}
    except nvml.NvmlDown as error:
        answer = {"ok": False, "code": "nvml_down", "detail": error.reason}
    except Exception as error:  # whatever the driver says
        answer = {"ok": False, "code": "layout_failed", "detail": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0
