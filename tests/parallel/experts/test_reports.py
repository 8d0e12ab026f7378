"""Reports of users of other systems about experts, and the tests that show what happens here.

Reports about split backward and sharded weights are not among them. Meg: NVIDIA/Megatron-LM, TT: pytorch/torchtitan,
DS: microsoft/DeepSpeed, PT: pytorch/pytorch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HERE, HANGS, SAVED = "parallel/experts", "operate/diagnose/hang/test_hang.py", "checkpoint/test_expert_checkpoints.py"
LAYOUTS = f"{HERE}/test_expert_layouts.py::test_every_layout_is_the_same_run"
GRADIENTS = f"{HERE}/test_experts_in_training.py::test_every_gradient_is_that_of_one_process"
EDGES = f"{HERE}/test_experts_in_training.py"

REPORTS: dict[str, tuple[str, ...]] = {
    "Meg#5749: all-to-all and reduction wait for each other": (
        f"{HANGS}::test_an_exchange_of_tokens_that_a_rank_left_out_is_named",
        f"{HERE}/test_experts_do_not_hang.py::test_a_thousand_steps_with_delays_end",
    ),
    "Meg v0.11, TT#1689: a stage without experts hangs or crashes": (f"{EDGES}::test_a_stage_without_experts",),
    "DS#5794, DS#5066, PaddleFormers#3010: a rank without tokens hangs": (
        f"{EDGES}::test_ranks_without_tokens_take_part",
        "ops/test_grouped_gemm.py::test_rows_meet_the_matrix_of_their_expert",
    ),
    "DS#6809: ranks disagree about a capacity": (
        f"{HERE}/test_capacity.py::test_an_expert_keeps_the_largest_weights_of_a_sequence", LAYOUTS,
    ),
    "Meg#1652, #5047, #2237, #3672, #5798: the balance loss depends on the layout": (LAYOUTS,),
    "Automodel#1408, #1412: the router has no gradient of the balance loss": (
        f"{HERE}/test_router_losses.py::test_gradients_are_those_of_finite_differences",
    ),
    "Automodel#3359: losses grow with the micro-batches": (LAYOUTS,),
    "megablocks#85, #86, DS#5259, Meg#5956, PT#160285: gradients of experts are too large": (GRADIENTS,),
    "Meg#5916, #1628, SpecForge#882: the norm lacks experts": (LAYOUTS,),
    "TT#4054: gradients below experts are lost with tp": (GRADIENTS,),
    "TT#4494, #4148: biases are not moved, or in evaluations": (
        f"{EDGES}::test_biases_have_the_same_bits_in_every_layout", f"{EDGES}::test_evaluation_counts_no_choices",
        f"{EDGES}::test_a_skipped_step_leaves_the_state_of_experts",
    ),
    "Meg#6114: positions without a token are counted": (
        f"{HERE}/test_padding.py::test_padding_changes_nothing", f"{EDGES}::test_a_lost_choice_ends_the_run",
        f"{EDGES}::test_a_microbatch_without_labels_routes_its_tokens",
    ),
    "Meg#3401: totals of experts hang with multi-token prediction": (
        "train/test_prediction_steps.py::test_layouts_are_the_same_run",
    ),
    "Meg#2417, #3159, #3959, #7498: its loss is divided by another count": (
        "train/test_prediction_steps.py::test_gradients_are_those_of_the_plain_formula",
    ),
    "Meg#1517, #7162, radixark/Megatron#66: another layout loads other experts": (
        f"{SAVED}::test_a_run_goes_on_in_any_layout",
    ),
    "KempnerForge#202, AReaL#1468, Meg#5844, Automodel#2682: state of experts is lost": (
        f"{SAVED}::test_a_checkpoint_without_an_expert_is_refused",
        f"{SAVED}::test_what_balances_experts_does_not_begin_anew",
    ),
    "DeepEP#99, megablocks#154: uneven loads run out of memory": (
        "plan/account/test_expert_memory.py::test_imbalance_adds_the_rows_that_arrive",
    ),
    "Meg#1862, #6311: overlap crashes": (f"{HERE}/test_expert_layouts.py::test_every_exchange_is_the_same_run",),
    "sglang#38695, vllm#14027: routers lose precision": (
        f"{HERE}/test_router_precision.py::test_logits_that_bf16_cannot_tell_apart_choose_an_expert",
        f"{HERE}/test_near_ties.py::test_other_choices_are_near_ties",
    ),
    "transformers#46743: no kernel for CPUs": ("ops/test_grouped_gemm.py::test_rows_meet_the_matrix_of_their_expert",),
    "TT#1720, #1750, Meg#894, #1881: losses of two layouts differ, and nobody knows where": (
        "cli/test_ckpt.py::test_diff_describes_the_differences", f"{SAVED}::test_tools_read_stacks",
    ),
    "prime-rl#778, TT#4300: MFU counts all experts": ("plan/account/test_flops.py::test_experts_count_as_published",),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_has_its_tests(report: str) -> None:
    for name in REPORTS[report]:
        file, _, function = name.partition("::")
        assert f"\ndef {function}(" in (ROOT / "tests" / file).read_text(), name
