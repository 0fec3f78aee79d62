"""The inferscale command, up to where vLLM takes over."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from inferscale_core import cli
from inferscale_core.client.locks import FileLock
from inferscale_core.client.rundir import CoreDir, Status


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.app, list(args))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Argument list and environment that ``serve`` would become."""
    called: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, env: called.extend((argv, env)))
    return called


def test_version() -> None:
    assert run("--version").output.strip()[0].isdigit()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
@pytest.mark.parametrize("form", ["{0} {1}", "{0}={1}"])
def test_serve_refuses_to_open_to_others(program: list[Any], host: str, form: str) -> None:
    result = run("serve", "org/model", *form.format("--host", host).split(" "))
    assert result.exit_code == 2
    assert "--insecure" in result.output
    assert not program


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ["--host", "127.0.0.1"]),
        (["--host", "localhost"], ["--host", "localhost"]),
        (["--host=127.0.0.5"], ["--host=127.0.0.5"]),
        (["--host", "0.0.0.0", "--insecure"], ["--host", "0.0.0.0"]),
        (["--uds", "/run/x.sock"], ["--uds", "/run/x.sock"]),
        (["--port", "9000", "--max-model-len", "512"], ["--port", "9000"]),
    ],
)
def test_serve_becomes_vllms_server(
    program: list[Any], args: list[str], expected: list[str]
) -> None:
    result = run("serve", "org/model", *args, "--store", "/f.db")
    assert result.exit_code == 0, result.output
    argv, env = program
    assert argv[1:6] == ["-P", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model"]
    assert " ".join(expected) in " ".join(argv)
    assert sum(arg.startswith("--host") for arg in argv) == ("--uds" not in args)
    assert argv.count("--max-model-len") == 1
    assert '"store": "/f.db"' in argv[argv.index("--kv-transfer-config") + 1]
    assert env["VLLM_PLUGINS"] == "inferscale"


def test_serve_with_wrong_input(program: list[Any]) -> None:
    for args, message in (
        (["serve", "/no/model"], "neither a directory nor a hub id"),
        (["serve", "org/model", "--core-config", "{"], "--core-config is not valid"),
        (["serve", "org/model", "--core-config", "[1]"], "--core-config is not valid"),
        (["serve", "org/model", "--core-config", '{"tial": 1}'], "tial"),
        (["serve", "org/model", "--core-config", '{"tial": 1}'], "tail, min_gain_tokens"),
        (["serve", "org/model", "--port", "99999"], "--port 99999 is no port"),
    ):
        result = run(*args)
        assert result.exit_code == 2
        assert message in result.output
    assert not program


def test_serve_on_a_port_that_is_taken(program: list[Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "org/model", "--port", str(port))
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in result.output
    assert not program


def test_models(small_model: str) -> None:
    assert f"smollm2-135m\t{''}" in run("models", "list").output
    assert run("models", "get", "smollm2").output.strip().endswith(small_model)
    assert run("models", "get", "nothing").exit_code == 2


def test_status_of_private_cores(core_home: Path) -> None:
    assert "no private core runs" in run("status").output
    core = CoreDir.of("0123456789abcdef")
    core.create()
    core.write_status(Status(state="ready", socket="/s", server_pid=7, model="/m"))
    assert "no private core runs" in run("status").output
    with FileLock(core.supervisor_lock) as lock:
        assert lock.try_acquire()
        assert "0123456789ab\tready\t0 users\tpid 7\t/m\t/s" in run("status").output
    assert core_home in core.path.parents


def test_status_of_a_served_core_that_is_not_there() -> None:
    result = run("status", "--base-url", "http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "no core answers at http://127.0.0.1:9" in result.output
