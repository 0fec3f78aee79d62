"""Questions in flight: encodings step back while there are any."""

import asyncio
import contextlib
from collections.abc import Iterator


class Traffic:
    """Counts questions, from their arrival to their last token."""

    def __init__(self) -> None:
        self.questions = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def begin(self) -> None:
        self.questions += 1
        self._quiet.clear()

    def end(self) -> None:
        self.questions -= 1
        if not self.questions:
            self._quiet.set()

    @contextlib.contextmanager
    def question(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    async def quiet(self, at_most: float) -> None:
        """Wait until no question is in flight, but no longer than ``at_most`` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), at_most)
