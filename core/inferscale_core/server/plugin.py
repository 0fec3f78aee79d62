"""What vLLM loads: the general plugin of every process, and the API server's endpoint plugin.

Both need ``VLLM_PLUGINS=inferscale`` (vLLM loads endpoint plugins only when they are named).
"""

import contextlib
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from inferscale_core.connector.protocol import ensure_secret

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State

    from inferscale_core.config import CoreConfig
    from inferscale_core.server.service import MemoryService

CONNECTOR = "InferScaleConnector"


def register() -> None:
    """Run by vLLM in every process of an engine, possibly more than once.

    The first one is the API server: the secret of the core's salts is made there, and the engine's
    processes inherit it through the environment.
    """
    ensure_secret()


class ConfigurationError(RuntimeError):
    """vLLM was started with options that a core cannot work with."""


class EndpointPlugin:
    """Adds the memory routes, and memories to chat completions. See vLLM's ``EndpointPlugin``."""

    name = "inferscale"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        ensure_secret()
        self._service: MemoryService | None = None

    def attach_router(self, app: "FastAPI") -> None:
        from inferscale_core.server import chat, errors, routes

        app.include_router(routes.router)
        app.include_router(chat.router)
        errors.add_handlers(app)
        inner = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: "FastAPI") -> AsyncIterator[Any]:
            async with inner(app) as state:
                try:
                    yield state
                finally:
                    if self._service is not None:
                        await self._service.close()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: "State", args: Namespace) -> None:
        from inferscale_core.server.routes import STATE

        config = core_config(engine_client.vllm_config)
        if getattr(args, "api_server_count", None) not in (None, 1):
            raise ConfigurationError(
                f"a core has one API server and not {args.api_server_count}: the fact store and "
                "its queue live in it; leave --api-server-count at 1"
            )
        self._service = await open_service(config, engine_client, state)
        setattr(state, STATE, self._service)
        self._service.start()


def core_config(vllm_config: Any) -> "CoreConfig":
    """The core's settings in the engine's configuration. Raises ConfigurationError."""
    from inferscale_core.config import CoreConfig

    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        found = "none" if transfer is None else repr(transfer.kv_connector)
        raise ConfigurationError(
            f"InferScale needs its KV connector, and vLLM was started with {found}; add "
            '--kv-transfer-config \'{"kv_connector": "InferScaleConnector", '
            '"kv_connector_module_path": "inferscale_core.connector", "kv_role": "kv_both"}\', '
            "or start the core with: inferscale serve MODEL"
        )
    try:
        return CoreConfig.from_extra(transfer.kv_connector_extra_config)
    except ValidationError as error:
        raise ConfigurationError(f"kv_connector_extra_config is not valid: {error}") from error


async def open_service(config: "CoreConfig", client: Any, state: "State") -> "MemoryService":
    """The memory service of an engine. Raises StoreError, EmbedderError, ConfigurationError."""
    import asyncio

    from inferscale_core.encoding.template import PromptTemplate
    from inferscale_core.facts.embedder import Embedder
    from inferscale_core.facts.index import EmbeddingIndex
    from inferscale_core.facts.store import FactStore
    from inferscale_core.server.engine import EngineMessages
    from inferscale_core.server.service import MemoryService

    vllm_config = client.vllm_config
    await bind_workers(client)
    tokenizer = client.renderer.get_tokenizer()
    template = PromptTemplate(tokenizer, config, state.online_renderer.chat_template)
    device = str(vllm_config.device_config.device_type)

    def load() -> tuple[FactStore, Embedder, EmbeddingIndex]:
        embedder = Embedder(config.embedder, device)
        store = FactStore(
            config.store_path,
            line_format=config.line_format,
            dated_line_format=config.dated_line_format,
        )
        try:
            store.use_embedder(embedder.name, embedder.dimension)
            index = EmbeddingIndex(embedder.dimension, device)
            index.load(store)
        except BaseException:
            store.close()
            raise
        return store, embedder, index

    store, embedder, index = await asyncio.to_thread(load)

    def engine_of(on_evicted: Callable[[list[tuple[str, str]]], None]) -> EngineMessages:
        return EngineMessages(
            client,
            on_evicted,
            token_id=template.header_ids()[0],
            prioritised=vllm_config.scheduler_config.policy == "priority",
        )

    models = state.openai_serving_models
    return MemoryService(
        config,
        store,
        embedder,
        index,
        template,
        engine_of,
        model=models.base_model_paths[0].name,
        max_model_len=vllm_config.model_config.max_model_len,
        device=device,
    )


async def bind_workers(client: Any) -> None:
    """Give the connector's workers the loaded model.

    Raises ConfigurationError without our worker extension, or when the model is refused.
    """
    if not client.vllm_config.parallel_config.worker_extension_cls:
        raise ConfigurationError(
            "InferScale needs its worker extension; add --worker-extension-cls "
            "inferscale_core.connector.extension.WorkerExtension, or start the core with: "
            "inferscale serve MODEL"
        )
    try:
        await client.collective_rpc("inferscale_bind")
    except Exception as error:
        raise ConfigurationError(f"the KV of this model cannot be injected: {error}") from error
