"""A request that carries a message of ours, as the scheduler side follows it."""

from dataclasses import dataclass, field
from typing import Any

from inferscale_core.connector.protocol import Span
from inferscale_core.connector.segments import Cover


@dataclass
class Tracked:
    """One request that carries a message of ours, from arrival to its end."""

    message: dict[str, Any]
    prompt: bytes = b""
    num_prompt_tokens: int = 0
    reason: str | None = None
    cover: Cover | None = None
    cover_version: int = -1
    # Tokens [start, end) to inject in the step that is being scheduled.
    load: tuple[int, int] | None = None
    block_ids: list[int] = field(default_factory=list)
    admitted: bool = False
    spans: list[Span] = field(default_factory=list)
    captured: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def op(self) -> str:
        return self.message["op"]

    def capture_report(self) -> dict[str, Any]:
        """What became of the spans of a capture request."""
        failed = dict(self.failed)
        for span in self.spans:
            failed[span.key] = self.reason or "aborted"
        if self.reason is not None:
            failed.update({s["key"]: self.reason for s in self.message["spans"]})
        return {"captured": self.captured, "failed": failed}

    def injection_report(self, bytes_per_token: int) -> dict[str, Any]:
        """What a question was given, and why it was not more."""
        report = self.report
        injected = report.get("injected_tokens", 0)
        reason = self.reason
        if reason is None and injected == 0:
            matched = report.get("matched_tokens", 0)
            reason = "not_resident" if matched == 0 else "no_gain"
            if matched and report.get("cached_tokens", 0) >= matched:
                reason = "prefix_cached"
        return {
            "injected_tokens": injected,
            "matched_tokens": report.get("matched_tokens", 0),
            "cached_tokens": report.get("cached_tokens", 0),
            "prompt_tokens": self.num_prompt_tokens,
            "reason": reason,
            "match_ms": report.get("match_ms"),
            "write_ms": report.get("write_ms"),
            "bytes": injected * bytes_per_token,
        }
