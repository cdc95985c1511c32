"""Models of pool."""

from pool.models.agent import AgentCommand, AgentEnrolment, AgentToken
from pool.models.allocation import Allocation, AllocationEvent, AllocationLog, AllocationMember
from pool.models.gpu import Gpu, MigSlice
from pool.models.lease import Lease, LeaseSpan, Reservation
from pool.models.place import Cluster, Dataset, Node, NodeFabric, NodeStorage, Site
from pool.models.scheduling import QueueEntry, ReclaimCase, SchedulerCycle, SchedulingPolicy

__all__ = [
    "AgentCommand",
    "AgentEnrolment",
    "AgentToken",
    "Allocation",
    "AllocationEvent",
    "AllocationLog",
    "AllocationMember",
    "Cluster",
    "Dataset",
    "Gpu",
    "Lease",
    "LeaseSpan",
    "MigSlice",
    "Node",
    "NodeFabric",
    "NodeStorage",
    "QueueEntry",
    "ReclaimCase",
    "Reservation",
    "SchedulerCycle",
    "SchedulingPolicy",
    "Site",
]
