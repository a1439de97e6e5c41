"""The reference for every layout: a plain PyTorch training loop in one process on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ds_finetune.engine.generation import GenerationLimits
from ds_finetune.labels import IGNORE_INDEX
from ds_finetune.selftest.cells import samples

LR, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-8
PROMPTS = [ids[: 3 + 2 * number].tolist() for number, (ids, _) in enumerate(samples()[:5])]
LIMITS = GenerationLimits(max_new_tokens=6, stop_ids=[1], pad_id=0)


@dataclass
class Steps:
    """Results of some optimizer steps.

    Each step has a loss and a gradient norm before clipping. `gradients` are those of the first step after clipping
    (fp32 on the CPU), and `answers` greedy answers to `PROMPTS` after the last step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW without weight decay."""
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)


def reference_loop(
    folder: Path, *, steps: int, max_grad_norm: float = 0.0, optimizer: Callable[[nn.Module], Any] = adamw
) -> Steps:
    """Take steps on all samples with the model that transformers loads from `folder`."""
    return reference_steps(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False),
        steps,
        max_grad_norm,
        optimizer,
    )


def reference_steps(model: nn.Module, steps: int, max_grad_norm: float, optimizer: Callable[[nn.Module], Any]) -> Steps:
    """Take steps on all samples, one unpadded sample per forward, with transformers' logits and torch's loss."""
    model.train()
    optim = optimizer(model)
    supervised = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in samples())
    results = Steps()
    for _ in range(steps):
        loss_sum = 0.0
        for ids, labels in samples():
            logits = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0]
            loss = functional.cross_entropy(
                logits, torch.from_numpy(labels).long(), ignore_index=IGNORE_INDEX, reduction="sum"
            )
            (loss / supervised).backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        results.losses.append(loss_sum / supervised)
        results.norms.append(float(norm))
        results.gradients = results.gradients or {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        optim.step()
        optim.zero_grad()
    results.answers = [_answer(model, prompt) for prompt in PROMPTS]
    return results


def _answer(model: Any, prompt: list[int]) -> list[int]:  # noqa: ANN401 - a causal LM
    ids, options = (
        torch.tensor([prompt]),
        {"max_new_tokens": LIMITS.max_new_tokens, "eos_token_id": LIMITS.stop_ids, "pad_token_id": LIMITS.pad_id},
    )
    with torch.no_grad():
        out = model.eval().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return [token for token in out[0, len(prompt) :].tolist() if token not in LIMITS.stop_ids]


def mean_loss(folder: Path, dtype: torch.dtype) -> float:
    """Mean loss over the samples of the model that plain transformers loads from `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()
    total, supervised = 0.0, 0
    with torch.no_grad():
        for ids, labels in samples():
            logits = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0].float()
            total += functional.cross_entropy(
                logits, torch.from_numpy(labels).long(), ignore_index=IGNORE_INDEX, reduction="sum"
            ).item()
            supervised += int((labels != IGNORE_INDEX).sum())
    return total / supervised
