"""Traces in benchmarks/roofline.py: kernels of a Hopper GPU by name, phases, and gaps."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import _kernels  # noqa: E402

FUNCTOR = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::"
NAMES = {
    "matrix products": (
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_tst_64x64_64x8_2x1_v_bz_splitK_TNT",
        "nvjet_hsh_192x192_64x4_2x1_v_bz_coopB_bias_TNN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas",
        "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_kernel",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false>(...)",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(...)",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel>>",
        "triton_tem_fused__to_copy_addmm_view_7",
        "triton_mm",
    ),
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(...)",
        "void cudnn::fusion::convert_dq_to_16bits<true>(...)",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "triton_tem_fused_flex_attention_0",
    ),
    "norms and residuals": (
        "triton_per_fused__to_copy_add_native_layer_norm_view_12",
        "triton_per_fused__to_copy_add_native_layer_norm_native_layer_norm_backward_19",
        "triton_red_fused_native_layer_norm_backward_4",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(...)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64u>(...)",
    ),
    "pointwise and reductions": (
        "triton_poi_fused_addmm_gelu_view_8",
        "triton_poi_fused__scaled_dot_product_flash_attention_clone_permute_3",
        "triton_red_fused__log_softmax_nll_loss_forward_0",
        "triton_per_fused_sum_21",
        ELEMENTWISE + "CUDAFunctor_add<float>, std::array<char*, 3ul>>(int, ...)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(...)",
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>(...)",
        "void at_cuda_detail::cub::DeviceSegmentedRadixSortKernel<at_cuda_detail::cub::policy_hub>(...)",
    ),
    "optimizer": (
        FUNCTOR + "FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>>(...)",
        FUNCTOR + "TensorListMetadata<1>, LpNormFunctor<float, (at::native::NormType)1, float, 1, 1, 0>>(...)",
        FUNCTOR + "TensorListMetadata<2>, TernaryOpScalarFunctor<float, 2, 2, 0>, LerpFunctor<float>, float>(...)",
    ),
    "copies": (
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(TensorIteratorBase&)>(...)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<4u>, unsigned int, 3, 64, 64>(...)",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>",
    ),
    "other": ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_kernel_kind_by_name(kind: str, name: str) -> None:
    assert kind in _kernels.KINDS
    assert _kernels.kind_of(name) == kind


def test_kernels_of_this_package_are_optimizer_kernels() -> None:
    text = (ROOT / "src" / "unskip" / "optim" / "_triton.py").read_text(encoding="utf-8")
    names = re.findall(r"@triton\.jit\ndef (\w+)", text)
    assert "unskip_adam" in names
    assert {_kernels.kind_of(name) for name in names} == {"optimizer"}


def event(category: str, name: str, start: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": 7}


def test_time_by_phase_and_kind(tmp_path: Path) -> None:
    trace = [
        event("gpu_user_annotation", "unskip: data", 0, 10),
        event("kernel", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopB_NNN", 0, 4),  # a crop as a matrix product
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 6, 4),
        event("kernel", "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 20, 30),
        event("kernel", "triton_poi_fused_gelu_0", 40, 20),  # on another stream, half of it overlaps the last
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 70, 10),
        event("kernel", "triton_poi_fused_gelu_0", 70, 10),
        event("gpu_user_annotation", "Torch-Compiled Region: 0/0", 0, 80),
        event("cpu_op", "aten::mm", 0, 500),
        {"ph": "i", "name": "no duration", "ts": 0},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": trace}))
    kernels = _kernels.kernels_of(file)
    found = {kind: time for kind, time in _kernels.by_kind(kernels).items() if time}
    assert found == {"matrix products": 30, "pointwise and reductions": 20, "optimizer": 10, "data": 8}
    assert _kernels.busy(kernels) == 4 + 4 + 40 + 10
    assert _kernels.largest(kernels, 1) == [("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products", 30)]


def test_cpu_operations_count_self_time(tmp_path: Path) -> None:
    trace = [
        event("user_annotation", "unskip: data", 0, 5),
        event("cpu_op", "aten::copy_", 1, 3),
        event("cpu_op", "aten::linear", 10, 20),
        event("cpu_op", "aten::addmm", 12, 15),
        event("cpu_op", "aten::empty", 13, 1),
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": trace}))
    found = {kind: time for kind, time in _kernels.by_kind(_kernels.kernels_of(file)).items() if time}
    assert found == {"matrix products": 14, "pointwise and reductions": 5 + 1, "data": 3}
