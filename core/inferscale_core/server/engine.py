"""Messages to the connector: small engine requests that capture, drop and count segments."""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from inferscale_core.connector.protocol import (
    PARAMS_KEY,
    capture_params,
    drop_params,
    stats_params,
)
from inferscale_core.encoding.plan import EncodingRequest
from inferscale_core.server.errors import UnavailableError

ENCODING_PRIORITY = 10
"""vLLM serves lower numbers first; questions have 0 unless their client says otherwise."""

CONTROL_PRIORITY = -10

CAPTURE_TOKENS = 2
"""Tokens that a capture generates: workers acknowledge it one step after it is complete."""

Segment = tuple[str, str]


@dataclass(frozen=True)
class CaptureReport:
    """``captured``: keys that are resident now; ``failed``: why others are not."""

    captured: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


class EngineMessages:
    """Sends messages through the engine and reads what comes back.

    ``on_evicted`` is called with the segments that the arena gave up, whichever report names
    them. ``token_id`` is any token of the vocabulary, for requests whose prompt has no meaning.
    """

    def __init__(
        self,
        client: EngineClient,
        on_evicted: Callable[[list[Segment]], None],
        *,
        token_id: int = 0,
        prioritised: bool = False,
    ) -> None:
        self._client = client
        self._on_evicted = on_evicted
        self._token_id = token_id
        self._prioritised = prioritised

    async def capture(
        self, ns: str, epoch: int, request: EncodingRequest, timeout: float
    ) -> CaptureReport:
        """Compute a request's prompt and keep its spans as segments of ``ns``.

        Raises UnavailableError when the engine does not answer within ``timeout`` seconds.
        """
        params, salt = capture_params(ns, epoch, request.spans)
        report = await self._send(
            request.prompt_token_ids,
            params,
            salt,
            tokens=CAPTURE_TOKENS,
            priority=ENCODING_PRIORITY,
            timeout=timeout,
        )
        return CaptureReport(set(report.get("captured", ())), dict(report.get("failed", {})))

    async def drop(
        self,
        keys: Iterable[Segment] = (),
        epochs: Iterable[tuple[str, int]] = (),
        *,
        namespaces: Iterable[str] = (),
        stale: Iterable[Segment] = (),
        texts: Iterable[Sequence[int]] = (),
        timeout: float,
    ) -> None:
        """Forget segments, see ``drop_params``; they are gone when this returns.

        Raises UnavailableError.
        """
        params, salt = drop_params(keys, namespaces, epochs, stale, texts)
        await self._send([self._token_id], params, salt, timeout=timeout)

    async def stats(self, timeout: float) -> dict[str, Any]:
        """The arena's counters. Raises UnavailableError."""
        params, salt = stats_params()
        return await self._send([self._token_id], params, salt, timeout=timeout)

    async def memcpy_ms(self, num_bytes: int) -> float:
        """Median time of a plain copy of ``num_bytes`` in the slowest worker, milliseconds."""
        return max(await self._client.collective_rpc("inferscale_memcpy_ms", args=(num_bytes,)))

    def take_evicted(self, report: dict[str, Any]) -> None:
        """Hand on what a report says was evicted."""
        evicted = [(str(ns), str(key)) for ns, key in report.get("evicted") or ()]
        if evicted:
            self._on_evicted(evicted)

    async def _send(
        self,
        ids: list[int],
        params: dict[str, Any],
        salt: str,
        *,
        tokens: int = 1,
        priority: int = CONTROL_PRIORITY,
        timeout: float,
    ) -> dict[str, Any]:
        op = params[PARAMS_KEY]["op"]
        sampling = SamplingParams(
            max_tokens=tokens,
            min_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": params},
        )
        outputs = self._client.generate(
            tokens_input(ids, cache_salt=salt),
            sampling,
            f"inferscale-{op}-{uuid.uuid4().hex}",
            priority=priority if self._prioritised else 0,
        )
        final: Any = None
        try:
            async with asyncio.timeout(timeout):
                async for output in outputs:
                    final = output
        except TimeoutError:
            raise UnavailableError(
                f"the engine did not answer a {op} message within {timeout:g} s"
            ) from None
        finally:
            await outputs.aclose()
        report = (getattr(final, "kv_transfer_params", None) or {}).get(PARAMS_KEY) or {}
        self.take_evicted(report)
        return report
