"""An app that connects to a private core and then does what it is told on stdin."""

import json
import os
import sys
from typing import Any

from inferscale_core.client import Client, InferScaleError, connect


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def chat(client: Client) -> str:
    answer = client.chat("Say hello.", max_tokens=4, temperature=0)
    return str(answer["choices"][0]["message"]["content"])


def forked_chat(client: Client) -> tuple[int, int]:
    """``(exit status, leases)`` of a child that answers a question with the inherited client."""
    core = client.core
    assert core is not None
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if chat(client) else 2
            count = len(list(core.directory.leases.glob("*.lease")))
            os.write(write_end, str(count).encode())
        finally:
            os._exit(status)
    os.close(write_end)
    leases = int(os.read(read_end, 16) or b"0")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), leases


def main() -> None:
    client = connect(sys.argv[1], **json.loads(sys.argv[2]))
    core = client.core
    assert core is not None
    status = core.status
    assert status is not None
    say(
        server=status.server_pid,
        supervisor=status.supervisor_pid,
        directory=str(core.directory.path),
    )
    for line in sys.stdin:
        try:
            match line.strip():
                case "chat":
                    say(content=chat(client), server=core.status and core.status.server_pid)
                case "fork":
                    code, leases = forked_chat(client)
                    say(code=code, leases=leases)
                case "again":
                    with connect(sys.argv[1], **json.loads(sys.argv[2])) as second:
                        say(
                            content=chat(second),
                            leases=len(list(core.directory.leases.glob("*.lease"))),
                        )
        except InferScaleError as error:
            say(error=type(error).__name__, message=str(error))


if __name__ == "__main__":
    main()
