"""Correctness: both kernels against the PyTorch reference on the same device, bit for bit."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from inferscale_kernels.gpu_check.cases import Case, Problem, difference, make
from inferscale_kernels.gpu_check.runner import Runner
from inferscale_kernels.launcher import PagedTransfer

PADDING = 7
"""Tokens that a captured launch has more than there are: a graph is made for the largest step."""

FORMS = ("write", "write captured", "read", "read captured")

Progress = Callable[[str], None]


def check(runner: Runner, cases: Iterable[Case], progress: Progress) -> dict[str, Any]:
    """Every case in both directions, launched with host arrays and replayed from a graph.

    Returns:
        ``cases``, ``runs`` and ``failures``: case, form, tensor, elements that differ and by how
        many representable numbers at most.

    """
    failures: list[dict[str, Any]] = []
    num_cases = 0
    for case in cases:
        num_cases += 1
        failures += check_case(runner, case)
        if num_cases % 20 == 0:
            progress(f"correctness: {num_cases} cases, {len(failures)} failures")
    return {"cases": num_cases, "runs": num_cases * len(FORMS), "failures": failures}


def check_case(runner: Runner, case: Case) -> list[dict[str, Any]]:
    """Tensors that differ; elements that must stay untouched are compared as well."""
    problem = make(case, runner.device)
    before = _copy(problem)
    expected = {}
    for writes in (True, False):
        problem.expected(writes)
        expected[writes] = _copy(problem)
        _restore(problem, before)
    transfer = runner.transfer(
        problem.arena, problem.layers, problem.codec, problem.scales, problem.channels
    )
    failures = []
    for form in FORMS:
        writes = form.startswith("write")
        _restore(problem, before)
        if "captured" in form:
            _replay(runner, transfer, problem, writes)
        elif writes:
            transfer.write(problem.src, problem.dst, problem.positions, key_scale=problem.key_scale)
        else:
            transfer.read(problem.dst, problem.src, problem.positions)
        for index, (got, right) in enumerate(zip(problem.tensors, expected[writes], strict=True)):
            if torch.equal(got.view(torch.uint8), right.view(torch.uint8)):
                continue
            elements, apart = difference(got, right)
            failures.append({
                "case": str(case), "form": form, "tensor": index, "elements": elements,
                "apart": apart,
            })  # fmt: skip
    return failures


def _copy(problem: Problem) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in problem.tensors]


def _restore(problem: Problem, before: list[torch.Tensor]) -> None:
    for tensor, old in zip(problem.tensors, before, strict=True):
        tensor.copy_(old)


def _replay(runner: Runner, transfer: PagedTransfer, problem: Problem, writes: bool) -> None:
    """Capture with all tokens padding, then replay with the indices that have come since."""
    num_tokens = len(problem.src)
    src, dst, positions = (
        torch.full((num_tokens + PADDING,), fill, dtype=dtype, device=runner.device)
        for fill, dtype in ((0, torch.int32), (-1, torch.int64), (0, torch.int64))
    )
    if writes:
        replay = runner.capture(
            lambda: transfer.write_on_device(src, dst, positions, key_scale=problem.key_scale)
        )
    else:
        replay = runner.capture(lambda: transfer.read_on_device(dst, src, positions))
    for buffer, array in ((src, problem.src), (dst, problem.dst), (positions, problem.positions)):
        buffer[:num_tokens] = torch.from_numpy(array).to(runner.device)
    replay()
