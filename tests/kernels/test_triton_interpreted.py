"""The Triton kernels where there is no GPU: run by the interpreter, in float32."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import pytest

from tests.support import forked

pytest.importorskip("triton", reason="triton is not installed")

QUICK = (
    "test_attend.py::test_agrees_for_every_form[cuda-f32-28-dtype0]",
    "test_attend.py::test_one_key_returns_its_value[cuda-656-dtype1]",
    "test_attend.py::test_nothing_named_is_empty[cuda-1152]",
    "test_attend.py::test_bad_input_changes_nothing[cuda]",
    "test_reference.py::test_index_logits_are_the_loop[cuda-ue8m0]",
    "test_reference.py::test_index_logits_are_the_loop[cuda-f32]",
    "test_reference.py::test_top_k_is_the_sort[cuda-2-7]",
    "test_reference.py::test_selection_attention_and_merge_join[cuda]",
    "test_rowcodec.py::test_a_row_has_the_golden_bytes[cuda]",
    "test_rowcodec.py::test_bytes_are_those_of_the_specification[cuda-656-dtype0]",
    "test_rowcodec.py::test_bytes_are_those_of_the_specification[cuda-1152-dtype1]",
    "test_indexcodec.py::test_keys_are_those_of_the_specification[cuda-f32-scale-20-dtype1]",
    "test_grouped.py::test_every_token_meets_its_expert[cuda-token3-weight3]",
    "test_grouped.py::test_bad_input_changes_nothing[cuda]",
    "test_triton_index.py::test_queries_that_share_keys_get_what_one_gets_alone[cuda-3]",
    "test_triton_index.py::test_shared_lists_are_those_of_one_program[cuda]",
    "test_triton_ops.py::test_lists_close_up_in_their_order[cuda]",
    "test_finish.py::test_rows_go_to_their_places[cuda-656-dtype0]",
    "test_finish.py::test_rows_are_normed_rotated_and_placed[cuda-656-dtype1]",
    "test_finish.py::test_keys_are_normed_rotated_mixed_and_placed[cuda-ue8m0-dtype0]",
    "test_finish.py::test_queries_turn_as_their_keys_do[cuda-ue8m0]",
    "test_linear.py::test_products_of_codes[cuda-5-130-384-dtype1]",
    "test_linear.py::test_values_may_lie_within_wider_lines[cuda-256-dtype1]",
    "test_linear.py::test_experts_by_the_loop[cuda-True]",
    "test_cut.py::test_lines_with_cuts_of_their_own[cuda]",
    "test_noise.py::test_noise_is_right_to_its_last_digits[cuda-1e-05]",
    "test_noise.py::test_noise_is_right_to_its_last_digits[cuda--1e-05]",
    "test_noise.py::test_draws_are_those_of_the_reference[cuda]",
    "test_noise.py::test_a_line_of_a_greedy_request_is_not_cut[cuda]",
    "test_received.py::test_tokens_are_taken_as_far_as_the_last_end[cuda-5-dtype1]",
    "test_received.py::test_gates_are_those_of_one_rank[cuda-5-0.5-dtype0]",
    "test_received.py::test_sums_are_in_order_and_of_lines_that_are_here[cuda-out_dtype1-dtype0]",
)
# What a GPU runs of these files, but for what takes the interpreter minutes.
MOST = {
    "attend": "cuda and not bits",
    "index": "cuda and (bad_input or (hard_lists and 1000))",
    "reference": "cuda",
    "rowcodec": "cuda",
    "indexcodec": "cuda",
    "grouped": "cuda",
    "finish": "cuda",
    "linear": "cuda",
    "received": "cuda",
    "triton_grouped": "cuda",
    "triton_ops": "cuda",
    "triton_index": "cuda",
    "triton_shapes": "cuda",
}


FEW = 8


def run_interpreted(*arguments: str, **environment: str) -> str:
    words = "-m", "pytest", "-p", "tests.support.interpreted", *arguments
    return forked.run("interpreted", *words, env={**os.environ, **environment})


def test_the_interpreter_agrees_on_a_few() -> None:
    printed = run_interpreted(*(f"tests/kernels/{each}" for each in QUICK))
    assert re.search(rf"\b{len(QUICK)} passed in ", printed), printed


def agrees(names: Sequence[str], every: int) -> None:
    """One in `every` of each function's cases."""
    tests = [f"tests/kernels/test_{name}.py" for name in names]
    which = " or ".join(f"(test_{name}.py and {MOST[name]})" for name in names)
    words = "-p", "tests.support.sampled", *tests, "-k", which, "-m", "not slow"
    printed = run_interpreted(*words, SAMPLED_EVERY=f"{every}")
    assert re.search(r"\d+ passed", printed), printed
    assert "skipped" not in printed


@pytest.mark.slow
def test_the_interpreter_agrees() -> None:
    """In one process: what each would import takes seconds."""
    agrees(list(MOST), FEW)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", MOST)
def test_the_interpreter_agrees_in_every_case(name: str) -> None:
    agrees([name], 1)


@pytest.mark.slow
@pytest.mark.long
def test_as_many_floats_are_cast_as_on_a_device() -> None:
    test = "tests/kernels/test_rowcodec.py::test_any_float_in_range_is_cast_as_torch_casts_it[cuda]"
    assert "1 passed" in run_interpreted(test, INTERPRET_ALL="1")
