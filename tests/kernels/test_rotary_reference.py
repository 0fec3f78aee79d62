"""The PyTorch reference against the definition of rotary embeddings, in complex numbers."""

import pytest
import torch

from inferscale_kernels.reference import rotate, unrotate


def _table(positions: torch.Tensor, rotary_dim: int, theta: float = 1e4) -> torch.Tensor:
    frequencies = 1 / theta ** (torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = positions.double()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1).float()


def _definition(keys: torch.Tensor, positions: torch.Tensor, rotary_dim: int, is_neox: bool):
    frequencies = 1 / 1e4 ** (torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    turn = torch.polar(torch.ones(()).double(), positions.double()[:, None] * frequencies)[:, None]
    x = keys.double()
    half = rotary_dim // 2
    first = x[..., :half] if is_neox else x[..., 0:rotary_dim:2]
    second = x[..., half:rotary_dim] if is_neox else x[..., 1:rotary_dim:2]
    turned = torch.complex(first, second) * turn
    out = x.clone()
    if is_neox:
        out[..., :half], out[..., half:rotary_dim] = turned.real, turned.imag
    else:
        out[..., 0:rotary_dim:2], out[..., 1:rotary_dim:2] = turned.real, turned.imag
    return out.float()


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (64, 16), (80, 32), (128, 128)])
def test_rotate_is_the_definition(head_dim: int, rotary_dim: int, is_neox: bool) -> None:
    torch.manual_seed(0)
    keys = torch.randn(23, 3, head_dim)
    positions = torch.randint(0, 4000, (23,))
    table = _table(positions, rotary_dim)
    expected = _definition(keys, positions, rotary_dim, is_neox)
    torch.testing.assert_close(rotate(keys, table, is_neox), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_neox", [True, False])
def test_unrotate_undoes_a_table_that_is_not_a_rotation(is_neox: bool) -> None:
    """A bfloat16 table, scaled as YaRN's: cos^2 + sin^2 is far from 1."""
    torch.manual_seed(1)
    keys = torch.randn(17, 2, 64)
    table = (1.27 * _table(torch.arange(17) * 91, 64)).bfloat16().float()
    back = unrotate(rotate(keys, table, is_neox), table, is_neox)
    torch.testing.assert_close(back, keys, atol=1e-5, rtol=1e-5)
