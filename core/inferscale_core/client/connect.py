"""``connect``: a client of a served core, or of a private one that is found or started."""

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from inferscale_core import models
from inferscale_core.client.aio import AsyncClient
from inferscale_core.client.chat_fields import CONNECT_FIELDS, check_spelling
from inferscale_core.client.client import BASE_URL_ENV, DEFAULT_TIMEOUT, Client
from inferscale_core.client.errors import ModelNotFound, StartupError
from inferscale_core.client.launch import extra_options, interpreter, raw_arguments
from inferscale_core.client.private_core import CoreSpec, use_core
from inferscale_core.config import CoreConfig

START_TIMEOUT = 600.0

EngineArgs = Sequence[str] | Mapping[str, Any] | None


def _spec(
    model: str | os.PathLike[str] | None,
    python: str | None,
    store: str | os.PathLike[str] | None,
    config: Mapping[str, Any] | CoreConfig | None,
    engine_args: EngineArgs,
    engine_options: Mapping[str, Any],
    progress: bool,
) -> CoreSpec:
    check_spelling(engine_options, CONNECT_FIELDS, "connect")
    if model is None:
        raise StartupError(
            "connect() needs model= (a directory, a hub id or 'smollm2-135m') to start a private "
            f"core, or base_url= (or {BASE_URL_ENV}) to use a core that runs"
        )
    fields = config.model_dump(exclude_unset=True) if isinstance(config, CoreConfig) else config
    values = dict(fields or {})
    if store is not None:
        values["store"] = os.fspath(store)
    try:
        core_config = CoreConfig.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        known = f"; its fields are {', '.join(CoreConfig.model_fields)}"
        raise StartupError(
            f"invalid config: {where}: {problem['msg']}"
            f"{known if problem['type'] == 'extra_forbidden' else ''}"
        ) from error
    path = str(core_config.store_path.expanduser().absolute())
    core_config = CoreConfig.model_validate({**values, "store": path})
    name = os.fspath(model)
    runner = interpreter(python)
    resolved = models.resolve(name, python=runner, progress=progress)
    local = Path(resolved).expanduser()
    if local.is_dir():
        resolved = str(local.resolve())
    elif name.startswith(("/", "./", "../", "~")):
        raise ModelNotFound(f"there is no directory {name}; pass an existing one, or a hub id")
    return CoreSpec(
        model=resolved,
        config=core_config,
        names=(name, resolved) if name != resolved else (),
        options={**engine_options, **extra_options(engine_args)},
        arguments=tuple(raw_arguments(engine_args)),
        python=runner,
    )


def connect(
    model: str | os.PathLike[str] | None = None,
    *,
    base_url: str | None = None,
    python: str | None = None,
    store: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | CoreConfig | None = None,
    engine_args: EngineArgs = None,
    start_timeout: float = START_TIMEOUT,
    timeout: float = DEFAULT_TIMEOUT,
    api_key: str | None = None,
    progress: bool = True,
    **engine_options: Any,
) -> Client:
    """A client of a core.

    With ``base_url``, or ``INFERSCALE_BASE_URL`` set, the core that is served there. Otherwise a
    private one for ``model``: the core of the same configuration if one runs for this user, else
    a new child process on a Unix socket. It ends, with all its processes, when the last process
    that connected has closed its clients or is gone (10 s later; ``INFERSCALE_IDLE_GRACE``).

    Args:
        model: a directory, a hub id, or a name of ``inferscale models list``.
        python: interpreter with vLLM; default ``INFERSCALE_PYTHON``, else this one.
        store: database of the facts; default ``facts.db`` in ``INFERSCALE_HOME``.
        config: fields of ``CoreConfig``.
        engine_args: options of vLLM, a mapping, or a list of command-line arguments.
        start_timeout: seconds until the core must serve.
        timeout: seconds without an answer, for the client.
        progress: show the start on stderr.
        engine_options: options of vLLM by name: ``max_model_len=4096``, ``dtype="float32"``,
            ``gpu_memory_utilization=0.5``, ``enforce_eager=False``. They win over our defaults;
            None drops a default.

    Raises:
        StartupError: or its subclass for the cause: ``ModelNotFound``, ``NotEnoughMemory``,
            ``UnsupportedArchitecture``, ``AddressInUse``, ``StoreLocked``.
        TypeError: an argument is misspelt.
    """
    address = base_url or os.environ.get(BASE_URL_ENV)
    if address:
        return Client(address, timeout=timeout, api_key=api_key)
    spec = _spec(model, python, store, config, engine_args, engine_options, progress)
    core = use_core(spec, start_timeout, progress)
    return Client(timeout=timeout, api_key=api_key, core=core)


async def aconnect(
    model: str | os.PathLike[str] | None = None,
    *,
    base_url: str | None = None,
    python: str | None = None,
    store: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | CoreConfig | None = None,
    engine_args: EngineArgs = None,
    start_timeout: float = START_TIMEOUT,
    timeout: float = DEFAULT_TIMEOUT,
    api_key: str | None = None,
    progress: bool = True,
    **engine_options: Any,
) -> AsyncClient:
    """``connect`` for asyncio; the event loop stays free during the start."""
    address = base_url or os.environ.get(BASE_URL_ENV)
    if address:
        return AsyncClient(address, timeout=timeout, api_key=api_key)
    given_up = threading.Event()

    def start() -> AsyncClient:
        spec = _spec(model, python, store, config, engine_args, engine_options, progress)
        core = use_core(spec, start_timeout, progress, given_up.is_set)
        if given_up.is_set():
            core.release()
            raise StartupError("the start was cancelled")
        return AsyncClient(timeout=timeout, api_key=api_key, core=core)

    try:
        return await asyncio.to_thread(start)
    except asyncio.CancelledError:
        given_up.set()
        raise
