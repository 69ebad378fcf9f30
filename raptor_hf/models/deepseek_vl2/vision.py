"""The vision tower of DeepSeek-VL2 (SigLIP) and its projector, under the module names of the original checkpoints.

Shapes: N views, S = grid * grid patches of a view, C its width.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from raptor_hf.models.deepseek_vl2.configuration import DeepseekVL2ProjectorConfig, DeepseekVL2VisionConfig

__all__ = ["DeepseekVL2Projector", "DeepseekVL2VisionTower"]

_EPS = 1e-6


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (N, S, C) -> (N, S, C): softmax(Q K' / sqrt(d)) V over all patches of a view."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class DeepseekVL2VisionBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)) with the tanh form of GELU."""

    def __init__(self, config: DeepseekVL2VisionConfig):
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width, eps=_EPS)
        self.attn = _Attention(width, config.heads)
        self.norm2 = nn.LayerNorm(width, eps=_EPS)
        hidden = int(width * config.mlp_ratio)
        self.mlp = nn.Sequential(
            OrderedDict(fc1=nn.Linear(width, hidden), act=nn.GELU(approximate="tanh"), fc2=nn.Linear(hidden, width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DeepseekVL2VisionTower(nn.Module):
    """Patches with learned positions, no class token, pre-norm blocks, a last norm."""

    def __init__(self, config: DeepseekVL2VisionConfig):
        super().__init__()
        self.patch_embed = nn.Sequential(
            OrderedDict(proj=nn.Conv2d(3, config.width, kernel_size=config.patch_size, stride=config.patch_size))
        )
        self.pos_embed = nn.Parameter(torch.empty(1, config.grid**2, config.width))
        self.blocks = nn.ModuleList(DeepseekVL2VisionBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=_EPS)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """pixel_values (N, 3, image_size, image_size) -> (N, S, C), patches row by row."""
        x = self.patch_embed(pixel_values).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class DeepseekVL2Projector(nn.Module):
    """r x r neighbouring patches become one token: their channels side by side, then an MLP with GELU.

    A grid that is no multiple of r gets zeros at its right and lower edge.
    """

    def __init__(self, config: DeepseekVL2ProjectorConfig):
        super().__init__()
        self.ratio = config.downsample_ratio
        hidden = int(config.n_embed * config.mlp_ratio)
        layers: list[nn.Module] = [nn.Linear(config.input_dim * self.ratio**2, hidden)]
        for width in [hidden] * (config.depth - 2) + [config.n_embed]:
            layers += [nn.GELU(), nn.Linear(hidden, width)]
        self.layers = nn.Sequential(*layers)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """patches (N, S, C) -> (N, side, side, H)."""
        grid, ratio = round(patches.shape[1] ** 0.5), self.ratio
        missing = -grid % ratio
        x = F.pad(patches.unflatten(1, (grid, grid)), (0, 0, 0, missing, 0, missing))
        side = (grid + missing) // ratio
        # for each channel its r x r square, row by row
        x = x.view(len(x), side, ratio, side, ratio, -1).permute(0, 1, 3, 5, 2, 4)
        return self.layers(x.flatten(3))
