"""Completes an app's config: what it leaves out runs on the core."""

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from mem0.configs.base import MemoryConfig

from inferscale_adapters.mem0.core import CoreOptions
from inferscale_adapters.mem0.registry import PROVIDER

logger = logging.getLogger(__name__)

SECTIONS = ("vector_store", "llm", "embedder")


def complete_config(config: MemoryConfig | Mapping[str, Any] | None) -> MemoryConfig:
    """The config with ``inferscale`` for every section that the app did not give.

    Sections of ours that name no core (neither ``model`` nor ``base_url``) take the core that
    another section names, the vector store's first, so naming it once is enough.

    Raises pydantic's ValidationError for a wrong config, TypeError for one of another type.
    """
    if isinstance(config, MemoryConfig):
        fields = {name: getattr(config, name) for name in config.model_fields_set}
    elif config is None or isinstance(config, Mapping):
        fields = deepcopy(dict(config or {}))
    else:
        raise TypeError(
            f"config must be a MemoryConfig, a dict or nothing, not {type(config).__name__}"
        )
    unknown = sorted(set(fields) - set(MemoryConfig.model_fields))
    if unknown:
        # Mem0 ignores them without a word; an app may keep keys of its own there.
        logger.warning(
            "Mem0 has no config section %s and ignores it; it has %s",
            ", ".join(map(repr, unknown)),
            ", ".join(MemoryConfig.model_fields),
        )
    for name in SECTIONS:
        section = fields.setdefault(name, {})
        if isinstance(section, Mapping):
            fields[name] = {"provider": PROVIDER, **section}
    core = _named_core(fields)
    for name in SECTIONS:
        section = fields[name]
        if not isinstance(section, dict) or section["provider"] != PROVIDER:
            continue
        own = dict(section.get("config") or {})
        if not CoreOptions.named_in(own):
            own = {**core, **own}
        fields[name] = {**section, "config": own}
    return MemoryConfig(**fields)


def _named_core(fields: Mapping[str, Any]) -> dict[str, Any]:
    for name in SECTIONS:
        section = fields[name]
        if isinstance(section, Mapping):
            provider, own = section["provider"], section.get("config") or {}
        else:
            provider, own = section.provider, section.config or {}
        if provider != PROVIDER:
            continue
        options = CoreOptions.given_in(own)
        if CoreOptions.named_in(options):
            return options
    return {}
