"""Schedules of pipeline stages: 1F1B, in which forwards and backwards of micro-batches alternate, and interleaved 1F1B.

In interleaved 1F1B, ranks have several chunks of layers and so idle less (Narayanan et al., arXiv 2104.04473, section
2.2).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.parallel.pipeline import Link, PipelineGroup
from ds_finetune.plan.batch import PipelineTurn, interleaved_turns


class StageForward(NamedTuple):
    """Result of a pipeline stage's forward."""

    loss: torch.Tensor | None
    """On the last stage the scaled loss, a scalar; on other stages the auxiliary losses of their layers, or None."""
    hidden: torch.Tensor | None
    """Hidden states [batch, tokens, width] for the next stage; None on the last stage."""


Forward = Callable[[ForwardRows], StageForward]
Backward = Callable[[torch.Tensor], None]
"""Function that runs backward from a scalar."""


class _WithGradient(torch.autograd.Function):
    """Function of `hidden` whose value is the scalar 0 and whose gradient is `grad`, received from the next stage."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(grad)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        (grad,) = ctx.saved_tensors
        return grad, None


def run_1f1b(stage: PipelineGroup, batches: Sequence[ForwardRows], forward: Forward, backward: Backward) -> None:
    """Run forward and backward of all micro-batches by DeepSpeed's 1F1B schedule (0.19.8, pipe/schedule.py:189).
    Neighbouring stages send and receive in matching order, so sends may block. Stage s (from 0) of n
    keeps the activations of n - s micro-batches.
    """
    from deepspeed.runtime.pipe import schedule

    turns = schedule.TrainSchedule(len(batches), stage.size, stage.group_rank)
    waiting = iter(batches)
    arrived: dict[int, torch.Tensor | None] = {}
    done: dict[int, StageForward] = {}
    grads: dict[int, torch.Tensor] = {}
    # The schedule's RecvActivation needs no action: the forward receives hidden states (model/parallel/pipeline.py).
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
    """The hidden states that a forward sends to the next stage."""
    assert done.hidden is not None, "the last stage sends no hidden states"
    return done.hidden


def scalar_of(done: StageForward, grad: torch.Tensor | None) -> torch.Tensor:
    """The scalar on which backward is called. On the last stage it is the loss. On earlier stages it is the auxiliary
    losses, plus a term whose gradient with respect to the hidden states is `grad`.
    """
    if grad is None:
        assert done.loss is not None, "the last stage has no loss"
        return done.loss
    sent_back: torch.Tensor = _WithGradient.apply(hidden_of(done), grad)
    return sent_back if done.loss is None else sent_back + done.loss


def grad_of(tensor: torch.Tensor | None) -> torch.Tensor:
    """The gradient of the hidden states that came from the previous stage, after backward."""
    assert tensor is not None
    assert tensor.grad is not None, "no gradient reached the hidden states from the stage before"
    return tensor.grad


class _TensorMessage(NamedTuple):
    """An asynchronous send or receive. Its tensor must stay in memory until the transfer is complete."""

    tensor: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


def run_pipeline(stage: PipelineGroup, batches: Sequence[ForwardRows], forward: Forward, backward: Backward) -> None:
    """Run forward and backward of all micro-batches, interleaved if a rank has several chunks."""
    run = run_interleaved_1f1b if stage.num_chunks > 1 else run_1f1b
    run(stage, batches, forward, backward)


def run_interleaved_1f1b(
    stage: PipelineGroup, batches: Sequence[ForwardRows], forward: Forward, backward: Backward
) -> None:
    """Run forward and backward of all micro-batches through all chunks of this rank. Sends are asynchronous: with
    blocking sends, neighbours would wait for each other.
    """
    step = _InterleavedStep(stage, batches)
    turns = interleaved_turns(pp=stage.size, vpp=stage.num_chunks, micro_batches=len(batches), rank=stage.group_rank)
    try:
        arriving = step.receive(turns[0])
        for number, turn in enumerate(turns, start=1):
            arrived = arriving.wait() if arriving is not None else None
            # Receiving the next input overlaps with the computation of this forward or backward.
            arriving = step.receive(turns[number]) if number < len(turns) else None
            if turn.is_forward:
                step.run_forward(turn, arrived, forward)
            else:
                step.run_backward(turn, arrived, backward)
        step.wait_for_sends()
    finally:
        stage.running_chunk = stage.input_hidden_states = None


class _InterleavedStep:
    """Tensors that a rank keeps during an optimizer step, by chunk of layers and micro-batch."""

    def __init__(self, stage: PipelineGroup, batches: Sequence[ForwardRows]) -> None:
        self._stage, self._batches = stage, batches
        self._arrived: dict[tuple[int, int], torch.Tensor | None] = {}
        self._done: dict[tuple[int, int], StageForward] = {}
        self._sent: dict[tuple[int, int], _TensorMessage] = {}
        self._sent_grads: deque[_TensorMessage] = deque()

    def receive(self, turn: PipelineTurn) -> _TensorMessage | None:
        """Begin to receive the input of `turn`, a forward or backward of a chunk of layers; None if it has no input."""
        stage = self._stage
        is_edge = (stage.is_first and turn.chunk == 0) if turn.is_forward else self._is_last_of_model(turn)
        if is_edge:
            return None
        into = stage.empty_hidden(self._batches[turn.micro].input_ids)
        source = stage.previous_rank if turn.is_forward else stage.next_rank
        group = stage.links[self._link(turn.is_forward, after=not turn.is_forward)]
        return _TensorMessage(into, dist.irecv(into, group=group, group_src=source))

    def run_forward(self, turn: PipelineTurn, arrived: torch.Tensor | None, forward: Forward) -> None:
        key, stage = (turn.chunk, turn.micro), self._stage
        stage.running_chunk = turn.chunk
        stage.input_hidden_states = self._arrived[key] = arrived.requires_grad_() if arrived is not None else None
        self._done[key] = forward(self._batches[turn.micro])
        if not self._is_last_of_model(turn):
            self._sent[key] = self._send(hidden_of(self._done[key]).detach(), is_forward=True)

    def run_backward(self, turn: PipelineTurn, arrived: torch.Tensor | None, backward: Backward) -> None:
        key = turn.chunk, turn.micro
        if arrived is not None:
            # The received gradient shows that the next rank has the hidden states, so their send is complete.
            self._sent.pop(key).wait()
        backward(scalar_of(self._done.pop(key), arrived))
        received = self._arrived.pop(key)
        if received is not None:
            self._sent_grads.append(self._send(grad_of(received), is_forward=False))
        # This wait limits the memory of sends. It is short, as the receiver lags by one forward or backward at most.
        while len(self._sent_grads) > self._stage.size:
            self._sent_grads.popleft().wait()

    def wait_for_sends(self) -> None:
        assert not self._done
        assert not self._sent
        while self._sent_grads:
            self._sent_grads.popleft().wait()

    def _send(self, tensor: torch.Tensor, *, is_forward: bool) -> _TensorMessage:
        stage, tensor = self._stage, tensor.contiguous()
        to = stage.next_rank if is_forward else stage.previous_rank
        group = stage.links[self._link(is_forward, after=is_forward)]
        return _TensorMessage(tensor, dist.isend(tensor, group=group, group_dst=to))

    def _link(self, is_forward: bool, *, after: bool) -> Link:
        return Link(is_forward, self._stage.is_last if after else self._stage.is_first)

    def _is_last_of_model(self, turn: PipelineTurn) -> bool:
        return self._stage.is_last and turn.chunk == self._stage.num_chunks - 1
