"""Mem0's embedder on the core's own."""

from collections.abc import Sequence

from mem0.configs.embeddings.base import BaseEmbedderConfig
from mem0.embeddings.base import EmbeddingBase

from inferscale_adapters.mem0.configs import core_of_embedder
from inferscale_adapters.mem0.core import client_for
from inferscale_core.client import Client

BATCH = 256
"""Texts per request."""


class InferScaleEmbedding(EmbeddingBase):
    """Vectors of the embedder that the core searches its facts with.

    Its dimension is asked from the core and set as ``config.embedding_dims``; naming another in
    the config is an error. ``config.model`` is the core's language model, not the embedder's
    (a connect option named ``embedder`` chooses that one).
    """

    def __init__(self, config: BaseEmbedderConfig | None = None) -> None:
        super().__init__(config)
        self.core: Client = client_for(core_of_embedder(self.config), self)
        probe = self.core.embed([])
        wanted = self.config.embedding_dims
        if wanted not in (None, probe.dimension):
            raise ValueError(
                f"embedding_dims is {wanted}, but the core's embedder {probe.model} has "
                f"{probe.dimension} dimensions; leave embedding_dims out"
            )
        self.config.embedding_dims = probe.dimension

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:
        """The vector of one text, ``[dimension]``; ``memory_action`` makes no difference."""
        return self.embed_batch([text])[0]

    def embed_batch(
        self, texts: Sequence[str], memory_action: str | None = "add"
    ) -> list[list[float]]:
        """One vector per text, ``[len(texts)][dimension]``."""
        vectors: list[list[float]] = []
        for start in range(0, len(texts), BATCH):
            vectors += self.core.embed(texts[start : start + BATCH]).embeddings
        return vectors
