"""Run in a process of its own with libasan preloaded: the kernels under Address- and UBSan.

Torch's memory then comes from the sanitizer's allocator, each tensor exactly as long as it is.
``python sanitized.py DIRECTORY FAULT``, where FAULT is "none" or a fault to make on purpose, of
which the sanitizers must tell.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from host_transfer import SANITIZE, HostCompiler, HostTransfer

from inferscale_kernels.gpu_check.cases import ROTATIONS, Case, make

FP8 = torch.float8_e4m3fn
CASES = [
    Case(),
    Case(head_dim=80, codec="int8", channels=True, rotations=ROTATIONS, order="HND K||V"),
    Case(head_dim=80, codec="int8", channels=True, rotations=ROTATIONS, block_size=7, num_heads=3),
    Case(head_dim=128, codec="fp8_e4m3", cache_dtype=FP8, rotations=ROTATIONS, padding=16),
    Case(head_dim=128, codec="fp8_e4m3", cache_dtype=FP8, order="HND planes", block_size=1),
    Case(shift=1, padding=1, rotations=ROTATIONS),
]
EDITS = {
    "token": ("token >= num_tokens", "token > num_tokens"),
    "layer": ("min(first_layer + layers_per_thread, num_layers)", "first_layer + 9"),
}


def run(compiler: HostCompiler, case: Case, writes: bool, fault: str) -> None:
    problem, oracle = make(case), make(case)
    transfer = HostTransfer(
        compiler, problem.arena, problem.layers, problem.codec, problem.scales, problem.channels
    )
    if fault in EDITS:
        text = transfer.program.text()
        assert EDITS[fault][0] in text
        transfer._library = compiler.load(transfer.program, text.replace(*EDITS[fault]))
    if fault == "alignment":
        transfer._library = compiler.load(replace(transfer.program, vector=8))
    # Clones: an index array of exactly as many bytes, not a part of a staging buffer.
    src, dst, positions = (
        torch.from_numpy(a).clone() for a in (problem.src, problem.dst, problem.positions)
    )
    if fault == "paged slot":
        dst[-1] = transfer._num_paged_slots
    if fault == "arena slot":
        src[-1] = transfer.num_slots
    if fault == "position":
        positions[-1] = 700
    if writes:
        transfer.write_on_device(src, dst, positions, key_scale=problem.key_scale)
    else:
        transfer.read_on_device(dst, src, positions)
    oracle.expected(writes)
    for got, expected in zip(problem.tensors, oracle.tensors, strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def main(directory: str, fault: str) -> None:
    compiler = HostCompiler(Path(directory), SANITIZE)
    if fault == "none":
        for case in CASES:
            run(compiler, case, True, fault)
            run(compiler, case, False, fault)
        return
    # The last layer's storage and the last slot: one step further is no tensor's.
    case = Case(rotations=("neox",), skipped=0, shift=int(fault == "alignment"))
    run(compiler, case, True, fault)


if __name__ == "__main__":
    main(*sys.argv[1:])
