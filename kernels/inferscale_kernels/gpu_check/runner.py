"""What runs and times work on a device."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from inferscale_kernels.launcher import PagedTransfer
from inferscale_kernels.pages import PagedLayer

Work = Callable[[], None]

WARM_UP = 3
"""Turns of :meth:`Runner.time` that do not count."""


class Runner(ABC):
    """A device that the kernels run on. The check's only way to it."""

    device: torch.device

    @abstractmethod
    def transfer(
        self,
        arena: torch.Tensor,
        layers: Sequence[PagedLayer],
        codec: str = "auto",
        scales: torch.Tensor | None = None,
        key_channels: torch.Tensor | None = None,
    ) -> PagedTransfer:
        """The kernels for these tensors; arguments as :class:`PagedTransfer`."""

    @abstractmethod
    def capture(self, work: Work) -> Work:
        """Record what ``work`` enqueues, which is not run, and return what replays it."""

    @abstractmethod
    def time(self, works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
        """Milliseconds on the device of each of ``works``, ``rounds`` samples, alternating."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory of the device that may be used."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """The device's last cache: work that is timed must not find its data there."""

    @abstractmethod
    def profile(self, work: Work) -> dict[str, int] | None:
        """How often the device ran what in ``work``, by the profiler; None where it cannot tell."""

    def host_microseconds(self, work: Work, rounds: int) -> list[float]:
        """Of a call of ``work``, the device idle before."""
        samples = []
        for turn in range(WARM_UP + rounds):
            self.synchronize()
            began = time.perf_counter()
            work()
            if turn >= WARM_UP:
                samples.append(1e6 * (time.perf_counter() - began))
        self.synchronize()
        return samples


class CudaRunner(Runner):
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def transfer(
        self,
        arena: torch.Tensor,
        layers: Sequence[PagedLayer],
        codec: str = "auto",
        scales: torch.Tensor | None = None,
        key_channels: torch.Tensor | None = None,
    ) -> PagedTransfer:
        from inferscale_kernels.cuda import CudaTransfer

        return CudaTransfer(arena, layers, codec, scales, key_channels)

    def capture(self, work: Work) -> Work:
        # Not torch.cuda.graph(): it collects garbage and empties the allocator each time.
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        self.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph.replay

    def time(self, works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
        # Nothing waits in between: the host runs ahead, and no sample holds the way of a launch
        # to an idle device.
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in works}
        for turn in range(WARM_UP + rounds):
            for name, work in works.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                work()
                end.record()
                if turn >= WARM_UP:
                    events[name].append((begin, end))
        self.synchronize()
        return {name: [b.elapsed_time(e) for b, e in pairs] for name, pairs in events.items()}

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(0.8 * torch.cuda.mem_get_info(self.device)[0])

    def cache_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).L2_cache_size

    def profile(self, work: Work) -> dict[str, int] | None:
        self.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            self.synchronize()
        counts: dict[str, int] = {}
        for event in profile.events() or []:
            if event.device_type == torch.autograd.DeviceType.CUDA:
                counts[event.name] = counts.get(event.name, 0) + 1
        # A machine may keep its counters from users: then nothing at all is seen.
        return counts or None
