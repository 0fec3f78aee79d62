"""NVRTC of the ``nvidia-cuda-nvrtc`` wheel: the compiler that CuPy uses, without a GPU or driver."""

import ctypes
from collections.abc import Sequence
from pathlib import Path


def find_library() -> Path | None:
    """The wheel's library, or None where the wheel is not installed."""
    try:
        import nvidia
    except ImportError:
        return None
    for root in nvidia.__path__:
        for found in sorted(Path(root).rglob("libnvrtc.so.*")):
            return found
    return None


def compile_cubin(library: Path, text: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Machine code and log of a program.

    Raises:
        RuntimeError: the program does not compile; the message is the compiler's log.

    """
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()
    assert (
        nvrtcok := nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"inferscale.cu", 0, None, None
        )
    ) == 0, nvrtcok
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
