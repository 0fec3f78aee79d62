"""How a benchmark or the demo ends when something outside it is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from inferscale_core.client.errors import InferScaleError
from inferscale_core.facts.errors import EmbedderError


class BenchError(Exception):
    """Says what was wrong and what to do; a user sees the message alone."""


@contextmanager
def reported() -> Iterator[None]:
    """Turn expected failures into their message on stderr and exit status 1."""
    try:
        yield
    except (BenchError, EmbedderError, InferScaleError) as error:
        typer.secho(f"Error: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from error
