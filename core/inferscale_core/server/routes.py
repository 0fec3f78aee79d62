"""The memory routes of the API: ``/v1/memories`` and ``/v1/collections``."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ValidationError

from inferscale_core.client.models import (
    AddRequest,
    AddResponse,
    EmbedRequest,
    EmbedResponse,
    Memory,
    MemoryList,
    SearchRequest,
    StatusResponse,
    UpdateRequest,
)
from inferscale_core.facts.scope import Scope
from inferscale_core.server.errors import BadRequestError, ScopeError, scope_error
from inferscale_core.server.service import MemoryService

STATE = "inferscale"
"""Name of the service in the app's state."""

router = APIRouter(tags=["memories"])


def service_of(request: Request) -> MemoryService:
    """The app's memory service."""
    return getattr(request.app.state, STATE)


Service = Annotated[MemoryService, Depends(service_of)]


class ScopeParams:
    """Scope fields of a query string."""

    def __init__(
        self,
        tenant: str = "default",
        user: str | None = None,
        agent: str | None = None,
        run: str | None = None,
    ) -> None:
        self.tenant = tenant
        self.fields = {"tenant": tenant, "user": user, "agent": agent, "run": run}

    def scope(self) -> Scope:
        """The scope they name. Raises ScopeError when they name none."""
        try:
            return Scope.model_validate(self.fields)
        except ValidationError as error:
            raise scope_error(error) from None

    def scope_if_any(self) -> Scope | None:
        """The scope, or None when only the tenant is given."""
        if any(self.fields[name] is not None for name in ("user", "agent", "run")):
            return self.scope()
        if not self.tenant:
            raise ScopeError("the tenant may not be empty", param="tenant")
        return None


Reader = Annotated[ScopeParams, Depends()]


def _filters(text: str | None) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadRequestError(f"filters is not valid JSON: {error}", param="filters") from None
    if not isinstance(value, dict):
        raise BadRequestError("filters must be a JSON object", param="filters")
    return value


@router.post("/v1/memories")
async def add(request: AddRequest, service: Service) -> AddResponse:
    """Store facts; they are durable when this answers."""
    return AddResponse(memories=await service.add(request))


@router.get("/v1/memories")
async def list_memories(
    service: Service,
    reader: Reader,
    collection: str | None = None,
    limit: Annotated[int, Query(ge=0, le=10_000)] = 100,
    offset: Annotated[int, Query(ge=0)] = 0,
    filters: str | None = None,
) -> MemoryList:
    """Facts that a scope sees, in order of arrival."""
    found, total = await service.run(
        service.store.list,
        reader.scope(),
        collection=collection,
        filters=_filters(filters),
        limit=limit,
        offset=offset,
    )
    return MemoryList(memories=found, total=total)


@router.delete("/v1/memories")
async def delete_memories(
    service: Service, reader: Reader, collection: str | None = None
) -> dict[str, int]:
    """Delete all facts that a scope sees."""
    return {"deleted": await service.delete_scope(reader.scope(), collection)}


@router.get("/v1/memories/status")
async def status(service: Service, reader: Reader, request: Request) -> StatusResponse:
    """Facts by KV state (of all tenants, a tenant or a scope), and the arena's fill."""
    named = bool(request.query_params.keys() & reader.fields.keys())
    return await service.status(reader.scope_if_any(), reader.tenant if named else None)


@router.post("/v1/memories/search")
async def search(request: SearchRequest, service: Service) -> MemoryList:
    """The facts most similar to a query, best first."""
    with service.traffic.question():
        return MemoryList(memories=await service.search(request))


@router.post("/v1/memories/embed")
async def embed(request: EmbedRequest, service: Service) -> EmbedResponse:
    """Embeddings of texts by the core's embedder."""
    return await service.embed(request.texts)


@router.get("/v1/memories/{fact_id:path}")
async def get(fact_id: str, service: Service, reader: Reader) -> Memory:
    """One fact."""
    return await service.get(fact_id, reader.tenant, reader.scope_if_any())


@router.patch("/v1/memories/{fact_id:path}")
async def update(fact_id: str, request: UpdateRequest, service: Service) -> Memory:
    """Change a fact."""
    return await service.update(fact_id, request)


@router.delete("/v1/memories/{fact_id:path}")
async def delete(fact_id: str, service: Service, reader: Reader) -> dict[str, int]:
    """Delete one fact."""
    deleted = await service.delete(fact_id, reader.tenant, reader.scope_if_any())
    return {"deleted": deleted}


@router.get("/v1/inferscale/memcpy")
async def memcpy(
    service: Service, num_bytes: Annotated[int, Query(alias="bytes", ge=1, le=1 << 32)]
) -> dict[str, float]:
    """Milliseconds of a plain memory copy in the worker: the yardstick of the benchmarks."""
    return {"ms": await service.engine.memcpy_ms(num_bytes)}


@router.delete("/v1/collections/{collection:path}")
async def delete_collection(
    collection: str, service: Service, tenant: str = "default"
) -> dict[str, int]:
    """Delete all facts of a tenant's collection."""
    return {"deleted": await service.delete_collection(collection, tenant)}
