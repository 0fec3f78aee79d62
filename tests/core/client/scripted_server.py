"""A small real HTTP server that answers what a test scripts, and keeps what it was sent.

It stands for a core in states that a real one cannot be brought to at will: overloaded, broken,
restarting, cut off in the middle of an answer.
"""

import inspect
import json
import socket
import threading
from typing import Any

import uvicorn
from client_apps import eventually
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

MEMORY = {
    "id": "m1",
    "scope": {"user": "alice"},
    "text": "Alice has a cat.",
    "line": "- Alice has a cat.\n",
    "hash": "0",
    "created_at": "2025-01-01T00:00:00Z",
    "updated_at": "2025-01-01T00:00:00Z",
    "kv_state": "ready",
}


def error(status: int, message: str, code: str | None = None, **headers: str) -> Response:
    body = {"error": {"message": message, "type": "Error", "param": None, "code": code}}
    return JSONResponse(body, status_code=status, headers=headers)


class ScriptedServer:
    """Answers the next of ``answers`` (the last one again and again); records requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answers: list[Any] = [{}]
        self.clients: set[tuple[str, int]] = set()
        app = FastAPI()
        app.add_api_route("/{path:path}", self._handle, methods=["GET", "POST", "PATCH", "DELETE"])
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        assert eventually(lambda: self._server.started, 10)

    async def _handle(self, request: Request, path: str) -> Response:
        body = await request.body()
        assert request.client is not None
        self.clients.add((request.client.host, request.client.port))
        self.requests.append(
            {
                "method": request.method,
                "path": request.url.path,
                "raw_path": request.scope["raw_path"].decode(),
                "query": dict(request.query_params),
                "body": json.loads(body) if body else None,
                "key": request.headers.get("authorization"),
            }
        )
        if path == "v1/models":
            return JSONResponse({"data": [{"id": "the-model"}]})
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if inspect.iscoroutinefunction(answer):
            answer = await answer()
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
