"""What the check needs, said in one line where it is missing."""

from importlib.util import find_spec


def missing() -> str | None:
    """The first thing that is missing and what to do about it, or None."""
    if find_spec("torch") is None:
        return "torch is not installed: install a CUDA build of it (pip install torch)"
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is not built for CUDA: install a CUDA build of it "
            "(pip install torch, on Linux)"
        )
    if not torch.cuda.is_available():
        return (
            "no CUDA device: torch sees none; run this on a machine with an NVIDIA GPU and a "
            "driver (nvidia-smi shows both)"
        )
    if find_spec("cupy") is None:
        return f"CuPy is not installed: pip install cupy-cuda{torch.version.cuda.split('.')[0]}x"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if properties.major < 8:
        return (
            f"{properties.name} has compute capability {properties.major}.{properties.minor}: "
            "use a GPU of 8.0 (Ampere) or newer"
        )
    return None
