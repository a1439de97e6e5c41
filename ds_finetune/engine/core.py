"""The engine: one `step` is one optimizer step, and its loss is the mean over the supervised tokens of the global batch."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.engine.experts import local_shape
from ds_finetune.engine.finite import FiniteProbe
from ds_finetune.engine.groups import Groups
from ds_finetune.engine.processes import everyones
from ds_finetune.engine.state import EngineState, persistent_buffers
from ds_finetune.errors import RunError
from ds_finetune.model.cuts import Cut
from ds_finetune.model.experts import ExpertGroup
from ds_finetune.model.loss import TokenLoss
from ds_finetune.model.tensor import TensorGroup
from ds_finetune.plan.layout import Plan


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank: loss is a mean in nats per supervised token of the global batch."""

    loss: float
    accuracy: float
    grad_norm: float
    num_tokens: int
    num_supervised_tokens: int
    skipped: bool
    culprit: str


@dataclass(frozen=True)
class EvalResult:
    """Mean loss in nats per supervised token and share of tokens predicted, over every row once."""

    loss: float
    accuracy: float
    num_supervised_tokens: int


@dataclass(frozen=True)
class Limits:
    """Where an answer ends: at most `max_new_tokens`, or at one of `stop_ids`; `pad_id` fills."""

    max_new_tokens: int
    stop_ids: list[int]
    pad_id: int


def _never() -> bool:
    return False


class Engine:
    """A model under DeepSpeed, seen as `step`, `evaluate`, `generate` and `tensors` (`tensor_specs` in advance)."""

    def __init__(self, wrapped: Any, plan: Plan, groups: Groups) -> None:  # noqa: ANN401 - a DeepSpeedEngine
        self.plan = plan
        self._groups = groups
        self._cut = Cut.of(plan.mesh)
        self._ds = wrapped
        self._device = torch.device(wrapped.device)
        self._probe = FiniteProbe(_named(wrapped.module))

    @property
    def lm(self) -> nn.Module:
        """The Hugging Face model inside."""
        return self._ds.module.lm

    @property
    def state(self) -> EngineState:
        """What a checkpoint saves and restores of this rank."""
        return EngineState(self._ds, self.plan)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.plan.world.rank == 0

    def step(self, batch: Batch, *, lr: float) -> StepResult:
        """Do one optimizer step with learning rate `lr` on the global batch of which `batch` is this rank's share."""
        self._ds.train()
        tokens, supervised = self._sum_over_ranks(batch.num_tokens, batch.num_supervised_tokens, copies=self.plan.mesh.sharing)
        for group in self._ds.optimizer.param_groups:
            group["lr"] = lr
        # DeepSpeed divides by its ranks in its reducers (zero/stage_1_and_2.py, engine.allreduce_bucket in 0.19.8); our loss is a mean already.
        scale = self.plan.zero_ranks / max(supervised, 1)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._probe.reset()
        for index, micro in enumerate(batch.micro, start=1):
            loss = self._forward(micro)
            self._ds.backward(loss.loss_sum * scale, scale_wrt_gas=False)
            sums += torch.stack([loss.loss_sum.detach().double(), loss.num_correct.double()])
            if index < len(batch.micro):
                self._ds.step()
        loss_sum, correct, bad = self._sum_over_ranks(*sums.tolist(), float(self._probe.is_bad()), copies=self.plan.mesh.tp)
        grad_norm, skipped = self._apply(bad > 0)
        return StepResult(
            loss=loss_sum / max(supervised, 1),
            accuracy=correct / max(supervised, 1),
            grad_norm=grad_norm,
            num_tokens=int(tokens),
            num_supervised_tokens=int(supervised),
            skipped=skipped,
            culprit=self._culprit() if skipped else "",
        )

    def evaluate(self, batches: Iterable[Batch], *, is_over: Callable[[], bool] = _never) -> EvalResult | None:
        """Mean loss and token accuracy over `batches`, which hold every row of the data once over all ranks.

        None where `is_over`, asked before each batch and the same on every rank, ends it.
        """
        self._ds.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        with torch.no_grad():
            for batch in batches:
                if is_over():
                    return None
                for micro in batch.micro:
                    loss = self._forward(micro)
                    sums[:2] += torch.stack([loss.loss_sum.double(), loss.num_correct.double()])
                sums[2] += batch.num_supervised_tokens / self.plan.mesh.sp
        loss_sum, correct, supervised = self._sum_over_ranks(*sums.tolist(), copies=self.plan.mesh.tp)
        return EvalResult(loss_sum / max(supervised, 1), correct / max(supervised, 1), int(supervised))

    def generate(self, prompts: list[list[int]], limits: Limits, *, is_over: Callable[[], bool] = _never) -> list[list[int]] | None:
        """Greedy answers (token ids without the prompt and the stop token) to `prompts`, shared out over the ranks.

        None where `is_over`, asked before each answer and the same on every rank, ends it.
        """
        self._ds.eval()
        mine = {}
        for number, prompt in self._my_share(prompts):
            if is_over():
                return None
            mine[number] = self._answer(prompt, limits)
        merged = {index: answer for part in everyones(mine) for index, answer in part.items()}
        return [merged[index] for index in range(len(prompts))]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every parameter and persistent buffer by its Hugging Face name: the whole tensor on rank zero's CPU, None elsewhere.

        One parameter is gathered at a time; every rank must run the iterator to its end.
        """
        for name, param in _named(self._ds.module):
            with self._gathered(param):
                whole = self._joined(name, param.detach())
                yield name, whole.cpu() if self.is_rank_zero else None
        for name, buffer in persistent_buffers(self._ds.module):
            yield name, buffer.detach().cpu() if self.is_rank_zero else None

    def tensor_specs(self) -> dict[str, torch.Tensor]:
        """Shape and dtype of what `tensors` yields, in its order, as tensors on the meta device; nothing is gathered."""
        shapes = {name: self._cut.window(name, local_shape(param)).shape for name, param in _named(self._ds.module)}
        specs = {name: torch.empty(shapes[name], dtype=param.dtype, device="meta") for name, param in _named(self._ds.module)}
        return specs | {name: buffer.to("meta") for name, buffer in persistent_buffers(self._ds.module)}

    def _forward(self, micro: MicroBatch) -> TokenLoss:
        sequence = self._ds.module.sequence
        rows = (micro.input_ids, micro.position_ids, micro.labels)
        parts = ((sequence.shard(part) if sequence else part).to(self._device, non_blocking=True) for part in rows)
        return TokenLoss(*self._ds(*parts, micro.documents))

    def _apply(self, has_bad_gradient: bool) -> tuple[float, bool]:
        """Take the optimizer step of a whole batch; returns the gradient norm before clipping and whether the step was skipped."""
        if self._is_plain:
            norm = self._plain_norm()
            if has_bad_gradient or not math.isfinite(norm):
                # DeepSpeed 0.19.8 applies NaN at stage 0 in fp32; parameters without a gradient are left alone by torch's optimizers.
                self._ds.zero_grad()
                self._ds.step()
                return norm, True
            self._ds.step()
            return norm, False
        skipped_before = self._ds.skipped_steps
        self._ds.step()
        skipped = self._ds.skipped_steps > skipped_before
        if has_bad_gradient and not skipped:
            raise RunError(f"a non-finite gradient was applied at ZeRO stage {self.plan.zero_stage}: {self._culprit()}", hint="please report this")
        norm = self._ds.get_global_grad_norm()
        return float("nan") if norm is None else float(norm), skipped

    @property
    def _is_plain(self) -> bool:
        return self.plan.zero_stage == 0 and self.plan.config.train.precision == "fp32"

    def _plain_norm(self) -> float:
        params = [param for param in self._ds.module.parameters() if param.grad is not None]
        tensor = self._groups.tensor
        if tensor is None:
            return float(torch.nn.utils.get_total_norm([param.grad for param in params]))
        cut, whole = ([param.grad for param in params if param.model_parallel == is_cut] for is_cut in (True, False))
        squares = tensor.total(torch.nn.utils.get_total_norm(cut) ** 2)
        return float((squares + torch.nn.utils.get_total_norm(whole) ** 2).sqrt())

    def _culprit(self) -> str:
        named = [f"{name} on rank {rank}" for rank, name in enumerate(everyones(self._probe.first_bad())) if name]
        return named[0] if named else "no single gradient; the reduction overflowed"

    def _sum_over_ranks(self, *values: float, copies: int) -> list[float]:
        """Sums of values of which each is had by `copies` ranks alike."""
        summed = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(summed)
        return (summed / copies).tolist()

    def _my_share(self, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
        """This rank's prompts; under ZeRO-3 every rank must run the model equally often, so the last ones may be answered twice."""
        ranks, rank = self.plan.zero_ranks, self.plan.world.rank // self.plan.mesh.tp
        rounds = math.ceil(len(prompts) / ranks)
        numbers = [min(turn * ranks + rank, len(prompts) - 1) for turn in range(rounds)]
        return [(number, prompts[number]) for number in numbers]

    def _answer(self, prompt: list[int], limits: Limits) -> list[int]:
        ids = torch.tensor([prompt], device=self._device)
        with torch.no_grad():
            out = self.lm.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=limits.max_new_tokens,
                eos_token_id=limits.stop_ids,
                pad_token_id=limits.pad_id,
                use_cache=True,
                synced_gpus=self._meets_others,
            )
        answer = out[0, len(prompt) :].tolist()
        ends = [place for place, token in enumerate(answer) if token in limits.stop_ids]
        return answer[: ends[0]] if ends else answer

    @property
    def _meets_others(self) -> bool:
        """Whether a forward waits for other ranks, which must then do as many: parameters gathered, or experts elsewhere."""
        return (self.plan.zero_stage == 3 and self.plan.zero_ranks > 1) or self.plan.mesh.ep > 1

    def _joined(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole parameter on rank zero's CPU from the parts of it; something else on other ranks, of which those that hold parts take part."""
        window = self._cut.window(name, tuple(part.shape))
        box = part.reshape(window.local)
        mesh = self.plan.mesh
        if mesh.rank not in mesh.parts_of_rank_zero():
            return box
        if self._groups.tensor is not None and window.dim is not None:
            box = _side_by_side(box, self._groups.tensor, dim=window.dim)
        if self._groups.experts is not None and window.is_shared_out and mesh.place("tp") == 0:
            box = _side_by_side(box, self._groups.experts, dim=0)
        return box.reshape(window.shape) if self.is_rank_zero else box

    def _gathered(self, param: nn.Parameter) -> Any:  # noqa: ANN401 - a context manager of DeepSpeed
        if not hasattr(param, "ds_id"):
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([param])


def _side_by_side(part: torch.Tensor, held: TensorGroup | ExpertGroup, *, dim: int) -> torch.Tensor:
    """The parts of a group's ranks, joined on the CPU of its first; the own part elsewhere."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(held.size)] if held.place == 0 else None
    dist.gather(part, parts, group=held.group, group_dst=0)
    return part if parts is None else torch.cat([each.cpu() for each in parts], dim=dim)


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.removeprefix("lm."), param) for name, param in module.named_parameters()]
