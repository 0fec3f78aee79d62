"""Settings of a core: one model, read from ``kv_connector_extra_config`` by every process."""

import json
import math
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

HOME_ENV = "INFERSCALE_HOME"


def home() -> Path:
    """Directory for facts, models and private cores (``INFERSCALE_HOME``, ``~/.inferscale``)."""
    return Path(os.environ.get(HOME_ENV) or Path.home() / ".inferscale")


class WindowConfig(BaseModel):
    """What a fact is encoded behind (design: Context-Window Encoding)."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["neighbours", "preceding", "turns", "none"] = "neighbours"
    size: int = Field(default=16, ge=0, le=256)
    max_tokens: int = Field(default=1024, ge=0, description="token budget, cut at the far end")
    growth: float = Field(
        default=2.0,
        description="encode a fact again once it stands among so many times more; 0: never",
    )

    @field_validator("growth")
    @classmethod
    def _grows(cls, growth: float) -> float:
        if growth and not 1 < growth < math.inf:
            raise ValueError("growth must be above 1, or 0 to encode each fact only once")
        return growth


class CoreConfig(BaseModel):
    """Everything about a core that is not vLLM's own."""

    model_config = ConfigDict(extra="forbid")

    arena_bytes: int = Field(default=1 << 30, gt=0, description="arena size per worker")
    kv_store_dtype: Literal["auto", "fp8", "fp8_e4m3", "int8"] = Field(
        default="auto", description="the arena's elements; auto: as the engine's KV cache"
    )
    store: str | None = Field(default=None, description="fact database; default in INFERSCALE_HOME")
    embedder: str | None = Field(default=None, description="sentence-transformers name or path")
    window: WindowConfig = WindowConfig()
    anchor: bool = True
    facts_per_request: int = Field(default=1, ge=1, le=64)
    tail: int = Field(default=0, ge=0, description="last lines of a prompt left to prefill")
    min_gain_tokens: int = Field(default=16, ge=1, description="smallest cover worth injecting")
    line_format: str = "- {text}\n"
    dated_line_format: str = "- {date}: {text}\n"
    system_prompt: str = (
        "You are a helpful AI. Answer the question based on query and memories.\nUser Memories:\n"
    )
    max_queue: int = Field(default=100_000, ge=1, description="facts waiting to be encoded")

    @field_validator("kv_store_dtype")
    @classmethod
    def _codec_name(cls, name: str) -> str:
        return "fp8_e4m3" if name == "fp8" else name

    @property
    def store_path(self) -> Path:
        return Path(self.store) if self.store else home() / "facts.db"

    @classmethod
    def from_json(cls, text: str | None, **fields: Any) -> "CoreConfig":
        """The fields of a JSON object, or none, and ``fields``; raises ValueError."""
        given = json.loads(text) if text else {}
        if not isinstance(given, dict):
            raise ValueError(f"expected a JSON object of fields, got {type(given).__name__}")
        return cls.model_validate(given | fields)

    @classmethod
    def from_extra(cls, extra: dict[str, Any] | None) -> "CoreConfig":
        """Read the ``kv_connector_extra_config`` dict; raises ValidationError naming the field."""
        return cls.model_validate(extra or {})
