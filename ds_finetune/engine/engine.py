"""The engine: one `step` is one optimizer step, and its loss is the mean over the supervised tokens of the global
batch.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.engine.collectives import all_gather_object
from ds_finetune.engine.finite_gradients import FiniteProbe
from ds_finetune.engine.parameter_tags import is_expert, local_shape
from ds_finetune.engine.pipeline_schedule import is_copy, run_by_turns
from ds_finetune.engine.process_groups import Groups
from ds_finetune.engine.state import EngineState, persistent_buffers
from ds_finetune.errors import RunError
from ds_finetune.model.four_bit import dequantised, dtype_of, is_four_bit, shape_of
from ds_finetune.model.lora import is_adapter
from ds_finetune.model.loss import TokenLoss
from ds_finetune.model.parallel.expert import ExpertParallelGroup
from ds_finetune.model.parallel.pipeline import PipelineGroup
from ds_finetune.model.parallel.sharding import ModelShard
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.patches.deepspeed_engine import gradients_reduced_at_end
from ds_finetune.plan.plan import Plan


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank: loss is a mean in nats per supervised token of the global
    batch.
    """

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
class GenerationLimits:
    """Where an answer ends: at most `max_new_tokens`, or at one of `stop_ids`; `pad_id` fills."""

    max_new_tokens: int
    stop_ids: list[int]
    pad_id: int


_PIECE = 2**26
"""Elements of a tensor that go from one stage to another at a time."""


def _never() -> bool:
    return False


class Engine:
    """A model under DeepSpeed, seen as `step`, `evaluate`, `generate`, `logits` and `tensors` (`tensor_specs` in
    advance).
    """

    def __init__(self, wrapped: Any, plan: Plan, groups: Groups) -> None:  # noqa: ANN401 - a DeepSpeedEngine
        self.plan = plan
        self._groups = groups
        self._stage = groups.stage
        self._model_shard = ModelShard.of(plan.mesh)
        self._ds = wrapped
        self._device = torch.device(wrapped.device)
        self._probe = FiniteProbe(_named(wrapped.module))
        self._specs = [self._own_specs()] if self._stage is None else self._stage.all_gather_object(self._own_specs())

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
        tokens, supervised = self._sum_over_ranks(
            batch.num_tokens, batch.num_supervised_tokens, copies=self.plan.mesh.sharing
        )
        for group in self._ds.optimizer.param_groups:
            group["lr"] = lr
        # DeepSpeed divides by its ranks in its reducers (zero/stage_1_and_2.py, engine.allreduce_bucket in 0.19.8); our
        # loss is a mean already.
        scale = self.plan.zero_ranks / max(supervised, 1)
        self._probe.reset()
        sums = self._passes(batch, scale) if self._stage is None else self._pipelined(batch, scale, self._stage)
        loss_sum, correct, bad = self._sum_over_ranks(
            *sums.tolist(), float(self._probe.is_bad()), copies=self.plan.mesh.tp
        )
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
        sums, counted = torch.zeros(2, dtype=torch.float64, device=self._device), 0
        with torch.no_grad():
            for batch in batches:
                if is_over():
                    return None
                for out in map(self._forward, batch.micro):
                    sums += _counted(out)
                counted += batch.num_supervised_tokens
        (supervised,) = self._sum_over_ranks(counted, copies=self.plan.mesh.sharing)
        loss_sum, correct = self._sum_over_ranks(*sums.tolist(), copies=self.plan.mesh.tp)
        return EvalResult(loss_sum / max(supervised, 1), correct / max(supervised, 1), int(supervised))

    def generate(
        self, prompts: list[list[int]], limits: GenerationLimits, *, is_over: Callable[[], bool] = _never
    ) -> list[list[int]] | None:
        """Greedy answers (token ids without the prompt and the stop token) to `prompts`, shared out over the ranks.

        None where `is_over`, asked before each answer and the same on every rank, ends it.
        """
        self._ds.eval()
        mine = {}
        for number, prompt in self._my_share(prompts):
            if is_over():
                return None
            mine[number] = self._answer(prompt, limits)
        merged = {index: answer for part in all_gather_object(mine) for index, answer in part.items()}
        return [merged[index] for index in range(len(prompts))]

    def logits(self, prompts: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        """Logits of each prompt (token ids) in the run's precision, [tokens, vocabulary] as fp32, on every rank; all
        ranks run it to its end.
        """
        self._ds.eval()
        for prompt in prompts:
            with torch.no_grad():
                yield self.lm(input_ids=torch.tensor([prompt], device=self._device), use_cache=False).logits[0].float()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every parameter and persistent buffer by its Hugging Face name: the whole tensor on rank zero's CPU, None
        elsewhere.

        One parameter is gathered at a time; every rank must run the iterator to its end. Ranks go from one to the
        next together, so that none waits longer than for what is done with one tensor. Adapters are left out, and
        not added. Weights in four bits are multiplied out.
        """
        return self._whole(lambda name: not is_adapter(name))

    def adapters(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The parameters of adapters in the same way."""
        return self._whole(is_adapter)

    def _whole(self, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor | None]]:
        here = dict(_named(self._ds.module)) | dict(persistent_buffers(self._ds.module))
        for stage, specs in enumerate(self._specs):
            held = here if stage == self.plan.mesh.place("pp") else {}
            for name, spec in ((name, spec) for name, spec in specs.items() if is_wanted(name)):
                dist.barrier()
                with self._gathered(held.get(name)):
                    whole = self.joined(name, dequantised(held[name])) if name in held else None
                    yield name, self._on_rank_zero(whole, spec, stage)

    def tensor_specs(self) -> dict[str, torch.Tensor]:
        """Shape and dtype of what `tensors` yields, in its order, as tensors on the meta device; nothing is
        gathered.
        """
        return {name: spec for specs in self._specs for name, spec in specs.items() if not is_adapter(name)}

    def _forward(self, micro: MicroBatch) -> TokenLoss | torch.Tensor:
        """The loss, or hidden states from a stage before the last."""
        sequence = self._ds.module.sp_group
        rows = (micro.input_ids, micro.position_ids, micro.labels)
        parts = ((sequence.shard(part) if sequence else part).to(self._device, non_blocking=True) for part in rows)
        out: TokenLoss | torch.Tensor = self._ds(*parts, micro.documents)
        return out

    def _passes(self, batch: Batch, scale: float) -> torch.Tensor:
        """Forward and backward of every micro-batch; returns summed loss and right predictions of this rank, fp64
        [2].
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for index, micro in enumerate(batch.micro, start=1):
            loss = self._forward(micro)
            assert isinstance(loss, TokenLoss)
            self._ds.backward(loss.loss_sum * scale, scale_wrt_gas=False)
            sums += _counted(loss)
            if index < len(batch.micro):
                self._ds.step()
        return sums

    def _pipelined(self, batch: Batch, scale: float, stage: PipelineGroup) -> torch.Tensor:
        """The same of a pipeline stage, whose sums are zeros before the last."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)

        def forward(micro: MicroBatch) -> torch.Tensor:
            out = self._forward(micro)
            sums.add_(_counted(out))
            return out.loss_sum * scale if isinstance(out, TokenLoss) else out

        with gradients_reduced_at_end(self._ds, zero_stage=self.plan.zero_stage):
            run_by_turns(stage, batch.micro, forward, lambda scalar: self._ds.backward(scalar, scale_wrt_gas=False))
            if self._is_tied:
                stage.all_reduce_embedding_grad(self._ds.module.lm.get_input_embeddings().weight.grad)
        return sums

    def _apply(self, has_bad_gradient: bool) -> tuple[float, bool]:
        """Take the optimizer step of a whole batch; returns the gradient norm before clipping and whether the step was
        skipped.
        """
        if self.plan.is_engine_clipping:
            params = [param for param in self._ds.module.parameters() if param.grad is not None]
            norm = self._plain_norm(params)
            is_skipped = has_bad_gradient or not math.isfinite(norm)
            if is_skipped:
                # DeepSpeed 0.19.8 applies NaN at stage 0 in fp32; parameters without a gradient are left alone by
                # torch's optimizers.
                self._ds.zero_grad()
            elif self.plan.optimizer.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(
                    params, self.plan.optimizer.max_grad_norm, torch.tensor(norm, device=self._device)
                )
            self._ds.step()
            return norm, is_skipped
        skipped_before = self._ds.skipped_steps
        self._ds.step()
        skipped = self._ds.skipped_steps > skipped_before
        if has_bad_gradient and not skipped:
            raise RunError(
                f"a non-finite gradient was applied at ZeRO stage {self.plan.zero_stage}: {self._culprit()}",
                hint="please report this",
            )
        norm = self._ds.get_global_grad_norm()
        return float("nan") if norm is None else float(norm), skipped

    @property
    def _is_tied(self) -> bool:
        """Whether this stage holds an embedding whose weight is the head's as well."""
        stage = self._stage
        return (
            stage is not None and (stage.is_first or stage.is_last) and bool(self._ds.module.config.tie_word_embeddings)
        )

    def _plain_norm(self, params: Sequence[nn.Parameter]) -> float:
        """Norm of the whole gradient, of which this rank has parts along every axis but the data's."""
        tensor, experts, stage = self._groups.tensor, self._groups.experts, self._stage
        square = torch.zeros((), device=self._device)
        for has_cut, has_experts in itertools.product((False, True), repeat=2):
            kind = [
                param.grad
                for param in params
                if not is_copy(param) and (_is_cut(param), is_expert(param)) == (has_cut, has_experts)
            ]
            part = torch.nn.utils.get_total_norm([grad for grad in kind if grad is not None]).to(self._device) ** 2
            for group, is_shared_out in ((tensor, has_cut), (experts, has_experts), (stage, True)):
                if group is not None and is_shared_out:
                    dist.all_reduce(part, group=group.group)
            square += part
        return float(square.sqrt())

    def _culprit(self) -> str:
        found = all_gather_object(self._probe.first_bad())
        # The last stage of a pipeline hands what is wrong there to the ones before.
        ranks = sorted(range(len(found)), key=lambda rank: -self.plan.mesh.place("pp", rank))
        named = [f"{found[rank]} on rank {rank}" for rank in ranks if found[rank]]
        return named[0] if named else "no single gradient; the reduction overflowed"

    def _sum_over_ranks(self, *values: float, copies: int) -> list[float]:
        """Sums of values of which each is had by `copies` ranks alike."""
        summed = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(summed)
        return (summed / copies).tolist()

    def _my_share(self, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
        """This rank's prompts; under ZeRO-3 every rank must run the model equally often, so the last ones may be
        answered twice.
        """
        mesh = self.plan.mesh
        ranks, rank = self.plan.zero_ranks, mesh.place("dp") * mesh.sp + mesh.place("sp")
        rounds = math.ceil(len(prompts) / ranks)
        numbers = [min(turn * ranks + rank, len(prompts) - 1) for turn in range(rounds)]
        return [(number, prompts[number]) for number in numbers]

    def _answer(self, prompt: list[int], limits: GenerationLimits) -> list[int]:
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
        """Whether a forward waits for other ranks, which must then do as many: parameters gathered, or experts
        elsewhere.
        """
        return (self.plan.zero_stage == 3 and self.plan.zero_ranks > 1) or self.plan.mesh.ep > 1

    def _own_specs(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, param in _named(self._ds.module):
            if not is_copy(param):
                shape = shape_of(param) if is_four_bit(param) else local_shape(param)
                found[name] = torch.empty(
                    self._model_shard.tensor_shard(name, shape).whole_shape, dtype=dtype_of(param), device="meta"
                )
        return found | {name: buffer.to("meta") for name, buffer in persistent_buffers(self._ds.module)}

    def joined(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor cut as parameter `name` is, on the stage's first rank; something else on other ranks,
        of which some take part.
        """
        shard = self._model_shard.tensor_shard(name, tuple(part.shape))
        box = part.reshape(shard.local_shape)
        mesh = self.plan.mesh
        if mesh.rank not in mesh.parts_of_leader():
            return box
        # NCCL takes what lies on the device alone; an offloaded optimizer's moments do not.
        experts = self._groups.experts if shard.is_expert_parallel and mesh.place("tp") == 0 else None
        if self._groups.tensor is not None and shard.dim is not None:
            end = torch.device("cpu") if experts is None else self._device
            box = _side_by_side(box.to(self._device), self._groups.tensor, dim=shard.dim, end=end)
        if experts is not None:
            box = _side_by_side(box.to(self._device), experts, dim=0, end=torch.device("cpu"))
        return box.reshape(shard.whole_shape) if mesh.rank == mesh.leader else box

    def _on_rank_zero(self, whole: torch.Tensor | None, spec: torch.Tensor, stage: int) -> torch.Tensor | None:
        """The whole tensor that stage number `stage` has, on rank zero's CPU; None elsewhere."""
        mesh = self.plan.mesh
        if self._stage is not None and stage and mesh.rank == mesh.leader:
            if mesh.place("pp") == stage:
                assert whole is not None
                for piece in whole.reshape(-1).split(_PIECE):
                    self._stage.send(piece.to(self._device), to=0)
            elif self.is_rank_zero:
                whole = torch.empty_like(spec, device="cpu")
                for piece in whole.view(-1).split(_PIECE):
                    piece.copy_(self._stage.receive(torch.empty_like(piece, device=self._device), source=stage))
        return whole.cpu() if self.is_rank_zero and whole is not None else None

    def _gathered(self, param: torch.Tensor | None) -> Any:  # noqa: ANN401 - a context manager of DeepSpeed
        if not hasattr(param, "ds_id"):
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([param])


def _is_cut(param: nn.Parameter) -> bool:
    return bool(param.model_parallel)  # type: ignore[attr-defined]


def _counted(out: TokenLoss | torch.Tensor) -> torch.Tensor:
    """Summed loss and right predictions, fp64 [2]; zeros of hidden states, which an earlier pipeline stage gives."""
    if not isinstance(out, TokenLoss):
        return torch.zeros(2, dtype=torch.float64, device=out.device)
    return torch.stack([out.loss_sum.detach().double(), out.num_correct.double()])


def _side_by_side(
    part: torch.Tensor, held: TensorParallelGroup | ExpertParallelGroup, *, dim: int, end: torch.device
) -> torch.Tensor:
    """The parts of a group's ranks, joined on the device `end` of its first; the own part elsewhere."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(held.size)] if held.rank == 0 else None
    dist.gather(part, parts, group=held.group, group_dst=0)
    return part if parts is None else torch.cat([each.to(end) for each in parts], dim=dim)


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.removeprefix("lm."), param) for name, param in module.named_parameters()]
