"""What the kinds of incidents are called, what they mean, and what to do next. Registered by the wiring, so that
the rooms that open them need no words for people."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from portal.ops.kinds import Text, register

WORDS: dict[str, tuple[Text, Text, Text]] = {
    "node_lost": (
        _("Node lost"),
        _("The node's agent has not been heard of for too long."),
        _("Look at its power, its network and its agent. Work on it is queued again once it is fenced."),
    ),
    "outbox_stuck": (
        _("News could not be delivered"),
        _("A part of the installation failed ten times to take in what another told it."),
        _("Read the error below; once its cause is mended, tell the event again from the data admin."),
    ),
    "request_cannot_be_judged": (
        _("A request stops the scheduler's judgement"),
        _("The scheduler failed over one request and set it aside, so that all others go on."),
        _("Read the error below and report it; the request is tried again as soon as it is changed."),
    ),
    "reclaim_thrashing": (
        _("Displaced again and again"),
        _(
            "One request was displaced several times within a day. The scheduler leaves it alone for a while by itself."
        ),
        _("See who displaces it: a larger guarantee, another priority or a shorter checkpoint helps."),
    ),
    "mig_layout_wanted": (
        _("A card is to be split anew"),
        _("A request waits for slices that no card has, and this one holds no work."),
        _(
            "Its agent splits it where it can; else run the commands below on its node. The task closes by itself when "
            "the card has the slices."
        ),
    ),
    "mig_layout_failed": (
        _("A card could not be split anew"),
        _(
            "The node's agent was told to split a free card and failed; the card has its former layout and is open "
            "again."
        ),
        _(
            "The code below says why: a pending MIG mode needs a reset of the card. The commands do the rest by hand."
        ),
    ),
    "nvml_broken": (
        _("GPU library broken on a node"),
        _("The agent runs, but the NVIDIA driver's library does not answer it."),
        _("Compare driver and library versions on the node; mostly a restart after a driver upgrade is due."),
    ),
    "xid": (
        _("GPU error (XID)"),
        _("The driver reported an error code of a GPU."),
        _("The code below tells hardware from application errors; hardware ones keep the GPU out of use."),
    ),
    "gpu_fault": (
        _("GPU fault"),
        _("A GPU is judged faulty and takes no new work."),
        _("Check the card; clear the condition on its page once it is well."),
    ),
    "gpu_suspect": (
        _("GPU suspect"),
        _("A GPU behaves oddly; it takes no new work until it is judged."),
        _("Look at its errors and temperature; clear the condition on its page once it is well."),
    ),
    "alert": (
        _("Alert rule fires"),
        _("A measure has been beyond the threshold of an alert rule for as long as the rule says."),
        _("See below what it is about; it closes by itself when nothing is beyond the threshold."),
    ),
    "gpu_ecc": (
        _("Uncorrectable memory errors"),
        _("The counter of uncorrectable ECC errors of a GPU grew."),
        _("Test the card when it is empty; clear its condition once it is well, or replace it."),
    ),
    "gpu_ecc_replace": (
        _("Too many memory errors"),
        _("The card itself says that its memory errors passed the limit for replacement."),
        _("Open a case with the vendor; the card takes no new work."),
    ),
    "gpu_remap_failed": (
        _("Row remapping failed"),
        _("The GPU has no spare memory rows left for a faulty one."),
        _("Replace the card; it takes no new work."),
    ),
    "gpu_remap_pending": (
        _("Reset needed to remap memory"),
        _("A faulty memory row is set aside at the next reset of the GPU."),
        _("Reset the card when it is empty; it closes by itself then."),
    ),
    "gpu_throttled": (
        _("GPU throttled by heat"),
        _("Its clocks have been held down by heat while it worked."),
        _("Look at airflow, fans and inlet temperature; compare with the neighbours of the card."),
    ),
    "gpu_stranded": (
        _("MIG layout leaves parts that nobody can use"),
        _("The instances on the card leave compute slices that no profile fits into."),
        _("Cordon the card, let it become empty, and have another layout made; it closes by itself then."),
    ),
    "gpu_power_brake": (
        _("GPU throttled by its power supply"),
        _("The node's power supply holds the GPU down."),
        _("Look at the power supplies and cables of the node."),
    ),
    "gpu_link_width": (
        _("PCIe link narrower than it should be"),
        _("The GPU runs with fewer PCIe lanes than it has."),
        _("Reseat the card or its riser; look for corrected errors in the kernel log."),
    ),
    "gpu_link_gen": (
        _("PCIe link slower than it should be"),
        _("The GPU works at a lower PCIe generation than it can."),
        _("Look at firmware settings and the riser of the card."),
    ),
    "gpu_nvlink": (
        _("NVLinks missing"),
        _("The GPU has fewer NVLinks up than the others of its node."),
        _("Look at the NVLink state on the node; a reset or a restart may bring them back."),
    ),
    "gpu_fan_error": (
        _("Fan cannot be read"),
        _("The driver answers with an error where the fan's speed is due."),
        _("Look at the fan and its connector; the card takes no new work."),
    ),
    "gpu_power_error": (
        _("Power cannot be read"),
        _("The driver answers with an error where the card's power is due."),
        _("Look at the power cables of the card; it takes no new work."),
    ),
    "gpu_reset_required": (
        _("GPU asks for a reset"),
        _("The driver says that the GPU has to be reset before it works again."),
        _("Reset it, or restart the node when it is empty."),
    ),
    "node_clock": (
        _("Clock of a node runs wrong"),
        _(
            "The node's clock differs from that of the installation; times of its samples are corrected by it."
        ),
        _("Look at time synchronisation (chrony, NTP) on the node."),
    ),
    "node_driver": (
        _("Driver differs from the node's group"),
        _("The NVIDIA driver of a node is another one than most nodes with these cards have."),
        _("Bring it to the same version, or plan maintenance for the others."),
    ),
    "gpu_vanished": (
        _("GPU vanished"),
        _("The node no longer sees a GPU that it had."),
        _("Restart the node when it is empty; look at the seat and the power of the card."),
    ),
    "gpu_not_free": (
        _("GPU not free after its lease"),
        _("The work ended, but the GPU was not seen free: it is not granted again."),
        _("Look for processes left on the node; the GPU is freed as soon as it is seen free."),
    ),
    "gpu_not_free_at_start": (
        _("GPU busy at hand-over"),
        _("The last look before the start found the GPU in use or unwell; the work went elsewhere."),
        _("Look for processes without a lease on the node."),
    ),
    "gpu_uuid_twice": (
        _("One GPU on two nodes"),
        _("Two nodes report a GPU of the same identity."),
        _("A copied machine image or a moved card: revoke the agent of the node that is gone."),
    ),
    "cluster_away": (
        _("Cluster does not answer"),
        _("Slurm or Kubernetes does not answer; what runs there is not judged and nothing new is placed."),
        _("Look at its controller and at the credentials on the cluster's page."),
    ),
    "stray_work": (
        _("Work without an allocation"),
        _("A job of an allocation that is over was found running in a cluster and was ended."),
        _("Nothing, if it stays with one; else look for starts that the cluster takes late."),
    ),
    "accounts_differ": (
        _("Two accounts differ"),
        _("The cluster's own accounting and the portal's runs do not say the same."),
        _("Compare the runs that the incident names; nothing was corrected."),
    ),
    "foreign_use": (
        _("GPU used without a lease"),
        _("A process uses a GPU that nobody holds through the portal."),
        _("Ask its owner; the GPU is left out of the free ones meanwhile."),
    ),
    "agent_token_stolen": (
        _("Agent token used by another machine"),
        _("A machine signed in with the token of another node and was refused."),
        _("Revoke the node's token and enrol it again; find out how the token got out."),
    ),
    "agent_message_bad": (
        _("Agent message not understood"),
        _("A node sends something that this version does not understand."),
        _("Bring the agent on that node up to date."),
    ),
    "telemetry_refused": (
        _("Telemetry refused"),
        _("Samples of a node were refused as impossible or foreign."),
        _("Look at the clock and the driver of the node."),
    ),
    "source_silent": (
        _("Telemetry source is silent"),
        _("A source that is fetched has told nothing, or not all of it, for several fetches."),
        _(
            "Its page says how the last fetch went and has a dry run. Its cards show no data meanwhile; the incident "
            "closes by itself when it answers well again."
        ),
    ),
    "approval_overdue": (
        _("Approval overdue"),
        _("A step of an approval has waited longer than its policy allows, and nobody is above it."),
        _("Decide it, or name somebody who may."),
    ),
    "price_missing": (
        _("Price missing"),
        _("GPU-hours were used for which the price book has no price: they are not charged yet."),
        _("Add a price for that flavour and time; the ledger follows by itself."),
    ),
    "ledger_differs": (
        _("Ledger differs from leases"),
        _("The nightly comparison of the ledger with closed leases found differences."),
        _("Compare the lines below; corrections are new rows, nothing is mended silently."),
    ),
    "sums_differ": (
        _("Sums differ from the ledger"),
        _("The comparison of the sums that pages show with the ledger's lines found differences."),
        _("Compare the rows below; the lines are what counts, nothing is mended silently."),
    ),
    "counters_differ": (
        _("Quota counters differ from leases"),
        _("The comparison of quota counters with open leases found differences."),
        _("Compare the lines below before anything is corrected."),
    ),
}


def register_all() -> None:
    """Register every kind."""
    for kind, (title, means, advice) in WORDS.items():
        register(kind, title, means, advice)
