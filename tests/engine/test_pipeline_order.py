"""Pipelines over NCCL: no order of messages in which ranks wait for each other for ever.

NCCL runs the messages of one group (communicator) of a rank one after another, and each of them lasts until its other
end is there. torch (2.13, ProcessGroupNCCL.cpp, `pointToPoint`) lets it begin after what the rank's compute stream was
given before, and `wait` lets later computation wait for it. The host waits for nothing. Each rank's part of a step is
recorded, with stand-ins for torch's functions, and the messages of all ranks are followed by these rules.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_finetune.engine.pipeline_schedules import StageForward, run_pipeline
from ds_finetune.model.parallel.pipeline import Link, PipelineGroup

LINKS = [Link(is_forward, wraps) for is_forward in (True, False) for wraps in (True, False)]


@dataclass
class Message:
    """One end of a message, sent or received by a rank in a group."""

    end: tuple[Hashable, int, int]
    """The group, who sends and who receives."""
    step: "RankStep"
    waits: int
    """How many messages the compute stream waited for before."""
    before: "Message | None"
    """The message before in the group."""
    has_arrived: bool = False

    @property
    def is_ready(self) -> bool:
        return self.waits <= self.step.passed() and (self.before is None or self.before.has_arrived)


@dataclass
class RankStep:
    """The messages of a rank in an optimizer step."""

    rank: int
    waited: list[Message] = field(default_factory=list)
    last: dict[Hashable, Message] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    received: list[Message] = field(default_factory=list)
    _passed: int = 0

    def begin(self, group: Hashable, peer: int, *, is_sent: bool) -> Any:
        ends = (self.rank, peer) if is_sent else (peer, self.rank)
        message = Message((group, *ends), self, len(self.waited), self.last.get(group))
        self.last[group] = message
        (self.sent if is_sent else self.received).append(message)
        return SimpleNamespace(wait=lambda: self.waited.append(message))

    def passed(self) -> int:
        """How many of its waits the compute stream is beyond."""
        while self._passed < len(self.waited) and self.waited[self._passed].has_arrived:
            self._passed += 1
        return self._passed


def _record(
    monkeypatch: pytest.MonkeyPatch, rank: int, pp: int, vpp: int, micro_batches: int, *, shared: bool
) -> RankStep:
    step, stage = RankStep(rank), PipelineGroup("the pipeline", pp, rank)  # type: ignore[arg-type]
    stage.num_chunks, stage.no_hidden_states = vpp, torch.zeros(0, 1)
    if vpp > 1:
        stage.links = {link: "the pipeline" if shared else link for link in LINKS}  # type: ignore[misc]
    monkeypatch.setattr(dist, "isend", lambda _, group, group_dst: step.begin(group, group_dst, is_sent=True))
    monkeypatch.setattr(dist, "irecv", lambda _, group, group_src: step.begin(group, group_src, is_sent=False))
    monkeypatch.setattr(dist, "send", lambda *given, **to: dist.isend(*given, **to).wait())
    monkeypatch.setattr(dist, "recv", lambda *given, **to: dist.irecv(*given, **to).wait())
    weight = torch.ones(1, requires_grad=True)

    def forward(rows: Any) -> StageForward:
        if vpp == 1 and not stage.is_first:
            # As the model does (model/parallel/pipeline.py).
            into = stage.empty_hidden(rows.input_ids)
            stage.input_hidden_states = stage.receive(into, source=rank - 1).requires_grad_()
        hidden = stage.input_hidden_states
        out = weight.expand(1, 2, 1) * (1 if hidden is None else hidden)
        return StageForward(out.sum(), None) if stage.runs_head else StageForward(None, out)

    rows: Any = [SimpleNamespace(input_ids=torch.zeros(1, 2)) for _ in range(micro_batches)]
    run_pipeline(stage, rows, forward, lambda scalar: scalar.backward())
    return step


def _left(steps: list[RankStep]) -> int:
    """How many messages never arrive."""
    received: dict[Hashable, list[Message]] = defaultdict(list)
    for message in (each for step in steps for each in step.received):
        received[message.end].append(message)
    pairs = [(sent, received[sent.end].pop(0)) for step in steps for sent in step.sent]
    assert not any(received.values()), "a message is received that nobody sends"
    while True:
        arrived = [pair for pair in pairs if all(end.is_ready for end in pair)]
        if not arrived:
            return len(pairs)
        for end in (end for pair in arrived for end in pair):
            end.has_arrived = True
        pairs = [pair for pair in pairs if not pair[0].has_arrived]


CASES = [(pp, vpp, groups * pp) for pp in (2, 3, 4, 8) for vpp in (1, 2, 3, 4) for groups in (1, 3)]


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), CASES)
def test_every_message_arrives(monkeypatch: pytest.MonkeyPatch, pp: int, vpp: int, micro_batches: int) -> None:
    steps = [_record(monkeypatch, rank, pp, vpp, micro_batches, shared=False) for rank in range(pp)]
    assert sum(len(step.sent) for step in steps) == 2 * micro_batches * (pp * vpp - 1)
    assert _left(steps) == 0


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [case for case in CASES if case[1] > 1])
def test_with_one_group_for_all_links_ranks_would_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, pp: int, vpp: int, micro_batches: int
) -> None:
    """Why `Link`s have groups of their own, and that the rules above find it."""
    assert _left([_record(monkeypatch, rank, pp, vpp, micro_batches, shared=True) for rank in range(pp)]) > 0
