"""The real default model: unit vectors of the dimension that it says."""

import threading

import numpy as np
import pytest
import torch

from inferscale_core.facts import embedder as module
from inferscale_core.facts.embedder import DEFAULT_EMBEDDER, Embedder, EmbedderError


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder()


def test_vectors_are_unit_and_rank_by_meaning(embedder: Embedder) -> None:
    assert embedder.name == DEFAULT_EMBEDDER
    assert embedder.dimension == 384
    vectors = embedder.embed(
        ["Alice adopted a puppy.", "Interest rates rose.", "Which pet does Alice have?"]
    )
    assert vectors.shape == (3, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[2] @ vectors[0] > vectors[2] @ vectors[1] + 0.2
    assert torch.get_num_threads() == 1


def test_no_text_gives_no_rows(embedder: Embedder) -> None:
    assert embedder.embed([]).shape == (0, 384)


def test_awkward_texts_are_embedded(embedder: Embedder) -> None:
    texts = ["", " ", "\ud800 lone", "\x00", "word " * 20_000, "\U0001f600" * 10]
    vectors = embedder.embed(texts)
    assert np.isfinite(vectors).all()
    np.testing.assert_array_equal(vectors[2], embedder.embed(["? lone"])[0])


def test_a_batch_gives_what_single_texts_give(embedder: Embedder) -> None:
    texts = [f"Fact number {i} " + "is long " * (i % 20) for i in range(70)]
    together = embedder.embed([*texts, texts[0]])
    np.testing.assert_array_equal(together[0], together[-1])
    fresh = Embedder(batch_size=1)
    np.testing.assert_allclose(fresh.embed(texts[:5]), together[:5], atol=1e-5)


def test_the_cache_is_bounded_and_not_shared(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHED_TEXTS", 3)
    first = embedder.embed(["one"])
    first[:] = 0
    again = embedder.embed(["one", "two", "three", "four", "one"])
    assert np.linalg.norm(again[0]) > 0.9
    assert len(embedder._cache) == 3


def test_threads_share_one_model(embedder: Embedder) -> None:
    expected = embedder.embed([f"t{i}" for i in range(8)])
    fresh = Embedder()
    results: dict[int, np.ndarray] = {}

    def work(number: int) -> None:
        results[number] = fresh.embed([f"t{number}"])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        np.testing.assert_allclose(results[number], expected[number], atol=1e-5)


def test_a_model_that_is_not_there_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EmbedderError, match=r"cannot be loaded.*path of one on disk"):
        Embedder(str(tmp_path))
    with pytest.raises(EmbedderError, match="no-such-model"):
        Embedder(str(tmp_path / "no-such-model"))
