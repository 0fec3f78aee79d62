"""The life of a private core with the real vLLM: who starts it, who shares it, what ends it."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_apps import App, eventually

from inferscale_core.client import (
    ModelNotFound,
    NotEnoughMemory,
    StartupError,
    UnsupportedArchitecture,
    aconnect,
    connect,
)
from inferscale_core.client.locks import held_leases, is_free
from inferscale_core.client.rundir import CoreDir, core_processes

GRACE = 3.0
OPTIONS = {"max_model_len": 2048, "config": {"arena_bytes": 64 << 20}}


@pytest.fixture(scope="module")
def apps(
    small_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[App, App, CoreDir]]:
    """Two apps that connected at the same moment, with one core in a home of their own."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INFERSCALE_HOME", str(tmp_path_factory.mktemp("home")))
        environment.setenv("INFERSCALE_IDLE_GRACE", str(GRACE))
        environment.delenv("INFERSCALE_BASE_URL", raising=False)
        both = App(small_model, **OPTIONS), App(small_model, **OPTIONS)
        try:
            first, second = (app.answer() for app in both)
            assert first == second
            yield both[0], both[1], CoreDir(Path(first["directory"]))
        finally:
            for app in both:
                app.kill()


def processes(core: CoreDir) -> list[int]:
    status = core.read_status()
    assert status is not None
    return core_processes(core.path, status.session)


def titles(core: CoreDir) -> list[str]:
    result = []
    for pid in processes(core):
        result.append(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode())
    return result


def server_pid(core: CoreDir) -> int:
    status = core.read_status()
    assert status is not None
    assert status.server_pid is not None
    return status.server_pid


def test_processes_that_connect_at_once_share_one_core(apps: tuple[App, App, CoreDir]) -> None:
    first, second, core = apps
    assert first.do("chat")["content"] == second.do("chat")["content"] != ""
    assert len(list(core.path.parent.iterdir())) == 1
    assert held_leases(core.leases) == 2
    assert len([title for title in titles(core) if title == "VLLM::EngineCore"]) == 1


def test_clients_of_one_process_share_a_lease(apps: tuple[App, App, CoreDir]) -> None:
    first, _, core = apps
    assert first.do("again")["leases"] == 2
    assert held_leases(core.leases) == 2
    assert first.do("chat")["content"]


def test_a_forked_child_uses_the_client_with_a_lease_of_its_own(
    apps: tuple[App, App, CoreDir],
) -> None:
    first, _, core = apps
    assert first.do("fork") == {"code": 0, "leases": 3}
    assert eventually(lambda: held_leases(core.leases) == 2, 2)
    assert first.do("chat")["content"]


def test_a_killed_server_takes_its_engine_along_and_comes_back(
    apps: tuple[App, App, CoreDir],
) -> None:
    first, second, core = apps
    old = processes(core)
    assert len(old) >= 3
    killed = server_pid(core)
    os.kill(killed, signal.SIGKILL)
    assert eventually(lambda: is_free(core.supervisor_lock) and not processes(core), 15)
    status = core.read_status()
    assert status is not None
    assert (status.state, status.reason) == ("failed", "the server was ended by SIGKILL")
    assert not Path(status.socket).exists()
    # The next call of either app starts the core again; the other one then finds it.
    assert first.do("chat")["content"]
    assert second.do("chat")["server"] == server_pid(core) != killed


def test_the_core_ends_with_its_last_app(apps: tuple[App, App, CoreDir]) -> None:
    first, second, core = apps
    first.kill()
    time.sleep(2 * GRACE)
    assert second.do("chat")["content"]
    assert held_leases(core.leases) == 1
    second.kill()
    assert eventually(lambda: is_free(core.supervisor_lock), GRACE + 15)
    assert processes(core) == []
    status = core.read_status()
    assert status is not None
    assert status.state == "stopped"
    assert not Path(status.socket).exists()


@pytest.mark.usefixtures("core_home")
def test_model_that_is_no_directory_and_no_hub_id() -> None:
    with pytest.raises(ModelNotFound, match="there is no directory /no/such/model"):
        connect("/no/such/model")
    with pytest.raises(ModelNotFound, match="neither a directory nor a hub id"):
        connect("nosuchmodel")


def test_directory_without_a_model(core_home: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        connect(core_home)


@pytest.mark.usefixtures("core_home")
def test_hub_id_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound) as caught:
        connect("nobody/there-is-no-such-model", progress=False, **OPTIONS)
    assert caught.value.log is not None
    assert str(caught.value.log) in str(caught.value)


async def test_architecture_that_vllm_does_not_know(core_home: Path, small_model: str) -> None:
    model = core_home / "odd"
    shutil.copytree(small_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["NoSuchForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitecture, match="NoSuchForCausalLM"):
        await aconnect(model, progress=False, **OPTIONS)


@pytest.mark.usefixtures("core_home")
def test_more_memory_than_there_is(small_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "100000")
    with pytest.raises(NotEnoughMemory, match=r"100000\.0 KV cache"):
        connect(small_model, progress=False)


@pytest.mark.usefixtures("core_home")
def test_option_that_vllm_does_not_know(small_model: str) -> None:
    with pytest.raises(StartupError, match="--no-such-option"):
        connect(small_model, progress=False, engine_args=["--no-such-option", "1"], **OPTIONS)


@pytest.mark.usefixtures("core_home")
def test_bad_arguments_of_connect(small_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="needs model="):
        connect()
    with pytest.raises(StartupError, match="arena_bytes"):
        connect(small_model, config={"arena_bytes": -1})
    with pytest.raises(StartupError, match="is a string"):
        connect(small_model, engine_args="--max-model-len 2048")
    monkeypatch.setenv("INFERSCALE_PYTHON", "/no/python")
    with pytest.raises(StartupError, match="/no/python does not run"):
        connect(small_model)
