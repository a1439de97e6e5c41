"""The 1F1B schedule of a pipeline stage: forwards and backwards of micro-batches alternate."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.parallel.pipeline import PipelineGroup


class StageForward(NamedTuple):
    """Result of a stage's forward."""

    loss: torch.Tensor | None
    """The scaled loss of the last stage, scalar; on others that of their layers' auxiliary losses, None without one."""
    hidden: torch.Tensor | None
    """Hidden states [batch, tokens, width] for the next stage; None on the last stage."""


Forward = Callable[[ForwardRows], StageForward]
Backward = Callable[[torch.Tensor], None]
"""From a scalar to gradients."""


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to hidden states is the one that the next stage sent back."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(grad)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        (grad,) = ctx.saved_tensors
        return grad, None


def run_1f1b(stage: PipelineGroup, every: Sequence[ForwardRows], forward: Forward, backward: Backward) -> None:
    """Forward and backward of every micro-batch, in the order of DeepSpeed's schedule (0.19.8, pipe/schedule.py:189).

    Neighbours send and receive in the same order, so a send may block until its receiver is ready. A stage holds the
    activations of as many forwards as there are stages from it to the last.
    """
    from deepspeed.runtime.pipe import schedule

    turns = schedule.TrainSchedule(len(every), stage.size, stage.group_rank)
    waiting = iter(every)
    arrived: dict[int, torch.Tensor | None] = {}
    done: dict[int, StageForward] = {}
    grads: dict[int, torch.Tensor] = {}
    # RecvActivation comes right before its ForwardPass, in which hidden states are received
    # (model/parallel/pipeline.py).
    actions: dict[type, Callable[[int], object]] = {
        schedule.ForwardPass: lambda slot: (
            done.update({slot: forward(next(waiting))}),
            arrived.update({slot: stage.input_hidden_states}),
        ),
        schedule.SendActivation: lambda slot: stage.send(hidden_of(done[slot]), to=stage.group_rank + 1),
        schedule.RecvGrad: lambda slot: grads.update(
            {slot: stage.receive(torch.empty_like(hidden_of(done[slot])), source=stage.group_rank + 1)}
        ),
        schedule.BackwardPass: lambda slot: backward(scalar_of(done.pop(slot), grads.pop(slot, None))),
        schedule.SendGrad: lambda slot: stage.send(grad_of(arrived.pop(slot)), to=stage.group_rank - 1),
    }
    for commands in turns.steps():
        for command in commands:
            if type(command) in actions:
                actions[type(command)](command.buffer_id)


def hidden_of(done: StageForward) -> torch.Tensor:
    """The hidden states for the next stage."""
    assert done.hidden is not None, "the last stage sends no hidden states"
    return done.hidden


def scalar_of(done: StageForward, grad: torch.Tensor | None) -> torch.Tensor:
    """The scalar whose gradients are those of the stage: `grad` is that of its hidden states."""
    if grad is None:
        assert done.loss is not None, "the last stage has no loss"
        return done.loss
    sent_back: torch.Tensor = _WithGradient.apply(hidden_of(done), grad)
    return sent_back if done.loss is None else sent_back + done.loss


def grad_of(tensor: torch.Tensor | None) -> torch.Tensor:
    """The gradient of hidden states that arrived, after their backward."""
    assert tensor is not None
    assert tensor.grad is not None, "no gradient reached the hidden states from the stage before"
    return tensor.grad
