"""Providers by name in Mem0's own class, and cores shared by processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mem0
import pytest

from inferscale_adapters.mem0 import Memory, install
from inferscale_core.client import ConnectionFailed, ScopeError

APP = """
import json, os, sys
from inferscale_adapters.mem0 import Memory
options, text = json.loads(sys.argv[1]), sys.argv[2]
memory = Memory({
    "vector_store": {"config": options},
    "history_db_path": os.path.join(os.environ["MEM0_DIR"], f"history-{os.getpid()}.db"),
})
memory.add(text, user_id="shared", infer=False)
private = memory.core.core
print(json.dumps({"socket": str(private.socket), "server": private.status.server_pid}), flush=True)
sys.stdin.readline()
found = memory.get_all(filters={"user_id": "shared"})["results"]
print(json.dumps([row["memory"] for row in found]), flush=True)
sys.stdin.readline()
"""


class App:
    """A Mem0 app in a process of its own."""

    def __init__(self, options: dict[str, Any], text: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(APP), json.dumps(options), text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start_app(core_options: dict[str, Any]) -> Iterator[Callable[..., App]]:
    apps: list[App] = []

    def start(text: str, **changes: Any) -> App:
        apps.append(App({**core_options, **changes}, text))
        return apps[-1]

    yield start
    for app in apps:
        app.kill()


def processes_of(core_directory: str) -> list[int]:
    """Processes that carry the mark of a private core in their environment."""
    mark = f"INFERSCALE_CORE_DIR={core_directory}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_mem0s_own_class_takes_our_providers(core_options: dict[str, Any], tmp_path: Path) -> None:
    install()
    provider = {"provider": "inferscale", "config": core_options}
    store = {**core_options, "collection_name": f"c{uuid.uuid4().hex}"}
    memory = mem0.Memory.from_config(
        {
            "llm": {"provider": "inferscale", "config": {**core_options, "max_tokens": 100}},
            "embedder": provider,
            "vector_store": {"provider": "inferscale", "config": store},
            "history_db_path": str(tmp_path / "history.db"),
        }
    )
    assert memory.embedding_model.core is memory.vector_store.core is memory.llm.core
    assert memory.embedding_model.config.embedding_dims == len(memory.embedding_model.embed("x"))
    vectors = memory.embedding_model.embed_batch(["x", "y"])
    assert vectors[0] == pytest.approx(memory.embedding_model.embed("x"), abs=1e-4)
    (added,) = memory.add("Likes tea", user_id="alice", infer=False)["results"]
    found = memory.search("tea", filters={"user_id": "alice"})["results"]
    assert [row["id"] for row in found] == [added["id"]]
    with pytest.raises(ScopeError):
        memory.search("tea", filters={"user_id": "*"})
    memory.delete_all(user_id="alice")
    assert memory.get_all(filters={"user_id": "alice"})["results"] == []
    memory.reset()
    memory.close()


async def test_mem0s_async_class_takes_our_providers(
    core_options: dict[str, Any], tmp_path: Path
) -> None:
    install()
    store = {**core_options, "collection_name": f"c{uuid.uuid4().hex}"}
    memory = mem0.AsyncMemory.from_config(
        {
            "llm": {"provider": "inferscale", "config": core_options},
            "embedder": {"provider": "inferscale", "config": core_options},
            "vector_store": {"provider": "inferscale", "config": store},
            "history_db_path": str(tmp_path / "history.db"),
        }
    )
    await asyncio.gather(
        *[memory.add(f"Likes tea number {n}", user_id="alice", infer=False) for n in range(4)]
    )
    found = await memory.search("tea", filters={"user_id": "alice"})
    assert len(found["results"]) == 4
    await memory.delete(found["results"][0]["id"])
    assert len((await memory.get_all(filters={"user_id": "alice"}))["results"]) == 3
    await memory.reset()
    assert (await memory.get_all(filters={"user_id": "alice"}))["results"] == []


def test_from_config_of_our_class(core_options: dict[str, Any], tmp_path: Path) -> None:
    history = {"history_db_path": str(tmp_path / "history.db")}
    with Memory.from_config({"vector_store": {"config": core_options}, **history}) as memory:
        assert memory.llm.core is memory.core is memory.embedding_model.core
    with pytest.raises(ValueError, match="dimensions"):
        Memory.from_config(
            {
                "vector_store": {"config": core_options},
                "embedder": {"config": {**core_options, "embedding_dims": 1536}},
                **history,
            }
        )


def test_a_closed_memory_gives_its_core_back(memory: Memory, make_memory, tmp_path: Path) -> None:
    first, second = make_memory(tenant="close"), make_memory(tenant="close")
    assert first.core is second.core is memory.core
    first.close()
    assert second.core.models()
    alone = make_memory(timeout=50.0)
    core = alone.core
    assert core is not memory.core
    alone.close()
    with pytest.raises(ConnectionFailed, match="closed"):
        core.models()
    second.close()
    assert memory.core.models()


def test_two_apps_share_one_core(memory: Memory, start_app: Callable[..., App]) -> None:
    memory.delete_all(user_id="shared")
    apps = [start_app("From the first app"), start_app("From the second app")]
    cores = [app.read() for app in apps]
    assert cores[0] == cores[1]
    assert memory.core.core is not None
    assert cores[0]["socket"] == str(memory.core.core.socket)
    for app in apps:
        app.go_on()
        assert sorted(app.read()) == ["From the first app", "From the second app"]
    memory.delete_all(user_id="shared")


def test_a_killed_app_leaves_no_core_behind(
    start_app: Callable[..., App], core_environment: dict[str, str], tmp_path: Path
) -> None:
    app = start_app("Soon gone", store=str(tmp_path / "facts.db"))
    server = app.read()["server"]
    environment = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    (mark,) = [line for line in environment if line.startswith(b"INFERSCALE_CORE_DIR=")]
    directory = mark.split(b"=", 1)[1].decode()
    assert server in processes_of(directory)
    app.kill()
    end = time.monotonic() + 60
    while processes_of(directory) and time.monotonic() < end:
        time.sleep(0.5)
    assert processes_of(directory) == []
