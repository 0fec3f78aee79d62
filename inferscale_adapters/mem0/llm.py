"""Mem0's language model on the core's chat completions."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mem0.configs.llms.base import BaseLlmConfig
from mem0.llms.base import LLMBase

from inferscale_adapters.mem0 import extraction
from inferscale_adapters.mem0.configs import InferScaleLlmConfig
from inferscale_adapters.mem0.core import client_for
from inferscale_core.client import BadRequest, Client

logger = logging.getLogger(__name__)


class ContextTooLong(BadRequest):
    """The prompt does not fit into the model's context."""


class InferScaleLLM(LLMBase):
    """Chat completions of the core, without injection (Mem0's own calls name no scope).

    Extraction calls decode by a JSON schema, so that a small model's answer always parses, and
    take a short prompt where Mem0's own does not fit (``extraction_prompt`` of the config).
    """

    config: InferScaleLlmConfig

    def __init__(self, config: BaseLlmConfig | Mapping[str, Any] | None = None) -> None:
        if isinstance(config, BaseLlmConfig) and not isinstance(config, InferScaleLlmConfig):
            names = {"model", *InferScaleLlmConfig.base_fields()}
            config = {name: getattr(config, name) for name in names}
        if config is None or isinstance(config, Mapping):
            config = InferScaleLlmConfig(**(config or {}))
        super().__init__(config)
        self.core: Client = client_for(config.core, self)
        self._warned = False

    def generate_response(
        self,
        messages: Sequence[Mapping[str, Any]],
        response_format: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        **kwargs: Any,
    ) -> str | dict[str, Any]:
        """The answer's text; with ``tools`` ``{"content", "tool_calls": [{"name", "arguments"}]}``.

        ``kwargs`` (and the fields of ``extra_body`` in them) go to the core as they are.

        Raises:
            ContextTooLong: the messages do not fit into the model's context.
            ExtractionError: an extraction call's answer cannot be read as facts.
        """
        params = self._get_common_params(**kwargs)
        params.update(params.pop("extra_body", None) or {})
        asks_json = isinstance(response_format, Mapping) and response_format.get("type") in (
            "json_object",
            "json_schema",
        )
        if asks_json and extraction.is_extraction(messages):
            params["response_format"] = extraction.response_format()
            choice = self._extract(list(messages), params)
            content = choice["message"].get("content")
            return extraction.read_facts(content, truncated=choice["finish_reason"] == "length")
        if response_format:
            params["response_format"] = response_format
        if tools:
            params.update(tools=list(tools), tool_choice=tool_choice)
        message = self._ask(messages, params)["message"]
        return _with_tools(message) if tools else message.get("content") or ""

    def _extract(
        self, messages: list[Mapping[str, Any]], params: Mapping[str, Any]
    ) -> dict[str, Any]:
        wanted = self.config.extraction_prompt
        if wanted == "short":
            return self._ask(extraction.shortened(messages), params)
        try:
            return self._ask(messages, params, leave_room=wanted == "auto")
        except ContextTooLong:
            if wanted == "mem0":
                raise
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            logger.log(
                level,
                "Mem0's extraction prompt does not fit into the context of %s; using the short "
                "one (extraction_prompt='short' in the llm config says so from the start)",
                self.config.model or "the core's model",
            )
            return self._ask(extraction.shortened(messages), params)

    def _ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: Mapping[str, Any],
        *,
        leave_room: bool = False,
    ) -> dict[str, Any]:
        """First choice of the answer.

        A prompt that fits, but not together with ``max_tokens``, is answered in what room is left
        unless ``leave_room`` asks for all of it.
        """
        try:
            return self._first_choice(messages, params)
        except BadRequest as error:
            if not _is_too_long(error):
                raise
            if leave_room:
                raise self._too_long(messages, error) from error
        try:
            rest = {key: value for key, value in params.items() if key != "max_tokens"}
            return self._first_choice(messages, rest)
        except BadRequest as error:
            if not _is_too_long(error):
                raise
            raise self._too_long(messages, error) from error

    def _first_choice(
        self, messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any]
    ) -> dict[str, Any]:
        return self.core.chat(list(messages), **params)["choices"][0]

    def _too_long(self, messages: Sequence[Mapping[str, Any]], error: BadRequest) -> ContextTooLong:
        text = f"the prompt does not fit into the context of the core's model: {error.message}"
        if extraction.is_extraction(messages):
            text += (
                " Mem0's extraction prompt alone has about 8,200 tokens. Use a model with a longer "
                "context, set extraction_prompt='short' in the llm config, or store the messages "
                "as they are with add(..., infer=False)."
            )
        else:
            text += " Send fewer or shorter messages, or use a model with a longer context."
        return ContextTooLong(text, status=error.status, code=error.code, param=error.param)


def _is_too_long(error: BadRequest) -> bool:
    """Whether vLLM refused the prompt's length, alone or together with ``max_tokens``."""
    return "context length" in error.message or "max_model_len" in error.message


def _with_tools(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}", strict=False)
        except ValueError as error:
            raise extraction.ExtractionError(
                f"the arguments of the tool call {function['name']} are not valid JSON: "
                f"{function['arguments'][:200]!r}"
            ) from error
        calls.append({"name": function["name"], "arguments": arguments})
    return {"content": message.get("content"), "tool_calls": calls}
