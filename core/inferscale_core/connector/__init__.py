"""The vLLM KV connector: scheduler side, worker side and the messages between them.

vLLM loads it by ``kv_connector_module_path="inferscale_core.connector"``. The class is resolved
on first use, so that :mod:`~inferscale_core.connector.protocol` can be imported without vLLM.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "InferScaleConnector":
        from inferscale_core.connector.connector import InferScaleConnector

        return InferScaleConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
