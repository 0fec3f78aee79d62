"""The CUDA source through NVRTC and nvcc for every architecture: no spills, few registers."""

import re
import shutil
import subprocess
import sys

import nvrtc
import pytest
import torch
from register_table import ARCHITECTURES, PROGRAMS

from inferscale_kernels.program import KERNELS, OPTIONS, Program

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
OTHERS = {
    "float16": Program("auto", torch.float16, torch.float16, 80, 8),
    "float32": Program("auto", torch.float32, torch.float32, 256, 4),
    "four an access": Program("auto", BF16, FP8, 64, 4),
    "one an access, fp8": Program("fp8_e4m3", FP8, BF16, 64, 1),
    "one an access, int8": Program("int8", INT8, FP8, 64, 1),
    "a lane holds several runs": Program("int8", INT8, BF16, 256, 1),
}
# Blocks of 128 threads on a multiprocessor's 65,536 registers: six at 80, five at 96, four at 128.
SIX, FIVE, FOUR = 80, 96, 128

# The source converts float8 itself below 8.9. nvcc is another front end with the same ptxas: the
# architectures between are NVRTC's.
BRANCHES = (80, 120)

# The wheel of NVRTC, which the extra `dev` installs, is made for Linux; there it must be found.
needs_nvrtc = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC's wheel is for Linux")


def most_registers(kernel: str, program: Program) -> int:
    if program.vector > 8:
        return FOUR
    return SIX if kernel == "rotate_scatter" and program.codec == "auto" else FIVE


def check(found: list[nvrtc.Resources], program: Program, architectures: tuple[int, ...]) -> None:
    assert {(r.kernel, r.architecture) for r in found} == {
        (kernel, arch) for kernel in KERNELS for arch in architectures
    }
    for r in found:
        assert (r.stack, r.spilled) == (0, 0), r
        assert r.registers <= most_registers(r.kernel, program), r


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nvrtc_spills_nothing(arch: int) -> None:
    """As CuPy compiles it: no include path, no CUDA header."""
    for program in (*PROGRAMS.values(), *OTHERS.values()):
        options = (*OPTIONS, f"-arch=sm_{arch}", nvrtc.VERBOSE)
        cubin, log = nvrtc.compile_cubin(program.text(), options)
        assert cubin.startswith(b"\x7fELF")
        check(nvrtc.resources(log), program, (arch,))


@needs_nvrtc
def test_a_spill_is_told() -> None:
    """With bounds that leave 32 registers: the check above can fail."""
    text = PROGRAMS["int8 -> bf16"].text()
    text = re.sub(r"__launch_bounds__\(128, [^)]*\)", "__launch_bounds__(128, 16)", text)
    _, log = nvrtc.compile_cubin(text, (*OPTIONS, "-arch=sm_90", nvrtc.VERBOSE))
    with pytest.raises(AssertionError, match="spilled"):
        check(nvrtc.resources(log), PROGRAMS["int8 -> bf16"], (90,))


@needs_nvrtc
def test_nvrtc_reports_an_error() -> None:
    text = PROGRAMS["bf16 -> bf16"].text().replace("extern", "extern error", 1)
    with pytest.raises(RuntimeError, match="error"):
        nvrtc.compile_cubin(text, OPTIONS)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("name", PROGRAMS)
def test_nvcc_spills_nothing_and_warns_of_nothing(name: str, tmp_path) -> None:
    source = tmp_path / "program.cu"
    source.write_text(PROGRAMS[name].text())
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in BRANCHES]
    done = subprocess.run(
        ["nice", "-n", "19", "nvcc", "-fatbin", *OPTIONS, *targets, "-Xptxas", "-v", "--Werror",
         "all-warnings", source, "-o", tmp_path / "out"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(nvrtc.resources(done.stderr), PROGRAMS[name], BRANCHES)
