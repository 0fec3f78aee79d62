"""Which core a provider talks to: one client per configuration, shared by a process's providers."""

import shlex
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from inferscale_core.client import Client, ModelNotFound, connect

DEFAULT_MODEL = "smollm2-135m"

_lock = threading.Lock()


class _Shared:
    """A client and the providers that use it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()


_shared: dict[str, _Shared] = {}


class CoreOptions(BaseModel):
    """Arguments of `inferscale_core.client.connect`, as they stand in a provider's config.

    With ``base_url`` (or ``INFERSCALE_BASE_URL`` set) the core that is served there, else a
    private one for ``model`` (default "smollm2-135m"). Two providers with equal options share a
    client, and so do other processes share the private core.

    - ``config``: fields of ``CoreConfig`` (embedder, arena_bytes, window ...).
    - ``engine_args``: options of vLLM: a command line such as "--max-model-len 4096", a list of
      its arguments, or a dict.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    base_url: str | None = None
    api_key: str | None = None
    python: str | None = None
    store: str | None = None
    config: dict[str, Any] | None = None
    engine_args: str | list[str] | dict[str, Any] | None = None
    start_timeout: float | None = None
    timeout: float | None = None
    progress: bool | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "CoreOptions":
        """The options in ``values``, where None stands for "not given".

        Raises ValueError naming what is unknown or wrong.
        """
        try:
            return CoreOptions.model_validate(
                {key: value for key, value in values.items() if value is not None}
            )
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                raise ValueError(
                    f"the inferscale provider has no option {name!r}; the core's are "
                    f"{', '.join(CoreOptions.model_fields)}, and options of vLLM go into "
                    "engine_args"
                ) from error
            raise ValueError(f"option {name} of the inferscale provider: {problem['msg']}") from (
                error
            )

    def given(self) -> dict[str, Any]:
        """The core's options that are set (not those of a subclass)."""
        return self.given_in(self)

    @classmethod
    def given_in(cls, section: Mapping[str, Any] | Self) -> dict[str, Any]:
        """The core's options in a provider's config, which may hold others as well."""
        values = section if isinstance(section, Mapping) else dict(section)
        packed = values.get("model_kwargs") or {}  # an embedder's, once Mem0 has validated it
        found = {name: values.get(name, packed.get(name)) for name in CoreOptions.model_fields}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def named_in(cls, section: Mapping[str, Any]) -> bool:
        """Whether a provider's config names a core, by ``model`` or ``base_url``."""
        given = cls.given_in(section)
        return "model" in given or "base_url" in given


def client_for(options: CoreOptions, user: object) -> Client:
    """The process's client for these options; the first call connects, and may start a core.

    ``user`` is the provider that asks, until `release`. Raises what ``connect`` raises, and
    ModelNotFound when ``base_url`` serves another model than ``model`` names.
    """
    given = options.given()
    key = CoreOptions(**given).model_dump_json(exclude_none=True)
    with _lock:
        _close_unused(keep=key)
        if key not in _shared:
            _shared[key] = _Shared(_connect(given))
        _shared[key].users.add(user)
        return _shared[key].client


def release(user: object) -> None:
    """A provider needs its client no more; one that no provider needs is closed."""
    with _lock:
        for shared in _shared.values():
            shared.users.discard(user)
        _close_unused()


def _close_unused(keep: str | None = None) -> None:
    for key in [k for k, shared in _shared.items() if k != keep and not shared.users]:
        _shared.pop(key).client.close()


def _connect(given: dict[str, Any]) -> Client:
    args = given.get("engine_args")
    if isinstance(args, str):
        given = {**given, "engine_args": shlex.split(args)}
    client = connect(**{"model": DEFAULT_MODEL, **given})
    if "model" in given and "base_url" in given:
        served = client.models()
        if given["model"] not in served:
            client.close()
            raise ModelNotFound(
                f"the core at {given['base_url']} serves {', '.join(served)}, not "
                f"{given['model']}; leave model out, or use another base_url"
            )
    return client
