"""What stands in for a layer of a Hugging Face vision tower.

A stand-in is a class that a module takes on in place of its own and gives up again: the module
stays the object that it was, with its parameters, hooks and name, and its class remains a subclass
of the one before.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from triton_kernels.attention import fused_rope_attention_qkvpacked

# In elements of a 16-bit dtype: the fast matrix kernels take only rows of whole 16 bytes, and like
# those of whole 128-byte lines.
_ACCEPTED = 8
_STORED = 64
_THETA = 10000.0  # transformers 4.57 has it in its code, not in the configuration


class StandIn(nn.Module):
    """Base of the stand-ins.

    Attributes:
        own_class: what the module's class was before, and will be again.
    """

    own_class: type[nn.Module]

    def take_on(self) -> None:
        """Change what the module stores; called once it is of this class."""

    def give_up(self) -> None:
        """Undo `take_on`; called before the module is of its own class again."""

    def is_intact(self) -> bool:
        """Whether nobody has changed the module since, so that it can give up its role.

        Parametrizations and FSDP, for instance, give it a class derived from the stand-in's.
        """
        return "own_class" in vars(type(self))

    def __reduce__(self) -> tuple:
        # The class is made at run time, so that pickle and copy can't find it by its name.
        return _new, type(self).__bases__, self.__getstate__()


def stand_in(module: nn.Module, role: type[StandIn]) -> None:
    """Have a module take on a role."""
    module.__class__ = _class(role, type(module))
    module.take_on()


def put_back(module: StandIn) -> None:
    """Have a module, which is intact, give up its role and be what it was."""
    module.give_up()
    module.__class__ = module.own_class


@functools.cache
def _class(role: type[StandIn], own: type[nn.Module]) -> type[StandIn]:
    return type(f"{role.__name__}_{own.__name__}", (role, own), {"own_class": own})


def _new(role: type[StandIn], own: type[nn.Module]) -> StandIn:
    cls = _class(role, own)
    return cls.__new__(cls)


class FusedAttention(StandIn):
    """Vision attention with the rotation inside the kernel, q, k and v read from the projection.

    Attributes:
        longest_window: tokens of a window where the layer attends within windows, else None.
    """

    def take_on(self) -> None:
        """Attend within frames, until told of windows."""
        self.longest_window: int | None = None

    def give_up(self) -> None:
        """Forget the windows."""
        del self.longest_window

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        longest_frame: int | None = None,
        max_seqlen: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend within segments.

        Args:
            hidden_states: [tokens, channels].
            cu_seqlens: [segments + 1] int32.
            position_embeddings: cos and sin, [tokens, head_dim], the second half like the first.
            longest_frame: upper bound on a frame's tokens, as planned for the call.
            max_seqlen: upper bound on a segment's tokens, as Hugging Face has it in a call that was
                not planned. Where neither is there, frames are measured, which waits for the GPU.

        Returns:
            [tokens, channels].
        """
        tokens = hidden_states.shape[0]
        cos, sin = (x[:, : self.head_dim // 2].float() for x in position_embeddings)
        attended = fused_rope_attention_qkvpacked(
            self.qkv(hidden_states).view(tokens, 3, self.num_heads, self.head_dim),
            cos,
            sin,
            cu_seqlens.to(hidden_states.device, torch.int32),
            max_seqlen=self.longest_window or longest_frame or max_seqlen,
            scale=self.scaling,
        )
        return self.proj(attended.view(tokens, -1))


class FusedRMSNorm(StandIn):
    """x / rms(x) x weight in one kernel, in fp32 and rounded once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [tokens, channels]."""
        if x.dtype != self.weight.dtype:  # mixed precision: by Hugging Face's rules
            return super().forward(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class ExactFrequencies(StandIn):
    """Rotary frequencies in fp32 where the model has been cast, and they with it.

    In bf16 they put cos and sin off by up to 0.12 on a 64 x 64 grid.
    """

    def take_on(self) -> None:
        """Compute them anew, theta ** (-i / n) for i in 0..n-1, as Hugging Face does in fp32."""
        # As a buffer it is moved and cast along.
        self.register_buffer("cast_inv_freq", self.inv_freq, persistent=False)
        count, config = len(self.inv_freq), getattr(self, "config", None)
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", _THETA)
        exponents = torch.arange(count, dtype=torch.float32, device="cpu") / count
        self.inv_freq = (1.0 / theta**exponents).to(self.inv_freq.device)

    def give_up(self) -> None:
        """Back to the frequencies that were there."""
        self.inv_freq = self.cast_inv_freq
        del self.cast_inv_freq


class PaddedLinear(StandIn):
    """A linear layer stored at an aligned width, filled up with zeros, that shows its own width.

    `in_features`, `out_features`, state dicts and what they accept keep the published sizes: there
    the weights are views. The parameters keep their identity and are wider.
    """

    def take_on(self) -> None:
        """Pad."""
        _resize(self, _pad, (aligned_width(self.out_features), aligned_width(self.in_features)))

    def give_up(self) -> None:
        """Cut the padding off."""
        _resize(self, _cut, (self.out_features, self.in_features))

    def is_intact(self) -> bool:
        """As for every stand-in; and its parameters are such as can be cut."""
        return super().is_intact() and holds_plain_parameters(self)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._parameters:
            if prefix + name in destination:
                # In the parameter's own memory, as of any module: what is written to it, as running
                # averages of models do, is written to the model.
                destination[prefix + name] = _published_part(
                    destination[prefix + name], (self.out_features, self.in_features)
                )

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.give_up()  # so that PyTorch compares, and complains of, the published shapes
        super()._load_from_state_dict(*arguments)
        self.take_on()


def aligned_width(width: int) -> int:
    """The width at which a layer is stored: 3420 becomes 3456, a multiple of 8 stays."""
    return width if width % _ACCEPTED == 0 else -(-width // _STORED) * _STORED


def holds_plain_parameters(linear: nn.Linear) -> bool:
    """Whether a layer holds a weight and a bias, if any, that can be resized, and nothing else.

    Sharded and quantised ones are of other types; pruning and weight norm hold something in their
    place, or beside them.
    """
    held = {**linear._parameters, **linear._buffers}
    return held.keys() <= {"weight", "bias"} and all(
        x is None or type(x) is nn.Parameter for x in held.values()
    )


Resize = Callable[[torch.Tensor, tuple[int, int]], torch.Tensor]


def _resize(linear: nn.Linear, resize: Resize, shape: tuple[int, int]) -> None:
    """Replace the values of the parameters, and of their gradients, not the parameters."""
    for parameter in linear.parameters(recurse=False):
        grad, parameter.grad = parameter.grad, None
        # Whatever the mode: what is made in inference mode can't be trained or written to outside.
        with torch.inference_mode(parameter.is_inference()):
            parameter.data = resize(parameter.data, shape)
            if grad is not None:
                parameter.grad = resize(grad, shape)


def _pad(values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Fill a weight [out, in] or a bias [out] up with zeros."""
    padded = values.new_zeros(shape[: values.ndim])
    padded[tuple(map(slice, values.shape))] = values
    return padded


def _cut(values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The first rows and columns of a weight, or rows of a bias, in memory of their own."""
    return _published_part(values, shape).clone(memory_format=torch.contiguous_format)


def _published_part(values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A view of the first rows and columns of a weight, or rows of a bias."""
    return values[tuple(map(slice, shape[: values.ndim]))]
