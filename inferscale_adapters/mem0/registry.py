"""Makes Mem0 know the providers named ``inferscale``.

Mem0 2.x has a register call for LLM classes only. Its other factories are plain dicts, and its
config classes check provider names against fixed lists; this module adds one name to each.
"""

import sys
import threading
from typing import Any

from mem0.configs.base import MemoryConfig
from mem0.embeddings.configs import EmbedderConfig
from mem0.llms.configs import LlmConfig
from mem0.utils.factory import EmbedderFactory, LlmFactory, VectorStoreFactory
from mem0.vector_stores.configs import VectorStoreConfig
from pydantic import BaseModel, ValidationInfo

from inferscale_adapters.mem0 import configs

PROVIDER = "inferscale"

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Register the ``inferscale`` llm, embedder and vector store; calling it again does nothing.

    Afterwards ``mem0.Memory.from_config({"llm": {"provider": "inferscale", "config": {...}},
    ...})`` works with Mem0's own class. All other provider names are checked as before.

    Raises RuntimeError when the installed mem0ai has not the config classes of 2.x.
    """
    global _installed
    with _lock:
        if _installed:
            return
        package = "inferscale_adapters.mem0"
        LlmFactory.register_provider(
            PROVIDER, f"{package}.llm.InferScaleLLM", configs.InferScaleLlmConfig
        )
        EmbedderFactory.provider_to_class[PROVIDER] = f"{package}.embedder.InferScaleEmbedding"
        VectorStoreFactory.provider_to_class[PROVIDER] = (
            f"{package}.vector_store.InferScaleVectorStore"
        )
        try:
            _admit_config(LlmConfig, configs.llm_config)
            _admit_config(EmbedderConfig, configs.embedder_config)
            _admit_vector_store()
            MemoryConfig.model_rebuild(force=True)
        except (AttributeError, KeyError) as error:
            import mem0

            raise RuntimeError(
                f"mem0ai {mem0.__version__} is not known to this adapter (no {error}); "
                "install a version that compat_matrix.md names"
            ) from error
        _installed = True


def _admit_config(model: type[BaseModel], ours: Any) -> None:
    """Let ``model`` take our provider: ``ours`` checks its config, Mem0's validator the rest."""
    decorator = model.__pydantic_decorators__.field_validators["validate_config"]
    mem0_check = decorator.func

    def check(value: Any, info: ValidationInfo) -> Any:
        if info.data.get("provider") == PROVIDER:
            return ours(value or {})
        return mem0_check(value, info)

    decorator.func = check
    model.model_rebuild(force=True)


def _admit_vector_store() -> None:
    """Mem0 imports ``mem0.configs.vector_stores.<provider>`` and takes the class named here."""
    names = VectorStoreConfig.__private_attributes__["_provider_configs"].default
    names[PROVIDER] = configs.InferScaleVectorConfig.__name__
    sys.modules[f"mem0.configs.vector_stores.{PROVIDER}"] = configs
