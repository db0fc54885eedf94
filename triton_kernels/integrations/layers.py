"""What stands in for a layer of a Hugging Face vision tower.

A stand-in is a class that a module takes on in place of its own and gives up again: the module
stays the object that it was, with its parameters, buffers, hooks and name, and its class remains a
subclass of the one before. What a stand-in needs beside these it derives from them in each call.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from triton_kernels.attention import fused_rope_attention, fused_rope_attention_qkvpacked
from triton_kernels.integrations.forms import NORMS, Form
from triton_kernels.integrations.layer_norm import run_layer_norm
from triton_kernels.integrations.plain import plain_weight

# An attribute of segments that are planned: the upper bound on their tokens.
BOUND = "longest_segment"

_THETA = 10000.0  # transformers 4.57 has it in its code, not in the configuration


class StandIn(nn.Module):
    """Base of the stand-ins.

    Attributes:
        own_class: what the module's class was before, and will be again.
    """

    own_class: type[nn.Module]

    def is_intact(self) -> bool:
        """Whether nobody has changed the module since, so that it can give up its role.

        Parametrizations and FSDP, for instance, give it a class derived from the stand-in's, and
        offloading a forward that goes on to the stand-in's.
        """
        return "own_class" in vars(type(self)) and "forward" not in vars(self)

    def __reduce__(self) -> tuple:
        # The class is made at run time, so that pickle and copy can't find it by its name.
        return _new, type(self).__bases__, self.__getstate__()


def stand_in(module: nn.Module, role: type[StandIn]) -> None:
    """Have a module take on a role."""
    module.__class__ = _class(role, type(module))


def put_back(module: StandIn) -> None:
    """Have a module, which is intact, give up its role and be what it was."""
    for name in ("form", "longest_window", "recordings"):
        vars(module).pop(name, None)
    module.__class__ = module.own_class


@functools.cache
def _class(role: type[StandIn], own: type[nn.Module]) -> type[StandIn]:
    return type(f"{role.__name__}_{own.__name__}", (role, own), {"own_class": own})


def _new(role: type[StandIn], own: type[nn.Module]) -> StandIn:
    cls = _class(role, own)
    return cls.__new__(cls)


class FusedAttention(StandIn):
    """Vision attention with the rotation, and norms of heads, inside the kernel.

    q, k and v are read from the projections.

    Attributes:
        form: how the module's own attention is built.
        longest_window: tokens of a window where the layer attends within windows, else None.
    """

    form: Form
    longest_window: int | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        longest_frame: int | None = None,
        max_seqlen: int | None = None,
        own_windows: bool = False,
        **further: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Attend within segments.

        Args:
            hidden_states: [tokens, channels].
            cu_seqlens: [segments + 1] int32.
            position_embeddings: cos and sin, [tokens, head_dim] or [1, tokens, head_dim], the
                second half like the first; or the angles, [tokens, head_dim / 2].
            rotary_pos_emb: the angles, where `position_embeddings` is None.
            longest_frame: upper bound on a frame's tokens, as planned for the call, where
                `cu_seqlens` has none of its own, BOUND.
            max_seqlen: upper bound on a segment's tokens, as Hugging Face has it in a call that was
                not planned. Where neither is there, frames are measured, which waits for the GPU.
            own_windows: whether the caller divided the tower's tokens into windows, whose bound is
                not the layer's.
            further: what the module's own attention may know beside these.

        Returns:
            [tokens, channels], and None for the attention weights in a form that returns them.
        """
        # The kernel keeps all, and masks none.
        if (self.training and self.attention_dropout) or further.get("attention_mask") is not None:
            given = {
                "position_embeddings": position_embeddings,
                "rotary_pos_emb": rotary_pos_emb,
                "max_seqlen": max_seqlen,
            }
            given = {name: value for name, value in given.items() if value is not None}
            return super().forward(hidden_states, cu_seqlens, **given, **further)
        # The host may take longer than the GPU: hence no loops, and no view that may be spared.
        form, tokens, head_dim = self.form, hidden_states.shape[0], self.head_dim
        angles = rotary_pos_emb if position_embeddings is None else position_embeddings
        if isinstance(angles, torch.Tensor):
            angles = angles.cos(), angles.sin()
        cos, sin = angles
        if cos.ndim > 2:
            cos, sin = cos.flatten(0, -2), sin.flatten(0, -2)
        half = head_dim // 2
        cos, sin = cos[:, :half].float(), sin[:, :half].float()
        bound = getattr(cu_seqlens, BOUND, None)
        if bound is None:
            bound = (not own_windows and self.longest_window) or longest_frame or max_seqlen
        cu_seqlens = cu_seqlens.to(hidden_states.device, torch.int32)
        scale = self.scaling
        first = getattr(self, form.inputs[0])(hidden_states)
        norms = self._norms(first.dtype) if form.normed else {}
        if len(form.inputs) == 1 and norms is not None and not form.grouped:
            qkv = first.view(tokens, 3, self.num_heads, head_dim)
            attended = fused_rope_attention_qkvpacked(
                qkv, cos, sin, cu_seqlens, max_seqlen=bound, scale=scale, **norms
            )
        else:
            columns = widths(self, form)
            if len(form.inputs) == 1:
                projected = first.split(columns, -1)
            else:
                projected = first, *(getattr(self, x)(hidden_states) for x in form.inputs[1:])
            q, k, v = (
                x.view(tokens, width // head_dim, head_dim)
                for x, width in zip(projected, columns, strict=True)
            )
            if norms is None:  # in mixed precision they may be of another dtype
                q, k, norms = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), {}
            attended = fused_rope_attention(
                q, k, v, cos, sin, cu_seqlens, max_seqlen=bound, scale=scale, **norms
            )
        output = getattr(self, form.output)(attended.view(tokens, -1))
        return (output, None) if form.weighed else output

    def _norms(self, dtype: torch.dtype) -> dict[str, Any] | None:
        """The norms of heads as the operation takes them; None where they have to be called."""
        norms = [self._modules[name] for name in NORMS]
        weights = [plain_weight(norm, FusedRMSNorm.forward) for norm in norms]
        if any(weight is None or weight.dtype != dtype for weight in weights):
            return None
        eps, other = (norm.variance_epsilon for norm in norms)
        return dict(zip(NORMS, weights, strict=True)) | {"norm_eps": eps} if eps == other else None


def widths(attention: nn.Module, form: Form) -> list[int]:
    """Columns of q, k and v that a module of a form projects to."""
    k_heads = attention.num_key_value_heads if form.grouped else attention.num_heads
    return [heads * attention.head_dim for heads in (attention.num_heads, k_heads, k_heads)]


class FusedRMSNorm(StandIn):
    """x / rms(x) x weight in one kernel, in fp32 and rounded once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [tokens, channels]."""
        if x.dtype != self.weight.dtype:  # mixed precision: by Hugging Face's rules
            return super().forward(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class FusedLayerNorm(StandIn):
    """LayerNorm by one kernel where no gradients are recorded, see `run_layer_norm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., channels]."""
        return run_layer_norm(self, x)


class PatchProduct(StandIn):
    """A convolution that is called with one patch at a time: the product that it is then.

    Of 4,096 patches cuDNN takes 600 us of an H200, a product 20.
    """

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether it is a convolution of which nothing but a patch's size is unusual."""
        return (
            type(module) in (nn.Conv2d, nn.Conv3d)
            and module.groups == 1
            and set(module.dilation) == {1}
            and (module.padding == "valid" or set(module.padding) == {0})
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [patches, channels, *patch] to [patches, out_channels, 1, 1], or with one 1 more."""
        if x.shape[2:] != self.kernel_size:
            return super().forward(x)
        y = F.linear(x.flatten(1), self.weight.flatten(1), self.bias)
        return y.view(*y.shape, *[1] * len(self.kernel_size))


class ExactFrequencies(StandIn):
    """Rotary frequencies in fp32 also where the model is cast, and its frequencies with it.

    In bf16 they put cos and sin off by up to 0.12 on a 64 x 64 grid.
    """

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether these are what a module of Hugging Face's holds, but for a cast."""
        held = module._buffers.get("inv_freq")
        if held is None or held.is_meta:
            return False
        limit = torch.finfo(held.dtype).eps
        return torch.allclose(held.float(), _frequencies_of(module), rtol=limit, atol=1e-7)

    @property
    def inv_freq(self) -> torch.Tensor:
        """Those of the buffer if it is in fp32; else what Hugging Face computes in fp32."""
        held = self._buffers["inv_freq"]
        return held if held.dtype == torch.float32 else _frequencies_of(self)


def _frequencies_of(module: nn.Module) -> torch.Tensor:
    held = module._buffers["inv_freq"]
    config = getattr(module, "config", None)
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", _THETA)
    return _frequencies(len(held), theta, held.device)


@torch.compiler.disable
def _frequencies(count: int, theta: float, device: torch.device) -> torch.Tensor:
    return _remembered_frequencies(count, theta, device)


@functools.cache  # for good: a CUDA graph reads them where they are
def _remembered_frequencies(count: int, theta: float, device: torch.device) -> torch.Tensor:
    """theta ** (-i / n) for i in 0..n-1, computed on the CPU as Hugging Face does."""
    # In a trace's modes it would have no values.
    with torch.inference_mode(False), _disable_current_modes():
        exponents = torch.arange(count, dtype=torch.float32, device="cpu") / count
        return (1.0 / theta**exponents).to(device)
