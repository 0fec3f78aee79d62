"""Prompts with memories: the model's own chat template, split into header, lines and suffix."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from inferscale_core.config import CoreConfig
from inferscale_core.encoding.plain_text import PlainText, backend_copy

Message = Mapping[str, Any]
Range = tuple[int, int]

_SYSTEM_ROLES = ("system", "developer")


class TemplateError(ValueError):
    """The chat template refused the messages, or lost the place of the memories."""


@dataclass(frozen=True)
class ComposedPrompt:
    """Token ids of a prompt and which of them are what; ranges are ``[start, end)``."""

    ids: list[int]
    header: Range
    lines: list[Range]
    suffix: Range


class PromptTemplate:
    """Composes prompts of one model.

    The lines of facts stand in the system message, behind ``config.system_prompt``, or behind the
    app's own system message and the last line of ``config.system_prompt``. A template that takes
    no system message gets them at the start of the first user message. The template's text is
    tokenised with its special tokens, as vLLM does; the lines are plain text (``PlainText``). The
    prompt is the concatenation of both, so a line has the same ids wherever it stands.

    ``chat_template`` overrides the tokenizer's own; a tokenizer without any gets a plain
    ``Role: text`` layout behind its BOS.
    """

    def __init__(
        self, tokenizer: Any, config: CoreConfig, chat_template: str | None = None
    ) -> None:
        self.config = config
        self.plain = PlainText(tokenizer)
        self._tokenizer = tokenizer
        self._backend = backend_copy(tokenizer) if getattr(tokenizer, "is_fast", False) else None
        self._chat_template = chat_template
        self.has_chat_template = bool(chat_template or getattr(tokenizer, "chat_template", None))
        self._bos = [] if self.has_chat_template else _leading_specials(tokenizer)
        # Nobody can guess it, so no message can contain it.
        self._mark = f"memories{secrets.token_hex(16)}"
        self._header_ids = lru_cache(maxsize=256)(self._encode_header)
        self.takes_system = self._takes_system()

    @property
    def heading(self) -> str:
        """What introduces the lines after an app's own system message."""
        *_, last = self.config.system_prompt.splitlines(keepends=True) or [""]
        return last

    def encode_text(self, text: str) -> list[int]:
        """Ids of ``text`` as plain text; no special token ever comes out."""
        return self.plain.encode(text)

    def line_ids(self, line: str) -> tuple[int, ...]:
        """``encode_text(line)``, remembered."""
        return self.plain.line(line)

    def header_ids(self) -> list[int]:
        """Header of a prompt without a system message of its own: the anchor of encodings."""
        messages = [{"role": "user", "content": "?"}]
        return list(self._header_ids(self._parts(self.render(self.place(messages)))[0], False))

    def compose(
        self,
        messages: Sequence[Message],
        lines: Sequence[str],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ComposedPrompt:
        """The prompt of ``messages`` with ``lines``; without lines it is the app's own.

        Raises TemplateError when the template refuses the messages.
        """
        placed = self.place(messages) if lines else list(messages)
        text = self.render(
            placed,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
        return self.split(text, lines)

    def place(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """``messages`` with the system text and the mark where the lines are to stand."""
        placed = [dict(m) for m in messages]
        first = placed[0] if placed else None
        if first is not None and first.get("role") in _SYSTEM_ROLES:
            text = self._behind(_text_of(first.get("content")))
            rest = placed[1:]
            if self.takes_system:
                return [{**first, "content": text + self._mark}, *rest]
            placed = rest
        else:
            text = self.config.system_prompt
            if self.takes_system:
                return [{"role": "system", "content": text + self._mark}, *placed]
        for i, message in enumerate(placed):
            if message.get("role") == "user":
                content = _prefixed(text + self._mark + "\n", message.get("content"))
                placed[i] = {**message, "content": content}
                return placed
        raise TemplateError(
            "this model's chat template takes no system message, and the request has no user "
            "message that could hold the memories; add one"
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The template's text for ``messages``."""
        if not self.has_chat_template:
            return _plain_layout(messages, add_generation_prompt)
        options = dict(template_kwargs or {})
        options.setdefault("add_generation_prompt", add_generation_prompt)
        if self._chat_template is not None:
            options["chat_template"] = self._chat_template
        try:
            return self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(t) for t in tools] if tools else None,
                tokenize=False,
                **options,
            )
        except Exception as error:  # jinja2 errors and whatever a template's own code raises
            raise TemplateError(f"the chat template refused the messages: {error}") from error

    def split(
        self, text: str, lines: Sequence[str], *, add_special_tokens: bool = False
    ) -> ComposedPrompt:
        """Ids of a rendered ``text``, with ``lines`` in the place of the mark.

        ``add_special_tokens`` puts the tokenizer's own leading tokens before the template's.
        """
        if not lines and self._mark not in text:
            ids = list(self._encode_header(text, add_special_tokens))
            return ComposedPrompt(ids, (0, len(ids)), [], (len(ids), len(ids)))
        before, after = self._parts(text)
        ids = list(self._header_ids(before, add_special_tokens))
        header = (0, len(ids))
        ranges: list[Range] = []
        for line in lines:
            start = len(ids)
            ids.extend(self.line_ids(line))
            ranges.append((start, len(ids)))
        start = len(ids)
        ids.extend(self._encode_template(after))
        return ComposedPrompt(ids, header, ranges, (start, len(ids)))

    def _parts(self, text: str) -> tuple[str, str]:
        parts = text.split(self._mark)
        if len(parts) != 2:
            raise TemplateError(
                f"the chat template writes the system message {len(parts) - 1} times; "
                "memories need a template that writes it once"
            )
        return parts[0], parts[1]

    def _behind(self, system: str) -> str:
        """The app's system text, then the heading unless it already ends with it."""
        heading = self.heading
        if not system.strip():
            return self.config.system_prompt
        if heading.strip() and system.rstrip().endswith(heading.strip()):
            return system if system.endswith("\n") else system + "\n"
        return system + ("" if system.endswith("\n") else "\n") + heading

    def _takes_system(self) -> bool:
        probe = [
            {"role": "system", "content": self._mark},
            {"role": "user", "content": "?"},
        ]
        try:
            return self.render(probe).count(self._mark) == 1
        except TemplateError:
            return False

    def _encode_header(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        lead = _leading_specials(self._tokenizer) if add_special_tokens else self._bos
        return (*lead, *self._encode_template(text))

    def _encode_template(self, text: str) -> list[int]:
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=False).ids
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _leading_specials(tokenizer: Any) -> list[int]:
    """Tokens that the tokenizer itself puts before a text (BOS, for most that have one)."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    for n in range(len(full) - len(bare) + 1):
        if full[n : n + len(bare)] == bare:
            return list(full[:n])
    return []


def _text_of(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text")
        if text is None:
            kind = part.get("type")
            raise TemplateError(f"a message that holds memories can have only text, not {kind!r}")
        parts.append(text)
    return "\n".join(parts)


def _prefixed(text: str, content: Any) -> Any:
    if content is None or isinstance(content, str):
        return text + (content or "")
    return [{"type": "text", "text": text}, *content]


def _plain_layout(messages: Sequence[Message], add_generation_prompt: bool) -> str:
    """Layout for base models: the system text as it is, then ``Role: text`` lines."""
    out = []
    for message in messages:
        role, text = str(message.get("role", "user")), _text_of(message.get("content"))
        if role in _SYSTEM_ROLES:
            out.append(text if text.endswith("\n") else text + "\n")
        else:
            out.append(f"{role.capitalize()}: {text}\n")
    if add_generation_prompt:
        out.append("Assistant:")
    return "".join(out)
