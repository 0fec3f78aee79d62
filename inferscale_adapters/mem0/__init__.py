"""Mem0 on InferScale: facts answered from injected KV instead of prompt text.

Either change one import, ``from inferscale_adapters.mem0 import Memory``, or keep Mem0's own class
and name the providers::

    from inferscale_adapters.mem0 import install

    install()
    memory = mem0.Memory.from_config({
        "llm": {"provider": "inferscale", "config": {"model": "smollm2-135m"}},
        "embedder": {"provider": "inferscale", "config": {"model": "smollm2-135m"}},
        "vector_store": {"provider": "inferscale", "config": {"model": "smollm2-135m"}},
    })

The names below are imported on first use, so that Mem0 itself is not loaded (and its files are
not made) before the app asks for them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferscale_adapters.mem0.embedder import InferScaleEmbedding
    from inferscale_adapters.mem0.llm import InferScaleLLM
    from inferscale_adapters.mem0.memory import Memory
    from inferscale_adapters.mem0.registry import install
    from inferscale_adapters.mem0.vector_store import InferScaleVectorStore

__all__ = ["InferScaleEmbedding", "InferScaleLLM", "InferScaleVectorStore", "Memory", "install"]

_MODULES = {
    "InferScaleEmbedding": "embedder",
    "InferScaleLLM": "llm",
    "InferScaleVectorStore": "vector_store",
    "Memory": "memory",
    "install": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "mem0":
            raise
        raise ModuleNotFoundError(
            "mem0 is not installed: pip install 'inferscale-adapters[mem0]'", name="mem0"
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
