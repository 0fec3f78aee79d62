"""The CUDA source through nvcc and NVRTC for every architecture: no spills, few registers."""

import re
import shutil
import subprocess

import nvrtc
import pytest
import torch

from inferscale_kernels.program import KERNELS, OPTIONS, Program

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PROGRAMS = {
    "bf16 -> bf16": Program("auto", BF16, BF16, 128, 8),
    "fp8 -> bf16": Program("fp8_e4m3", FP8, BF16, 128, 8),
    "int8 -> bf16": Program("int8", torch.int8, BF16, 128, 8),
    "bf16 -> fp8": Program("auto", BF16, FP8, 128, 8),
    "fp8 -> fp8": Program("fp8_e4m3", FP8, FP8, 128, 16),
}
# Blocks of 128 threads on a multiprocessor's 65,536 registers: six at 80, four at 128.
MOST_REGISTERS = {("rotate_scatter", 8): 80, ("rotate_scatter", 16): 128}
MOST_REGISTERS |= {("gather_unrotate", 8): 96, ("gather_unrotate", 16): 128}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("name", PROGRAMS)
def test_nvcc_spills_nothing(name: str, tmp_path, record_property) -> None:
    program = PROGRAMS[name]
    source = tmp_path / "program.cu"
    source.write_text(program.text())
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    done = subprocess.run(
        ["nice", "-n", "19", "nvcc", "-fatbin", *OPTIONS, *targets, "-Xptxas", "-v", "--Werror",
         "all-warnings", source, "-o", tmp_path / "out"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers",
        done.stderr,
        re.DOTALL,
    )
    assert {(kernel, int(arch)) for kernel, arch, *_ in found} == {
        (kernel, arch) for kernel in KERNELS for arch in ARCHITECTURES
    }
    for kernel, arch, stack, stores, loads, registers in found:
        record_property(f"{name} {kernel} sm_{arch} registers", registers)
        print(f"{name:13} {kernel:16} sm_{arch:4} {registers} registers")
        assert (stack, stores, loads) == ("0", "0", "0"), (kernel, arch)
        assert int(registers) <= MOST_REGISTERS[kernel, program.vector], (kernel, arch)


@pytest.mark.skipif(nvrtc.find_library() is None, reason="nvidia-cuda-nvrtc is not installed")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nvrtc_compiles(arch: int) -> None:
    """As CuPy compiles it: no include path, no CUDA header."""
    others = [
        Program("auto", torch.float16, torch.float16, 80, 8),
        Program("auto", torch.float32, torch.float32, 256, 4),
        Program("int8", torch.int8, FP8, 64, 1),
    ]
    for program in (*PROGRAMS.values(), *others):
        options = (*OPTIONS, f"-arch=sm_{arch}")
        cubin, _ = nvrtc.compile_cubin(nvrtc.find_library(), program.text(), options)
        assert cubin.startswith(b"\x7fELF")
        assert all(kernel.encode() in cubin for kernel in KERNELS)


@pytest.mark.skipif(nvrtc.find_library() is None, reason="nvidia-cuda-nvrtc is not installed")
def test_nvrtc_reports_an_error() -> None:
    text = PROGRAMS["bf16 -> bf16"].text().replace("extern", "extern error", 1)
    with pytest.raises(RuntimeError, match="error"):
        nvrtc.compile_cubin(nvrtc.find_library(), text, OPTIONS)
