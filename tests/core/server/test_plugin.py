"""Start-up errors and the queue's manners, without a server."""

import asyncio
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.config import KVTransferConfig

from inferscale_core.connector.protocol import SECRET_ENV
from inferscale_core.facts.errors import FactError, FilterError, StoreError
from inferscale_core.server.errors import QueueFullError, add_handlers
from inferscale_core.server.plugin import ConfigurationError, core_config
from inferscale_core.server.traffic import Traffic


def engine(transfer: KVTransferConfig | None) -> Any:
    return SimpleNamespace(kv_transfer_config=transfer)


def connector(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="InferScaleConnector",
        kv_connector_module_path="inferscale_core.connector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )


def test_a_server_without_the_connector() -> None:
    with pytest.raises(ConfigurationError, match="started with none"):
        core_config(engine(None))
    other = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    with pytest.raises(ConfigurationError, match="OffloadingConnector"):
        core_config(engine(other))


def test_settings() -> None:
    assert core_config(engine(connector(arena_bytes=7))).arena_bytes == 7
    with pytest.raises(ConfigurationError, match="arena_byte"):
        core_config(engine(connector(arena_byte=7)))


def test_register_makes_one_secret_and_imports_little() -> None:
    code = (
        "import os, sys\n"
        "from inferscale_core.server.plugin import register\n"
        "register(); secret = os.environ['INFERSCALE_SALT_SECRET']\n"
        "register(); assert os.environ['INFERSCALE_SALT_SECRET'] == secret\n"
        "assert len(secret) >= 32\n"
        "assert not {'torch', 'vllm', 'fastapi'} & set(sys.modules)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != SECRET_ENV}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_errors_in_openais_form() -> None:
    app = FastAPI()
    add_handlers(app)
    errors = {
        "full": QueueFullError("full", retry_after=4.2),
        "store": StoreError("locked"),
        "fact": FactError("bad fact"),
        "filter": FilterError("bad filter"),
    }

    @app.get("/{name}")
    async def fail(name: str) -> None:
        raise errors[name]

    client = TestClient(app)
    full = client.get("/full")
    assert (full.status_code, full.headers["retry-after"]) == (429, "5")
    assert full.json()["error"] == {
        "message": "full", "type": "RateLimitError", "param": None, "code": 429,
    }  # fmt: skip
    assert client.get("/store").status_code == 503
    assert client.get("/fact").status_code == 400
    assert client.get("/filter").status_code == 400


async def test_encodings_wait_for_questions_but_not_for_ever() -> None:
    traffic = Traffic()
    await traffic.quiet(0)
    with traffic.question():
        began = time.monotonic()
        await traffic.quiet(0.05)
        assert time.monotonic() - began >= 0.05
        waiting = asyncio.create_task(traffic.quiet(10))
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)
