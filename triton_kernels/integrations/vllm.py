"""vLLM's vision encoders on the fused attention: a plugin that vLLM finds where it is installed.

vllm.md beside this file is for those who run it. `register` imports nothing of vLLM's: it waits for
vLLM to import its models, and replaces there what the source says to be what was tested. All else
is left to vLLM, and a line of the log says so.
"""

import functools
import hashlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from triton_kernels.attend import attend
from triton_kernels.attention import fused_rope_attention, fused_rope_attention_qkvpacked
from triton_kernels.checks import DTYPES, MAX_TILED_HEAD_DIM
from triton_kernels.integrations.forms import text_of
from triton_kernels.integrations.gelu import is_tanh_gelu, takes_gelu
from triton_kernels.integrations.layer_norm import has_rows, run_layer_norm
from triton_kernels.integrations.mlp import aligned_operands, is_misaligned
from triton_kernels.integrations.plain import is_own
from triton_kernels.launching.fast_path import goes_unseen, locate

__all__ = ["register", "unregister"]

VARIABLE = "FUSED_ROPE_VLLM"
PARTS = ("attention", "norm", "mlp")
_ALL = ("", "1")

# Towers whose norms are PyTorch's LayerNorm.
_LAYER_NORMED = ("Qwen2VisionTransformer", "Qwen3_VisionTransformer")

# Of what is replaced, and of what it calls. A comment says from which version of vLLM on.
FINGERPRINTS = {
    "Qwen2_5_VisionAttention": {"c008d6726880"},  # 0.20
    "Qwen2VisionAttention": {"dd5545e4b980"},  # 0.20
    "RMSNorm": {"660c8bbfc7d1"},  # 0.26
    "Qwen2_5_VisionMLP": {"d2275feb3e9b"},  # 0.26
    "Qwen3_VisionMLP": {"4a6072efe7c6"},  # 0.26
    "QuickGELU": {"8e07da363ce0"},  # 0.26
    **{name: {"25baf514060c"} for name in _LAYER_NORMED},  # PyTorch's norm
}
# In those that take the segments as they are.
_BACKENDS = {"FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA"}

_logger = logging.getLogger("vllm.fused_rope_attention")  # vLLM shows what is below its own
_undo: list[tuple[Any, str, Any]] = []
_MISSING = object()


def register() -> None:
    """Have vLLM's vision encoders run the fused attention, in this process.

    vLLM calls it in each of its processes, by the entry point group vllm.general_plugins. Encoders
    are changed that are built from then on. Called again, it changes nothing. What the environment
    variable FUSED_ROPE_VLLM says is replaced: "0" nothing, "attention,norm,mlp" or some of them
    those, unset all. It raises nothing: what can't be replaced is left to vLLM.
    """
    if not _parts() or _finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _finder)
    for name in _CHANGES:
        if name in sys.modules:
            _change(sys.modules[name])


def unregister() -> None:
    """Undo `register`: attention and MLPs are vLLM's own again, norms in encoders built later."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    while _undo:
        owner, name, own = _undo.pop()
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _parts() -> tuple[str, ...]:
    asked = os.environ.get(VARIABLE, "")
    if asked in _ALL:
        return PARTS
    names = [] if asked == "0" else [name.strip() for name in asked.split(",")]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        _say(f"{VARIABLE} may name {', '.join(PARTS)}, got {', '.join(unknown)}")
    return tuple(part for part in PARTS if part in names)


@functools.cache
def _say(message: str) -> None:
    _logger.info("Fused RoPE attention: %s", message)


class _Finder(MetaPathFinder):
    """Has modules of vLLM's changed when vLLM imports them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _CHANGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), _change(module))
        return spec


_finder = _Finder()


def _change(module: ModuleType) -> None:
    """Replace what was asked for in a module of vLLM's."""
    for part, change in _CHANGES[module.__name__]:
        if part is None or part in _parts():
            _guarded(change, module)


def _guarded(change: Callable[..., None], *arguments: Any) -> None:
    """Run what knows vLLM from inside; in a version that it doesn't fit, vLLM goes on alone."""
    try:
        change(*arguments)
    except Exception as error:
        _say(f"left to vLLM, {change.__name__.strip('_')} failed: {type(error).__name__}: {error}")


def _set(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, value)


def _after_init(cls: type[nn.Module], look: Callable[[nn.Module], None]) -> None:
    """Have instances looked at when they are built, outside of whatever may trace their calls."""
    own = cls.__init__

    @functools.wraps(own)
    def init(self: nn.Module, *arguments: Any, **options: Any) -> None:
        own(self, *arguments, **options)
        _guarded(look, self)

    _set(cls, "__init__", init)


def _of_vllm(name: str) -> ModuleType:
    return importlib.import_module(f"vllm.{name}")


def _is_known(part: str, cls: type, *functions: Callable) -> bool:
    """Whether a part can run here, and its code is what was tested."""
    if (reason := _unfit_process()) is not None:
        _say(f"off, as {reason}")
        return False
    known = fingerprint(*functions) in FINGERPRINTS[cls.__name__]
    if not known:
        _say(f"leaves {part} ({cls.__name__}) to vLLM, as this version's code is not known")
    return known


def fingerprint(*functions: Callable) -> str:
    """A hash of what functions say, without decorators, docstrings and annotations."""
    text = "\n".join(text_of(function.__code__) for function in functions)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _unfit_process() -> str | None:
    """Why nothing may be replaced in this process; None where it may."""
    platform = _of_vllm("platforms").current_platform
    if getattr(_of_vllm("envs"), "VLLM_BATCH_INVARIANT", False):
        return "VLLM_BATCH_INVARIANT is on"
    if platform.is_cpu() and os.environ.get(VARIABLE, "") not in _ALL:
        return None  # by its parts' names, for tests: it gains nothing there
    if not platform.is_cuda() or not platform.has_device_capability(80):
        return "it needs an NVIDIA GPU of compute capability 8.0 or higher"
    return None


def _change_packed_attention(module: ModuleType) -> None:
    cls = module.Qwen2_5_VisionAttention
    own = cls.forward
    if not _is_known("attention", cls, own):
        return

    @functools.wraps(own)
    def forward(
        self: nn.Module,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rotary_pos_emb_cos: torch.Tensor | None,
        rotary_pos_emb_sin: torch.Tensor | None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        angles = rotary_pos_emb_cos, rotary_pos_emb_sin
        if not _takes(self, x, cu_seqlens, angles):
            return own(self, x, cu_seqlens, *angles, max_seqlen, sequence_lengths)
        tokens, inner = x.shape[0], self.attn
        x, _ = self.qkv(x)
        qkv = x.view(tokens, 3, inner.num_heads, inner.head_size)
        run = _operator if torch.compiler.is_compiling() else _attend
        attended = run([qkv], *angles, cu_seqlens, max_seqlen, inner.scale)
        return self.proj(attended.view(tokens, 1, -1))[0]

    _replace_attention(cls, forward)


def _change_separate_attention(module: ModuleType) -> None:
    cls = module.Qwen2VisionAttention
    own = cls.forward
    if not _is_known("attention", cls, own, cls.split_qkv):
        return

    @functools.wraps(own)
    def forward(
        self: nn.Module,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rotary_pos_emb_cos: torch.Tensor,
        rotary_pos_emb_sin: torch.Tensor,
        max_seqlen: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        angles = rotary_pos_emb_cos, rotary_pos_emb_sin
        if not _takes(self, x, cu_seqlens, angles):
            return own(self, x, cu_seqlens, *angles, max_seqlen)
        x, _ = self.qkv(x)
        qkv = [part.squeeze(1) for part in self.split_qkv(x)]  # of all ranks, then this one's
        attended = _attend(qkv, *angles, cu_seqlens, max_seqlen, self.attn.scale)
        return self.proj(attended.view(x.shape[0], 1, -1))[0]

    _replace_attention(cls, forward)


def _replace_attention(cls: type[nn.Module], forward: Callable[..., torch.Tensor]) -> None:
    _set(cls, "is_fused", False)  # of instances that are there already
    _set(cls, "forward", forward)
    _after_init(cls, _judge_attention)
    _say(f"replaces the attention of {cls.__name__}")


def _judge_attention(attention: nn.Module) -> None:
    """Note whether an attention's settings are those of ours."""
    inner = attention.attn
    expected = _of_vllm("model_executor.layers.attention").MMEncoderAttention
    heads, head_dim, backend = inner.num_heads, inner.head_size, inner.attn_backend.name
    reason = None
    if type(inner) is not expected:
        reason = f"its attention is a {type(inner).__name__} of {type(inner).__module__}"
    elif backend not in _BACKENDS:
        reason = f"its backend is {backend}"
    elif inner.fp8_enabled:
        reason = "it attends in FP8"
    elif head_dim % 8 or head_dim > MAX_TILED_HEAD_DIM or inner.num_kv_heads != heads:
        reason = f"its {heads} heads have {head_dim} columns, and {inner.num_kv_heads} keys"
    attention.is_fused = reason is None
    if reason is not None:
        _say(f"leaves a {type(attention).__name__} to vLLM: {reason}")


def _takes(
    attention: nn.Module,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor,
    angles: tuple[torch.Tensor | None, torch.Tensor | None],
) -> bool:
    """Whether a call is one that the operation takes: x is [tokens, batch, channels]."""
    return (
        attention.is_fused
        and angles[0] is not None
        and angles[1] is not None
        and x.shape[1] == 1
        and x.dtype in DTYPES
        and cu_seqlens.dtype == torch.int32
    )


def _attend(
    qkv: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of a packed projection, or of q, k and v; cos and sin in vLLM's dtype."""
    tensors, bound = (*qkv, cos, sin, cu_seqlens), _bound(max_seqlen)
    if cos.dtype == qkv[0].dtype and goes_unseen(tensors):
        # The kernel casts them: two launches a layer fewer, and the host may be the slower one.
        return attend(tensors, (bound, scale, "auto", "auto", False, "rope"), *locate(tensors))
    # Not remembered in fp32: the same tensors come with other values when a CUDA graph is replayed.
    angles = cos.float(), sin.float()
    function = fused_rope_attention_qkvpacked if len(qkv) == 1 else fused_rope_attention
    return function(*qkv, *angles, cu_seqlens, max_seqlen=bound, scale=scale)


# A compiled encoder must not be traced into where the bound is read.
_operator = torch.library.custom_op("fused_rope_attention::vllm", _attend, mutates_args=())


@_operator.register_fake
def _(qkv: list[torch.Tensor], *others: Any) -> torch.Tensor:
    return qkv[0].new_empty(qkv[0].shape[0], *qkv[0].shape[-2:])


def _bound(max_seqlen: torch.Tensor | int | None) -> int | None:
    """vLLM's bound, a tensor on the CPU, which is 0 or None where its backend needs none."""
    return None if max_seqlen is None else int(max_seqlen) or None


def _change_norms(module: ModuleType) -> None:
    cls = _of_vllm("model_executor.layers.layernorm").RMSNorm
    custom = _of_vllm("model_executor.custom_op").CustomOp
    if not _is_known("norm", cls, cls.forward_native, cls.forward_cuda, custom.forward):
        return
    ops = _of_vllm("ir").ops
    alone, with_sum = (op.impls["vllm_c"] for op in (ops.rms_norm, ops.fused_add_rms_norm))
    if not (alone.supported and with_sum.supported):
        _say("leaves the norms to vLLM, whose own kernels are not there")
        return

    def normalize(
        norm: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        kernel, tensors = (alone, (x,)) if residual is None else (with_sum, (x, residual))
        arguments = *tensors, norm.weight.data, norm.variance_epsilon
        if torch.compiler.is_compiling() or not kernel.supports_args(*arguments):
            return norm.forward_native(x, residual)
        return kernel.impl_fn(*arguments)

    def use_kernels(tower: nn.Module) -> None:
        for norm in tower.modules():
            if type(norm) is cls and norm.has_weight and norm.variance_size_override is None:
                norm._forward_method = functools.partial(normalize, norm)

    _after_init(module.Qwen2_5_VisionTransformer, use_kernels)
    _say("has the encoder's norms run by vLLM's own kernels")


def _change_mlp(module: ModuleType) -> None:
    cls = module.Qwen2_5_VisionMLP
    own = cls.forward
    linear = _of_vllm("model_executor.layers.linear")
    activation = _of_vllm("model_executor.layers.activation").SiluAndMul
    up_class, down_class = linear.MergedColumnParallelLinear, linear.RowParallelLinear
    functions = own, up_class.forward, down_class.forward, activation.forward_native
    if not _is_known("mlp", cls, *functions):
        return
    if not _of_vllm("platforms").current_platform.is_device_capability(90):
        _say("leaves the MLPs to vLLM: theirs was measured on Hopper GPUs")
        return
    reduce = _of_vllm("distributed").tensor_model_parallel_all_reduce
    forwards = {c: c.forward for c in (up_class, down_class, activation)}

    def parameters(mlp: nn.Module, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Weight and bias of gate, of up and of down; None where the layers have to be called."""
        up, down = mlp.gate_up_proj, mlp.down_proj
        if not all(is_own(layer, forwards) for layer in (up, down, mlp.act_fn)):
            return None  # adapters, for instance
        plain = linear.UnquantizedLinearMethod
        if not type(up.quant_method) is type(down.quant_method) is plain:
            return None
        held = up.weight, up.bias, down.weight, down.bias
        if any(p is None or p.dtype != x.dtype or p.device != x.device for p in held):
            return None
        (gate, up_weight), (gate_bias, up_bias) = (p.data.chunk(2) for p in held[:2])
        return [gate, gate_bias, up_weight, up_bias, down.weight.data, down.bias]

    @functools.wraps(own)
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        down = self.down_proj
        misaligned = is_misaligned(x, down.input_size_per_partition)
        if not misaligned or (held := parameters(self, x)) is None:
            return own(self, x)
        *operands, bias = held
        product = aligned_operands(x.reshape(-1, x.shape[-1]), *operands)
        out = F.linear(*product, bias if down.tp_rank == 0 else None)
        if down.tp_size > 1 and down.reduce_results:
            out = reduce(out)
        return out.view(*x.shape[:-1], -1)

    _set(cls, "forward", forward)
    _say(f"replaces the MLP of {cls.__name__} where its width shuts out the fast matrix kernels")


def _change_layer_norms(module: ModuleType) -> None:
    def use_kernel(tower: nn.Module) -> None:
        for norm in tower.modules():
            if has_rows(norm):
                norm.forward = functools.partial(run_layer_norm, norm)

    for cls in filter(None, map(vars(module).get, _LAYER_NORMED)):
        if _is_known("norm", cls, nn.LayerNorm.forward):
            _after_init(cls, use_kernel)
            _say(f"has the LayerNorms of {cls.__name__} run by one kernel each")


def _change_gelu_mlp(module: ModuleType) -> None:
    cls = module.Qwen3_VisionMLP
    own = cls.forward
    linear = _of_vllm("model_executor.layers.linear")
    up_class = linear.ColumnParallelLinear
    if not _is_known("mlp", cls, own, up_class.forward):
        return
    forwards = {up_class: up_class.forward}

    @functools.wraps(own)
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        up, rows = self.linear_fc1, x.reshape(-1, x.shape[-1])
        plain = is_own(up, forwards) and type(up.quant_method) is linear.UnquantizedLinearMethod
        if not plain or up.gather_output or not is_tanh_gelu(self.act_fn):
            return own(self, x)
        weight, bias = up.weight.data, None if up.bias is None else up.bias.data
        if not takes_gelu(rows, weight, bias):
            return own(self, x)
        hidden = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
        return self.linear_fc2(hidden.view(*x.shape[:-1], -1))

    _set(cls, "forward", forward)
    _say(f"has the activation of {cls.__name__} applied by the product before it")


def _change_quick_gelu(module: ModuleType) -> None:
    cls = _of_vllm("model_executor.layers.activation").QuickGELU
    custom = _of_vllm("model_executor.custom_op").CustomOp
    if not _is_known("mlp", cls, cls.forward_native, cls.forward_cuda, custom.forward):
        return

    def activate(activation: nn.Module, x: torch.Tensor) -> torch.Tensor:
        compiled = torch.compiler.is_compiling()
        return (activation.forward_native if compiled else activation.forward_cuda)(x)

    def use_kernel(tower: nn.Module) -> None:
        for activation in tower.modules():
            if type(activation) is cls:
                activation._forward_method = functools.partial(activate, activation)

    _after_init(module.Qwen2VisionTransformer, use_kernel)
    _say("has the encoder's QuickGELU run by vLLM's own kernel")


def _change_compile_cache(module: ModuleType) -> None:
    """Have encoders that were compiled with and without ours kept apart, or by another ours."""
    own = module.aot_compile_hash_factors
    parts = ",".join(_parts())
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]

    @functools.wraps(own)
    def factors(*arguments: Any) -> list[str]:
        return [*own(*arguments), f"{VARIABLE}={parts} {code}"]

    _set(module, "aot_compile_hash_factors", factors)


# By module: which part a change belongs to, None to all.
_CHANGES = {
    "vllm.model_executor.models.qwen2_vl": (
        ("attention", _change_separate_attention),
        ("norm", _change_layer_norms),
        ("mlp", _change_quick_gelu),
    ),
    "vllm.model_executor.models.qwen2_5_vl": (
        ("attention", _change_packed_attention),
        ("norm", _change_norms),
        ("mlp", _change_mlp),
    ),
    "vllm.model_executor.models.qwen3_vl": (
        ("norm", _change_layer_norms),
        ("mlp", _change_gelu_mlp),
    ),
    "vllm.compilation.caching": ((None, _change_compile_cache),),
}
