"""The engine: one `step` is one optimizer step, and its loss is the mean over the units of the global batch.

It knows the terms, sums and metrics of an objective, and nothing else about it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.engine.collectives import all_gather_object
from ds_finetune.engine.communication import CommunicationMeter
from ds_finetune.engine.document_scores import NO_SCORES, DocumentScores, gather_scores, scores_of
from ds_finetune.engine.finite_gradients import FiniteProbe
from ds_finetune.engine.generation import GenerationLimits, answer_prompt, prompts_of_rank, weights_for_answers
from ds_finetune.engine.gradient_norm import clip_gradients
from ds_finetune.engine.loss_normalisation import detached_sums, scale_for_deepspeed, term_weights
from ds_finetune.engine.pipeline_schedule import StageForward, run_1f1b
from ds_finetune.engine.process_groups import Groups
from ds_finetune.engine.rank_rows import rank_rows
from ds_finetune.engine.results import HeldOutScores, StepResult
from ds_finetune.engine.router_balance import finish_step
from ds_finetune.engine.state import EngineState
from ds_finetune.engine.whole_tensors import WholeTensors, named_parameters
from ds_finetune.errors import RunError
from ds_finetune.model.forward_rows import ForwardRows, StageOutput
from ds_finetune.model.lora import adapters_off, is_adapter
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.model.parallel.pipeline import PipelineGroup, has_tied_head
from ds_finetune.model.routers import RouterCollector
from ds_finetune.model.score_head import SCORE_HEAD, logits_of_prompt
from ds_finetune.objectives.examples import Examples
from ds_finetune.objectives.extra import TotalLoss
from ds_finetune.objectives.objective import LossAndSums, Objective, ScoreObjective, StepNumbers, Unit
from ds_finetune.patches.deepspeed_engine import gradients_reduced_at_end
from ds_finetune.plan.plan import Plan


def _examples_of(micro: MicroBatch) -> Examples:
    assert micro.examples is not None, "the batch has no examples; set documents_per_unit in its BatchPlan"
    return micro.examples


def _never() -> bool:
    return False


class Engine:
    """A model under DeepSpeed: `step`, `evaluate`, `document_log_probs`, `generate`, `logits`, and its whole
    `tensors`.
    """

    drawn: tuple[str, ...] = ()
    """Names of this rank's parameters that were drawn because the model's folder does not have them."""
    has_bad_gradient = False
    """Whether a gradient of the latest step was not finite on any rank."""
    own_norms: Mapping[str, float] = MappingProxyType({})
    """Norms of the latest gradients of the parameters that an auxiliary loss trains alone, by the name of the loss."""

    def __init__(self, wrapped: Any, plan: Plan, groups: Groups, objective: Objective) -> None:  # noqa: ANN401 - a DeepSpeedEngine
        self.plan = plan
        self.objective = objective
        self._groups = groups
        self._stage = groups.stage
        self._ds = wrapped
        self._device = torch.device(wrapped.device)
        self.meter = CommunicationMeter(is_blocking=self._device.type == "cpu")
        self._probe = FiniteProbe(named_parameters(wrapped.module))
        self._whole = WholeTensors(wrapped.module, plan, groups, self._device)

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
        self.meter.restart()
        self.meter.restart()
        batch = replace(batch, micro=tuple(map(self._with_reference, batch.micro)))
        counts = self._global_counts(batch.counts)
        numbers = self._step_numbers(counts, batch.baseline)
        self._share_embedding()
        self._ds.train()
        (tokens,) = self._sum_over_ranks(batch.num_tokens, copies=self.plan.mesh.sharing)
        for group in self._ds.optimizer.param_groups:
            group["lr"] = lr
        self._probe.reset()
        if self._routers is not None:
            self._routers.clear()
        if self._stage is None:
            sums = self._run_micro_batches(batch, numbers)
        else:
            sums = self._run_pipeline(batch, numbers, self._stage)
        *totals, bad = self._sum_over_ranks(*sums.tolist(), float(self._probe.is_bad()), copies=self.plan.mesh.tp)
        self.has_bad_gradient = bad > 0
        grad_norm, skipped = self._step_optimizer()
        choices = None
        if self._routers is not None:
            choices = finish_step(self._routers, self.plan.mesh, num_tokens=int(tokens), is_skipped=skipped)
        own = {f"{loss}_grad_norm": math.inf if skipped else norm for loss, norm in self.own_norms.items()}
        return StepResult(
            metrics={**self._total_loss.metrics(self._total_loss.named(totals), counts), **own},
            grad_norm=grad_norm,
            num_tokens=int(tokens),
            num_supervised_tokens=int(counts["supervised_tokens"]),
            num_examples=int(counts["examples"]),
            skipped=skipped,
            culprit=self._probe.culprit(self.plan.mesh) if skipped else "",
            router_choices=choices,
            communication=self.meter.counted() if self.plan.world.world_size > 1 else None,
        )

    def evaluate(
        self, batches: Iterable[Batch], *, baseline: Iterable[MicroBatch] = (), is_over: Callable[[], bool] = _never
    ) -> HeldOutScores | None:
        """Metrics over `batches`, which hold every row of the data once over all ranks.

        `baseline` has this rank's share of the documents from which the objective's number of the global batch is
        computed, here of all the data. `is_over` is called before each batch and must return the same on every rank;
        where it is true, the result is None.
        """
        self._share_embedding()
        self._ds.eval()
        sums, counts, scores = self._no_sums(), Counter[str](), list[DocumentScores]()
        numbers = self._step_numbers({term.unit: 1 for term in self._total_loss.terms}, baseline)
        with torch.no_grad():
            for batch in batches:
                if is_over():
                    return None
                for micro in map(self._with_reference, batch.micro):
                    out = self._forward(micro, numbers)
                    sums += detached_sums(out, len(sums))
                    scores.append(scores_of(out, micro) if self._gathers_scores else NO_SCORES)
                counts.update(batch.counts)
        totals = self._sum_over_ranks(*sums.tolist(), copies=self.plan.mesh.tp)
        everywhere = self._global_counts(counts)
        together = gather_scores(scores, self.plan.mesh) if self._gathers_scores else NO_SCORES
        return self._scores(self._total_loss.named(totals), everywhere, together)

    def pool(self, scores: Iterable[HeldOutScores]) -> HeldOutScores:
        """Scores over all rows of several evaluations together."""
        sums, counts, together = Counter[str](), Counter[str](), NO_SCORES
        for part in scores:
            sums.update(part.sums)
            counts.update(part.counts)
            together = np.concatenate([together, part.scores])
        return self._scores(sums, counts, together)

    def document_log_probs(self, batches: Iterable[Batch]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Numbers [n] of all documents of `batches`, ascending, and their log-probabilities [n] in nats: the sum over
        the supervised tokens of each.

        The batches of all ranks hold each document once, and every rank gets all documents. They are the numbers that
        `step` computes, bit by bit, where the forwards have the same rows.
        """
        self._ds.eval()
        numbers, logps = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for batch in batches:
            for micro in batch.micro:
                logps.append(self._log_probs(micro).cpu().numpy())
                numbers.append(_examples_of(micro).numbers.numpy())
        mesh = self.plan.mesh
        is_first = mesh.place("tp") == mesh.place("sp") == mesh.place("pp") == 0
        mine = (np.concatenate(numbers), np.concatenate(logps)) if is_first else (numbers[0], logps[0])
        every = [np.concatenate(parts) for parts in zip(*all_gather_object(mine), strict=True)]
        order = np.argsort(every[0], kind="stable")
        return every[0][order], every[1][order]

    def generate(
        self, prompts: list[list[int]], limits: GenerationLimits, *, is_over: Callable[[], bool] = _never
    ) -> list[list[int]] | None:
        """Greedy answers (token ids without the prompt and the stop token) to `prompts`, which are distributed over
        the ranks.

        `is_over` is called before each answer and must return the same on every rank; where it is true, the result is
        None.
        """
        self._ds.eval()
        mine = {}
        with weights_for_answers(self._ds, self.plan) as is_collective:
            for number, prompt in prompts_of_rank(prompts, self.plan):
                if is_over():
                    return None
                mine[number] = answer_prompt(self.lm, prompt, limits, device=self._device, is_collective=is_collective)
        merged = {index: answer for part in all_gather_object(mine) for index, answer in part.items()}
        return [merged[index] for index in range(len(prompts))]

    def logits(self, prompts: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        """Logits of each prompt (token ids) in the run's precision, [tokens, vocabulary] as fp32, on every rank; of a
        classifier the scores of the prompt, [1, outputs].

        Every rank must run the iterator to its end.
        """
        self._ds.eval()
        for prompt in prompts:
            with torch.no_grad():
                yield logits_of_prompt(self.lm, torch.tensor([prompt], device=self._device)).float()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every parameter and persistent buffer by its Hugging Face name: the whole tensor on rank zero's CPU, None
        elsewhere.

        One parameter is gathered at a time; every rank must run the iterator to its end. Adapters are left out and not
        merged. Weights in four bits are dequantised.
        """
        return self._whole.gather(lambda name: not is_adapter(name))

    def adapters(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The parameters of adapters in the same way."""
        return self._whole.gather(is_adapter)

    def score_head(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The parameters of a score head in the same way; none of a language model."""
        return self._whole.gather(lambda name: name.startswith(f"{SCORE_HEAD}."))

    def tensor_specs(self) -> dict[str, torch.Tensor]:
        """Shape and dtype of what `tensors` yields, in its order, as tensors on the meta device; nothing is
        gathered.
        """
        return {name: spec for name, spec in self._whole.specs().items() if not is_adapter(name)}

    def gather_shards(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which `part` is sharded like parameter `name`, on the first rank of its stage."""
        return self._whole.gather_shards(name, part)

    def _forward(self, micro: MicroBatch, numbers: StepNumbers) -> LossAndSums | StageOutput:
        out: LossAndSums | StageOutput = self._ds(self._rows(micro), numbers)
        return out

    def _rows(self, micro: MicroBatch) -> ForwardRows:
        return rank_rows(micro, self._ds.module.sp_group, self._device)

    def _log_probs(self, micro: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the documents of a micro-batch, fp64 [documents], the same on all its ranks."""
        with torch.no_grad():
            out = self._ds(self._rows(micro), wants_log_probs=True)
        if self._stage is None:
            assert isinstance(out, torch.Tensor)
            return out
        logps = torch.zeros(len(_examples_of(micro).numbers), dtype=torch.float64, device=self._device)
        return self._stage.broadcast_from_last(out if self._stage.is_last else logps)  # type: ignore[arg-type]

    def _with_reference(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch with log-probabilities of the reference, where that is the model without its adapters."""
        if not self.objective.reference_from_adapters:
            return micro
        self._ds.eval()
        with adapters_off(self.lm):
            return replace(micro, examples=replace(_examples_of(micro), reference=self._log_probs(micro)))

    def _baseline(self, micros: Iterable[MicroBatch]) -> float:
        """The objective's number of the global batch, from the log-ratios of the documents of all ranks."""
        if not self.objective.needs_baseline:
            return 0.0
        self._ds.eval()
        total, count = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for micro in map(self._with_reference, micros):
            reference = _examples_of(micro).reference.to(self._device)
            total += (self._log_probs(micro) - reference).sum()
            count += len(reference)
        return self.objective.baseline(*self._sum_over_ranks(total.item(), count, copies=self.plan.mesh.sharing))

    def _run_micro_batches(self, batch: Batch, numbers: StepNumbers) -> torch.Tensor:
        """Forward and backward of every micro-batch; returns this rank's sums of the objective, fp64."""
        sums = self._no_sums()
        for index, micro in enumerate(batch.micro, start=1):
            out = self._forward(micro, numbers)
            assert isinstance(out, LossAndSums)
            self._ds.backward(self._scaled(out.loss), scale_wrt_gas=False)
            sums += out.sums
            if index < len(batch.micro):
                self._ds.step()
        return sums

    def _run_pipeline(self, batch: Batch, numbers: StepNumbers, stage: PipelineGroup) -> torch.Tensor:
        """The same on a pipeline stage; only the last stage has sums other than zeros."""
        sums = self._no_sums()

        def forward(micro: MicroBatch) -> StageForward:
            out = self._forward(micro, numbers)
            sums.add_(detached_sums(out, len(sums)))
            loss = None if out.loss is None else self._scaled(out.loss)
            return StageForward(loss, out.hidden if isinstance(out, StageOutput) else None)

        with gradients_reduced_at_end(self._ds, zero_stage=self.plan.zero_stage):
            run_1f1b(stage, batch.micro, forward, lambda scalar: self._ds.backward(scalar, scale_wrt_gas=False))
            if self._trains_both_ends:
                stage.all_reduce_embedding_grad(self._ds.module.lm.get_input_embeddings().weight.grad)
        return sums

    def _share_embedding(self) -> None:
        """Give the last stage the first one's embedding, where multi-token prediction only reads it."""
        stage, module = self._stage, self._ds.module
        if stage is not None and stage.is_end and mtp_layers(module.config) and not self._trains_both_ends:
            stage.broadcast_embedding(module.lm.get_input_embeddings().weight)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return scale_for_deepspeed(loss, zero_ranks=self.plan.zero_ranks)

    def _no_sums(self) -> torch.Tensor:
        return torch.zeros(len(self._total_loss.sum_names), dtype=torch.float64, device=self._device)

    def _step_numbers(self, counts: Mapping[str, float], baseline: Iterable[MicroBatch] = ()) -> StepNumbers:
        weights = term_weights(self._total_loss.terms, counts)
        number = torch.tensor(self._baseline(baseline), dtype=torch.float64, device=self._device)
        return StepNumbers(weights.to(self._device), number)

    @property
    def _routers(self) -> RouterCollector | None:
        found: RouterCollector | None = self._ds.module.routers
        return found

    @property
    def _total_loss(self) -> TotalLoss:
        return TotalLoss(self.objective, tuple(each.extra for each in self._ds.module.extras))

    @property
    def _gathers_scores(self) -> bool:
        return isinstance(self.objective, ScoreObjective) and self.objective.gathers_scores

    def _scores(
        self, sums: Mapping[str, float], counts: Mapping[str, float], together: DocumentScores
    ) -> HeldOutScores:
        metrics = self._total_loss.metrics(sums, counts)
        if isinstance(self.objective, ScoreObjective) and self.objective.gathers_scores:
            metrics |= self.objective.score_metrics(together[:, 0], together[:, 1])
        return HeldOutScores(metrics, counts, self.objective.is_per_token, sums, together)

    def _global_counts(self, counts: Mapping[str, float]) -> dict[str, float]:
        """The numbers of units of all ranks, each of which counts its own rows."""
        values = [counts.get(unit, 0) for unit in get_args(Unit)]
        summed = self._sum_over_ranks(*values, copies=self.plan.mesh.sharing)
        return dict(zip(get_args(Unit), summed, strict=True))

    def _step_optimizer(self) -> tuple[float, bool]:
        """Take the optimizer step of a whole batch; returns the gradient norm before clipping and whether the step was
        skipped.
        """
        if self.plan.is_engine_clipping:
            params = [param for param in self._ds.module.parameters() if param.grad is not None]
            limit = self.plan.optimizer.max_grad_norm
            norm, *own = clip_gradients(params, limit, self._groups, losses=self.own_norms, device=self._device)
            self.own_norms = dict(zip(self.own_norms, own, strict=True))
            is_skipped = self.has_bad_gradient or not all(map(math.isfinite, (norm, *own)))
            if is_skipped:
                # DeepSpeed 0.19.8 applies NaN at stage 0 in fp32; parameters without a gradient are left alone by
                # torch's optimizers.
                self._ds.zero_grad()
            self._ds.step()
            return norm, is_skipped
        skipped_before, steps_before = self._ds.skipped_steps, self._ds.global_steps
        self._ds.step()
        skipped = self._ds.skipped_steps > skipped_before
        if self.has_bad_gradient and not skipped:
            culprit = self._probe.culprit(self.plan.mesh)
            raise RunError(
                f"a non-finite gradient was applied at ZeRO stage {self.plan.zero_stage}: {culprit}",
                hint="please report this",
            )
        # ZenFlow computes a norm only in steps that update all weights.
        found = self._ds.get_global_grad_norm() if self._ds.global_steps > steps_before else None
        return math.nan if found is None else float(found), skipped

    @property
    def _trains_both_ends(self) -> bool:
        """Whether this stage and another one have the embedding's weight and each get a part of its gradient."""
        module = self._ds.module
        trains_copy = has_tied_head(module.lm) or any(each.trains_embedding for each in module.extras)
        return self._stage is not None and self._stage.is_end and trains_copy

    def _sum_over_ranks(self, *values: float, copies: int) -> list[float]:
        """Sums over all ranks, where each value is held by `copies` ranks and counts once."""
        summed = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(summed)
        return (summed / copies).tolist()
