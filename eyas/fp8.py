"""Block-scaled fp8: e4m3 codes and one bfloat16 scale per 128 values of a layer's hidden axis.

Cost: 1 + 2/128 bytes a value when 128 divides the width. Error of a value x in a block whose largest magnitude is m, before the result is
rounded to bfloat16: at most |x|/16 (e4m3 has three bits of mantissa), or m/458752 where that is more (its subnormals, |x| < m/28672).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
LARGEST = 448.0  # largest finite e4m3 value
SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny  # keeps the division normal for blocks of zeros and of subnormal values
# Every code's value, bit by bit: a lookup is four times as fast on a CPU as torch's conversion.
_VALUES_AS_INT16 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16).view(torch.int16).numpy()


def blocks(width: int) -> int:
    """Scales of one layer's ``width`` hidden values; the last block may be short."""
    return -(-width // BLOCK)


def quantise(values_TC: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return (codes_TC float8_e4m3fn, scales_TS bfloat16) of finite bfloat16 values; C is a whole number of layers of ``width`` values.

    Blocks never cross from one layer into the next, whose magnitude differs. A scale is the block's largest magnitude / 448, cut off to
    bfloat16: downwards, so that 448 x scale cannot overflow.
    """
    tokens = len(values_TC)
    layers = values_TC.shape[1] // width
    padded = pad(values_TC.float().view(tokens, layers, width), (0, blocks(width) * BLOCK - width))
    blocked = padded.view(tokens, layers, blocks(width), BLOCK)
    exact = (blocked.abs().amax(-1) / LARGEST).clamp_min(SMALLEST_SCALE)
    scales = (exact.view(torch.int32) & -65536).view(torch.float32)
    # The cut-off scale lets the quotient reach 451.5, which still rounds to 448 and not (as from 464 on) to NaN.
    codes = (blocked / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    codes_TC = codes.view(tokens, layers, -1)[:, :, :width].reshape(tokens, -1)
    return codes_TC, scales.to(torch.bfloat16).view(tokens, -1)


def dequantise(codes_TC: Tensor, scales_TS: Tensor, width: int) -> Tensor:
    """Return the bfloat16 values_TC. A code has 4 significant bits and a scale 8, so their product in bfloat16 is rounded only once."""
    tokens = len(codes_TC)
    layers = codes_TC.shape[1] // width
    values = _values(codes_TC).view(tokens, layers, width)
    scales = scales_TS.view(tokens, layers, -1, 1)
    whole = width // BLOCK
    values[:, :, : whole * BLOCK].unflatten(2, (whole, BLOCK)).mul_(scales[:, :, :whole])
    if whole * BLOCK < width:
        values[:, :, whole * BLOCK :].mul_(scales[:, :, whole])
    return values.view(tokens, -1)


def _values(codes: Tensor) -> Tensor:
    """The codes' own values in bfloat16, in fresh memory."""
    if codes.device.type != "cpu":
        return codes.to(torch.bfloat16)
    return torch.from_numpy(_VALUES_AS_INT16[codes.view(torch.uint8).numpy()]).view(torch.bfloat16)
