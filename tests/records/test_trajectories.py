"""Rollouts as the objects of RL frameworks write them become tokens, targets and columns."""

from typing import Any

import numpy as np
import pytest

from energon_packed import RecordError, normalize

_ = -100
# name: record, input_ids, labels, columns, unused fields
TRAJECTORIES: dict[str, tuple[dict[str, Any], list[int], list[int], dict[str, list[Any]], list[str]]] = {
    # trl/trainer/grpo_trainer.py, `_generate_and_score_completions` of 1.16: tensors of a batch, a row each
    "TRL": (
        {"prompt_ids": [0, 11, 12], "prompt_mask": [0, 1, 1], "completion_ids": [21, 22, 31, 23], "advantages": 0.5,
         "completion_mask": [1, 1, 1, 1], "tool_mask": [1, 1, 0, 1], "old_per_token_logps": [-1, -2, -4, -3],
         "sampling_per_token_logps": [-1.5, -2.5, -4.5, -3.5], "num_items_in_batch": 7},
        [11, 12, 21, 22, 31, 23], [_, _, 21, 22, _, 23],
        {"old_per_token_logps": [0, 0, -1, -2, -4, -3], "sampling_per_token_logps": [0, 0, -1.5, -2.5, -4.5, -3.5],
         "advantages": [0, 0, 0.5, 0.5, 0, 0.5]},
        ["num_items_in_batch"],
    ),
    # the dict of a `rollout_func` of TRL
    "TRL rollout_func": (
        {"prompt_ids": [11], "completion_ids": [21, 22], "logprobs": [-1, -2], "env_mask": [1, 0]},
        [11, 21, 22], [_, 21, _], {"logprobs": [0, -1, -2]}, [],
    ),
    # verifiers/types.py, TrajectoryStepTokens, with reward and advantage of TrajectoryStep
    "verifiers": (
        {"prompt_ids": [11, 12], "prompt_mask": [0, 0], "completion_ids": [21, 31, 22], "completion_mask": [1, 0, 1],
         "completion_logprobs": [-1, 0, -2], "overlong_prompt": False, "is_truncated": False, "routed_experts": None,
         "reward": 1.0, "advantage": -0.25, "trajectory_id": "t", "extras": {}},
        [11, 12, 21, 31, 22], [_, _, 21, _, 22],
        {"completion_logprobs": [0, 0, -1, 0, -2], "reward": [0, 0, 1, 0, 1], "advantage": [0, 0, -0.25, 0, -0.25]},
        ["extras", "is_truncated", "overlong_prompt", "trajectory_id"],
    ),
    # prime-rl, src/prime_rl/transports/rollouts/types.py, TrainingSample
    "prime-rl": (
        {"token_ids": [11, 21, 31, 22], "mask": [False, True, False, True], "logprobs": [0.0, -1, 0, -2],
         "temperatures": [1, 1, 1, 1], "env_name": "e", "ref_logprobs": None, "mm_kwargs": None,
         "mm_token_type_ids": [0, 0, 0, 0], "rl_weights": [0, 1, 0, 0.5], "advantages": [0, 0.5, 0, 0.5]},
        [11, 21, 31, 22], [_, 21, _, 22],
        {"logprobs": [0, -1, 0, -2], "temperatures": [1, 1, 1, 1], "rl_weights": [0, 1, 0, 0.5],
         "advantages": [0, 0.5, 0, 0.5]},
        ["env_name", "mm_token_type_ids"],
    ),
    # slime/utils/types.py, `Sample.to_dict()`
    "slime": (
        {"group_index": 0, "index": 3, "prompt": "2 + 3?", "tokens": [11, 12, 21, 31, 22], "response": "5",
         "response_length": 3, "label": "5", "reward": 1.0, "loss_mask": [1, 0, 1], "remove_sample": False,
         "rollout_log_probs": [-1, 0, -2], "teacher_log_probs": [-3, 0, -4], "status": "completed", "metadata": {},
         "weight_versions": ["1"], "rollout_routed_experts": None, "train_metadata": {"a": 1}},
        [11, 12, 21, 31, 22], [_, _, 21, _, 22],
        {"rollout_log_probs": [0, 0, -1, 0, -2], "teacher_log_probs": [0, 0, -3, 0, -4], "reward": [0, 0, 1, 0, 1]},
        ["group_index", "index", "label", "metadata", "prompt", "response", "status", "weight_versions"],
    ),
    "slime without a mask": (
        {"tokens": [11, 12, 21, 22], "response_length": 2, "loss_mask": None, "reward": {"score": 1}},
        [11, 12, 21, 22], [_, _, 21, 22], {}, ["reward"],
    ),
    # verl/experimental/agent_loop/agent_loop.py, the batch of `generate_sequences`, with columns of ray_trainer.py
    "verl": (
        {"prompts": [0, 0, 11, 12], "responses": [21, 31, 22, 0], "response_mask": [1, 0, 1, 0],
         "input_ids": [0, 0, 11, 12, 21, 31, 22, 0], "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0],
         "position_ids": [0, 0, 0, 1, 2, 3, 4, 5], "rollout_log_probs": [-1, 0, -2, 0], "rm_scores": [0, 0, 1, 0],
         "advantages": [0.5, 0, 0.5, 0], "routed_experts": [[1, 2]] * 8, "__num_turns__": 4},
        [11, 12, 21, 31, 22], [_, _, 21, _, 22],
        {"rollout_log_probs": [0, 0, -1, 0, -2], "rm_scores": [0, 0, 0, 0, 1], "advantages": [0, 0, 0.5, 0, 0.5],
         "routed_experts": [[1, 2]] * 5},
        ["__num_turns__", "position_ids"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAJECTORIES)
@pytest.mark.parametrize("arrays", [False, True])
def test_trajectories_are_read_as_they_are(name: str, arrays: bool) -> None:
    record, ids, labels, columns, unused = TRAJECTORIES[name]
    if arrays:
        is_list = {k: isinstance(v, list) and isinstance(v[0], int) for k, v in record.items()}
        record = {k: np.asarray(v) if is_list[k] else v for k, v in record.items()}
    found = normalize(record)
    assert found.input_ids is not None
    assert found.labels is not None
    assert (found.input_ids.tolist(), found.labels.tolist()) == (ids, labels)
    assert {name: column.tolist() for name, column in (found.columns or {}).items()} == columns
    assert list(found.unused_fields) == unused


def test_a_removed_sample_of_slime_has_no_target() -> None:
    record = {**TRAJECTORIES["slime"][0], "remove_sample": True}
    assert (normalize(record).labels == -100).all()


@pytest.mark.parametrize(
    ("name", "fields", "detail"),
    [
        ("TRL", {"completion_mask": [1]}, "completion_mask has 1 entries for 4 tokens of the response"),
        ("TRL", {"old_per_token_logps": [1.0]}, "old_per_token_logps has 1 entries for 6 tokens or 4 tokens of the"),
        ("TRL", {"prompt_mask": [1, 0, 1]}, "prompt_mask has a 0 after a 1, and padding of a prompt is on its left"),
        ("verifiers", {"advantage": float("inf")}, "advantage of the record is inf; use a finite number"),
        ("verifiers", {"advantage": 10**39}, "advantage of the record is 10{39}; use a finite number"),
        ("slime", {"response_length": 6}, "response_length is 6 for 5 tokens; use 0 to 5"),
        (
            "slime",
            {"rollout_routed_experts": [[[1, 2]]] * 4},
            "rollout_routed_experts has 4 entries for 5 tokens or 3",
        ),
        ("prime-rl", {"logprobs": [0.0]}, "logprobs has 1 entries for 4 tokens"),
        ("verl", {"input_ids": [1] * 8}, "input_ids are not prompts and then responses"),
        ("verl", {"attention_mask": [1]}, "attention_mask has 1 entries for 8 tokens of prompt and response"),
    ],
)
def test_invalid_trajectories_are_rejected(name: str, fields: dict[str, Any], detail: str) -> None:
    with pytest.raises(RecordError, match=detail):
        normalize({**TRAJECTORIES[name][0], **fields})


def test_prompts_and_responses_of_other_formats_are_no_trajectories() -> None:
    found = normalize({"prompt": "Hi", "response": "Hello.", "tokens": ["Hi"], "response_length": 1})
    assert [turn.content for turn in found.messages] == ["Hi", "Hello."]
