"""What is resident, what matches, what is evicted and what goes with a dropped segment."""

import random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from inferscale_core.connector.segments import Segment, SegmentTable, token_bytes
from inferscale_core.kv.arena import SlotAllocator


def _table(num_slots: int = 1000) -> SegmentTable:
    return SegmentTable(SlotAllocator(num_slots))


def _put(table: SegmentTable, ns: str, key: str, kind, tokens: list[int], behind=()) -> Segment:
    slots, _ = table.reserve(len(tokens))
    segment = Segment(ns, key, kind, token_bytes(tokens), slots, frozenset(behind))
    table.insert(segment)
    return segment


def _match(table: SegmentTable, namespaces: list[str], prompt: list[int]):
    return table.match(namespaces, token_bytes(prompt), len(prompt))


HEADER, A, B, SHORT = [1, 2, 3, 4, 5], [9, 9, 7, 6, 5, 4], [9, 9, 7, 6, 5, 4, 3, 3], [8, 8]


def test_cover_runs_from_the_first_token_and_takes_the_longest() -> None:
    table = _table()
    _put(table, "n", "h", "header", HEADER)
    for key, line in (("a", A), ("b", B), ("s", SHORT)):
        _put(table, "n", key, "line", line)
    cover = _match(table, ["n"], HEADER + B + SHORT + A + [77, 78])
    assert [s.key for s in cover.segments] == ["h", "b", "s", "a"]
    assert cover.gaps == ()
    assert [s.key for s in cover.without_tail(1).segments] == ["h", "b", "s"]
    assert [s.key for s in cover.without_tail(9).segments] == ["h"]


def test_no_header_no_cover_but_gaps_to_learn() -> None:
    table = _table()
    _put(table, "n", "a", "line", A)
    _put(table, "n", "s", "line", [8, 8, 8, 8, 8])
    prompt = HEADER + A + [50, 51] + [8] * 5 + [60]
    cover = _match(table, ["n"], prompt)
    assert cover.segments == ()
    assert [(g.kind, g.start, g.end, set(g.behind)) for g in cover.gaps] == [
        ("header", 0, 5, set()),
        ("literal", 11, 13, {"a"}),
    ]


def test_a_header_stands_first_only_and_a_line_never_first() -> None:
    table = _table()
    _put(table, "n", "h", "header", HEADER)
    _put(table, "n", "a", "line", A)
    assert _match(table, ["n"], A + A).segments == ()
    assert [s.key for s in _match(table, ["n"], HEADER + HEADER + A).segments] == ["h"]


def test_other_namespaces_are_never_matched() -> None:
    table = _table()
    for ns in ("alice", "bob"):
        _put(table, ns, "h", "header", HEADER)
    _put(table, "alice", "a", "line", A)
    assert [s.namespace for s in _match(table, ["bob"], HEADER + A).segments] == ["bob"]
    assert _match(table, ["carol"], HEADER + A).segments == ()
    assert len(_match(table, ["bob", "alice"], HEADER + A).segments) == 2


def test_the_limit_is_never_passed() -> None:
    table = _table()
    _put(table, "n", "h", "header", HEADER)
    _put(table, "n", "a", "line", A)
    prompt = token_bytes(HEADER + A)
    assert table.match(["n"], prompt, len(HEADER) + len(A) - 1).num_tokens == len(HEADER)


def test_dropping_takes_what_was_encoded_behind_it() -> None:
    table = _table()
    _put(table, "n", "h", "header", HEADER)
    _put(table, "n", "a", "line", A)
    _put(table, "n", "b", "line", B, behind=("a",))
    _put(table, "n", "lit", "literal", [60, 61], behind=("a",))
    _put(table, "m", "c", "line", SHORT, behind=("a",))
    used = table.num_slots_used
    assert table.drop([("n", "a")]) == 3
    assert {s for s in ("h", "b", "lit") if table.get("n", s)} == {"h"}
    # Another owner's line with the same text in its window is another line.
    assert table.get("m", "c") is not None
    assert table.num_slots_used == used - len(A) - len(B) - 2
    assert table.drop([], ["m", "n"]) == 2
    assert table.num_slots_used == 0


def test_a_stale_line_takes_nothing_but_what_was_computed_from_its_kv() -> None:
    table = _table()
    _put(table, "n", "h", "header", HEADER)
    _put(table, "n", "a", "line", A, behind=("b",))
    _put(table, "n", "b", "line", B, behind=("a",))
    _put(table, "n", "lit", "literal", [60, 61], behind=("a",))
    assert table.drop([], stale=[("n", "a")], touched=["n"]) == 2
    assert {s for s in ("h", "a", "b", "lit") if table.get("n", s)} == {"h", "b"}


def test_no_literal_keeps_the_tokens_of_a_deleted_line() -> None:
    table = _table()
    _put(table, "n", "h", "header", HEADER)
    _put(table, "n", "h2", "header", [*HEADER, *SHORT, 3])
    _put(table, "reader", "lit", "literal", [60, *A, 61])
    _put(table, "reader", "other", "literal", [60, *A[:-1], 61])
    _put(table, "n", "b", "line", [*SHORT, *A])
    texts = [token_bytes(A), token_bytes(SHORT)]
    assert table.drop([("n", "a")], touched=["n"], texts=texts) == 2
    left = [s.key for s in (table.get("n", "h"), table.get("n", "b")) if s]
    assert left == ["h", "b"]
    assert table.get("reader", "lit") is None
    assert table.get("reader", "other") is not None


def test_eviction_is_least_recently_used_and_spares_the_pinned() -> None:
    table = _table(20)
    a, b, c = (_put(table, "n", k, "line", [i] * 6) for i, k in enumerate("abc", 10))
    table.touch([a])
    slots, evicted = table.reserve(6)
    assert [s.key for s in evicted] == ["b"]
    assert slots is not None
    assert table.reserve(20, pinned=[a]) == (None, [])
    assert table.get("n", "a") is a
    assert table.get("n", "c") is c
    assert table.get("n", b.key) is None
    table.release(slots)
    assert table.num_evictions == 1


def test_a_segment_encoded_again_replaces_the_old_one() -> None:
    table = _table()
    _put(table, "n", "a", "line", A)
    second = _put(table, "n", "a", "line", A)
    assert table.num_slots_used == len(A)
    assert table.get("n", "a") is second


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_cover_is_what_a_plain_search_finds(seed: int) -> None:
    """Against the definition: at every position the longest segment that stands there."""
    draw = random.Random(seed)
    table = _table(4000)
    header = [draw.randrange(3) for _ in range(draw.randrange(1, 6))]
    _put(table, "n", "h", "header", header)
    lines = {}
    for i in range(draw.randrange(1, 12)):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
        if tokens not in lines.values() and tokens != header:
            lines[f"l{i}"] = tokens
            _put(table, "n", f"l{i}", "line", tokens)
    assume(lines)
    prompt = header + [t for _ in range(6) for t in draw.choice(list(lines.values()))]
    prompt += [draw.randrange(3) for _ in range(4)]
    expected, position = ["h"], len(header)
    while position < len(prompt):
        fits = [k for k, t in lines.items() if prompt[position : position + len(t)] == t]
        if not fits:
            break
        best = max(fits, key=lambda k: len(lines[k]))
        expected.append(best)
        position += len(lines[best])
    assert [s.key for s in _match(table, ["n"], prompt).segments] == expected
