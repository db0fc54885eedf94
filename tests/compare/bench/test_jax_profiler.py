"""Reading device time out of a profiler's trace."""

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("jax")

from jax.profiler import ProfileData

from compare.bench import jax_profiler
from compare.bench.jax_profiler import DeviceEvent, Profile, device_events, group_of

# Two calls of two kernels on two streams; the lines that repeat them, and the host, do not count.
TRACE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "rope" } }
  event_metadata { key: 2 value { id: 2 name: "attention" } }
  lines { name: "Stream #13(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 2000000 }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 4000000 } }
  lines { name: "Stream #14(Compute)" timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 3000000 duration_ps: 5000000 }
    events { metadata_id: 2 offset_ps: 14000000 duration_ps: 5000000 } }
  lines { name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 2000000 } }
}
planes {
  name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "launch" } }
  lines { name: "Stream of thought" events { metadata_id: 1 duration_ps: 7000000 } }
}
"""


def test_events_of_the_gpus_streams():
    events = device_events(
        ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(TRACE))
    )
    assert sorted((event.name, event.duration) for event in events) == [
        ("attention", 5000),
        ("attention", 5000),
        ("rope", 2000),
        ("rope", 4000),
    ]
    measured = Profile(events, calls=2)
    assert measured.kernels_per_call == 2
    assert measured.timing().samples == 2
    assert measured.timing().median_us == pytest.approx((7 + 9) / 2)
    assert measured.timing().spread_us == pytest.approx(0.8 * (9 - 7))
    assert measured.by_kernel() == {"attention": pytest.approx(5), "rope": pytest.approx(3)}


def test_without_jax_pytorchs_profiler_tells(monkeypatch):
    torch = pytest.importorskip("torch")
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    place = SimpleNamespace(start=3.0, elapsed_us=lambda: 7.0)
    told = [
        SimpleNamespace(name=name, device_type=device, is_user_annotation=named, time_range=place)
        for name, device, named in (
            ("rope", cuda, False),
            ("call", cuda, True),
            ("add", cpu, False),
        )
    ]
    profiler = contextlib.nullcontext(SimpleNamespace(events=lambda: told))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiler)
    monkeypatch.setattr(jax_profiler.importlib.util, "find_spec", lambda name: None)
    ran = []
    assert jax_profiler.profile(lambda: ran.append(1), 2).events == [DeviceEvent("rope", 3e3, 7e3)]
    assert ran == [1]


def test_calls_that_do_not_divide_evenly_give_their_mean():
    events = [DeviceEvent("kernel", start, 3000) for start in range(5)]
    timing = Profile(events, calls=2).timing()
    assert timing.samples == 1
    assert timing.spread_us is None
    assert timing.median_us == pytest.approx(7.5)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products"),
        ("gemm_fusion_dot_3", "products"),
        ("window_kernel", "windowed attention"),
        ("stream_kernel", "frame attention"),
        ("rotate_kernel", "frame attention"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<96, 128>>", "frame attention"),
        ("triton_red_fused__fused_rms_norm_add_1", "norms and elementwise"),
        ("triton_red_fused__fused_rms_norm__to_copy_sub_0", "norms and elementwise"),
        ("gated_kernel", "norms and elementwise"),
        ("gated_product_kernel", "products"),
        ("gated_product_kernel_mosaic_gpu_kernel", "products"),
        ("norm_scale_kernel", "norms and elementwise"),
        ("loop_multiply_fusion", "norms and elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "norms and elementwise"),
        ("MemcpyD2D", "copies"),
        ("Memset", "copies"),
        ("loop_transpose_fusion", "copies"),
        ("wrapped_copy", "copies"),
        ("mystery", "other"),
    ],
)
def test_groups_of_kernels(kernel, group):
    assert group_of(kernel) == group


def test_groups_sum_up_to_the_call():
    events = [DeviceEvent(name, 0, 2000) for name in ("window_kernel", "nvjet_x", "window_kernel")]
    groups = Profile(events, calls=2).by_group()
    assert groups["windowed attention"] == pytest.approx(2)
    assert groups["products"] == pytest.approx(1)
    assert sum(groups.values()) == pytest.approx(3)
