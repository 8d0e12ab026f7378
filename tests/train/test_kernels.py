"""Purposes of kernels by names seen on GPUs, and parsing of a profiler's trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.device import Device, profiler_range
from megascale.record.recorder import Recorder
from megascale.train.kernels import (
    ALL_PURPOSES,
    Kernel,
    KernelProfile,
    classify,
    profile_from_trace,
    profile_kernels,
    time_shares,
)
from tests.recorded_events import recorded_events

CPU = Device(torch.device("cpu"), "gloo")
LAMBDA = "at::native::{}(at::TensorIteratorBase&)::{{lambda()#1}}::operator()() const::{{lambda(float)#1}}, std::array>"

NAMES = {
    "gemm": [
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN",
        "nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_64x3_tn_align8>(T1::Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, "
        "cutlass::float_e4m3_t> >(T1::Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>",
        "ampere_sgemm_128x64_tn",
        "triton_tem_fused_mm_t_4",
        "aten::addmm",
        "aten::_scaled_mm",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4, false> >",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel>",
        "void flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128> >(flash::Flash_bwd_params, int)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Mainloop> > >",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "triton_tem_fused_flex_attention_0",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ],
    "norms": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float, 64u, 1u>",
        "_rms_norm_forward_kernel",
        "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<transformer_engine::Kernel_traits<float> >",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
    ],
    "activation": [
        "void at::native::vectorized_elementwise_kernel<4, " + LAMBDA.format("silu_kernel"),
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)",
        "_swiglu_backward_kernel",
        "triton_poi_fused_mul_silu_3",
    ],
    "rope": ["_triton_rope", "void transformer_engine::fused_rope_forward_kernel<float>(float const*)"],
    "loss": [
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
        "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>(float*, float const*, int)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
        "liger_cross_entropy_kernel",
    ],
    "quantise": ["void at::native::vectorized_elementwise_kernel<4, at::native::float8_copy_kernel_cuda(at::"],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4> >",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, LAMBStage1Functor<float>, float*>",
        "aten::_fused_adamw_",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "gloo:all_reduce",
        "c10d::allreduce_",
    ],
    "copies": [
        "void at::native::unrolled_elementwise_kernel<" + LAMBDA.format("direct_copy_kernel_cuda"),
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 3, 64, 64>",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "aten::copy_",
    ],
    "other": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array>",
        "void at::native::elementwise_kernel<128, 2, " + LAMBDA.format("pow_tensor_scalar_kernel"),
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float> > >",
        "triton_poi_fused_add_1",
        "aten::embedding",
        "aten::broadcast_tensors",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("purpose", "name"), [(purpose, name) for purpose, names in NAMES.items() for name in names])
def test_the_purpose_of_a_kernel_by_its_name(purpose: str, name: str) -> None:
    assert classify(name) == purpose


def test_every_purpose_is_shown() -> None:
    assert NAMES.keys() == set(ALL_PURPOSES)


MULTIPLY = NAMES["other"][1]
COPY = NAMES["copies"][0]


@pytest.mark.parametrize(
    ("name", "within", "purpose"),
    [
        (MULTIPLY, ("aten::mul", "_RMSNorm", "F"), "norms"),
        (MULTIPLY, ("aten::mul", "autograd::engine::evaluate_function: _SwiGLUBackward"), "activation"),
        (MULTIPLY, ("aten::mul", "_RotateHeads", "F"), "rope"),
        (MULTIPLY, ("aten::sub_", "_CrossEntropy", "F"), "loss"),
        (MULTIPLY, ("aten::mul_", "update"), "optimizer"),
        (COPY, ("aten::copy_", "update"), "optimizer"),
        (MULTIPLY, ("aten::linalg_vector_norm", "grad_norm"), "optimizer"),
        (MULTIPLY, ("aten::linalg_vector_norm", "compute_updates"), "optimizer"),
        (MULTIPLY, ("aten::mul", "_Columns", "F"), "other"),
        (COPY, ("aten::copy_", "_ColumnsBackward"), "copies"),
        ("Memset (Device)", ("aten::mm", "_Columns"), "gemm"),
        (COPY, ("ScaledDotProductFlashAttentionBackward0",), "attention"),
        (NAMES["gemm"][0], ("aten::mm", "_RMSNormBackward"), "gemm"),
    ],
)  # fmt: skip
def test_an_ambiguous_kernel_has_the_purpose_of_its_enclosing_range(
    name: str, within: tuple[str, ...], purpose: str
) -> None:
    assert classify(name, within) == purpose


def test_shares_are_of_the_span_and_idle_is_the_rest() -> None:
    result = time_shares(
        KernelProfile((Kernel("nvjet_x", (), 0.5), Kernel("Memset", (), 0.1), Kernel("nvjet_y", (), 0.2)), 0.6), 1.0
    )
    assert result["gemm"] == pytest.approx(0.7)
    assert (result["copies"], result["idle"]) == (0.1, 0.4)
    assert sum(result.values()) == pytest.approx(1.2)  # two streams at once for 0.2 s
    assert list(result) == [*ALL_PURPOSES, "idle"]
    assert time_shares(KernelProfile((), 1.1), 1.0)["idle"] == 0.0


def interval(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": args}


ON_GPU = [  # as torch writes them
    {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
    interval("user_annotation", "F", 100, 50),
    interval("cpu_op", "_RMSNorm", 105, 20, **{"External id": 2}),
    interval("cpu_op", "aten::mul", 106, 10, **{"External id": 3}),
    interval("cuda_runtime", "cudaLaunchKernel", 108, 2, correlation=11, **{"External id": 3}),
    interval("cpu_op", "aten::mm", 130, 10, **{"External id": 4}),
    interval("cuda_driver", "cuLaunchKernelEx", 132, 2, correlation=12, **{"External id": 4}),
    interval("cpu_op", "aten::mul", 106, 9, tid=2),  # another thread, at the same time
    interval("cuda_runtime", "cudaMemsetAsync", 107, 1, tid=2, correlation=13),
    interval("cuda_runtime", "cudaDeviceSynchronize", 160, 500, correlation=14),
    interval("gpu_user_annotation", "F", 300, 200, tid=9),
    interval("kernel", "elementwise", 300, 10, tid=9, correlation=11, stream=7, device=0),
    interval("kernel", "nvjet_hsh_256x128", 320, 100, tid=9, correlation=12, stream=7, device=0),
    interval("gpu_memset", "Memset (Device)", 400, 40, tid=10, correlation=13, stream=8, device=0),
    interval("kernel", "unknown", 450, 5, tid=9, correlation=99, stream=7, device=0),
    {"ph": "s", "id": 11, "pid": 7, "tid": 1, "ts": 108, "cat": "ac2g", "name": "ac2g"},
]  # fmt: skip


def test_kernels_of_a_gpu_belong_to_their_launches() -> None:
    result = profile_from_trace(ON_GPU)
    assert result.kernels == (
        Kernel("elementwise", ("aten::mul", "_RMSNorm", "F"), pytest.approx(10e-6)),
        Kernel("nvjet_hsh_256x128", ("aten::mm", "F"), pytest.approx(100e-6)),
        Kernel("Memset (Device)", ("aten::mul",), pytest.approx(40e-6)),
        Kernel("unknown", (), pytest.approx(5e-6)),
    )
    assert result.busy_s == pytest.approx((10 + (440 - 320) + 5) * 1e-6)


def test_operators_of_a_cpu_have_their_self_time() -> None:
    result = profile_from_trace([event for event in ON_GPU if event.get("cat") in ("cpu_op", "user_annotation")])
    assert [(k.name, k.enclosing, round(k.seconds * 1e6)) for k in result.kernels] == [
        ("_RMSNorm", ("F",), 10),
        ("aten::mul", ("_RMSNorm", "F"), 10),
        ("aten::mm", ("F",), 10),
        ("aten::mul", (), 9),
    ]
    assert result.busy_s == pytest.approx(39e-6)


def test_a_profile_names_actions_and_operators() -> None:
    recorder, x = Recorder(named_range=profiler_range), torch.ones(64, 64)

    def work() -> None:
        with recorder.action("update"):
            x.add_(1)
        torch.mm(x, x)

    result = {kernel.name: kernel for kernel in profile_kernels(work, CPU).kernels}
    assert result["aten::add_"].enclosing == ("update",)
    assert result["aten::mm"].enclosing == ()
    assert all(kernel.seconds >= 0 for kernel in result.values())
    assert [event.name for event in recorded_events(recorder)] == ["update"]  # as without a profiler
