"""Models of pool."""

from pool.models.agent import AgentCommand, AgentEnrolment, AgentToken
from pool.models.allocation import Allocation, AllocationEvent, AllocationLog, AllocationMember
from pool.models.gpu import Gpu, MigSlice
from pool.models.lease import Lease, LeaseSpan, Reservation
from pool.models.maintenance import MaintenanceNode, MaintenanceWindow
from pool.models.place import Cluster, ClusterCredential, Dataset, Node, NodeFabric, NodeStorage, Site
from pool.models.reclaim import (
    DepartmentMode,
    IdleWatch,
    KeptPlace,
    KeptSpan,
    LayoutTask,
    ReclaimAdvice,
    ReclaimCase,
    ReclaimConsent,
    ReclaimRuleSet,
)
from pool.models.scheduling import (
    QueueEntry,
    QueueLine,
    QueuePlace,
    SchedulerCycle,
    SchedulerSnapshot,
    SchedulingPolicy,
)
from pool.models.work import WorkUpload, WorkUploadPiece

__all__ = [
    "AgentCommand",
    "AgentEnrolment",
    "AgentToken",
    "Allocation",
    "AllocationEvent",
    "AllocationLog",
    "AllocationMember",
    "Cluster",
    "ClusterCredential",
    "Dataset",
    "DepartmentMode",
    "Gpu",
    "IdleWatch",
    "KeptPlace",
    "KeptSpan",
    "LayoutTask",
    "Lease",
    "LeaseSpan",
    "MaintenanceNode",
    "MaintenanceWindow",
    "MigSlice",
    "Node",
    "NodeFabric",
    "NodeStorage",
    "QueueEntry",
    "QueueLine",
    "QueuePlace",
    "ReclaimAdvice",
    "ReclaimCase",
    "ReclaimConsent",
    "ReclaimRuleSet",
    "Reservation",
    "SchedulerCycle",
    "SchedulerSnapshot",
    "SchedulingPolicy",
    "Site",
    "WorkUpload",
    "WorkUploadPiece",
]
