"""The client costs an app no heavy import."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "sqlalchemy", "transformers", "numpy", "typer", "fastapi", "uvicorn")


@pytest.mark.parametrize(
    "module",
    [
        "inferscale_core.client",
        "inferscale_core.models",
        "inferscale_core.client.supervisor",
    ],
)
def test_nothing_heavy_is_imported(module: str) -> None:
    program = f"import sys, {module}; print(*(m for m in {HEAVY} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == ""


def test_the_help_of_the_command_is_light() -> None:
    program = (
        "import sys, inferscale_core.cli as cli\n"
        "try:\n    cli.app(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(*(m for m in ('torch', 'vllm', 'sqlalchemy', 'httpx') if m in sys.modules),"
        " file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "serve" in result.stdout
    assert result.stderr.strip() == ""
