"""HTTP client of a core; imports neither torch nor vLLM."""

from inferscale_core.client.aio import AsyncChatStream, AsyncClient
from inferscale_core.client.client import ChatStream, Client
from inferscale_core.client.connect import aconnect, connect
from inferscale_core.client.errors import (
    AddressInUse,
    BadRequest,
    Conflict,
    ConnectionFailed,
    InferScaleError,
    ModelNotFound,
    NotEnoughMemory,
    NotFound,
    RateLimited,
    ScopeError,
    ServerError,
    StartupError,
    StoreLocked,
    Timeout,
    UnsupportedArchitecture,
)
from inferscale_core.client.models import Memory, MemoryIn, Scope, Turn

__all__ = [
    "AddressInUse", "AsyncChatStream", "AsyncClient", "BadRequest", "ChatStream", "Client",
    "Conflict", "ConnectionFailed", "InferScaleError", "Memory", "MemoryIn", "ModelNotFound",
    "NotEnoughMemory", "NotFound", "RateLimited", "Scope", "ScopeError", "ServerError",
    "StartupError", "StoreLocked", "Timeout", "Turn", "UnsupportedArchitecture", "aconnect",
    "connect",
]  # fmt: skip
