"""The layers of the vision towers in PyTorch, the twin of `flax_models.blocks`.

What differs between families is `config.family`'s. Every layer takes and returns
[tokens, channels] in the tower's dtype. Parameters are named as `tower_weights` names them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from compare.torch_tower.attention import Segments, attend
from compare.torch_tower.gated import add_product
from compare.torch_tower.gated_product import gated_product
from compare.torch_tower.summed_norm import sum_and_norm
from flax_models import VisionConfig
from flax_models.common.weights import Biases
from triton_kernels.integrations.plain import is_plain


class RMSNorm(nn.Module):
    """x / rms(x) x weight, in fp32 and rounded once."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.weight.dtype)  # in autocast x is of less
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


_NORMS = {"rms": RMSNorm, "layer": nn.LayerNorm}


def _norm(config: VisionConfig, features: int) -> nn.Module:
    return _NORMS[config.family.norm](features, config.norm_eps)


class PatchEmbed(nn.Module):
    """The convolution over patches, which do not overlap: one product with flattened patches."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.patch_dim, config.hidden_size, config.family.patch_bias)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.proj(patches.to(self.proj.weight.dtype))


class PositionTable(nn.Module):
    """A square of learned embeddings, stretched over each frame, corners onto corners.

    Between its entries it is interpolated bilinearly.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.side = config.position_table_side
        self.weight = nn.Parameter(torch.zeros(self.side**2, config.hidden_size))

    def forward(self, positions: torch.Tensor, frame_sizes: torch.Tensor) -> torch.Tensor:
        """Embeddings fp32 [tokens, hidden_size] of `Layout`'s arrays of these names."""
        stretched = positions.float() * (self.side - 1) / (frame_sizes - 1).clamp(min=1)
        floor = stretched.floor()
        upper_share = stretched - floor
        entries = torch.stack([floor, floor + 1], dim=-1).int()  # [tokens, axis, lower-upper]
        row, column = entries.clamp(max=self.side - 1).unbind(dim=1)
        shares = torch.stack([1 - upper_share, upper_share], dim=-1)
        corners = (row[:, :, None] * self.side + column[:, None, :]).view(-1, 4)
        weights = (shares[:, 0, :, None] * shares[:, 1, None, :]).view(-1, 4, 1)
        # Trained in fp32 before it is read: an entry's gradient is a sum over all that read it.
        table = self.weight.float() if self.weight.requires_grad else self.weight
        return (F.embedding(corners, table).float() * weights).sum(dim=1)


class _Product(nn.Module):
    """Base of products that a kernel goes on from, or adds to.

    No nn.Linear: what an adapter adds to a layer's result would miss the rest, so that adapter
    libraries have to refuse it. Its forward is called, for whoever hooks it.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Linear does


class SummedProduct(_Product):
    """residual += x weight^T."""

    def forward(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        add_product(residual, x, self.weight)


class GatedProduct(_Product):
    """Gate and up in one product, their norm and the activation: see `gated_product`."""

    def forward(
        self, residual: torch.Tensor, biases: Biases, eps: float, implementation: str
    ) -> torch.Tensor:
        return gated_product(residual, self.weight, biases, eps, implementation)


class Attention(nn.Module):
    """Self-attention within segments, without the product `proj` that the block ends it by."""

    def __init__(self, config: VisionConfig, proj: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = proj(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, segments: Segments) -> torch.Tensor:
        tokens = x.shape[0]
        qkv = self.qkv(x).view(tokens, 3, self.num_heads, self.head_dim)
        return attend(qkv, segments).view(tokens, -1)


def _quick_gelu(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = linear(x)
    return y * torch.sigmoid(1.702 * y)


def _gelu_tanh(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    # cuBLAS applies it to the product; on a CPU the operator is the exact GELU. It has no gradient.
    operator = x.is_cuda and is_plain(linear)
    if operator and not any(t.requires_grad for t in (x, linear.weight, linear.bias)):
        return torch._addmm_activation(linear.bias, x, linear.weight.t(), use_gelu=True)
    return F.gelu(linear(x), approximate="tanh")


_ACTIVATED = {"quick_gelu": _quick_gelu, "gelu_pytorch_tanh": _gelu_tanh}


class MLP(nn.Module):
    """down(activation(up(x))); widths as `tower_weights` pads."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.aligned_intermediate_size
        self.activation = config.family.activation
        self.up = nn.Linear(config.hidden_size, width)
        self.down = nn.Linear(width, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(_ACTIVATED[self.activation](self.up, x))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) x up(x)), gate and up in one product; widths as `tower_weights` pads."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.aligned_intermediate_size
        self.gate_up = nn.Linear(hidden, 2 * width)
        self.down = nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention and MLP, each after a norm and added to the residual stream.

    Compiled by itself, a block begins and ends with the residual stream in memory. That is why it
    ends with the norm that the next block begins with: a sum and its norm are one kernel. One that
    is trained begins with its own, as it may be sharded, or run again, by itself.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = _norm(config, config.hidden_size)
        self.attn = Attention(config)
        self.norm2 = _norm(config, config.hidden_size)
        self.mlp = (MLP if len(config.family.mlp_inputs) == 1 else GatedMLP)(config)

    def forward(
        self,
        x: torch.Tensor,
        normed: torch.Tensor | None,
        segments: Segments,
        next_norm: nn.Module | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """From x and norm1(x) to the layer's output y and next_norm(y), for inference.

        y may have the memory of x. A block that is trained goes from None to None.
        """
        if normed is None:
            x = x + self.attn.proj(self.attn(self.norm1(x), segments))
            return x + self.mlp(self.norm2(x)), None
        implementation = segments.implementation
        attended = self.attn.proj(self.attn(normed, segments))
        x, normed = sum_and_norm(x, attended, self.norm2, implementation)
        return sum_and_norm(x, self.mlp(normed), next_norm, implementation)


class LateNormMLP(nn.Module):
    """norm2, MLP and residual sum of a layer, the norm as `compare.torch_tower.gated` applies it.

    Gate and up are one product; weights and widths are as `tower_weights` makes them.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.aligned_intermediate_size
        self.eps = config.norm_eps
        self.gate_up = GatedProduct(hidden, 2 * width)
        self.stream_bias = nn.Parameter(torch.zeros(hidden))
        self.product_bias = nn.Parameter(torch.zeros(2 * width))
        self.bias = nn.Parameter(torch.zeros(2 * width))
        self.down = SummedProduct(width, hidden)

    def forward(self, residual: torch.Tensor, implementation: str) -> None:
        biases = Biases(self.stream_bias, self.product_bias, self.bias)
        self.down(residual, self.gate_up(residual, biases, self.eps, implementation))


class LateNormBlock(nn.Module):
    """One layer whose second norm is applied behind the MLP's first product.

    Both residual sums are within products, which are faster without a bias: the MLP adds that of
    the attention's output too.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = _norm(config, config.hidden_size)
        self.attn = Attention(config, SummedProduct)
        self.mlp = LateNormMLP(config)

    def forward(
        self, x: torch.Tensor, normed: torch.Tensor, segments: Segments, next_norm: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From x and norm1(x) to the layer's output y, in the memory of x, and next_norm(y)."""
        self.attn.proj(x, self.attn(normed, segments))
        self.mlp(x, segments.implementation)
        return x, next_norm(x)


class PatchMerger(nn.Module):
    """The tokens of each merge unit, which lie side by side, into one embedding.

    The norm is each token's or, in DeepStack's mergers (`norm_merged`), the merge unit's.
    """

    def __init__(self, config: VisionConfig, norm_merged: bool = False) -> None:
        super().__init__()
        self.merged_size = config.merge_unit * config.hidden_size
        self.normed_size = self.merged_size if norm_merged else config.hidden_size
        self.norm = _norm(config, self.normed_size)
        self.fc1 = nn.Linear(self.merged_size, self.merged_size)
        self.fc2 = nn.Linear(self.merged_size, config.out_hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x.view(-1, self.normed_size))
        return self.fc2(F.gelu(self.fc1(normed.view(-1, self.merged_size))))
