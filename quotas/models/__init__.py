"""Models of quotas."""

from quotas.models.approval import ApprovalPolicy, ApprovalStep, Delegation
from quotas.models.flavour import FlavourCapacity, GpuFlavour
from quotas.models.grant import QuotaChange, QuotaGrant, QuotaUsage, UserLimit
from quotas.models.money import LedgerEntry, LedgerMonth, PriceRate, UsageSpan
from quotas.models.request import CapacityRequest, RequestEvent

__all__ = [
    "ApprovalPolicy",
    "ApprovalStep",
    "CapacityRequest",
    "Delegation",
    "FlavourCapacity",
    "GpuFlavour",
    "LedgerEntry",
    "LedgerMonth",
    "PriceRate",
    "QuotaChange",
    "QuotaGrant",
    "QuotaUsage",
    "RequestEvent",
    "UsageSpan",
    "UserLimit",
]
