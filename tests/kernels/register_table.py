"""Registers a thread of the kernels, as NVRTC compiles them: the table of kernels/README.md.

``python tests/kernels/register_table.py`` prints it.
"""

import nvrtc
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
"""By what the arena and the paged cache hold; heads of 128."""


def main() -> None:
    print(f"NVRTC {'.'.join(map(str, nvrtc.version()))}\n")
    print("| kernel | arena, cache |", *(f"sm_{a} |" for a in ARCHITECTURES))
    print("|---|---|" + "---|" * len(ARCHITECTURES))
    for kernel in KERNELS:
        for name, program in PROGRAMS.items():
            row = []
            for arch in ARCHITECTURES:
                options = (*OPTIONS, f"-arch=sm_{arch}", nvrtc.VERBOSE)
                _, log = nvrtc.compile_cubin(program.text(), options)
                row += [r.registers for r in nvrtc.resources(log) if r.kernel == kernel]
            print(f"| `{kernel}` | {name.replace(' -> ', ', ')} |", *(f"{r} |" for r in row))


if __name__ == "__main__":
    main()
