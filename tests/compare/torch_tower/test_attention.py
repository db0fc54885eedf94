"""The PyTorch tower with a library's attention over whole frames."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._dynamo.testing import CompileCounter  # noqa: E402
from torch.nn.attention import SDPBackend  # noqa: E402

from compare.torch_tower import attention  # noqa: E402
from compare.torch_tower.device import find_device  # noqa: E402
from compare.torch_tower.inputs import layout_tensors  # noqa: E402
from compare.torch_tower.tower import encode, load_vision_tower  # noqa: E402
from tests.compare.naive import naive_varlen  # noqa: E402
from tests.frame_attention_contract import CLIPS, FrameAttentionContract  # noqa: E402
from tests.tower_checkpoints import GRIDS  # noqa: E402
from tests.tower_contract import FP32_TOLERANCE, relative_error  # noqa: E402
from triton_kernels.attend import INTERPRETED  # noqa: E402
from triton_kernels.reference import rotate_reference  # noqa: E402


def varlen_on_dirty_memory(q, k, v, cu_seqlens, max_seqlen):
    """As libraries do it: rows of no segment stay what the memory held."""
    out = torch.full_like(q, torch.nan)
    ends = cu_seqlens.tolist()
    out[: ends[-1]] = naive_varlen(q[: ends[-1]], k, v, cu_seqlens, max_seqlen)
    return out


class TestFrameAttention(FrameAttentionContract):
    libraries = attention.FRAME_ATTENTION[1:]
    array = staticmethod(partial(torch.tensor, device=find_device(None)))
    encode_prepared = staticmethod(encode)

    @staticmethod
    def load(directory, dtype, **options):
        # What stands for a library waits for the GPU, which no recording can.
        options |= {"compile": False, "cuda_graphs": False}
        return load_vision_tower(directory, getattr(torch, dtype), **options)

    @staticmethod
    def encode(tower, patches, layout):
        placed = torch.tensor(patches, device=tower.device)
        return encode(tower, placed, layout_tensors(layout, tower.device))

    @staticmethod
    def numpy(array):
        return array.float().cpu().numpy()

    @staticmethod
    def stand_in(monkeypatch):
        monkeypatch.setattr(attention, "_CUDNN", SDPBackend.MATH)
        monkeypatch.setattr(attention, "_varlen", lambda _: varlen_on_dirty_memory)

    @pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
    def test_padded_frames_of_any_lengths(self, config, fused, with_library, grid):
        ours = self.rows(with_library("fa2"), config, grid)
        assert relative_error(ours, self.rows(fused, config, grid)) < FP32_TOLERANCE

    def test_compiled_blocks_take_libraries_whole(self, config, fused, with_library):
        compiler = CompileCounter()
        tower = with_library("fa3")
        for block in tower.blocks:
            block.compile(dynamic=True, backend=compiler, fullgraph=True)
        for grid in (CLIPS, GRIDS["mix"], GRIDS["one_whole_window"]):
            ours = self.rows(tower, config, grid)
            assert relative_error(ours, self.rows(fused, config, grid)) < FP32_TOLERANCE
        # Over windows, over frames, and the last block, which no other follows.
        assert compiler.frame_count == 2 + config.family.windows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_by_the_kernel(dtype):
    if not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("Triton's interpreter is off and there is no GPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn((37, 3, 2, 80), generator=generator, device=device).to(dtype)
    angles = torch.randn((37, 40), generator=generator, device=device)
    qk = qkv[:, :2].flatten(1, 2)
    assert qk.data_ptr() == qkv.data_ptr()  # a view
    ours = attention.rotate_by_kernel(qk, angles.cos(), angles.sin())
    expected = rotate_reference(qk, angles.cos(), angles.sin())
    torch.testing.assert_close(
        ours, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
