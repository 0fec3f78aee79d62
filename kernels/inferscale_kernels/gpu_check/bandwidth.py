"""Bandwidth of both kernels against a copy on the device, and against index-put in PyTorch.

Work is timed from graphs, so that a sample holds no launch from the host, over steps that
together are larger than the device's last cache. Kernel and copy alternate; their ratio is taken
pair by pair.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inferscale_kernels import reference
from inferscale_kernels.gpu_check.index_put import index_put, peak_bytes
from inferscale_kernels.gpu_check.runner import Runner, Work
from inferscale_kernels.gpu_check.statistics import ratios, scaled, spread
from inferscale_kernels.gpu_check.workload import Geometry, Step, Workload
from inferscale_kernels.launcher import PagedTransfer
from inferscale_kernels.pages import PagedLayer

KERNELS = ("rotate_scatter", "gather_unrotate")


def measure(
    runner: Runner,
    geometry: Geometry,
    num_tokens: int,
    codec: str,
    order: str,
    rounds: int,
    least_bytes: int,
) -> list[dict[str, Any]]:
    """A row for each kernel.

    Args:
        runner: the device.
        geometry: of the model.
        num_tokens: of a step, which is one launch.
        codec: how the arena stores elements.
        order: of the paged cache, one of ``cases.ORDERS``.
        rounds: samples of each.
        least_bytes: that a sample moves; as many steps as that takes.

    Returns:
        Rows with ``kernel``, ``bytes`` (read and written by a launch), ``microseconds`` of a
        launch, ``gb_per_s``, ``copy_gb_per_s``, ``of_copy`` (ratio of the bandwidths) and
        ``equal`` (a launch was compared with the reference in the first and the last layer); or
        one with ``left_out`` where memory does not suffice.

    """
    row = {"geometry": geometry.name, "tokens": num_tokens, "codec": codec, "order": order}
    step_bytes = num_tokens * geometry.bytes_moved(codec)
    num_steps = _num_steps(runner, step_bytes, least_bytes)
    # As much again is copied; a quarter on top is for what is compared.
    if (reason := _too_large(runner, 2.25 * num_steps * step_bytes)) is not None:
        return [row | {"left_out": reason}]
    workload = Workload(geometry, num_tokens, num_steps, codec, order, runner.device)
    transfer = _transfer(runner, workload)
    equal = {name: _equals_reference(workload, transfer, name) for name in KERNELS}
    half = step_bytes // 2
    source, target = (
        torch.ones((num_steps, half), dtype=torch.uint8, device=runner.device) for _ in range(2)
    )
    works = {name: _launches(transfer, workload.steps, name) for name in KERNELS}
    works["copy"] = _copies(source, target)
    times = runner.time({name: runner.capture(work) for name, work in works.items()}, rounds)
    gigabytes_ms = num_steps * step_bytes / 1e6
    return [
        row
        | {
            "kernel": name,
            "bytes": step_bytes,
            "launches_a_sample": num_steps,
            "microseconds": spread([1e3 * ms / num_steps for ms in times[name]]),
            "gb_per_s": scaled(gigabytes_ms, times[name]),
            "copy_gb_per_s": scaled(num_steps * 2 * half / 1e6, times["copy"]),
            "of_copy": ratios(times["copy"], times[name]),
            "equal": equal[name],
        }
        for name in KERNELS
    ]


def compare(
    runner: Runner, geometry: Geometry, num_tokens: int, codec: str, rounds: int, least_bytes: int
) -> dict[str, Any]:
    """``rotate_scatter`` against :func:`index_put`, called one by one and replayed from graphs.

    Returns:
        ``{kernel,index_put}{,_captured}_microseconds`` of a step, ``times_faster``,
        ``times_faster_captured`` and ``equal``; arguments and ``left_out`` as :func:`measure`.

    """
    row: dict[str, Any] = {"geometry": geometry.name, "tokens": num_tokens, "codec": codec}
    step_bytes = num_tokens * geometry.bytes_moved(codec)
    num_steps = _num_steps(runner, step_bytes, least_bytes)
    # A graph keeps memory of its own beside what the calls before it took.
    needed = num_steps * step_bytes + 2 * peak_bytes(geometry, num_tokens)
    if (reason := _too_large(runner, needed)) is not None:
        return row | {"left_out": reason}
    workload = Workload(geometry, num_tokens, num_steps, codec, "NHD", runner.device)
    transfer = _transfer(runner, workload)
    works: dict[str, Work] = {
        "kernel": _launches(transfer, workload.steps, "rotate_scatter"),
        "index_put": _index_puts(workload),
    }
    results = []
    for work in works.values():
        for storage in workload.storages:
            storage.zero_()
        work()
        results.append(
            [storage.clone() for storage in (workload.storages[0], workload.storages[-1])]
        )
    equal = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    works |= {f"{name}_captured": runner.capture(work) for name, work in works.items()}
    times = runner.time(works, rounds)
    return (
        row
        | {
            f"{name}_microseconds": spread([1e3 * ms / num_steps for ms in samples])
            for name, samples in times.items()
        }
        | {
            "times_faster": ratios(times["index_put"], times["kernel"]),
            "times_faster_captured": ratios(times["index_put_captured"], times["kernel_captured"]),
            "equal": equal,
        }
    )


def launches(runner: Runner, geometry: Geometry, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Launches of a step, and microseconds of the host for its calls.

    Returns:
        ``launches`` a step of each kernel as the launcher counts them, ``profiled`` what the
        profiler saw of both (None where it sees nothing), ``host_microseconds`` of the calls:
        ``write`` and ``read`` check and copy host arrays, ``_on_device`` only launch.

    """
    workload = Workload(geometry, num_tokens, 1, "auto", "NHD", runner.device)
    transfer = _transfer(runner, workload)
    (step,) = workload.steps
    src, dst, positions = step.on_host()
    works: dict[str, Work] = {
        "write": lambda: transfer.write(src, dst, positions),
        "read": lambda: transfer.read(dst, src, positions),
        "write_on_device": _launches(transfer, [step], "rotate_scatter"),
        "read_on_device": _launches(transfer, [step], "gather_unrotate"),
    }
    counts = {}
    for name, call in zip(KERNELS, ("write", "read"), strict=True):
        before = transfer.num_launches
        works[call]()
        counts[name] = transfer.num_launches - before
    try:
        profiled = runner.profile(_both(works["write"], works["read"]))
    except RuntimeError:
        # Profilers need rights that not every machine gives; the launcher's count stands.
        profiled = None
    return {
        "geometry": geometry.name,
        "tokens": num_tokens,
        "launches": counts,
        "profiled": profiled,
        "host_microseconds": {
            name: spread(runner.host_microseconds(work, rounds)) for name, work in works.items()
        },
    }


def _num_steps(runner: Runner, step_bytes: int, least_bytes: int) -> int:
    return max(1, -(-max(least_bytes, 4 * runner.cache_bytes()) // step_bytes))


def _too_large(runner: Runner, needed: float) -> str | None:
    free = runner.free_bytes()
    if needed <= free:
        return None
    return f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"


def _transfer(runner: Runner, workload: Workload) -> PagedTransfer:
    return runner.transfer(workload.arena, workload.layers, workload.codec, workload.scales)


def _launches(transfer: PagedTransfer, steps: Sequence[Step], kernel: str) -> Work:
    def launch() -> None:
        for step in steps:
            if kernel == "rotate_scatter":
                transfer.write_on_device(step.src, step.dst, step.positions)
            else:
                transfer.read_on_device(step.dst, step.src, step.positions)

    return launch


def _index_puts(workload: Workload) -> Work:
    def put() -> None:
        for step in workload.steps:
            index_put(workload, step)

    return put


def _copies(source: torch.Tensor, target: torch.Tensor) -> Work:
    def copy() -> None:
        for to, from_ in zip(target, source, strict=True):
            to.copy_(from_)

    return copy


def _both(first: Work, second: Work) -> Work:
    def work() -> None:
        first()
        second()

    return work


def _equals_reference(workload: Workload, transfer: PagedTransfer, kernel: str) -> bool:
    """Whether a launch leaves the first and the last layer as the reference does."""
    step, writes = workload.steps[0], kernel == "rotate_scatter"
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index in {0, len(workload.layers) - 1}:
        storage, layer = workload.storages[index], workload.layers[index]
        arena = workload.arena[index : index + 1]
        scales = None if workload.scales is None else workload.scales[index : index + 1]
        if writes:
            expected = storage.clone()
            layer = _moved(layer, expected)
            reference.rotate_scatter(
                arena, [layer], step.src, step.dst, step.positions,
                codec=workload.codec, scales=scales,
            )  # fmt: skip
            pairs.append((storage, expected))
            continue
        expected = arena.clone()
        expected_scales = None if scales is None else scales.clone()
        reference.gather_unrotate(
            expected, [layer], step.dst, step.src, step.positions,
            codec=workload.codec, scales=expected_scales,
        )  # fmt: skip
        pairs.append((arena, expected))
        if scales is not None and expected_scales is not None:
            pairs.append((scales, expected_scales))
    _launches(transfer, [step], kernel)()
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _moved(layer: PagedLayer, storage: torch.Tensor) -> PagedLayer:
    """``layer`` in another storage."""
    keys, values = (
        storage.as_strided(t.shape, t.stride(), t.storage_offset())
        for t in (layer.keys, layer.values)
    )
    return replace(layer, keys=keys, values=values)
