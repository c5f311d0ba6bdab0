"""The front door's part of pipelines: `pipeline.open`, `.status`, `.audit`, `.list`, `.cancel`."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.completion.accounting import Accounting
from headrace.completion.pipeline_account import PipelineAccounting
from headrace.completion.pipelines import Pipelines
from headrace.completion.sources import SourceReader
from headrace.completion.store import Store
from headrace.contracts.pipeline import (
    PipelineCancelRequest,
    PipelineOpenRequest,
    PipelineRequest,
    PipelinesReply,
    PipelinesRequest,
)
from headrace.mesh.microservice import ApiServer


def serve_pipelines(
    server: ApiServer, store: Store, sources: SourceReader, accounting: Accounting, pipelines: Pipelines
) -> None:
    """Add the endpoints to `server`."""
    account = PipelineAccounting(store, sources, accounting)

    async def opened(request: PipelineOpenRequest, _headers: Mapping[str, str]) -> object:
        return await pipelines.open(request)

    async def status(request: PipelineRequest, _headers: Mapping[str, str]) -> object:
        return await account.status(request.pipeline)

    async def audit(request: PipelineRequest, _headers: Mapping[str, str]) -> object:
        return await account.audit(request.pipeline)

    async def listed(request: PipelinesRequest, _headers: Mapping[str, str]) -> object:
        return PipelinesReply(pipelines=await account.newest(request.limit))

    async def cancel(request: PipelineCancelRequest, _headers: Mapping[str, str]) -> object:
        await pipelines.cancel(request.pipeline, request.reason)
        return await account.status(request.pipeline)

    server.endpoint("pipeline.open", PipelineOpenRequest, opened, timeout_s=30.0)
    server.endpoint("pipeline.status", PipelineRequest, status, timeout_s=30.0)
    server.endpoint("pipeline.audit", PipelineRequest, audit, timeout_s=120.0)
    server.endpoint("pipeline.list", PipelinesRequest, listed, timeout_s=30.0)
    server.endpoint("pipeline.cancel", PipelineCancelRequest, cancel, timeout_s=60.0)
