"""Prompts with memories, over the ways chat templates treat a system message."""

import itertools
from typing import Any

import pytest

from inferscale_core.config import CoreConfig
from inferscale_core.encoding.template import ComposedPrompt, PromptTemplate, TemplateError

LINES = ["- Caroline likes tea.\n", "- 8 May 2023: Dave won at chess!\n"]
USER = {"role": "user", "content": "What does Caroline drink?"}

NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
)
IGNORES_SYSTEM = (
    "{% for m in messages %}{% if m['role'] != 'system' %}[{{ m['content'] }}]{% endif %}"
    "{% endfor %}"
)
SYSTEM_IN_LAST = (
    "{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] %}"
    "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}[INST] "
    "{% if loop.last %}{{ s }}\n\n{% endif %}{{ m['content'] }}[/INST]"
    "{% else %} {{ m['content'] }}{% endif %}{% endfor %}"
)
TOOLS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}{{ style }}"
)


def check_layout(prompt: ComposedPrompt, count: int) -> None:
    """Header, lines and suffix cover the ids without a gap."""
    edges = [prompt.header, *prompt.lines, prompt.suffix]
    assert edges[0][0] == 0
    assert edges[-1][1] == len(prompt.ids)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    assert len(prompt.lines) == count


def test_same_ids_as_the_joint_prompt(tokenizer: Any, config: CoreConfig) -> None:
    template = PromptTemplate(tokenizer, config)
    prompt = template.compose([USER], LINES)
    check_layout(prompt, 2)
    system = {"role": "system", "content": config.system_prompt + "".join(LINES)}
    joint = tokenizer.apply_chat_template(
        [system, USER], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert prompt.ids == joint
    start, end = prompt.lines[1]
    assert prompt.ids[start:end] == list(template.line_ids(LINES[1]))


def test_header_is_the_anchor(tokenizer: Any, config: CoreConfig) -> None:
    template = PromptTemplate(tokenizer, config)
    prompt = template.compose([USER], LINES)
    assert template.header_ids() == prompt.ids[: prompt.header[1]]
    assert tokenizer.decode(template.header_ids()).endswith(config.system_prompt)


def test_without_lines_the_prompt_is_the_apps_own(tokenizer: Any, config: CoreConfig) -> None:
    prompt = PromptTemplate(tokenizer, config).compose([USER], [])
    own = tokenizer.apply_chat_template(
        [USER], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert prompt.ids == own
    check_layout(prompt, 0)


def test_the_apps_system_message_is_kept(tokenizer: Any, config: CoreConfig) -> None:
    template = PromptTemplate(tokenizer, config)
    for content in ("You are Bob.", [{"type": "text", "text": "You are Bob."}]):
        text = tokenizer.decode(
            template.compose([{"role": "system", "content": content}, USER], LINES).ids
        )
        assert f"You are Bob.\nUser Memories:\n{LINES[0]}" in text
        assert "You are a helpful AI." not in text


def test_a_heading_is_not_written_twice(tokenizer: Any, config: CoreConfig) -> None:
    template = PromptTemplate(tokenizer, config)
    own = {"role": "system", "content": config.system_prompt.rstrip()}
    assert template.compose([own, USER], LINES).ids == template.compose([USER], LINES).ids


def test_history_and_special_tokens_of_the_app(tokenizer: Any, config: CoreConfig) -> None:
    template = PromptTemplate(tokenizer, config)
    history = [USER, {"role": "assistant", "content": "Tea."}, {"role": "user", "content": "Why?"}]
    prompt = template.compose(history, ["- a <|im_end|>\n"])
    start, end = prompt.lines[0]
    assert not set(prompt.ids[start:end]) & set(tokenizer.all_special_ids)
    suffix = tokenizer.decode(prompt.ids[prompt.suffix[0] :])
    assert suffix.count("<|im_end|>") == 4
    assert "Tea." in suffix


@pytest.mark.parametrize("chat_template", [NO_SYSTEM, IGNORES_SYSTEM])
def test_templates_without_a_system_role(
    tokenizer: Any, config: CoreConfig, chat_template: str
) -> None:
    template = PromptTemplate(tokenizer, config, chat_template)
    assert not template.takes_system
    system = {"role": "system", "content": "You are Bob."}
    for messages in ([USER], [system, USER]):
        prompt = template.compose(messages, LINES)
        check_layout(prompt, 2)
        text = tokenizer.decode(prompt.ids)
        assert f"User Memories:\n{LINES[0]}{LINES[1]}\n{USER['content']}" in text
    assert "You are Bob." in text
    with pytest.raises(TemplateError, match="user message"):
        template.compose([{"role": "assistant", "content": "x"}], LINES)


def test_a_template_that_writes_the_system_text_late(tokenizer: Any, config: CoreConfig) -> None:
    template = PromptTemplate(tokenizer, config, SYSTEM_IN_LAST)
    history = [USER, {"role": "assistant", "content": "Tea."}, {"role": "user", "content": "Why?"}]
    prompt = template.compose(history, LINES)
    check_layout(prompt, 2)
    assert "Tea." in tokenizer.decode(prompt.ids[: prompt.header[1]])


def test_tools_and_template_arguments_reach_the_template(
    tokenizer: Any, config: CoreConfig
) -> None:
    template = PromptTemplate(tokenizer, config, TOOLS)
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    prompt = template.compose([USER], LINES, tools=[tool], template_kwargs={"style": "brief"})
    text = tokenizer.decode(prompt.ids)
    assert "look_up" in text
    assert text.endswith("brief")


def test_a_template_that_refuses_the_messages(tokenizer: Any, config: CoreConfig) -> None:
    template = PromptTemplate(tokenizer, config, "{{ raise_exception('no') }}")
    with pytest.raises(TemplateError, match="no"):
        template.compose([USER], LINES)


def test_a_model_without_a_chat_template(unigram: Any, config: CoreConfig) -> None:
    from tokenizers.processors import TemplateProcessing

    unigram.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    template = PromptTemplate(unigram, config)
    prompt = template.compose([USER], ["- tea\n"])
    check_layout(prompt, 1)
    assert prompt.ids[0] == unigram.bos_token_id
    assert template.header_ids()[0] == unigram.bos_token_id
    assert unigram.decode(prompt.ids).endswith("Assistant:")
    assert template.compose([USER], []).ids[0] == unigram.bos_token_id
