"""The layers of a Qwen2.5-VL vision tower in PyTorch, the twin of `flax_models.blocks`.

Every layer takes and returns [tokens, channels] in the tower's dtype. Parameters are named as
`tower_weights` names them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from flax_models import VisionConfig
from triton_kernels import fused_rope_attention_qkvpacked


@dataclass(frozen=True)
class Segments:
    """What attention needs beside q, k and v.

    Attributes:
        cos, sin: [tokens, head_dim / 2] fp32, of each token's rotation angles.
        cu_seqlens: [segments + 1] int32, where each segment of tokens that see each other starts.
        max_seqlen: upper bound on a segment's length.
        implementation: of the attention, as in `triton_kernels`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    implementation: str


class RMSNorm(nn.Module):
    """x / rms(x) x weight, in fp32 and rounded once."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PatchEmbed(nn.Module):
    """The convolution over patches, which do not overlap: one product with flattened patches."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.patch_dim, config.hidden_size, bias=False)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.proj(patches.to(self.proj.weight.dtype))


class Attention(nn.Module):
    """Self-attention within segments; the rotation of q and k happens in the kernel."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, segments: Segments) -> torch.Tensor:
        tokens = x.shape[0]
        attended = fused_rope_attention_qkvpacked(
            self.qkv(x).view(tokens, 3, self.num_heads, self.head_dim),
            segments.cos,
            segments.sin,
            segments.cu_seqlens,
            max_seqlen=segments.max_seqlen,
            implementation=segments.implementation,
        )
        return self.proj(attended.view(tokens, -1))


class MLP(nn.Module):
    """down(silu(gate(x)) x up(x)), gate and up in one product; widths as `tower_weights` pads."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.aligned_intermediate_size
        self.gate_up = nn.Linear(config.hidden_size, 2 * width)
        self.down = nn.Linear(width, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, segments: Segments) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), segments)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """The tokens of each merge unit, which lie side by side, into one embedding."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.merged_size = config.merge_unit * config.hidden_size
        self.ln_q = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc1 = nn.Linear(self.merged_size, self.merged_size)
        self.fc2 = nn.Linear(self.merged_size, config.out_hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(self.ln_q(x).view(-1, self.merged_size))))
