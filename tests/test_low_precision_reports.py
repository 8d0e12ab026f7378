"""Reports of users about training in low precision, and the tests by which this project does not repeat them.

A report whose format another package of tests covers, such as the order of FP4 codes, is beside that format.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

REPORTS = {
    "Megatron-LM#442, torchtitan#3109: an amax that is not reduced over tp": (
        "parallel/test_fp8_linear.py::test_two_ranks_quantize_as_one_process",
        "parallel/test_fp8_linear.py::test_without_the_amax_all_reduce_operands_differ",
    ),
    "Megatron-Bridge#638: gradients of MXFP8 in e5m2 diverge": (
        "test_low_precision_reports.py::test_gradients_with_scales_of_a_byte_are_e4m3",
    ),
    "Megatron-LM#2272: parameters are not finite without overlap": (
        "train/test_low_precision_runs.py::test_overlapped_gathers_change_no_bit",
    ),
    "marin#7271: a gradient is NaN, and a checkpoint is saved": (
        "ops/test_every_recipe.py::test_one_element_that_is_not_finite_makes_all_that_depend_on_it_so",
        "train/test_low_precision_runs.py::test_poison_in_an_operand_stops_the_run_and_saves_nothing",
        "train/test_finite_check.py::test_a_state_that_is_not_finite_is_not_saved",
    ),
    "torchtitan#1056: rowwise and torch.compile": (
        "train/test_compile.py::test_a_compiled_run_in_fp8_is_near_the_eager_run",
    ),
    "ao#3356: rows of zeros become NaN": ("ops/test_every_recipe.py::test_zeros_stay_zeros",),
    "ao#4300: the loss differs if FP8 is gathered": (
        "parallel/test_sharded_weights.py::test_sharded_weights_have_the_bits_of_zero_2",
        "parallel/test_fp8_codes.py::test_processes_have_the_bits_of_zero_2",
    ),
    "Megatron-LM#6666, TE#304, Megatron-LM#1350: loading changes codes, or an opaque state hinders it": (
        "parallel/test_fp8_linear.py::test_a_resumed_run_is_bit_equal",
        "parallel/test_fp8_linear.py::test_amax_history_restarts_without_a_matching_history",
    ),
    "TE#982: a resumed run has lost its history": ("parallel/test_fp8_linear.py::test_a_resumed_run_is_bit_equal",),
    "TE#1190, #3394: recomputation updates the history": (
        "parallel/test_recompute.py::test_every_setting_is_bit_equal_in_fp8",
        "train/test_low_precision_runs.py::test_recomputation_leaves_the_amax_history_as_it_is",
    ),
    "TE#3298, Megatron-LM#5707: operands of old weights": (
        "parallel/test_fp8_linear.py::test_weights_are_quantized_once_per_step",
        "train/test_low_precision_runs.py::test_operands_follow_their_master_weights",
    ),
    "torchtitan#2262, ms-swift#9722: alignment after tp, and of experts": (
        "config/test_rules.py::test_a_broken_rule_names_the_key",
        "parallel/experts/test_fp8_gemms.py::test_a_row_has_its_own_result",
    ),
    "TE#3248: later tokens change earlier ones": (
        "ops/test_every_recipe.py::test_later_tokens_reach_earlier_ones_as_the_recipe_says",
    ),
    "TE#3348: a rank without a part of a weight": (
        "parallel/test_sharded_weights.py::test_sharded_weights_have_the_bits_of_zero_2",
    ),
    "Megatron-Bridge#521, miles#1137: an export without scales": (
        "train/test_low_precision_runs.py::test_an_export_has_the_master_weights_in_full",
    ),
    "TE PR3073: the reduction of an amax is left out for one group": (
        "parallel/test_fp8_linear.py::test_ranks_that_share_sequences_quantize_as_one_process",
        "parallel/test_fp8_linear.py::test_layouts_train_equally",
    ),
    "TE#445: FP8 is slower than bf16 at small sizes": (
        "plan/search/test_plan.py::test_a_plan_says_where_bf16_is_as_fast",
    ),
    "aiter#3212: scales that are rounded down clip a third of the blocks": (
        "ops/test_mxfp8.py::test_scales_rounded_down_would_saturate",
        "ops/test_mxfp8.py::test_scales_are_the_smallest_powers_of_two_that_do_not_saturate",
    ),
    "Megatron-LM#1152: experts in FP8 lose 0.09 of loss": (
        "parallel/experts/test_fp8_gemms.py::test_losses_stay_near_those_of_bf16",
    ),
    "sglang#23625: halves of bytes, or scales, in another order": (
        "ops/test_nvfp4.py::test_codes_and_scales_of_a_row",
        "ops/test_block_scaled_gemm.py::test_scales_lie_in_the_order_of_tensor_cores",
    ),
}
"""The tests of each report."""


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_has_its_tests(report: str) -> None:
    for test in REPORTS[report]:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_gradients_with_scales_of_a_byte_are_e4m3() -> None:
    from megascale.catalog.recipes import RECIPES

    specs = [RECIPES[name].facts[operand] for name in RECIPES.names() for operand in ("gradient", "gradient_column")]
    assert all(spec.element != "e5m2" for spec in specs if spec.scale == "e8m0")
