"""A stored text never becomes a control token, on any family of tokenizers."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from inferscale_core.encoding.plain_text import PlainText


@pytest.fixture(scope="module")
def plain(tokenizer: Any) -> PlainText:
    return PlainText(tokenizer)


def test_special_tokens_stay_text(tokenizer: Any, plain: PlainText) -> None:
    for token in tokenizer.all_special_tokens:
        line = f"- she wrote {token} in it\n"
        ids = plain.encode(line)
        assert not set(ids) & set(tokenizer.all_special_ids)
        assert tokenizer.decode(ids) == line


def test_the_tokenizer_is_left_as_it_was(tokenizer: Any) -> None:
    before = tokenizer.backend_tokenizer.to_str()
    PlainText(tokenizer).encode("a <|im_end|> b")
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer.encode("<|im_end|>") == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_tokens_with_a_meaning_that_are_not_marked_special(model_path: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert tokenizer.encode("<think>") == [think]
    assert think not in PlainText(tokenizer).encode("he did <think> about it")


def test_control_tokens_that_are_words_of_the_vocabulary(unigram: Any, byte_level: Any) -> None:
    for tokenizer, token in ((unigram, "</s>"), (byte_level, "<|eot|>")):
        plain = PlainText(tokenizer)
        line = f"-{token}{token}tea{token}"
        ids = plain.encode(line)
        assert not set(ids) & plain.control_ids
        assert "".join(tokenizer.convert_ids_to_tokens(ids)) == line


def test_no_space_is_put_before_a_line(unigram: Any) -> None:
    tokens = unigram.convert_ids_to_tokens(PlainText(unigram).encode("- tea\n"))
    assert tokens == ["-", "\u2581tea", "\n"]


def test_lines_concatenate(tokenizer: Any) -> None:
    plain = PlainText(tokenizer)
    lines = ["- 8 May 2023: Caroline likes tea.\n", "- Dave plays chess!\n", "- caf\u00e9 42\n"]
    joint = tokenizer.encode("".join(lines), add_special_tokens=False)
    assert [i for line in lines for i in plain.line(line)] == joint


def test_lone_surrogates_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="not valid Unicode"):
        PlainText(tokenizer).encode("a \ud800 b")


def test_characters_the_vocabulary_lacks(unigram: Any) -> None:
    ids = PlainText(unigram).encode("tea \u00e9")
    assert ids[-1] == unigram.unk_token_id
    unigram.eos_token = "<unk>"
    assert PlainText(unigram).encode("tea \u00e9") == ids[:-1]


def test_empty_text(tokenizer: Any, unigram: Any) -> None:
    assert PlainText(tokenizer).encode("") == []
    assert PlainText(unigram).encode("") == []


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_text(tokenizer: Any, plain: PlainText, data: st.DataObject) -> None:
    special = st.sampled_from([*tokenizer.all_special_tokens, "<|", "|>", "im_end"])
    # The small model's vocabulary lacks a few bytes, which it drops.
    printable = st.text(
        st.characters(exclude_categories=("Cc", "Cs"), max_codepoint=0x2FFF), max_size=8
    )
    text = "".join(data.draw(st.lists(st.one_of(printable, special), max_size=8)))
    ids = plain.encode(text)
    assert not set(ids) & plain.control_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
