"""How far a result is from another, and the rules that decide whether that is near enough."""

import torch

from compare.common.result_files import Verdict

# Relative RMS error of the kernels against the fp64 oracle, by dtype.
ORACLE_LIMITS = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 1e-5}
# Ours against the unfused computation in the same dtype, both measured against the oracle.
UNFUSED_FACTOR = 2.0
# Pallas against Triton: half of what each may differ from the oracle.
TWIN_LIMITS = {dtype: limit / 2 for dtype, limit in ORACLE_LIMITS.items()}
# Our bf16 tower against Hugging Face's bf16 tower, both measured against its fp32 tower.
TOWER_FACTOR = 1.1
# Hugging Face's tower on another attention, which is there to be timed: wide enough for another
# order of rounding, too narrow for a wrong result.
PEER_TOWER_FACTOR = 1.5


def relative_rms_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """||result - reference|| / ||reference|| in fp64; NaN or infinite values give NaN or inf.

    Args:
        result: any shape and floating dtype.
        reference: the same shape; all zero only if the result should be.

    Raises:
        ValueError: the shapes differ.
    """
    _check_shapes(result, reference)
    reference = reference.double()
    difference = (result.to(reference.device).double() - reference).norm().item()
    size = reference.norm().item()
    return difference / size if size else difference


def max_abs_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference of two tensors of one shape."""
    _check_shapes(result, reference)
    return (result.to(reference.device).double() - reference.double()).abs().max().item()


def equal_share(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of elements that are equal, 0 to 1."""
    _check_shapes(a, b)
    return (a.to(b.device) == b).double().mean().item()


def kernel_verdict(error: float, unfused_error: float, dtype: str) -> Verdict:
    """Rule 1: within the dtype's limit and within twice the unfused computation's error."""
    return Verdict(error, min(ORACLE_LIMITS[dtype], UNFUSED_FACTOR * unfused_error))


def unfused_verdict(error: float, unfused_error: float) -> Verdict:
    """Within twice the unfused computation's error: of gradients and of added positions.

    What is added makes logits larger, and with them the error of any computation.
    """
    return Verdict(error, UNFUSED_FACTOR * unfused_error)


def twin_verdict(error: float, dtype: str) -> Verdict:
    """Rule 2: the two kernels against each other."""
    return Verdict(error, TWIN_LIMITS[dtype])


def tower_verdict(error: float, hugging_face_error: float, ours: bool = True) -> Verdict:
    """The tower rule: no further from fp32 than Hugging Face's tower in the same dtype, x 1.1.

    Args:
        error: relative RMS, against the fp32 Hugging Face tower; in training of its gradient, or of
            the losses of many steps.
        hugging_face_error: the same of Hugging Face's tower in the dtype in question.
        ours: a peer is held to a wider limit.
    """
    return Verdict(error, (TOWER_FACTOR if ours else PEER_TOWER_FACTOR) * hugging_face_error)


def _check_shapes(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(f"results differ in shape: {tuple(a.shape)} and {tuple(b.shape)}")
