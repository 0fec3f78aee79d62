"""Messages that reach the connector inside ``kv_transfer_params``.

The service in the API process talks to the scheduler side of the connector through the requests
it sends to the engine: ``kv_transfer_params["inferscale"]`` holds one of the messages below, and
the report of a finished request comes back in ``RequestOutput.kv_transfer_params["inferscale"]``.

Every request that reads or writes segments carries a ``cache_salt`` derived from a secret of the
core, so that approximate KV never leaves the namespace it was made for through vLLM's prefix
cache, and so that no client can name a namespace by itself.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

PARAMS_KEY = "inferscale"
SECRET_ENV = "INFERSCALE_SALT_SECRET"

SpanKind = Literal["header", "line", "literal"]


@dataclass(frozen=True)
class Span:
    """Tokens ``[start, end)`` of a capture request that become one segment.

    ``key`` names the segment within its namespace. ``behind`` lists the keys of the lines that
    stand before it in the request: dropping one of them drops this segment too.
    """

    key: str
    kind: SpanKind
    start: int
    end: int
    behind: tuple[str, ...] = ()


def ensure_secret() -> str:
    """The core's salt secret; made and exported to child processes when there is none yet."""
    return os.environ.setdefault(SECRET_ENV, secrets.token_hex(16))


def salt_for(op: str, reader: str, scopes: Iterable[tuple[str, int]]) -> str:
    """``cache_salt`` of a request of ``reader`` over ``(namespace, epoch)`` pairs."""
    text = "\x00".join([op, reader, *(f"{ns}\x01{epoch}" for ns, epoch in sorted(scopes))])
    return hmac.new(ensure_secret().encode(), text.encode(), hashlib.sha256).hexdigest()


def capture_params(ns: str, epoch: int, spans: Sequence[Span]) -> tuple[dict[str, Any], str]:
    """Params and ``cache_salt`` of a request whose spans are stored as segments of ``ns``.

    The request generates two tokens (``min_tokens=2, ignore_eos=True``): the workers acknowledge
    a capture one step after the forward pass that completes it.
    Report: ``{"captured": [key], "failed": {key: reason}, "evicted": [[ns, key]]}``.
    """
    message = {"op": "capture", "ns": ns, "epoch": epoch, "spans": [asdict(s) for s in spans]}
    return {PARAMS_KEY: message}, salt_for("capture", ns, [(ns, epoch)])


def inject_params(
    reader: str, scopes: Sequence[tuple[str, int]], tail: int = 0
) -> tuple[dict[str, Any], str]:
    """Params and ``cache_salt`` of a question of ``reader`` (a namespace).

    ``scopes`` lists the namespaces whose segments may be injected, with their epochs; segments
    captured on first sight (headers, literals) belong to ``reader``, which must be among them.
    The last ``tail`` lines are left to prefill.
    Report: ``{"injected_tokens", "matched_tokens", "cached_tokens", "prompt_tokens", "reason",
    "match_ms", "write_ms", "bytes", "evicted"}``.
    """
    pairs = sorted({(ns, int(epoch)) for ns, epoch in scopes})
    message = {"op": "inject", "reader": reader, "scopes": [list(p) for p in pairs], "tail": tail}
    return {PARAMS_KEY: message}, salt_for("inject", reader, pairs)


def drop_params(
    keys: Iterable[tuple[str, str]] = (),
    namespaces: Iterable[str] = (),
    epochs: Iterable[tuple[str, int]] = (),
    stale: Iterable[tuple[str, str]] = (),
    texts: Iterable[Sequence[int]] = (),
) -> tuple[dict[str, Any], str]:
    """Params and salt of a one-token request that forgets segments when it reaches the scheduler.

    ``keys`` are ``(namespace, key)`` pairs of lines whose text is gone: what was encoded behind
    them goes too. ``stale`` are lines whose text stays and whose KV does not. ``texts`` are the
    token ids of lines that are gone: no header or literal that holds them stays.
    ``namespaces`` are dropped whole; ``epochs`` are the
    new epochs of the namespaces touched: questions that carry an older one are not injected.
    """
    message = {
        "op": "drop",
        "keys": [list(k) for k in keys],
        "namespaces": list(namespaces),
        "epochs": [list(e) for e in epochs],
        "stale": [list(k) for k in stale],
        "texts": [list(ids) for ids in texts],
    }
    return {PARAMS_KEY: message}, salt_for("drop", "", [])


def stats_params() -> tuple[dict[str, Any], str]:
    """Params and salt of a one-token request whose report holds the arena's counters."""
    return {PARAMS_KEY: {"op": "stats"}}, salt_for("stats", "", [])
