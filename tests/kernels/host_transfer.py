"""The kernels' CUDA source compiled for the host, launched with the arguments of a CUDA launch."""

import ctypes
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from inferscale_kernels.gpu_check.runner import Runner, Work
from inferscale_kernels.launcher import Launch, PagedTransfer
from inferscale_kernels.pages import PagedLayer
from inferscale_kernels.program import Program

HOST = Path(__file__).parent / "host"

_FLAGS = ("-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
SANITIZE = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class HostCompiler:
    """Compiles programs with g++, each once.

    Args:
        directory: where the libraries go.
        flags: of optimisation or sanitizers.

    """

    def __init__(self, directory: Path, flags: Sequence[str] = ("-O2",)):
        self._directory, self._flags = directory, flags
        self._made: dict[str, ctypes.CDLL] = {}

    def load(self, program: Program, text: str | None = None) -> ctypes.CDLL:
        """Library of ``program``, or of ``text`` in its place."""
        text = text or program.text()
        if text not in self._made:
            library = self._directory / f"program{len(self._made)}.so"
            source = library.with_suffix(".cpp")
            source.write_text(f'#include "host_shim.h"\n{text}\n#include "host_entry.h"\n')
            subprocess.run(
                ["nice", "-n", "19", "g++", *_FLAGS, *self._flags, f"-I{HOST}", source, "-o",
                 library], check=True,
            )  # fmt: skip
            self._made[text] = ctypes.CDLL(str(library))
        return self._made[text]


class HostTransfer(PagedTransfer):
    """:class:`PagedTransfer` on the host.

    Args:
        compiler: of the programs.
        multiprocessors: what the device would have; decides how layers are shared out.

    """

    def __init__(
        self,
        compiler: HostCompiler,
        arena: torch.Tensor,
        layers: Sequence[PagedLayer],
        codec: str = "auto",
        scales: torch.Tensor | None = None,
        key_channels: torch.Tensor | None = None,
        multiprocessors: int = 1,
        text: str | None = None,
    ):
        self._multiprocessors = multiprocessors
        self.launches: list[Launch] = []
        super().__init__(arena, layers, codec, scales, key_channels)
        self._library = compiler.load(self.program, text)

    def _launch(self, launch: Launch) -> None:
        self.launches.append(launch)
        name, arguments = launch.kernel, [np.asarray(a) for a in launch.args]
        # A launch of CUDA copies as many bytes as the kernel's signature says.
        sizes = getattr(self._library, f"size_{name}")
        assert [a.itemsize for a in arguments] == [
            sizes(i) for i in range(getattr(self._library, f"count_{name}")())
        ]
        pointers = (ctypes.c_void_p * len(arguments))(*(a.ctypes.data for a in arguments))
        grid, block = ((ctypes.c_uint * 3)(*n) for n in (launch.grid, launch.block))
        assert block[0] * block[1] * block[2] <= 128
        getattr(self._library, f"launch_{name}")(grid, block, pointers)

    def _num_multiprocessors(self) -> int:
        return self._multiprocessors

    def _make_event(self) -> "_Passed":
        return _Passed()


class HostRunner(Runner):
    """The check's device on the host: its times are the host's, and mean nothing.

    Args:
        compiler: of the programs.
        text_of: the text to compile in a program's place, to make faults.

    """

    def __init__(self, compiler: HostCompiler, text_of: Callable[[Program], str] = Program.text):
        self.device = torch.device("cpu")
        self.free = 2**30
        self._compiler, self._text_of = compiler, text_of

    def transfer(self, arena, layers, codec="auto", scales=None, key_channels=None):
        transfer = HostTransfer(self._compiler, arena, layers, codec, scales, key_channels)
        transfer._library = self._compiler.load(transfer.program, self._text_of(transfer.program))
        return transfer

    def capture(self, work: Work) -> Work:
        return work

    def time(self, works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                began = time.perf_counter()
                work()
                samples[name].append(1e3 * (time.perf_counter() - began))
        return samples

    def synchronize(self) -> None: ...

    def free_bytes(self) -> int:
        return self.free

    def cache_bytes(self) -> int:
        return 0

    def profile(self, work: Work) -> None:
        work()


class _Passed:
    """The host's work is done when its call returns."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True
