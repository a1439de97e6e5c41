"""Losses of TRL's GRPO trainer on given log-probabilities, and their gradients: `python trl_grpo_worker.py FOLDER`, in an
environment with TRL.

Reads `grpo_cases.json` of FOLDER and writes `grpo_losses.json`. The trainer's `_compute_loss` is run on an object that
has what it reads of a trainer, since a trainer itself would sample answers.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOTrainer

FOLDER = Path(sys.argv[1])
KEYS: dict[str, Any] = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.0,
    "delta": None,
    "max_completion_length": 1,
}


def main() -> None:
    """Compute every case."""
    given = json.loads((FOLDER / "grpo_cases.json").read_text())
    losses = [_loss(KEYS | keys, given["answers"]) for keys in given["cases"]]
    (FOLDER / "grpo_losses.json").write_text(json.dumps(losses))


def _padded(answers: list[dict[str, Any]], name: str) -> torch.Tensor:
    return pad_sequence([torch.tensor(each[name], dtype=torch.float64) for each in answers], batch_first=True)


def _loss(keys: dict[str, Any], answers: list[dict[str, Any]]) -> dict[str, Any]:
    logp, old, reference = (_padded(answers, name) for name in ("logp", "old", "reference"))
    mask = pad_sequence([torch.ones(len(each["logp"]), dtype=torch.int64) for each in answers], batch_first=True)
    logp.requires_grad_()
    trainer = SimpleNamespace(
        **{name: value for name, value in keys.items() if name != "delta"},
        args=SimpleNamespace(use_bias_correction_kl=True, delta=keys["delta"], steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )
    ids = torch.zeros(len(answers), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": torch.tensor([each["advantage"] for each in answers], dtype=torch.float64),
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logp.grad is not None
    gradients = [row[: len(each["logp"])].tolist() for row, each in zip(logp.grad, answers, strict=True)]
    return {"loss": loss.item(), "gradients": gradients}


if __name__ == "__main__":
    main()
