"""NVRTC, the compiler that CuPy uses, from the ``nvidia-cuda-nvrtc`` wheel: needs no GPU."""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

VERBOSE = "--ptxas-options=-v"
"""Makes the log tell the resources of each kernel."""

_RESOURCES = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel: architecture, registers a thread, bytes of stack and spills."""

    kernel: str
    architecture: int
    registers: int
    stack: int
    spilled: int


def resources(log: str) -> list[Resources]:
    """Of every kernel in a log of ptxas (``-v``)."""
    return [
        Resources(kernel, int(arch), int(registers), int(stack), int(stores) + int(loads))
        for kernel, arch, stack, stores, loads, registers in _RESOURCES.findall(log)
    ]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """NVRTC of the wheel.

    Raises:
        FileNotFoundError: the wheel is not installed.

    """
    try:
        import nvidia

        roots = list(nvidia.__path__)
    except ImportError:
        roots = []
    for root in roots:
        for found in sorted(Path(root).rglob("libnvrtc.so.*")):
            # Not every wheel's library finds its other half by itself.
            for other in found.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(other))
            return ctypes.CDLL(str(found))
    raise FileNotFoundError("NVRTC is missing: pip install 'nvidia-cuda-nvrtc>=13'")


def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    return major.value, minor.value


def compile_cubin(text: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Machine code and log of a program.

    Raises:
        RuntimeError: the program does not compile; the message is the compiler's log.

    """
    nvrtc = library()
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"inferscale.cu", 0, None, None
    )
    assert created == 0, created
    flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), flags)
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode()
    if status:
        raise RuntimeError(log)
    return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log


def _text(get_size, get, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    assert get_size(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert get(program, buffer) == 0
    return buffer.raw
