"""Tokenisation of stored text: never a control token, and the same ids wherever it stands."""

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

# Added tokens that a chat format gives a meaning to, whether or not the tokenizer's author marked
# them special (Qwen3 does not mark <think> and <tool_call>). Runs of white space, which Gemma
# lists as added tokens too, are ordinary text and stay as they are.
_CONTROL = re.compile(r"^(<.+>|\[[^\s\]]+\])$", re.DOTALL)

_LINE_CACHE = 1 << 16


class PlainText:
    """Encodes text so that no control token can come out of it.

    Works on private copies of the tokenizer, so the one passed in is never changed, and calls
    from several threads are safe.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._slow = None if getattr(tokenizer, "is_fast", False) else tokenizer
        self._control: dict[int, str] = {
            int(i): str(tokenizer.convert_ids_to_tokens(int(i))) for i in tokenizer.all_special_ids
        }
        for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
            if token.special or _CONTROL.match(token.content):
                self._control[int(token_id)] = token.content
        if self._slow is None:
            self._backend = _without_control_tokens(tokenizer, self._control)
        unknown = tokenizer.unk_token_id
        if unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            self._control.pop(unknown, None)
        self._breaks = re.compile(
            "|".join(re.escape(t) for t in sorted(self._control.values(), key=len, reverse=True))
            or r"(?!)"
        )
        # SentencePiece tokenizers put a space before whatever they are given. A line that stands
        # after a newline has none, so it is encoded behind one, which is then cut off.
        self._lead = self._raw("\n") if self._adds_space() else []
        self._line_ids = lru_cache(maxsize=_LINE_CACHE)(self._encode_line)

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that never come out of ``encode``."""
        return frozenset(self._control)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, special-token text included as ordinary characters.

        Raises ValueError for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error}") from None
        ids = self._after_newline(text)
        if self._control.keys().isdisjoint(ids):
            return ids
        # A vocabulary that holds the token as a plain word: cut inside each occurrence.
        ids = [i for part in self._cut(text) for i in self._after_newline(part)]
        # What is left came from a normalizer, or stands for a character that the vocabulary
        # lacks, in a tokenizer whose unknown token is also its end of text.
        return [i for i in ids if i not in self._control]

    def line(self, line: str) -> tuple[int, ...]:
        """``encode(line)``, remembered."""
        return self._line_ids(line)

    def _encode_line(self, line: str) -> tuple[int, ...]:
        return tuple(self.encode(line))

    def _cut(self, text: str) -> Iterable[str]:
        start = 0
        for match in self._breaks.finditer(text):
            yield text[start : match.start() + 1]
            start = match.start() + 1
        yield text[start:]

    def _adds_space(self) -> bool:
        if self._slow is not None:
            first = self._slow.convert_ids_to_tokens(self._raw("a")[:1])
        else:
            first = self._backend.encode("a", add_special_tokens=False).tokens[:1]
        return bool(first) and str(first[0]).startswith("\u2581")

    def _after_newline(self, text: str) -> list[int]:
        if not text or not self._lead:
            return self._raw(text) if text else []
        ids = self._raw("\n" + text)
        n = len(self._lead)
        return ids[n:] if ids[:n] == self._lead else self._raw(text)

    def _raw(self, text: str) -> list[int]:
        if self._slow is not None:
            return list(
                self._slow.encode(text, add_special_tokens=False, split_special_tokens=True)
            )
        return self._backend.encode(text, add_special_tokens=False).ids


def backend_copy(tokenizer: Any, state: dict[str, Any] | None = None) -> Tokenizer:
    """A private ``tokenizers.Tokenizer`` of a fast tokenizer, without truncation or padding."""
    text = json.dumps(state) if state else tokenizer.backend_tokenizer.to_str()
    copy = Tokenizer.from_str(text)
    copy.no_truncation()
    copy.no_padding()
    return copy


def _without_control_tokens(tokenizer: Any, control: dict[int, str]) -> Tokenizer:
    """A copy that reads the tokens of ``control`` as plain text; ids stay what they are."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in state.get("added_tokens", ()):
        # Removing a token would renumber the ones after it; marking it special does not.
        token["special"] = token["special"] or token["id"] in control
    copy = backend_copy(tokenizer, state)
    copy.encode_special_tokens = True
    return copy
