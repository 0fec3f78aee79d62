"""One vLLM server with the plugin, for all tests of a session, and a client of it."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

START_TIMEOUT = 400.0
MAX_MODEL_LEN = 2048
BYTES_PER_TOKEN = 23_040
ARENA_TOKENS = 1500
MODEL = "smollm2"


@dataclass
class Core:
    """A running server. ``http`` talks to its socket."""

    http: httpx.Client
    socket: str
    home: Path
    log: Path

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        return self.call("POST", path, status, json=body)

    def get(self, path: str, status: int = 200, **params: Any) -> Any:
        return self.call("GET", path, status, params=params)

    def call(self, method: str, path: str, status: int, **kwargs: Any) -> Any:
        response = self.http.request(method, path, **kwargs)
        assert response.status_code == status, response.text
        return response.json()

    def add(
        self, scope: dict[str, str], texts: list[str], wait: float = 120, **fields: Any
    ) -> list[dict[str, Any]]:
        memories = [text if isinstance(text, dict) else {"text": text} for text in texts]
        body = {"scope": scope, "memories": memories, "wait": wait, **fields}
        return self.post("/v1/memories", body)["memories"]

    def chat(self, question: str, inferscale: Any = None, status: int = 200, **fields: Any) -> Any:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 4,
            "temperature": 0,
            **fields,
        }
        if inferscale is not None:
            body["inferscale"] = inferscale
        return self.post("/v1/chat/completions", body, status)

    def until(self, done: Any, timeout: float = 60) -> Any:
        """Poll ``done()`` until it is true."""
        deadline = time.monotonic() + timeout
        while not (value := done()):
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.1)
        return value


def model_path() -> str:
    named = os.environ.get("INFERSCALE_TEST_MODEL")
    if named:
        return named
    from inferscale_core.models import resolve

    return str(resolve("smollm2-135m"))


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    home = tmp_path_factory.mktemp("core")
    log = home / "server.log"
    socket = f"/tmp/inferscale-{uuid.uuid4().hex[:8]}.sock"  # a socket's path has 107 bytes
    transfer = {
        "kv_connector": "InferScaleConnector",
        "kv_connector_module_path": "inferscale_core.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "arena_bytes": ARENA_TOKENS * BYTES_PER_TOKEN,
            "facts_per_request": 2,
            "window": {"max_tokens": 256},
        },
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", model_path(), "--served-model-name", MODEL,
        "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN),
        "--gpu-memory-utilization", "0.3", "--disable-hybrid-kv-cache-manager",
        "--scheduling-policy", "priority", "--enable-prompt-tokens-details",
        "--worker-extension-cls", "inferscale_core.connector.extension.WorkerExtension",
        "--uds", socket, "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    env = os.environ | {
        "INFERSCALE_HOME": str(home),
        "INFERSCALE_PARENT_DEATH": "1",
        "VLLM_PLUGINS": "inferscale",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=env, stdout=output, stderr=output, start_new_session=True
        )
    http = httpx.Client(
        transport=httpx.HTTPTransport(uds=socket), base_url="http://core", timeout=300
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                if http.get("/health").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        yield Core(http, socket, home, log)
    finally:
        http.close()
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(30)
        Path(socket).unlink(missing_ok=True)


@pytest.fixture
def scope() -> dict[str, str]:
    """A scope that no other test has."""
    return {"tenant": f"t-{uuid.uuid4().hex[:8]}", "user": "alice"}
