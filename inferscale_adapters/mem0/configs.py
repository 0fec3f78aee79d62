"""Configs of the three providers, as Mem0 hands them to their classes.

Mem0 also imports this module under the name ``mem0.configs.vector_stores.inferscale``.
Values are strings, numbers and booleans, so that every copy that Mem0 makes of a config works.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from mem0.configs.embeddings.base import BaseEmbedderConfig
from mem0.configs.llms.base import BaseLlmConfig
from pydantic import Field

from inferscale_adapters.mem0.core import CoreOptions

ExtractionPrompt = Literal["auto", "mem0", "short"]

_EMBEDDER_FIELDS = ("embedding_dims",)


class InferScaleVectorConfig(CoreOptions):
    """Config of the vector store: the core's options, and which collection of which tenant."""

    collection_name: str = Field(default="memories", min_length=1)
    tenant: str = Field(default="default", min_length=1)
    embedding_model_dims: int | None = Field(
        default=None, description="taken and ignored: the core knows its embedder's dimension"
    )


class InferScaleLlmConfig(BaseLlmConfig):
    """Config of the llm: Mem0's own fields, the core's options, and the extraction prompt.

    Args:
        extraction_prompt: ``"mem0"`` sends Mem0's extraction prompt (about 8,200 tokens),
            ``"short"`` one of about 250 tokens, ``"auto"`` the short one only where the model's
            context cannot hold Mem0's and ``max_tokens`` of answer.
        options: fields of Mem0's ``BaseLlmConfig`` (temperature, top_p, max_tokens ...) and of
            `CoreOptions`. ``model`` is the core's.

    Raises:
        ValueError: a field that neither has.
    """

    def __init__(
        self,
        model: str | None = None,
        extraction_prompt: ExtractionPrompt = "auto",
        **options: Any,
    ) -> None:
        own = {name: options.pop(name) for name in self.base_fields() if name in options}
        super().__init__(model=model, **own)
        if extraction_prompt not in ("auto", "mem0", "short"):
            raise ValueError(
                f"extraction_prompt is {extraction_prompt!r}; use 'auto', 'mem0' or 'short'"
            )
        self.extraction_prompt: ExtractionPrompt = extraction_prompt
        self.core = CoreOptions.read({**options, "model": model, "api_key": self.api_key})

    @staticmethod
    def base_fields() -> set[str]:
        """Names of the fields that Mem0's own config class has."""
        return set(inspect.signature(BaseLlmConfig.__init__).parameters) - {"self", "model"}


def llm_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config`` of an llm section, checked. Raises ValueError for what is wrong in it."""
    InferScaleLlmConfig(**config)
    return dict(config)


def embedder_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config`` of an embedder section in the fields that Mem0's class takes.

    Mem0 builds a fixed `BaseEmbedderConfig` for every embedder, so the core's options travel in
    ``model_kwargs``. Raises ValueError for unknown options.
    """
    kept = {name: config[name] for name in _EMBEDDER_FIELDS if name in config}
    packed = config.get("model_kwargs") or {}
    core = {key: value for key, value in config.items() if key not in {*kept, "model_kwargs"}}
    options = CoreOptions.read({**packed, **core}).given()
    return {**kept, "model": options.get("model"), "model_kwargs": options}


def core_of_embedder(config: BaseEmbedderConfig) -> CoreOptions:
    """The core that an embedder's config names, see `embedder_config`."""
    return CoreOptions.read(
        {"model": config.model, "api_key": config.api_key, **config.model_kwargs}
    )
