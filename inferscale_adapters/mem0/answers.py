"""Chat answers with the attributes that users of OpenAI's client know."""

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from inferscale_core.client import ChatStream
from inferscale_core.client.models import MemoryReport


class Fields(dict[str, Any]):
    """A dict whose keys are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return _wrapped(self[name])
        except KeyError:
            raise AttributeError(f"the answer has no field {name!r}") from None


class ChatAnswer(Fields):
    """An OpenAI chat completion, or one chunk of it.

    ``answer.choices[0].message.content`` and ``answer["choices"][0]["message"]["content"]`` are
    the same. `inferscale` is the report on memory, `text` the first choice's text.
    """

    @property
    def inferscale(self) -> MemoryReport | None:
        """What became of the facts; None where the core sent none (most chunks of a stream)."""
        report = self.get("inferscale")
        return None if report is None else MemoryReport.model_validate(report)

    @property
    def text(self) -> str:
        """Text of the first choice; of a chunk, the piece that it adds."""
        choices = self.get("choices") or [{}]
        part = choices[0].get("message") or choices[0].get("delta") or {}
        return part.get("content") or ""


class ChatAnswerStream:
    """Chunks of a streamed answer; iterate once, or `close` to abort the request.

    `inferscale` is the report, from the chunk that carries it on.
    """

    def __init__(self, chunks: ChatStream) -> None:
        self._chunks = chunks
        self.inferscale: MemoryReport | None = None

    def __iter__(self) -> Iterator[ChatAnswer]:
        return self

    def __next__(self) -> ChatAnswer:
        chunk = ChatAnswer(next(self._chunks))
        self.inferscale = chunk.inferscale or self.inferscale
        return chunk

    def close(self) -> None:
        self._chunks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _wrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return Fields(value)
    if isinstance(value, list):
        return [_wrapped(item) for item in value]
    return value
