"""Names of arguments that are passed on, to tell a misspelt one from one of a newer vLLM."""

import difflib
from collections.abc import Iterable

_CHAT = """
agent fact_ids filters k min_score mode query run scope stream tail tenant user
frequency_penalty logit_bias logprobs max_completion_tokens max_tokens messages metadata model n
parallel_tool_calls presence_penalty reasoning_effort response_format seed stop stream_options
temperature tool_choice tools top_logprobs top_p
add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs
ec_transfer_params ignore_eos
include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids min_p min_tokens
priority prompt_logprobs repetition_penalty request_id return_token_ids return_token_offsets
return_tokens_as_token_ids skip_special_tokens stop_token_ids structured_outputs top_k
truncate_prompt_tokens vllm_xargs
"""
_CONNECT = """
api_key base_url config engine_args model progress python start_timeout store timeout
dtype enforce_eager gpu_memory_utilization max_model_len max_num_seqs tensor_parallel_size
"""

CHAT_FIELDS = tuple(_CHAT.split())
CONNECT_FIELDS = tuple(_CONNECT.split())


def check_spelling(
    names: Iterable[str], known: Iterable[str] = CHAT_FIELDS, call: str = "chat"
) -> None:
    """Refuse a name that is none of ``known`` but looks like one.

    Raises:
        TypeError: as Python does for an argument that a function does not have. vLLM itself
            ignores such a field, and an answer of unlimited length is how one would notice.
    """
    known = tuple(known)
    for name in names:
        near = difflib.get_close_matches(name, known, 1, 0.8)
        if near and name not in known:
            raise TypeError(
                f"{call}() got an unexpected keyword argument {name!r}; did you mean {near[0]!r}?"
            )
