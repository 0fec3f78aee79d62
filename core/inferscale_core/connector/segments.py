"""Which segments are resident, where, and how a prompt's tokens find them."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from inferscale_core.connector.protocol import SpanKind
from inferscale_core.kv.arena import SlotAllocator

_PREFIX_TOKENS = 4
_TOKEN_BYTES = 4


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as a hashable byte string, four bytes a token."""
    return array("i", token_ids).tobytes()


@dataclass(eq=False)
class Segment:
    """KV of a run of tokens in the arena. ``slots`` is int32 ``[num_tokens]``."""

    namespace: str
    key: str
    kind: SpanKind
    tokens: bytes
    slots: np.ndarray
    behind: frozenset[str] = frozenset()

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


@dataclass
class _Namespace:
    """Segments of one owner, findable by key and by content."""

    by_key: dict[str, Segment] = field(default_factory=dict)
    by_tokens: dict[bytes, Segment] = field(default_factory=dict)
    # First tokens of a segment -> lengths (tokens) of the segments that start so, with counts.
    lengths: dict[bytes, dict[int, int]] = field(default_factory=dict)
    short: dict[int, int] = field(default_factory=dict)

    def add(self, segment: Segment) -> None:
        self.by_key[segment.key] = segment
        if segment.tokens not in self.by_tokens:
            counts = self._counts(segment)
            counts[segment.num_tokens] = counts.get(segment.num_tokens, 0) + 1
        self.by_tokens[segment.tokens] = segment

    def remove(self, segment: Segment) -> None:
        self.by_key.pop(segment.key, None)
        if self.by_tokens.get(segment.tokens) is segment:
            del self.by_tokens[segment.tokens]
            counts = self._counts(segment)
            counts[segment.num_tokens] -= 1
            if not counts[segment.num_tokens]:
                del counts[segment.num_tokens]
                if segment.num_tokens >= _PREFIX_TOKENS and not counts:
                    del self.lengths[segment.tokens[: _PREFIX_TOKENS * _TOKEN_BYTES]]

    def _counts(self, segment: Segment) -> dict[int, int]:
        if segment.num_tokens < _PREFIX_TOKENS:
            return self.short
        return self.lengths.setdefault(segment.tokens[: _PREFIX_TOKENS * _TOKEN_BYTES], {})

    def at(self, prompt: bytes, start: int) -> Iterator[Segment]:
        """Segments whose tokens stand at token ``start`` of the prompt, longest first."""
        begin = start * _TOKEN_BYTES
        counts = self.lengths.get(prompt[begin : begin + _PREFIX_TOKENS * _TOKEN_BYTES])
        for lengths in (counts, self.short):
            for length in sorted(lengths or (), reverse=True):
                found = self.by_tokens.get(prompt[begin : begin + length * _TOKEN_BYTES])
                if found is not None:
                    yield found


class _Contents:
    """Runs of tokens to look for in others."""

    def __init__(self, texts: Iterable[bytes]):
        self._by_start: dict[bytes, list[bytes]] = {}
        for text in texts:
            self._by_start.setdefault(text[: _PREFIX_TOKENS * _TOKEN_BYTES], []).append(text)
        self._lengths = {len(start) for start in self._by_start if start}

    def stand_in(self, tokens: bytes) -> bool:
        """Whether one of the runs stands anywhere in ``tokens``."""
        for length in self._lengths:
            for at in range(0, len(tokens) - length + 1, _TOKEN_BYTES):
                for text in self._by_start.get(tokens[at : at + length], ()):
                    if tokens.startswith(text, at):
                        return True
        return False


@dataclass(frozen=True)
class Gap:
    """Prompt tokens ``[start, end)`` between known segments that could become one."""

    kind: SpanKind
    start: int
    end: int
    behind: frozenset[str]


@dataclass(frozen=True)
class Cover:
    """The run of segments that explains a prompt from its first token on, and what follows it."""

    segments: tuple[Segment, ...] = ()
    gaps: tuple[Gap, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.segments)

    def without_tail(self, tail: int) -> "Cover":
        """The cover cut before its last ``tail`` lines."""
        if tail <= 0:
            return self
        lines = [i for i, s in enumerate(self.segments) if s.kind == "line"]
        keep = lines[-tail] if tail <= len(lines) else (lines[0] if lines else len(self.segments))
        return Cover(self.segments[:keep], self.gaps)

    def arena_slots(self, start: int, end: int) -> np.ndarray:
        """Arena slots of prompt tokens ``[start, end)``, int32."""
        return np.concatenate([s.slots for s in self.segments])[start:end]


class SegmentTable:
    """All segments of an engine: the only authority on what is resident.

    Evicts the least recently used. ``version`` changes whenever a match could come out another.
    """

    def __init__(self, allocator: SlotAllocator):
        self._allocator = allocator
        self._namespaces: dict[str, _Namespace] = {}
        self._recent: OrderedDict[tuple[str, str], Segment] = OrderedDict()
        self.version = 0
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def num_slots(self) -> int:
        return self._allocator.num_slots

    @property
    def num_slots_used(self) -> int:
        return self._allocator.num_slots - self._allocator.num_free

    def get(self, namespace: str, key: str) -> Segment | None:
        return self._recent.get((namespace, key))

    def reserve(
        self, count: int, pinned: Iterable[Segment] = ()
    ) -> tuple[np.ndarray | None, list[Segment]]:
        """Slots for ``count`` tokens, evicting unpinned segments, and what was evicted.

        Returns None for the slots when they cannot be had; nothing is evicted then.
        """
        keep = {id(s) for s in pinned}
        victims: list[Segment] = []
        room = self._allocator.num_free
        if room < count:
            for segment in self._recent.values():
                if id(segment) not in keep:
                    victims.append(segment)
                    room += segment.num_tokens
                    if room >= count:
                        break
        if room < count:
            return None, []
        for victim in victims:
            self.remove(victim)
        self.num_evictions += len(victims)
        return self._allocator.allocate(count), victims

    def release(self, slots: np.ndarray) -> None:
        """Give back reserved slots that never became a segment."""
        self._allocator.free(slots)

    def insert(self, segment: Segment) -> None:
        """Make a segment resident, in place of one with the same key or content."""
        space = self._namespaces.setdefault(segment.namespace, _Namespace())
        for old in (space.by_key.get(segment.key), space.by_tokens.get(segment.tokens)):
            if old is not None and (segment.namespace, old.key) in self._recent:
                self.remove(old)
        space = self._namespaces.setdefault(segment.namespace, _Namespace())
        space.add(segment)
        self._recent[segment.namespace, segment.key] = segment
        self.version += 1

    def remove(self, segment: Segment) -> None:
        """Forget a segment; its slots are free at once (loads run before stores in a step)."""
        del self._recent[segment.namespace, segment.key]
        space = self._namespaces[segment.namespace]
        space.remove(segment)
        if not space.by_key:
            del self._namespaces[segment.namespace]
        self._allocator.free(segment.slots)
        self.version += 1

    def drop(
        self,
        keys: Iterable[tuple[str, str]],
        namespaces: Iterable[str] = (),
        touched: Iterable[str] = (),
        stale: Iterable[tuple[str, str]] = (),
        texts: Iterable[bytes] = (),
    ) -> int:
        """Forget segments by key or namespace, and every segment that was encoded behind them.

        ``touched`` are further namespaces whose lines may stand behind the dropped ones. Lines
        elsewhere keep their KV: a key names a line's text, which another owner may have too.

        Lines behind a ``stale`` one keep theirs, as they were computed from its text; headers and
        literals, which questions compute from its KV, do not. ``texts`` are tokens that no header
        or literal may hold any more: of a line that it took in before the line had KV.
        """
        keys, whole, stale = list(keys), set(namespaces), list(stale)
        gone = {key for _, key in keys}
        tainted = {key for _, key in stale}
        held = _Contents(texts)
        reached = whole.union((namespace for namespace, _ in keys), touched)
        named = (self._recent.get(k) for k in [*keys, *stale])
        doomed = {id(s): s for s in named if s is not None}
        for name in whole:
            for segment in list(self._namespaces.get(name, _Namespace()).by_key.values()):
                doomed[id(segment)] = segment
                gone.add(segment.key)
        for segment in self._recent.values():
            if segment.kind == "line":
                spoilt = segment.namespace in reached and not gone.isdisjoint(segment.behind)
            else:
                behind = segment.behind
                spoilt = not (gone.isdisjoint(behind) and tainted.isdisjoint(behind))
                spoilt = spoilt or held.stand_in(segment.tokens)
            if spoilt:
                doomed[id(segment)] = segment
        for segment in doomed.values():
            self.remove(segment)
        return len(doomed)

    def touch(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            self._recent.move_to_end((segment.namespace, segment.key))

    def match(self, namespaces: Sequence[str], prompt: bytes, limit: int) -> Cover:
        """Cover of a prompt's first ``limit`` tokens by segments of ``namespaces``.

        Longest match first at every position. A header stands at position 0 only, lines and
        literals only after it. Where the cover ends, the next known line is looked for: the
        tokens up to it are a gap that can be captured once they are computed as text.
        """
        spaces = [s for s in (self._namespaces.get(n) for n in namespaces) if s is not None]
        if not spaces:
            return Cover()
        segments: list[Segment] = []
        gaps: list[Gap] = []
        behind: set[str] = set()
        position = 0
        while position < limit:
            found = self._at(spaces, prompt, position, limit)
            if found is not None:
                if not gaps:
                    segments.append(found)
                behind |= found.behind
                if found.kind == "line":
                    behind.add(found.key)
                position += found.num_tokens
                continue
            following = self._next_line(spaces, prompt, position + 1, limit)
            if following is None:
                break
            kind: SpanKind = "literal" if position else "header"
            gaps.append(Gap(kind, position, following, frozenset(behind)))
            position = following
        return Cover(tuple(segments), tuple(gaps))

    @staticmethod
    def _at(spaces: list[_Namespace], prompt: bytes, position: int, limit: int) -> Segment | None:
        best: Segment | None = None
        for space in spaces:
            for segment in space.at(prompt, position):
                fits = position + segment.num_tokens <= limit
                if fits and (segment.kind == "header") == (position == 0):
                    if best is None or segment.num_tokens > best.num_tokens:
                        best = segment
                    break
        return best

    def _next_line(
        self, spaces: list[_Namespace], prompt: bytes, start: int, limit: int
    ) -> int | None:
        prefix = _PREFIX_TOKENS * _TOKEN_BYTES
        for position in range(start, limit):
            begin = position * _TOKEN_BYTES
            head = prompt[begin : begin + prefix]
            if any(head in space.lengths for space in spaces):
                found = self._at(spaces, prompt, position, limit)
                if found is not None and found.kind == "line":
                    return position
        return None
