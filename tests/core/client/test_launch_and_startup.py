"""The command line of a core, and what its log says when it does not start."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inferscale_core.client.errors import (
    AddressInUse,
    ModelNotFound,
    NotEnoughMemory,
    StartupError,
    StoreLocked,
    UnsupportedArchitecture,
)
from inferscale_core.client.launch import (
    GIB,
    Engine,
    cpu_memory,
    cpu_memory_fraction,
    flags,
    probe,
    server_argv,
    server_env,
)
from inferscale_core.client.private_core import CoreSpec
from inferscale_core.client.startup import Progress, diagnose
from inferscale_core.config import CoreConfig

CPU = Engine("/usr/bin/python3", "0.32.0", cpu=True)
GPU = Engine("/usr/bin/python3", "0.32.0", cpu=False)


def options_of(argv: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    name = ""
    for arg in argv[4:]:
        if arg.startswith("--"):
            name, _, value = arg[2:].partition("=")
            assert name not in found, f"{name} stands twice"
            found[name] = [value] if value else []
        else:
            found[name].append(arg)
    return found


def test_flags() -> None:
    options = {"a_b": True, "c": False, "d": None, "e": 1.5, "f": {"x": [1]}, "g": ["p", "q"]}
    assert flags(options) == ["--a-b", "--no-c", "--e", "1.5", "--f", '{"x": [1]}', "--g", "p", "q"]


def test_our_options() -> None:
    config = CoreConfig(arena_bytes=GIB, store="/facts.db")
    options = options_of(server_argv(CPU, "/m", config, {}, []))
    transfer = json.loads(options.pop("kv-transfer-config")[0])
    assert transfer == {
        "kv_connector": "InferScaleConnector",
        "kv_connector_module_path": "inferscale_core.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"arena_bytes": GIB, "store": "/facts.db"},
    }
    assert 0 < float(options.pop("gpu-memory-utilization")[0]) <= 0.92
    assert options == {
        "model": ["/m"],
        "enable-prompt-tokens-details": [],
        "scheduling-policy": ["priority"],
        "max-model-len": ["auto"],
        "worker-extension-cls": ["inferscale_core.connector.extension.WorkerExtension"],
        "enforce-eager": [],
    }
    on_gpu = options_of(server_argv(GPU, "/m", config, {}, []))
    assert not {"enforce-eager", "gpu-memory-utilization"} & set(on_gpu)


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        ({"max_model_len": 4096}, [], {"max-model-len": ["4096"]}),
        ({}, ["--max-model-len", "4096"], {"max-model-len": ["4096"]}),
        ({}, ["--max_model_len=4096"], {"max_model_len": ["4096"], "max-model-len": None}),
        ({"enforce_eager": False}, [], {"no-enforce-eager": [], "enforce-eager": None}),
        ({}, ["--no-enforce-eager"], {"no-enforce-eager": [], "enforce-eager": None}),
        ({"kv_transfer_config": None}, [], {"kv-transfer-config": None}),
        ({"gpu-memory-utilization": 0.2}, [], {"gpu-memory-utilization": ["0.2"]}),
        ({"dtype": "float32"}, ["--seed", "7"], {"dtype": ["float32"], "seed": ["7"]}),
    ],
)
def test_the_users_options_win(
    options: dict[str, Any], arguments: list[str], expected: dict[str, list[str] | None]
) -> None:
    found = options_of(server_argv(CPU, "/m", CoreConfig(), options, arguments))
    assert {name: found.get(name) for name in expected} == expected


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "other,inferscale")
    env = server_env(CPU, [])
    assert env["VLLM_PLUGINS"] == "inferscale,other"
    assert env["INFERSCALE_PARENT_DEATH"] == env["VLLM_NO_USAGE_STATS"] == "1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_env(CPU, ["--kv-cache-memory-bytes", "9"])
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_env(GPU, [])
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_env(CPU, [])


def test_memory_is_counted_as_vllm_counts_it() -> None:
    program = (
        "from vllm.utils.cpu_resource_utils import get_memory_node_info as info\n"
        "print(info(0).total_memory, info(0).available_memory)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    its_total, its_available = (int(word) for word in result.stdout.split()[-2:])
    total, available = cpu_memory()
    assert total == its_total
    assert abs(available - its_available) < 2 * GIB  # other processes come and go
    assert cpu_memory_fraction() * total < available


def test_interpreter_without_vllm(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(StartupError, match=r"vLLM is not installed .*pip install 'inferscale"):
        probe(str(bare))
    assert probe(sys.executable).version


def test_what_makes_another_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(**changes: Any) -> str:
        config = CoreConfig(**changes.pop("config", {}))
        return CoreSpec(model="/m", config=config, python="python", **changes).digest

    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path))
    base = digest()
    assert digest(options={}, arguments=()) == base == digest(config={"tail": 0})
    others = [
        digest(options={"dtype": "float32"}),
        digest(arguments=("--seed", "1")),
        digest(config={"tail": 3}),
    ]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    others.append(digest())
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "other"))
    others.append(digest())
    assert len({base, *others}) == 6


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("RuntimeError: operator torchvision::nms does not exist", StartupError),
        (
            "ValueError: Available memory on node 0 (2.1/15.6 GiB) on startup is less than desired "
            "CPU memory utilization (0.92, 14.3 GiB).",
            NotEnoughMemory,
        ),
        (
            "ValueError: To serve at least one request with the models's max seq len (131072), "
            "(16.0 GiB KV cache is needed, which is larger than the available KV cache memory",
            NotEnoughMemory,
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", NotEnoughMemory),
        (
            "pydantic_core.ValidationError: Model architectures ['MambaX'] are not supported for "
            "now.",
            UnsupportedArchitecture,
        ),
        (
            "inferscale_core.kv.rotary.UnsupportedModelError: layers with MambaSpec keep no "
            "per-token keys and values",
            UnsupportedArchitecture,
        ),
        ("OSError: a/b is not a local folder and is not a valid model identifier", ModelNotFound),
        ("OSError: [Errno 98] Address already in use", AddressInUse),
        (
            "inferscale_core.facts.errors.StoreError: the fact store /f.db is in use by another "
            "core, process 7",
            StoreLocked,
        ),
        (
            "ValueError: arena_bytes=1000 holds no token of this model (23040 bytes a token); "
            "raise arena_bytes",
            StartupError,
        ),
        ("api_server.py: error: unrecognized arguments: --no-such", StartupError),
        ("somewhere.StrangeError: nobody has seen this before", StartupError),
    ],
)
def test_cause_in_the_log(tmp_path: Path, line: str, expected: type[StartupError]) -> None:
    log = tmp_path / "core.log"
    log.write_text(
        "(APIServer pid=1) INFO 11-30 21:09:19 [api_utils.py:286] non-default args: "
        "{'model': 'out of memory'}\n"
        f"(EngineCore pid=2) ERROR 11-30 21:09:41 [core.py:1] {line}\n"
    )
    error = diagnose(log, "/m", "the server ended with exit status 1")
    assert type(error) is expected
    for part in ("/m", str(log), line[:60]):
        assert part in str(error)


def test_killed_without_a_word(tmp_path: Path) -> None:
    error = diagnose(tmp_path / "none.log", "/m", "the server was ended by SIGKILL")
    assert isinstance(error, NotEnoughMemory)
    assert "most likely by the kernel" in str(error)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress(tmp_path: Path) -> None:
    log = tmp_path / "core.log"
    plain, terminal = io.StringIO(), Terminal()
    shown = [Progress("core for m", log, True, out) for out in (plain, terminal)]
    for text in (
        "",
        "x Resolved architecture: LlamaForCausalLM\n",
        "Starting to load mo",
        "del /m\n",
    ):
        with log.open("a") as file:
            file.write(text)
        for progress in shown:
            progress.update()
    for progress in shown:
        progress.finish("ready")
    assert [line.split(": ", 2)[2] for line in plain.getvalue().splitlines()] == [
        "starting (0 s)",
        "model configuration read (LlamaForCausalLM) (0 s)",
        "loading the model (0 s)",
        "ready (0 s)",
    ]
    assert terminal.getvalue().count("\r") == 5
    assert terminal.getvalue().endswith("ready (0 s)\n")


def test_no_progress_for_a_core_that_is_there(tmp_path: Path) -> None:
    out = io.StringIO()
    Progress("core", tmp_path / "log", True, out).finish("ready")
    assert out.getvalue() == ""
