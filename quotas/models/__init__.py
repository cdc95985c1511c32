"""Models of quotas."""

from quotas.models.approval import ApprovalPolicy, ApprovalStep, Delegation
from quotas.models.flavour import FlavourCapacity, GpuFlavour, PoolName
from quotas.models.grant import AskRule, QuotaChange, QuotaGrant, QuotaUsage, UserLimit
from quotas.models.money import (
    Budget,
    BudgetWarning,
    LedgerEntry,
    LedgerMonth,
    LedgerSum,
    PriceRate,
    UsageSpan,
)
from quotas.models.request import CapacityRequest, RequestDependency, RequestEvent

__all__ = [
    "Budget",
    "BudgetWarning",
    "ApprovalPolicy",
    "ApprovalStep",
    "AskRule",
    "CapacityRequest",
    "Delegation",
    "FlavourCapacity",
    "GpuFlavour",
    "LedgerEntry",
    "LedgerMonth",
    "LedgerSum",
    "PoolName",
    "PriceRate",
    "QuotaChange",
    "QuotaGrant",
    "QuotaUsage",
    "RequestDependency",
    "RequestEvent",
    "UsageSpan",
    "UserLimit",
]
