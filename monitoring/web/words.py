"""Words for codes: why a measure is missing, what measures are called, what an XID asks for."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

REASONS: dict[str, Any] = {
    "not_supported": _("this card or its driver does not report it"),
    "not_permitted": _("the agent is not permitted to read it"),
    "not_reported": _("its source does not report it"),
    "gpu_lost": _("the driver has lost the card"),
    "reset_required": _("the card has to be reset first"),
    "collector_down": _("the collector on the node does not answer"),
    "error": _("the driver answered with an error"),
    "blank": _("the driver answered with its “no value” number"),
    "out_of_range": _("the value cannot be true and was refused"),
    "not_a_number": _("the value was not a number and was refused"),
    "card_level": _("counted once per card, not per slice"),
    "stale": _("the last sample is too old"),
    "lost": _("the card or its node is not heard of any more"),
    "no_sample": _("no sample has arrived yet"),
    "no_driver": _("no NVIDIA driver on the node"),
    "nvml_error": _("NVML does not work on the node"),
    "not_measurable": _("it cannot be measured of a card that is split"),
    "first_reading": _("it is told from the second reading on"),
    "driver_mismatch": _("the driver and its library differ: the node needs a restart"),
    "no_devices": _("the driver finds no cards"),
    "not_found": _("neither NVML nor nvidia-smi is on the node"),
}

MEASURES: dict[str, Any] = {
    "state": pgettext_lazy("measure", "State"),
    "busy": pgettext_lazy("measure", "Busy time"),
    "sm": pgettext_lazy("measure", "SM activity"),
    "mem": pgettext_lazy("measure", "Memory"),
    "temp": pgettext_lazy("measure", "Temperature"),
    "power": pgettext_lazy("measure", "Power"),
}
ICONS = {"state": "wall", "busy": "gauge", "sm": "chip", "mem": "memory", "temp": "thermo", "power": "bolt"}

EVENTS: dict[str, Any] = {
    "xid": _("XID {code}"),
    "gpu_lost": _("The driver lost the card"),
    "gpu_back": _("The card is back"),
    "nvml_broken": _("NVML stopped answering on the node"),
    "foreign_process": _("A process without a lease"),
}

ACTIONS: dict[str, Any] = {
    "ignore": _("noted; no change"),
    "log_only": _("noted; told to operators when it comes twice"),
    "restart_app": _("a fault of the program; its holder is told, the card stays in use"),
    "watch": _("watched; scheduling goes on"),
    "drain_gpu": _("nothing new is placed on this card until it was reset and tested"),
    "drain_node": _("nothing new is placed on this node until it was restarted"),
    "reset_when_idle": _("the card is reset when it is next free"),
    "ticket": _("a person has to look at it"),
}


def reason(code: str) -> Any:
    """The words of a reason; an unknown code is shown as it is."""
    return REASONS.get(code, code)
