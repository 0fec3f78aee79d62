"""Configs: what the adapter adds to them and what Mem0's validators make of them."""

import mem0
import pytest
from mem0.configs.base import MemoryConfig
from mem0.embeddings.configs import EmbedderConfig
from mem0.llms.configs import LlmConfig
from mem0.vector_stores.configs import VectorStoreConfig
from pydantic import ValidationError

from inferscale_adapters.mem0 import install
from inferscale_adapters.mem0.configs import InferScaleLlmConfig, InferScaleVectorConfig
from inferscale_adapters.mem0.core import CoreOptions
from inferscale_adapters.mem0.sections import complete_config

OURS = {"model": "m", "engine_args": "--max-model-len 512"}


@pytest.fixture(autouse=True)
def _installed() -> None:
    install()
    install()


def test_mem0s_own_config_takes_the_three_providers() -> None:
    config = MemoryConfig(
        llm={"provider": "inferscale", "config": {**OURS, "temperature": 0}},
        embedder={"provider": "inferscale", "config": OURS},
        vector_store={"provider": "inferscale", "config": {**OURS, "collection_name": "c"}},
    )
    assert config.llm.config == {**OURS, "temperature": 0}
    assert config.embedder.config == {"model": "m", "model_kwargs": OURS}
    assert isinstance(config.vector_store.config, InferScaleVectorConfig)
    assert config.vector_store.config.collection_name == "c"
    again = MemoryConfig(**dict(config))
    assert again.embedder.config == config.embedder.config
    assert again == config.model_copy(deep=True)


def test_other_providers_are_checked_as_before() -> None:
    assert LlmConfig(provider="openai", config={"model": "x"}).config == {"model": "x"}
    with pytest.raises(ValidationError, match="Unsupported LLM provider"):
        LlmConfig(provider="nonsense", config={})
    with pytest.raises(ValidationError, match="Unsupported embedding provider"):
        EmbedderConfig(provider="nonsense", config={})
    with pytest.raises(ValidationError, match="Unsupported vector store provider"):
        VectorStoreConfig(provider="nonsense", config={})
    with pytest.raises(ValidationError, match="Unsupported LLM provider"):
        mem0.Memory.from_config({"llm": {"provider": "nonsense", "config": {}}})


@pytest.mark.parametrize("section", ["llm", "embedder", "vector_store"])
def test_unknown_options_are_named(section: str) -> None:
    with pytest.raises(ValidationError, match="max_modle_len"):
        MemoryConfig(**{section: {"provider": "inferscale", "config": {"max_modle_len": 1}}})


def test_without_a_config_everything_is_ours() -> None:
    for config in (None, {}, MemoryConfig()):
        complete = complete_config(config)
        for section in (complete.llm, complete.embedder, complete.vector_store):
            assert section.provider == "inferscale"
        assert CoreOptions.given_in(complete.vector_store.config) == {}


def test_a_section_that_mem0_ignores_is_told(caplog: pytest.LogCaptureFixture) -> None:
    complete_config({"llmm": {"provider": "inferscale"}})
    assert "no config section 'llmm'" in caplog.text


def test_the_core_is_named_once_for_all() -> None:
    complete = complete_config({"vector_store": {"config": {**OURS, "tenant": "t"}}})
    assert complete.llm.config == OURS
    assert CoreOptions.given_in(complete.embedder.config) == OURS
    other = complete_config({"llm": {"config": {"base_url": "http://h:1", "max_tokens": 9}}})
    assert CoreOptions.given_in(other.vector_store.config) == {"base_url": "http://h:1"}
    both = complete_config({"llm": {"config": {"model": "a"}}, "embedder": {"config": OURS}})
    assert both.llm.config == {"model": "a"}
    assert CoreOptions.given_in(both.embedder.config) == OURS


def test_sections_of_other_providers_stay() -> None:
    given = {"llm": {"provider": "openai", "config": {"model": "gpt"}}, "custom_instructions": "x"}
    complete = complete_config(given)
    assert complete.llm == LlmConfig(**given["llm"])
    assert complete.custom_instructions == "x"
    assert complete.vector_store.provider == "inferscale"
    config = MemoryConfig(llm=LlmConfig(**given["llm"]))
    assert complete_config(config).llm == config.llm
    assert given == {
        "llm": {"provider": "openai", "config": {"model": "gpt"}},
        "custom_instructions": "x",
    }
    with pytest.raises(TypeError, match="MemoryConfig"):
        complete_config("vector_store")


def test_llm_config_has_mem0s_fields_and_ours() -> None:
    config = InferScaleLlmConfig(model="m", max_tokens=5, extraction_prompt="short", timeout=3)
    assert (config.max_tokens, config.temperature, config.extraction_prompt) == (5, 0.1, "short")
    assert config.core.given() == {"model": "m", "timeout": 3}
    with pytest.raises(ValueError, match="extraction_prompt"):
        InferScaleLlmConfig(extraction_prompt="long")
