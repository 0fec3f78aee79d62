"""Misspelt arguments are told; those that only a newer vLLM knows are passed on."""

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from inferscale_core.client import connect
from inferscale_core.client.chat_fields import CHAT_FIELDS, CONNECT_FIELDS, check_spelling


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_tokns", "max_tokens"), ("usr", "user"), ("fact_id", "fact_ids")],
)
def test_a_near_miss_is_refused(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}'; did you mean '{meant}'"):
        check_spelling([name])


def test_what_vllm_knows_is_never_refused() -> None:
    for name in ChatCompletionRequest.model_fields:
        check_spelling([name])
    for name in AsyncEngineArgs.__dataclass_fields__:
        check_spelling([name], CONNECT_FIELDS)
    check_spelling(["something_new_of_the_engine", *CHAT_FIELDS])


def test_connect_tells() -> None:
    with pytest.raises(TypeError, match=r"connect\(\) .*'modle'; did you mean 'model'"):
        connect(modle="x")
