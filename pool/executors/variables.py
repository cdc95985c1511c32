"""What a job is told about the request that it belongs to, as environment variables; the same for every
executor.
"""

from __future__ import annotations

from pool.services.hook_post import hook_secret
from quotas.models import CapacityRequest


def request_variables(request: CapacityRequest) -> dict[str, str]:
    """``GPUPOOL_REQUEST`` always; ``GPUPOOL_ARRAY_INDEX`` (from 0) and ``GPUPOOL_ARRAY_SIZE`` for a member of an
    array, ``GPUPOOL_REPLICA`` for one of a service, ``GPUPOOL_WINDOW_END`` (UTC) for a reserved window,
    ``GPUPOOL_DATASETS`` where data sets were named, ``GPUPOOL_CHECKPOINT_SECRET`` where its checkpoint is an address.
    """
    out = {"GPUPOOL_REQUEST": request.ref}
    head = request.head
    if head is not None:
        out["GPUPOOL_SERIES"] = head.ref
        if head.series == CapacityRequest.Series.ARRAY:
            out["GPUPOOL_ARRAY_INDEX"] = str(request.member_index)
            out["GPUPOOL_ARRAY_SIZE"] = str(head.array_count)
        elif head.series == CapacityRequest.Series.SERVICE:
            out["GPUPOOL_REPLICA"] = str(request.member_index)
    if request.end_at is not None:
        out["GPUPOOL_WINDOW_END"] = request.end_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    if (request.checkpoint or {}).get("url"):
        out["GPUPOOL_CHECKPOINT_SECRET"] = hook_secret(str(request.uid))
    if request.datasets:
        out["GPUPOOL_DATASETS"] = ",".join(str(code) for code in request.datasets)
    return out
