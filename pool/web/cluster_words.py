"""Words for what checks of outside systems find, and for why they cannot be used."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy as _

FINDINGS: dict[str, Any] = {
    "controller_answers": _("The controller answers"),
    "version_known": _("Its version is one we know"),
    "partition_there": _("The partition has nodes"),
    "nodes_with_gpus": _("Nodes with GPUs"),
    "gpu_types_known": _("All GPU types have a model"),
    "folder_usable": _("The shared folder can be written"),
    "accounts_there": _("Departments have their accounts"),
    "accounting_kept": _("Accounting is kept"),
    "may_submit_for_others": _("Work can be submitted as its owners"),
    "agent_enrolled": _("The node is enrolled"),
    "agent_heard": _("The node is heard of"),
    "controller_away": _("The controller does not answer"),
    "slurm_slow": _("The controller is too slow"),
    "slurmrestd_away": _("slurmrestd does not answer"),
    "login_host_away": _("The login host does not answer"),
    "credential_refused": _("The credential is not accepted"),
    "credential_unreadable": _("The credential must be entered again"),
    "settings_wrong": _("The settings cannot be used"),
    "command_missing": _("Slurm's commands are not installed here"),
    "slurm_refused": _("Slurm refuses"),
    "answers": _("The API server answers"),
    "credential_lasts": _("The credential lasts"),
    "right": _("The account may"),
    "gpu_nodes": _("Nodes offer GPUs"),
    "gpu_operator_not_ready": _("The GPU Operator is not ready there"),
    "mig_invalid": _("The MIG layout is not one that the device plugin takes"),
    "mig_layout_unknown": _("The MIG layout is not known"),
    "mig_not_there": _("The MIG layout that was asked for is not there"),
    "mig_managed_twice": _("Two programs manage MIG there"),
    "hami_register_unreadable": _("HAMi's register cannot be read"),
    "cluster_away": _("The API server does not answer"),
    "throttled": _("The API server asks for patience"),
    "credential_missing": _("The credential is missing"),
    "credential_expired": _("The credential has expired"),
    "rights_missing": _("The account lacks a right"),
    "adopted_already": _("Taken in already"),
    "work_over": _("It has ended"),
}


def finding_word(code: str) -> Any:
    """What a finding is called; an unknown code is shown as it is."""
    return FINDINGS.get(code, code)
