"""Chat completions with memories: vLLM's own route, with the prompt composed here.

Without the ``inferscale`` field a request goes to vLLM's handler as it came. With it, the facts
are looked up, the prompt's token ids are composed, and the same handler serves the request, with
an engine client in between that keeps the connector's report.
"""

import contextlib
import copy
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion import api_router as vllm_chat
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from inferscale_core.client.models import ChatMemory, Memory, MemoryReport, SearchRequest
from inferscale_core.connector.protocol import PARAMS_KEY, inject_params
from inferscale_core.encoding.template import TemplateError
from inferscale_core.server import prompt as prompts
from inferscale_core.server.errors import (
    BadRequestError,
    scope_error,
)
from inferscale_core.server.prompt import Question
from inferscale_core.server.routes import service_of
from inferscale_core.server.service import MemoryService

FIELD = "inferscale"
DEFAULT_K = 10

router = APIRouter(tags=["chat"])


class ReportingClient:
    """The engine client of one request: passes everything on and keeps the connector's report."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.report: dict[str, Any] | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        outputs = self._client.generate(*args, **kwargs)
        try:
            async for output in outputs:
                self._read(output)
                yield output
        finally:
            await outputs.aclose()

    def _read(self, output: Any) -> None:
        if output.prompt_token_ids is not None:
            self.prompt_tokens = len(output.prompt_token_ids)
        if output.num_cached_tokens is not None:
            self.cached_tokens = output.num_cached_tokens
        params = output.kv_transfer_params
        if isinstance(params, dict) and PARAMS_KEY in params:
            rest = dict(params)
            self.report = rest.pop(PARAMS_KEY)
            # It names namespaces and keys, which are nobody's business outside.
            output.kv_transfer_params = rest or None


@router.post("/v1/chat/completions", dependencies=[Depends(vllm_chat.validate_json_request)])
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """OpenAI's chat completions, with the field ``inferscale`` for memories."""
    service = service_of(raw_request)
    service.traffic.begin()
    ended = False

    def end() -> None:
        nonlocal ended
        if not ended:
            ended = True
            service.traffic.end()

    try:
        if isinstance(request.kv_transfer_params, dict) and (
            PARAMS_KEY in request.kv_transfer_params
        ):
            raise BadRequestError(
                f"kv_transfer_params[{PARAMS_KEY!r}] is set by the server; send the field "
                f"{FIELD!r} instead",
                param="kv_transfer_params",
            )
        if (request.model_extra or {}).get(FIELD) is None:
            response = await vllm_chat.create_chat_completion(request, raw_request)
        else:
            response = await answer_with_memories(request, raw_request)
        if isinstance(response, StreamingResponse):
            response.body_iterator = _Counted(response.body_iterator, end)
            return response
    except BaseException:
        end()
        raise
    end()
    return response


class _Counted:
    """The chunks of a streamed answer; calls ``end`` once they are over, or nobody wants them.

    Not a generator: one that is dropped before its first chunk would never run its ``finally``.
    """

    def __init__(self, chunks: Any, end: Callable[[], None]) -> None:
        self._chunks = aiter(chunks)
        self._end = end

    def __aiter__(self) -> "_Counted":
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._chunks)
        except BaseException:
            self._end()
            raise

    def __del__(self) -> None:
        self._end()


@vllm_chat.with_cancellation
@vllm_chat.load_aware_call
async def answer_with_memories(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """Serve a request that has the ``inferscale`` field, as vLLM's route serves others."""
    service = service_of(raw_request)
    handler = vllm_chat.chat(raw_request)
    if handler is None:
        raise NotImplementedError("The model does not support Chat Completions API")
    extra = request.model_extra or {}
    memory = parse_field(extra.pop(FIELD))
    for message in request.messages:
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            # Validation leaves an iterator that can be read once only.
            message["content"] = list(content)
    question = Question(memory, service.config.tail if memory.tail is None else memory.tail)
    client = ReportingClient(handler.engine_client)
    reporting = copy.copy(handler)
    reporting.engine_client = client
    error = await compose(request, question, service, handler)
    if error is not None:
        return _vllm_error(error)
    result = await reporting.create_chat_completion(request, raw_request)
    if isinstance(result, ErrorResponse):
        return _vllm_error(result)
    if isinstance(result, ChatCompletionResponse):
        content = result.model_dump()
        content[FIELD] = finish(question, client, service).model_dump()
        label = vllm_chat.ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL
        headers = vllm_chat.metrics_header(raw_request.headers.get(label, ""))
        return JSONResponse(content=content, headers=headers)
    args = getattr(raw_request.app.state, "args", None)
    interval = float(getattr(args, "sse_keep_alive_interval", 0))
    chunks = with_report(result, question, client, service)
    return StreamingResponse(
        content=vllm_chat.with_sse_keep_alive(chunks, interval), media_type="text/event-stream"
    )


def _vllm_error(error: Any) -> JSONResponse:
    return JSONResponse(content=error.model_dump(), status_code=error.error.code)


def parse_field(value: Any) -> ChatMemory:
    """The ``inferscale`` field. Raises BadRequestError saying what is wrong with it."""
    try:
        return ChatMemory.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"][:1] == ("scope",):
            raise scope_error(error) from None
        place = ".".join([FIELD, *map(str, first["loc"])])
        raise BadRequestError(f"{place}: {first['msg']}", param=place) from None


async def compose(
    request: ChatCompletionRequest, question: Question, service: MemoryService, handler: Any
) -> Any:
    """Look up the facts and set the request's prompt, message to the connector and salt.

    Returns vLLM's error response when it refuses the request's chat template, else None.
    """
    ranked = await _ranked_facts(request, question.memory, service)
    # vLLM refuses chats of models without a template, which have a plain one here.
    if ranked or not (service.template.has_chat_template or request.chat_template):
        error, text = await _render(request, service, handler, bool(ranked))
        if error is not None:
            return error
        question.prompt, question.facts, question.dropped = await service.run(
            prompts.lay_out,
            service.template,
            text,
            ranked,
            service.max_model_len - _answer_room(request, service.max_model_len),
            add_special_tokens=request.add_special_tokens,
        )
        await service.queue.wake(question.memory.scope.tenant, [m.id for m in ranked])
    params = dict(request.kv_transfer_params or {})
    if question.prompt is not None:
        params["prompt_token_ids"] = question.prompt.ids
    if question.injects:
        reader = question.memory.scope.key
        if question.prompt is not None:
            spaces = {reader, *(fact.scope.key for fact in question.facts)}
            epochs = await service.run(service.store.epochs, spaces)
        else:
            epochs = await service.run(service.store.visible_epochs, question.memory.scope)
            if reader not in epochs:
                epochs |= await service.run(service.store.epochs, [reader])
        message, request.cache_salt = inject_params(reader, list(epochs.items()), question.tail)
        params |= message
    request.kv_transfer_params = params or None
    return None


async def _ranked_facts(
    request: ChatCompletionRequest, memory: ChatMemory, service: MemoryService
) -> list[Memory]:
    """The facts of a question, best last; none when it names none and asks for none."""
    if memory.fact_ids is not None:
        ids = list(dict.fromkeys(memory.fact_ids))
        return await service.get_visible(memory.scope, ids) if ids else []
    if memory.query is None and memory.k is None:
        return []
    found = await service.search(
        SearchRequest(
            scope=memory.scope,
            query=memory.query if memory.query is not None else _last_user_text(request),
            k=DEFAULT_K if memory.k is None else memory.k,
            filters=memory.filters,
            min_score=memory.min_score,
        )
    )
    return found[::-1]


def _last_user_text(request: ChatCompletionRequest) -> str:
    for message in reversed(request.messages):
        if message.get("role") != "user":
            continue
        content = message.get("content")
        if isinstance(content, str):
            return content
        parts = [part if isinstance(part, str) else part.get("text") for part in content or ()]
        return "\n".join(part for part in parts if part)
    raise BadRequestError(
        f"{FIELD}.query is missing and the request has no user message to search with",
        param=f"{FIELD}.query",
    )


def _answer_room(request: ChatCompletionRequest, max_model_len: int) -> int:
    """Tokens of the context to keep free for the answer."""
    wanted = request.max_completion_tokens
    if wanted is None:
        wanted = request.max_tokens
    return min(256, max_model_len // 8) if wanted is None else max(1, wanted)


async def _render(
    request: ChatCompletionRequest, service: MemoryService, handler: Any, with_memories: bool
) -> tuple[Any, str]:
    """``(error, text)``: the chat template's text, with the mark where the lines are to stand.

    Rendered by vLLM, so that tools, template arguments and content parts mean what they mean
    without memories.
    """
    if request.echo:
        raise BadRequestError("echo cannot be used together with memories", param="echo")
    for message in request.messages:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind not in ("text", "input_text", "output_text", "refusal", "thinking"):
                raise BadRequestError(
                    f"memories can be placed in prompts of text only, not of {kind!r}",
                    param="messages",
                )
    template = service.template
    placed = template.place(request.messages) if with_memories else list(request.messages)
    if not template.has_chat_template and request.chat_template is None:
        prompt = template.render(placed, add_generation_prompt=request.add_generation_prompt)
        return None, prompt
    online = handler.online_renderer
    refused = online.validate_chat_template(
        request_chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        trust_request_chat_template=online.trust_request_chat_template,
    )
    if refused is not None:
        return refused, ""
    without_tools = request.tool_choice == "none" and online.exclude_tools_when_tool_choice_none
    tools = None if without_tools else [tool.model_dump() for tool in request.tools or ()] or None
    params = request.build_chat_params(
        online.chat_template, online.chat_template_content_format
    ).with_defaults({**online.default_chat_template_kwargs, "tools": tools, "tokenize": False})
    _, rendered = await online.renderer.render_messages_async(placed, params)
    text = rendered.get("prompt")
    if not isinstance(text, str):
        raise TemplateError(
            "this model's tokenizer renders chats to token ids and not to text, so memories "
            "cannot be placed in them; start vLLM with --tokenizer-mode hf"
        )
    return None, text


def finish(question: Question, client: ReportingClient, service: MemoryService) -> MemoryReport:
    """The report of an answered question; tells the queue what it says about the arena."""
    if client.report is not None:
        service.engine.take_evicted(client.report)
        missing = prompts.missing_segments(question, client.report)
        if missing:
            service.queue.missing(missing)
    return prompts.report(question, client.report, client.prompt_tokens, client.cached_tokens)


async def with_report(
    chunks: AsyncGenerator[str, None],
    question: Question,
    client: ReportingClient,
    service: MemoryService,
) -> AsyncIterator[str]:
    """A stream's events, with the report in the first one that carries a finish reason."""
    done = False
    try:
        async for chunk in chunks:
            if not done and '"finish_reason":"' in chunk:
                added = _add_report(chunk, question, client, service)
                done, chunk = added is not None, added or chunk
            yield chunk
    finally:
        if not done and client.report is not None:
            finish(question, client, service)
        with contextlib.suppress(Exception):
            await chunks.aclose()


def _add_report(
    chunk: str, question: Question, client: ReportingClient, service: MemoryService
) -> str | None:
    prefix = "data: "
    if not chunk.startswith(prefix):
        return None
    data = json.loads(chunk[len(prefix) :])
    if not any(choice.get("finish_reason") for choice in data.get("choices", ())):
        return None
    data[FIELD] = finish(question, client, service).model_dump()
    return f"{prefix}{json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
