"""The rules that never bend, on one engine: scope, salt, epochs, leaks, drops, convergence."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import Answer, Engine, engine
from inferscale_core.connector.protocol import (
    PARAMS_KEY,
    capture_params,
    drop_params,
    inject_params,
    stats_params,
)
from prompts import Prompt


@pytest.fixture(scope="module")
def e(tiny_llama: Path) -> Iterator[Engine]:
    with engine(tiny_llama, skip_tokenizer_init=True, max_num_batched_tokens=96) as started:
        yield started


def _fill(e: Engine, prompt: Prompt, ns: str, epoch: int = 0) -> None:
    report = e.capture(prompt.ids(), capture_params(ns, epoch, prompt.spans()))
    assert report["failed"] == {}
    assert len(report["captured"]) == len(prompt.lines) + 1


def _same(a: Answer, b: Answer) -> bool:
    return a.token_ids == b.token_ids and a.distance(b) < 1e-3


def test_approximate_kv_never_leaks_through_the_prefix_cache(e: Engine) -> None:
    prompt = Prompt(1)
    order = list(reversed(range(12)))
    _fill(e, prompt, "leak")
    before = e.ask(prompt.ids(order))
    injected = e.ask(prompt.ids(order), inject_params("leak", [("leak", 0)]))
    assert injected.report["injected_tokens"] == prompt.memory_tokens()
    assert injected.distance(before) > 1e-2
    e.llm.reset_prefix_cache()
    injected = e.ask(prompt.ids(order), inject_params("leak", [("leak", 0)]))
    assert injected.report["injected_tokens"] == prompt.memory_tokens()
    assert _same(e.ask(prompt.ids(order)), before)
    # A second question of the same reader finds the blocks in its own salted prefix cache.
    again = e.ask(prompt.ids(order), inject_params("leak", [("leak", 0)]))
    assert again.report["cached_tokens"] > 0
    assert _same(again, injected)


def test_identical_text_of_another_scope_is_never_injected(e: Engine) -> None:
    prompt = Prompt(2)
    _fill(e, prompt, "alice")
    text = e.ask(prompt.ids())
    answer = e.ask(prompt.ids(), inject_params("bob", [("bob", 0)]))
    assert answer.report["injected_tokens"] == 0
    assert answer.report["reason"] == "not_resident"
    assert _same(answer, text)


@pytest.mark.parametrize("salt", [None, "guess", "right-of-another-reader"])
def test_no_salt_no_injection(e: Engine, salt: str | None) -> None:
    prompt = Prompt(3)
    _fill(e, prompt, "salted")
    params, right = inject_params("salted", [("salted", 0)])
    forged = {"guess": "guess", "right-of-another-reader": inject_params("x", [("x", 0)])[1]}
    answer = e.ask(prompt.ids(), (params, forged.get(salt or "", "")))
    assert answer.report["injected_tokens"] == 0
    assert answer.report["reason"] == "bad_salt"
    refused = e.capture(
        prompt.ids(), (capture_params("salted", 0, prompt.spans())[0], forged.get(salt or "", ""))
    )
    assert refused["captured"] == []
    assert set(refused["failed"].values()) == {"bad_salt"}
    assert e.ask(prompt.ids(), (params, right)).report["matched_tokens"] > 0


def test_no_scope_no_injection(e: Engine) -> None:
    for message in (inject_params("", []), inject_params("reader", [("another", 0)])):
        answer = e.ask(Prompt(3).ids(), message)
        assert answer.report["reason"] == "no_scope"
        assert answer.token_ids


def test_dropped_fact_and_those_behind_it_are_gone(e: Engine) -> None:
    prompt = Prompt(4)
    _fill(e, prompt, "drop")
    e.ask([5], drop_params([("drop", "line6")], epochs=[("drop", 1)]), max_tokens=1)
    stale = e.ask(prompt.ids(), inject_params("drop", [("drop", 0)]))
    assert stale.report["reason"] == "stale_epoch"
    order = [0, 1, 6, 2, 3, 7, 11, 4]
    answer = e.ask(prompt.ids(order), inject_params("drop", [("drop", 1)]))
    kept = len(prompt.header) + len(prompt.lines[0]) + len(prompt.lines[1])
    assert answer.report["injected_tokens"] == kept
    behind = e.ask(prompt.ids([0, 7, 8]), inject_params("drop", [("drop", 1)]))
    assert behind.report["matched_tokens"] == len(prompt.header) + len(prompt.lines[0])
    # A capture that was on its way when the fact was dropped does not bring it back.
    late = e.capture(prompt.ids(), capture_params("drop", 0, prompt.spans()))
    assert late["captured"] == []
    assert set(late["failed"].values()) == {"stale_epoch"}


def test_a_newer_epoch_waits_for_its_drop(e: Engine) -> None:
    """A question may overtake the drop message of the change that made its epoch."""
    prompt = Prompt(12)
    _fill(e, prompt, "ahead")
    text = e.ask(prompt.ids())
    early = e.ask(prompt.ids(), inject_params("ahead", [("ahead", 1)]))
    assert early.report["injected_tokens"] == 0
    assert early.report["reason"] == "drop_pending"
    assert _same(early, text)
    e.ask([5], drop_params([("ahead", "line11")], epochs=[("ahead", 1)]), max_tokens=1)
    late = e.ask(prompt.ids([0, 1, 2]), inject_params("ahead", [("ahead", 1)]))
    assert late.report["matched_tokens"] > 0


def test_a_report_names_others_segments_to_the_core_alone(e: Engine) -> None:
    prompt = Prompt(13)
    _fill(e, prompt, "named")
    params, right = stats_params()
    assert "evicted" in e.ask([5], (params, right), max_tokens=1).report
    for made_up in (params, drop_params()[0], inject_params("named", [("named", 0)])[0]):
        assert "evicted" not in e.ask([5], (made_up, "guess"), max_tokens=1).report
    assert "segments" not in e.ask([5], (params, "guess"), max_tokens=1).report


def test_drop_needs_the_cores_secret(e: Engine) -> None:
    prompt = Prompt(5)
    _fill(e, prompt, "kept")
    e.ask([5], (drop_params([], ["kept"])[0], "guess"), max_tokens=1)
    assert e.ask(prompt.ids(), inject_params("kept", [("kept", 0)])).report["injected_tokens"] > 0


def test_any_layout_converges_to_full_cover(e: Engine) -> None:
    """Header and literal text that no capture named is learned from the first request."""
    prompt = Prompt(6)
    _fill(e, prompt, "learn")
    other_header, literal = [1, *range(40, 60)], list(range(70, 80))
    ids = [
        *other_header, *prompt.lines[0], *prompt.lines[1], *literal, *prompt.lines[2],
        *prompt.lines[3], *prompt.question,
    ]  # fmt: skip
    first = e.ask(ids, inject_params("learn", [("learn", 0)]))
    assert first.report["injected_tokens"] == 0
    assert _same(first, e.ask(ids))
    e.llm.reset_prefix_cache()
    second = e.ask(ids, inject_params("learn", [("learn", 0)]))
    assert second.report["injected_tokens"] == len(ids) - len(prompt.question)


def test_tail_is_left_to_prefill(e: Engine) -> None:
    prompt = Prompt(7)
    _fill(e, prompt, "tail")
    answer = e.ask(prompt.ids(), inject_params("tail", [("tail", 0)], tail=3))
    left = sum(len(line) for line in prompt.lines[-3:])
    assert answer.report["injected_tokens"] == prompt.memory_tokens() - left


def test_one_token_is_left_to_compute(e: Engine) -> None:
    prompt = Prompt(8)
    _fill(e, prompt, "all")
    ids = prompt.ids()[: prompt.memory_tokens()]
    text = e.ask(ids)
    answer = e.ask(ids, inject_params("all", [("all", 0)]))
    assert answer.report["injected_tokens"] == len(ids) - 1
    assert _same(answer, text)


def test_small_gains_are_left_alone(e: Engine) -> None:
    prompt = Prompt(9)
    _fill(e, prompt, "small")
    ids = prompt.header + [400] * 30
    answer = e.ask(ids, inject_params("small", [("small", 0)]))
    assert answer.report["injected_tokens"] == 0
    assert answer.report["reason"] == "no_gain"


@pytest.mark.parametrize(
    "message",
    ["text", 7, {}, {"op": "inject"}, {"op": "capture", "ns": "x", "epoch": 0, "spans": 3},
     {"op": "inject", "reader": "x", "scopes": [["x", "y"]]}, {"op": "unknown"}],
)  # fmt: skip
def test_bad_messages_are_text(e: Engine, message: object) -> None:
    prompt = Prompt(10)
    text = e.ask(prompt.ids())
    assert _same(e.ask(prompt.ids(), ({PARAMS_KEY: message}, "salt")), text)


def test_abort_at_any_moment_loses_no_slots(e: Engine) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = Prompt(11)
    _fill(e, prompt, "abort0")
    e.ask([5], drop_params([], ["abort0"]), max_tokens=1)
    used = e.ask([5], stats_params(), max_tokens=1).report["arena_tokens_used"]
    llm_engine = e.llm.llm_engine
    for steps in range(6):
        params, salt = capture_params(f"abort{steps}", 0, prompt.spans())
        llm_engine.add_request(
            f"abort-{steps}",
            TokensPrompt(prompt_token_ids=prompt.ids(), cache_salt=salt),
            SamplingParams(max_tokens=2, min_tokens=2, extra_args={"kv_transfer_params": params}),
        )
        for _ in range(steps):
            if llm_engine.has_unfinished_requests():
                llm_engine.step()
        llm_engine.abort_request([f"abort-{steps}"])
    e.ask([5], drop_params([], [f"abort{i}" for i in range(6)]), max_tokens=1)
    after = e.ask([5], stats_params(), max_tokens=1).report
    assert after["arena_tokens_used"] == used
    _fill(e, prompt, "after-abort")
