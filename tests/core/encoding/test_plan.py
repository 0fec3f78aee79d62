"""The layout of encoding requests."""

import pytest

from inferscale_core.encoding.plan import LineTooLongError, header_key, plan_encoding

HEADER = [1, 2, 3]
WINDOW = [("a", [10, 11]), (None, [12]), ("b", [13, 14])]


def test_layout_of_one_line() -> None:
    request = plan_encoding(HEADER, WINDOW, [("c", [20, 21])], max_tokens=100)
    assert request.prompt_token_ids == [1, 2, 3, 10, 11, 12, 13, 14, 20, 21]
    header, line = request.spans
    assert (header.kind, header.key, header.start, header.end) == (
        "header", header_key(HEADER), 0, 3,
    )  # fmt: skip
    assert header.key.startswith("header:")
    assert (line.kind, line.key, line.start, line.end) == ("line", "c", 8, 10)
    assert line.behind == ("a", "b")


def test_lines_that_share_a_window_stand_behind_each_other() -> None:
    request = plan_encoding(HEADER, WINDOW, [("c", [20]), ("d", [21, 22])], max_tokens=100)
    assert [(s.start, s.end, s.behind) for s in request.spans[1:]] == [
        (8, 9, ("a", "b")),
        (9, 11, ("a", "b", "c")),
    ]
    assert request.lines == ["c", "d"]


def test_without_anchor() -> None:
    request = plan_encoding(HEADER, WINDOW, [("c", [20])], max_tokens=100, anchor=False)
    assert request.prompt_token_ids == [10, 11, 12, 13, 14, 20]
    assert [s.key for s in request.spans] == ["c"]


def test_the_window_shrinks_from_its_far_end() -> None:
    request = plan_encoding(HEADER, WINDOW, [("c", [20, 21])], max_tokens=8)
    assert request.prompt_token_ids == [1, 2, 3, 12, 13, 14, 20, 21]
    assert request.spans[-1].behind == ("b",)
    request = plan_encoding(HEADER, WINDOW, [("c", [20, 21])], max_tokens=5)
    assert request.prompt_token_ids == [1, 2, 3, 20, 21]


def test_a_line_longer_than_the_context() -> None:
    with pytest.raises(LineTooLongError, match="5 tokens") as caught:
        plan_encoding(HEADER, WINDOW, [("c", [20, 21])], max_tokens=4)
    assert (caught.value.key, caught.value.tokens, caught.value.limit) == ("c", 5, 4)


def test_lines_that_do_not_fit_together_are_left_out_from_the_end() -> None:
    lines = [("c", [20]), ("d", [21, 22]), ("e", [23])]
    request = plan_encoding(HEADER, WINDOW, lines, max_tokens=6)
    assert request.lines == ["c", "d"]
    request = plan_encoding(HEADER, WINDOW, lines, max_tokens=5)
    assert request.lines == ["c"]
    assert len(request.prompt_token_ids) <= 5


def test_equal_lines_are_one_segment() -> None:
    window = [("c", [20]), ("a", [10])]
    request = plan_encoding(HEADER, window, [("c", [20]), ("c", [20])], max_tokens=100)
    assert request.prompt_token_ids == [1, 2, 3, 10, 20]
    assert request.spans[-1].behind == ("a",)


def test_no_lines() -> None:
    with pytest.raises(ValueError, match="at least one line"):
        plan_encoding(HEADER, WINDOW, [], max_tokens=100)
