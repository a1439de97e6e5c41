"""The interleaved 1F1B schedule: ranks hold several chunks of layers, so they wait less (Narayanan et al., arXiv
2104.04473, section 2.2).
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_finetune.engine.schedules.pipeline_schedule import (
    Backward,
    Forward,
    StageForward,
    grad_of,
    hidden_of,
    run_1f1b,
    scalar_of,
)
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.parallel.pipeline import Link, PipelineGroup
from ds_finetune.plan.pipeline import PipelineTurn, interleaved_turns


class _TensorMessage(NamedTuple):
    """A tensor on its way, which must stay in memory until then."""

    tensor: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        """The tensor, once it was sent or has arrived."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


def run_pipeline(stage: PipelineGroup, every: Sequence[ForwardRows], forward: Forward, backward: Backward) -> None:
    """Forward and backward of every micro-batch in the order of the schedule for this number of chunks a rank."""
    run = run_interleaved_1f1b if stage.num_chunks > 1 else run_1f1b
    run(stage, every, forward, backward)


def run_interleaved_1f1b(
    stage: PipelineGroup, every: Sequence[ForwardRows], forward: Forward, backward: Backward
) -> None:
    """Forward and backward of every micro-batch through every chunk of this rank.

    A rank waits for what it receives, never for a receiver: with blocking sends neighbours would wait for each other.
    """
    step = _InterleavedStep(stage, every)
    turns = interleaved_turns(pp=stage.size, vpp=stage.num_chunks, micro_batches=len(every), rank=stage.group_rank)
    try:
        arriving = step.receive(turns[0])
        for number, turn in enumerate(turns, start=1):
            arrived = arriving.wait() if arriving is not None else None
            # Asked for before this turn is computed, so that it travels meanwhile.
            arriving = step.receive(turns[number]) if number < len(turns) else None
            if turn.is_forward:
                step.run_forward(turn, arrived, forward)
            else:
                step.run_backward(turn, arrived, backward)
        step.wait_for_sends()
    finally:
        stage.running_chunk = stage.input_hidden_states = None


class _InterleavedStep:
    """What a rank keeps of an optimizer step between its turns, by chunk and micro-batch."""

    def __init__(self, stage: PipelineGroup, every: Sequence[ForwardRows]) -> None:
        self._stage, self._every = stage, every
        self._arrived: dict[tuple[int, int], torch.Tensor | None] = {}
        self._done: dict[tuple[int, int], StageForward] = {}
        self._sent: dict[tuple[int, int], _TensorMessage] = {}
        self._sent_grads: deque[_TensorMessage] = deque()

    def receive(self, turn: PipelineTurn) -> _TensorMessage | None:
        """Ask for what a turn needs from another rank; None where it needs nothing."""
        stage = self._stage
        is_edge = self._is_first_of_model(turn) if turn.is_forward else self._is_last_of_model(turn)
        if is_edge:
            return None
        into = stage.empty_hidden(self._every[turn.micro].input_ids)
        source = stage.previous_rank if turn.is_forward else stage.next_rank
        group = stage.links[self._link(turn.is_forward, after=not turn.is_forward)]
        return _TensorMessage(into, dist.irecv(into, group=group, group_src=source))

    def run_forward(self, turn: PipelineTurn, arrived: torch.Tensor | None, forward: Forward) -> None:
        """Run a chunk from the hidden states that arrived, and send its own on."""
        key, stage = (turn.chunk, turn.micro), self._stage
        stage.running_chunk = turn.chunk
        stage.input_hidden_states = self._arrived[key] = arrived.requires_grad_() if arrived is not None else None
        self._done[key] = forward(self._every[turn.micro])
        if not self._is_last_of_model(turn):
            self._sent[key] = self._send(hidden_of(self._done[key]).detach(), is_forward=True)

    def run_backward(self, turn: PipelineTurn, arrived: torch.Tensor | None, backward: Backward) -> None:
        """Compute the gradients of a chunk from that of its hidden states, and send that of its input back."""
        key = turn.chunk, turn.micro
        if arrived is not None:
            # The receiver had the hidden states before it sent their gradient.
            self._sent.pop(key).wait()
        backward(scalar_of(self._done.pop(key), arrived))
        given = self._arrived.pop(key)
        if given is not None:
            self._sent_grads.append(self._send(grad_of(given), is_forward=False))
        # The receiver is at most one turn behind, so this does not wait long, and memory does not grow.
        while len(self._sent_grads) > self._stage.size:
            self._sent_grads.popleft().wait()

    def wait_for_sends(self) -> None:
        """Return when all that was sent has arrived."""
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
        """The link to the rank `after` this one, or to the one before it."""
        return Link(is_forward, self._stage.is_last if after else self._stage.is_first)

    def _is_first_of_model(self, turn: PipelineTurn) -> bool:
        return self._stage.is_first and turn.chunk == 0

    def _is_last_of_model(self, turn: PipelineTurn) -> bool:
        return self._stage.is_last and turn.chunk == self._stage.num_chunks - 1
