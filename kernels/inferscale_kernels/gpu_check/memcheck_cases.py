"""What runs under ``compute-sanitizer``: cases of the sweep, or one that must be told.

``python -m inferscale_kernels.gpu_check.memcheck_cases`` runs the cases; with the argument
``fault``, a write behind the end of a paged cache.
"""

import sys

import torch

from inferscale_kernels.gpu_check.cases import ROTATIONS, Case, make
from inferscale_kernels.gpu_check.runner import CudaRunner, Runner

FP8 = torch.float8_e4m3fn
# Programs that the sweep has compiled: CuPy keeps them.
CASES = (
    Case(),
    Case(shift=1),
    Case(codec="int8", rotations=ROTATIONS, head_dim=80, channels=True, cache_scales=(0.037, 1.7)),
    Case(codec="fp8_e4m3", cache_dtype=FP8, head_dim=128, num_heads=8, rotations=ROTATIONS),
)


def run(runner: Runner, case: Case, fault: bool) -> None:
    """Both directions of ``case``; with ``fault`` the last token goes behind the cache's end."""
    problem = make(case, runner.device)
    transfer = runner.transfer(
        problem.arena, problem.layers, problem.codec, problem.scales, problem.channels
    )
    src, dst, positions = (
        torch.from_numpy(a).to(runner.device) for a in (problem.src, problem.dst, problem.positions)
    )
    if fault:
        keys = problem.layers[0].keys
        dst[-1] = keys.shape[0] * keys.shape[1]
    transfer.write_on_device(src, dst, positions, key_scale=problem.key_scale)
    if not fault:
        transfer.read_on_device(dst, src, positions)
    runner.synchronize()


def main(arguments: list[str]) -> None:
    runner = CudaRunner()
    if arguments == ["fault"]:
        run(runner, Case(rotations=("neox",)), fault=True)
        return
    for case in CASES:
        run(runner, case, fault=False)


if __name__ == "__main__":
    main(sys.argv[1:])
