"""The engine: `Engine.step` is one optimizer step, whose loss is the mean over the units of the global batch.

The engine knows only the terms, sums and metrics of an objective, not its formula.
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.engine.devices import use_device
from ds_finetune.engine.generation import answer_prompts
from ds_finetune.engine.gradients import FiniteProbe, clip_gradients
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.groups.communication import CommunicationMeter
from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.loss_normalisation import UNITS, detached_sums, scale_for_deepspeed, term_weights, unit_counts
from ds_finetune.engine.patches.deepspeed_engine import gradients_reduced_at_end
from ds_finetune.engine.patches.deepspeed_gathering import KeptWeights
from ds_finetune.engine.pipeline_schedules import StageForward, run_pipeline
from ds_finetune.engine.rank_rows import RankBatch, copy_to_device, host_rows, rank_batch, rows_on_device
from ds_finetune.engine.results import (
    NO_SCORES,
    DocumentScores,
    HeldOutScores,
    StepResult,
    check_counts,
    gather_scores,
    global_counts,
    read_step,
    scores_of,
)
from ds_finetune.engine.sampling.answers import SampledAnswer, SamplingLimits, SamplingRequest
from ds_finetune.engine.sampling.sampler import check_answers, sample_prompts
from ds_finetune.engine.state.full_tensors import FullTensors, named_parameters
from ds_finetune.engine.state.replicas import check_replicas
from ds_finetune.engine.state.state import EngineState
from ds_finetune.errors import RunError
from ds_finetune.model.adapters.lora import adapters_off as turn_adapters_off
from ds_finetune.model.loss.extra_loss import TotalLoss
from ds_finetune.model.loss.forward_rows import ForwardRows, StageOutput
from ds_finetune.model.loss.score_head import logits_of_prompt
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.model.parallel.pipeline import PipelineGroup, has_tied_head
from ds_finetune.model.weights.names import is_adapter
from ds_finetune.objectives.objective import AnswerObjective, Examples, LossAndSums, Objective, StepNumbers
from ds_finetune.plan.plan import Plan


def _examples_of(rows: ForwardRows) -> Examples:
    assert rows.examples is not None, "the batch has no examples; set documents_per_unit in its BatchPlan"
    return rows.examples


class Engine:
    """A model under DeepSpeed: the engine trains, evaluates and generates, and gathers full tensors."""

    random_parameters: tuple[str, ...] = ()
    """Names of this rank's randomly initialised parameters, which the model's folder lacks."""
    has_bad_gradient = False
    """Whether a gradient of any rank was NaN or infinite in the latest step."""
    own_norms: Mapping[str, float] = MappingProxyType({})
    """Latest gradient norms of parameters that only an auxiliary loss trains, by the name of that loss."""

    def __init__(self, wrapped: Any, plan: Plan, groups: Groups, objective: Objective) -> None:  # noqa: ANN401 - a DeepSpeedEngine
        self.plan = plan
        self.objective = objective
        self._groups = groups
        self._stage = groups.stage
        self._ds = wrapped
        self._device = torch.device(wrapped.device)
        self.meter = CommunicationMeter(is_blocking=self._device.type == "cpu")
        self._probe = FiniteProbe(named_parameters(wrapped.module))
        self._full_tensors = FullTensors(wrapped.module, plan, groups, self._device)
        self._kept: KeptWeights | None = None

    @property
    def lm(self) -> nn.Module:
        """The Hugging Face model."""
        return self._ds.module.lm

    @property
    def state(self) -> EngineState:
        """This rank's training state, which checkpoints save and restore."""
        return EngineState(self._ds, self.plan, self._groups.same_shard)

    def use_device(self) -> None:
        """Make this rank's GPU the current CUDA device of this thread."""
        use_device(self._device)

    def check_replicas(self) -> None:
        """Raise RunError on every rank if replicas of a weight differ in any bit; collective."""
        module, shared = self._ds.module, None
        if self._trains_both_ends:
            weight = module.lm.get_input_embeddings().weight
            shared = next(name for name, param in named_parameters(module) if param is weight)
        check_replicas(module, self.state, self.plan, self._groups, embedding=shared)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process is rank zero, which prints and writes files."""
        return self.plan.world.rank == 0

    def step(self, batch: Batch, *, lr: float) -> StepResult:
        """Take one optimizer step with learning rate `lr`. `batch` is this rank's part of the global batch."""
        self.meter.restart()
        prepared, mesh = self.prepare(batch), self.plan.mesh
        rows = tuple(map(self._with_reference, prepared.rows))
        counts = global_counts(batch, mesh, self._device)
        numbers = self._step_numbers(counts, prepared.baseline_rows)
        self._share_embedding()
        self._ds.train()
        for group in self._ds.optimizer.param_groups:
            group["lr"] = lr
        self._probe.reset()
        if self._stage is None:
            sums = self._run_micro_batches(rows, numbers)
        else:
            sums = self._run_pipeline(rows, numbers, self._stage)
        own_counts = copy_to_device(unit_counts(batch.counts), self._device)
        reading = read_step(sums, self._probe.is_bad(), own_counts, self._total_loss.extras, mesh)
        check_counts(batch.global_counts or reading.counts, reading.counts)
        self.has_bad_gradient = reading.has_bad_gradient
        norm, is_skipped = self._step_optimizer()
        if self._ds.module.in_fp32.params:
            self.state.update_fp32()
        number, loss = {unit: int(count) for unit, count in reading.counts.items()}, self._total_loss
        counted = {
            extra.name: extra.finish_step(
                *reading.counted[extra.name], num_tokens=number["tokens"], is_skipped=is_skipped
            )
            for extra in loss.extras
            if extra.name in reading.counted
        }
        own_norms = {f"{name}_grad_norm": math.inf if is_skipped else norm for name, norm in self.own_norms.items()}
        return StepResult(
            metrics={**loss.metrics(loss.named(reading.sums), reading.counts), **own_norms},
            grad_norm=norm,
            num_tokens=number["tokens"],
            num_supervised_tokens=number["supervised_tokens"],
            num_examples=number["examples"],
            skipped=is_skipped,
            counted=counted,
            culprit=self._probe.culprit(mesh) if is_skipped else "",
            communication=self.meter.counted() if mesh.world_size > 1 else None,
        )

    def prepare(self, batch: Batch) -> RankBatch:
        """Prepare the rows of `batch` for a step, on the host, even while the device computes an earlier step."""
        return batch if isinstance(batch, RankBatch) else rank_batch(batch, self._ds.module.sp_group, self._device)

    def evaluate(
        self,
        batches: Iterable[Batch],
        *,
        baseline: Iterable[MicroBatch] = (),
        is_over: Callable[[], bool] = lambda: False,
    ) -> HeldOutScores | None:
        """Compute metrics over `batches`. The batches of all ranks must contain every row of the data once. `baseline`
        has this rank's documents for the baseline of the objective (KTO's z0), which is computed over all ranks.
        `is_over` is called before each batch and must return the same on every rank. If it returns True, the evaluation
        ends and the result is None.
        """
        self._share_embedding()
        self._ds.eval()
        sums, counts, scores = self._no_sums(), Counter[str](), list[DocumentScores]()
        ones = torch.ones(len(UNITS), dtype=torch.float64, device=self._device)
        numbers = self._step_numbers(ones, (host_rows(micro, self._ds.module.sp_group) for micro in baseline))
        with torch.no_grad():
            for batch in batches:
                if is_over():
                    return None
                for micro, rows in zip(batch.micro, self.prepare(batch).rows, strict=True):
                    out = self._forward(self._with_reference(rows), numbers)
                    sums += detached_sums(out, len(sums))
                    scores.append(scores_of(out, micro) if self.objective.gathers_scores else NO_SCORES)
                counts.update(batch.counts)
        totals = self._sum_over_ranks(sums, copies=self.plan.mesh.tp)
        units = self._sum_over_ranks(unit_counts(counts).to(self._device), copies=self.plan.mesh.sharing)
        total_units = dict(zip(UNITS, units, strict=True))
        all_scores = gather_scores(scores, self.plan.mesh) if self.objective.gathers_scores else NO_SCORES
        return self._scores(self._total_loss.named(totals), total_units, all_scores)

    def pool(self, scores: Iterable[HeldOutScores]) -> HeldOutScores:
        """Compute metrics over the rows of several evaluations together."""
        sums, counts, all_scores = Counter[str](), Counter[str](), NO_SCORES
        for part in scores:
            sums.update(part.sums)
            counts.update(part.counts)
            all_scores = np.concatenate([all_scores, part.scores])
        return self._scores(sums, counts, all_scores)

    def document_log_probs(self, batches: Iterable[Batch]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Log-probabilities of all documents, each summed over its supervised tokens, on every rank. Returns document
        numbers [n], ascending, and log-probabilities [n] in nats. The batches of all ranks must contain each document
        once. The values are bitwise equal to those that `step` computes in forwards with the same rows.
        """
        self._ds.eval()
        numbers, logps = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for batch in batches:
            for micro, rows in zip(batch.micro, self.prepare(batch).rows, strict=True):
                logps.append(self._log_probs(rows).cpu().numpy())
                assert micro.examples is not None
                numbers.append(micro.examples.numbers.numpy())
        mesh = self.plan.mesh
        is_first = mesh.coordinate("tp") == mesh.coordinate("sp") == mesh.coordinate("pp") == 0
        own_results = (np.concatenate(numbers), np.concatenate(logps)) if is_first else (numbers[0], logps[0])
        merged = [np.concatenate(parts) for parts in zip(*all_gather_object(own_results), strict=True)]
        order = np.argsort(merged[0], kind="stable")
        return merged[0][order], merged[1][order]

    def token_log_probs(
        self, batches: Iterable[Batch], *, of_reference: bool = False
    ) -> dict[int, NDArray[np.float32]]:
        """Log-probability of each supervised token in nats, by document number. Every rank gets all results. The
        batches of all ranks must contain each document once, with equally many forwards on each rank. The values are
        bitwise equal to those that `step` computes in forwards with the same rows. `of_reference` uses the weights that
        `keep_as_reference` copied, or else the model with its adapters disabled.
        """
        self._ds.eval()
        own_results = list[tuple[int, NDArray[np.float32]]]()
        reference = turn_adapters_off(self.lm) if self._kept is None else self._kept.used()
        with reference if of_reference else nullcontext():
            for batch in batches:
                for rows in self.prepare(batch).rows:
                    logp, supervised = self._log_probs(rows).cpu().numpy(), rows.supervised
                    examples = _examples_of(rows)
                    assert supervised is not None
                    index = examples.index.reshape(-1)[supervised]
                    ends = index.bincount(minlength=len(examples.numbers)).cumsum(0)
                    own_results += zip(examples.numbers.tolist(), np.split(logp, ends.tolist()[:-1]), strict=False)
        mesh = self.plan.mesh
        of_ranks = all_gather_object((mesh.coordinate("sp"), own_results if mesh.coordinate("tp") == 0 else []))
        parts_of_document: dict[int, list[NDArray[np.float32]]] = {}
        for _, of_rank in sorted(of_ranks, key=itemgetter(0)):
            for number, part in of_rank:
                parts_of_document.setdefault(number, []).append(part)
        return {number: np.concatenate(parts) for number, parts in parts_of_document.items()}

    def keep_as_reference(self) -> None:
        """Copy the current weights to host memory, as the reference model of `token_log_probs`."""
        self._kept = KeptWeights(self._ds.module)

    @property
    def shares_prompts(self) -> bool:
        """Whether the answers to a prompt can share the prompt's tokens in a packed row. They cannot if a loss balances
        the load of experts, because it counts the tokens of each document.
        """
        router = self.plan.router
        is_balanced = router is not None and bool(router.balance or router.bias_update)
        return not is_balanced and self._ds.module.continues_documents(self._device)

    def allow_only(self, allowed: torch.Tensor | None) -> None:
        """Normalise log-probabilities of answers over the `allowed` ids only, bool [vocabulary]; None means all ids."""
        head, mesh = self._ds.module.lm.get_output_embeddings(), self.plan.mesh
        head.forbidden = None if allowed is None else ~allowed.chunk(mesh.tp)[mesh.coordinate("tp")].to(self._device)

    def generate(
        self, prompts: list[list[int]], limits: SamplingLimits, *, is_over: Callable[[], bool] = lambda: False
    ) -> list[list[int]] | None:
        """Generate greedy answers to `prompts`, which are distributed over the ranks. Returns the answers' token ids,
        without stop tokens. `is_over` is called before each answer and must return the same on every rank. If it
        returns True, generation ends and the result is None.
        """
        self._ds.eval()
        own_answers = answer_prompts(self._ds, self.plan, prompts, limits, is_over=is_over)
        if own_answers is None:
            return None
        merged = {index: answer for part in all_gather_object(own_answers) for index, answer in part.items()}
        return [merged[index] for index in range(len(prompts))]

    def sample(self, request: SamplingRequest) -> list[list[SampledAnswer]] | None:
        """Sample answers to each prompt of `request`, distributed over the ranks. Every rank gets all answers."""
        was_training = self._ds.training
        self._ds.eval()
        own_answers = sample_prompts(self._ds, self.plan, self._groups.tensor, request)
        self._ds.train(was_training)
        if own_answers is None:
            return None
        is_first = self.plan.mesh.coordinate("tp") == self.plan.mesh.coordinate("pp") == 0
        of_ranks = all_gather_object(own_answers if is_first else {})
        answers = {index: answer for of_rank in of_ranks for index, answer in of_rank.items()}
        check_answers(answers.values())
        size = request.group_size
        return [[answers[prompt * size + at] for at in range(size)] for prompt in range(len(request.prompts))]

    def logits(self, prompts: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        """Yield the logits of each prompt (token ids), in the run's precision, on every rank. Logits are fp32 [tokens,
        vocabulary]; a classifier gives its scores [1, outputs]. Collective: every rank must exhaust the iterator.
        """
        self._ds.eval()
        for prompt in prompts:
            with torch.no_grad():
                yield logits_of_prompt(self.lm, torch.tensor([prompt], device=self._device)).float()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield full tensors of all parameters and persistent buffers by Hugging Face name, on rank zero's CPU. On
        other ranks the tensors are None. One parameter is gathered at a time, and every rank must exhaust the iterator.
        Adapters are neither included nor merged. 4-bit weights are dequantised.
        """
        return self._full_tensors.gather(lambda name: not is_adapter(name))

    def adapters(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield full tensors of the adapters' parameters, on rank zero's CPU; see `tensors`."""
        return self._full_tensors.gather(is_adapter)

    def named_tensors(self, names: Container[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield full tensors of the parameters called `names`, on rank zero's CPU; see `tensors`."""
        return self._full_tensors.gather(lambda name: name in names)

    def tensor_specs(self) -> dict[str, torch.Tensor]:
        """Shapes and dtypes of the tensors that `tensors` yields, in order, as meta tensors. Nothing is gathered."""
        return {name: spec for name, spec in self._full_tensors.specs().items() if not is_adapter(name)}

    def gather_shards(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Gather a full tensor on its stage's first rank; `part` is this rank's shard, sharded as parameter `name`."""
        return self._full_tensors.gather_shards(name, part)

    def _forward(self, rows: ForwardRows, numbers: StepNumbers | None) -> LossAndSums | StageOutput:
        out: LossAndSums | StageOutput = self._ds(rows_on_device(rows, self._device), numbers)
        return out

    def _log_probs(self, rows: ForwardRows) -> torch.Tensor:
        """Log-probabilities of a forward's documents, fp64 [documents], equal on all ranks that share its rows."""
        with torch.no_grad():
            out = self._ds(rows_on_device(rows, self._device), wants_log_probs=True)
        if self._stage is None:
            assert isinstance(out, torch.Tensor)
            return out
        logps = torch.zeros(len(_examples_of(rows).numbers), dtype=torch.float64, device=self._device)
        return self._stage.broadcast_from_last(out if self._stage.is_last else logps)  # type: ignore[arg-type]

    def _with_reference(self, rows: ForwardRows) -> ForwardRows:
        if not self.objective.reference_from_adapters:
            return rows
        self._ds.eval()
        with turn_adapters_off(self.lm):
            return replace(rows, examples=replace(_examples_of(rows), reference=self._log_probs(rows)))

    def _baseline(self, forwards: Iterable[ForwardRows]) -> float:
        if not self.objective.needs_baseline:
            return 0.0
        self._ds.eval()
        numbers = torch.zeros(2, dtype=torch.float64, device=self._device)
        for rows in map(self._with_reference, forwards):
            reference = _examples_of(rows).reference.to(self._device, non_blocking=True)
            numbers[0] += (self._log_probs(rows) - reference).sum()
            numbers[1] += len(reference)
        return self.objective.baseline(*self._sum_over_ranks(numbers, copies=self.plan.mesh.sharing))

    def _run_micro_batches(self, micro_batches: Sequence[ForwardRows], numbers: StepNumbers) -> torch.Tensor:
        sums, once = self._no_sums(), self.plan.reduces_once
        # With sampled answers the number of micro-batches varies by step, so DeepSpeed is told which one is the last.
        varies = not once and isinstance(self.objective, AnswerObjective)
        with gradients_reduced_at_end(self._ds, zero_stage=self.plan.zero_stage) if once else nullcontext():
            for index, rows in enumerate(micro_batches, start=1):
                out = self._forward(rows, numbers)
                assert isinstance(out, LossAndSums)
                if varies:
                    self._ds.set_gradient_accumulation_boundary(index == len(micro_batches))
                self._ds.backward(scale_for_deepspeed(out.loss, zero_ranks=self.plan.zero_ranks), scale_wrt_gas=False)
                sums += out.sums
                if index < len(micro_batches) and not once:
                    self._ds.step()
        return sums

    def _run_pipeline(self, batches: Sequence[ForwardRows], numbers: StepNumbers, stage: PipelineGroup) -> torch.Tensor:
        """Forward and backward of all micro-batches on this rank's pipeline stage. Returns the sums over them."""
        sums = self._no_sums()

        def forward(rows: ForwardRows) -> StageForward:
            out = self._forward(rows, numbers)
            sums.add_(detached_sums(out, len(sums)))
            loss = None if out.loss is None else scale_for_deepspeed(out.loss, zero_ranks=self.plan.zero_ranks)
            return StageForward(loss, out.hidden if isinstance(out, StageOutput) else None)

        with gradients_reduced_at_end(self._ds, zero_stage=self.plan.zero_stage):
            run_pipeline(stage, batches, forward, lambda scalar: self._ds.backward(scalar, scale_wrt_gas=False))
            if self._trains_both_ends:
                stage.all_reduce_embedding_grad(self._ds.module.lm.get_input_embeddings().weight.grad)
        return sums

    def _share_embedding(self) -> None:
        """Copy the first pipeline stage's embedding to the last stage, where multi-token prediction reads it."""
        stage, module = self._stage, self._ds.module
        if stage is not None and stage.is_end and mtp_layers(module.config) and not self._trains_both_ends:
            stage.broadcast_embedding(module.lm.get_input_embeddings().weight)

    def _no_sums(self) -> torch.Tensor:
        return torch.zeros(len(self._total_loss.sum_names), dtype=torch.float64, device=self._device)

    def _step_numbers(self, counts: torch.Tensor, baseline: Iterable[ForwardRows] = ()) -> StepNumbers:
        number = torch.full((), self._baseline(baseline), dtype=torch.float64, device=self._device)
        return StepNumbers(term_weights(self._total_loss.terms, counts), number)

    @property
    def _total_loss(self) -> TotalLoss:
        return TotalLoss(self.objective, self._ds.module.extras)

    def _scores(
        self, sums: Mapping[str, float], counts: Mapping[str, float], all_scores: DocumentScores
    ) -> HeldOutScores:
        metrics = self._total_loss.metrics(sums, counts)
        if self.objective.gathers_scores:
            metrics |= self.objective.score_metrics(all_scores[:, 0], all_scores[:, 1])
        return HeldOutScores(metrics, counts, self.objective.is_per_token, sums, all_scores)

    def _step_optimizer(self) -> tuple[float, bool]:
        """Take the optimizer step. Returns the gradient norm before clipping, and whether the step was skipped."""
        if self.plan.is_engine_clipping:
            params = [param for param in self._ds.module.parameters() if param.grad is not None]
            limit = self.plan.train.max_grad_norm
            norm, *own_norms = clip_gradients(params, limit, self._groups, losses=self.own_norms, device=self._device)
            self.own_norms = dict(zip(self.own_norms, own_norms, strict=True))
            is_skipped = self.has_bad_gradient or not all(map(math.isfinite, (norm, *own_norms)))
            if is_skipped:
                # DeepSpeed 0.19.8 would apply NaN gradients at stage 0 in fp32. torch's optimizer changes no weight
                # without a gradient.
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
                hint="this is a fault of the program: please report it",
            )
        # DeepSpeed's ZenFlow computes a gradient norm only in steps that update all weights.
        global_norm = self._ds.get_global_grad_norm() if self._ds.global_steps > steps_before else None
        return math.nan if global_norm is None else float(global_norm), skipped

    @property
    def _trains_both_ends(self) -> bool:
        """Whether this is the first or last pipeline stage, and both compute a part of the embedding's gradient."""
        module, is_end = self._ds.module, self._stage is not None and self._stage.is_end
        trains_copy = has_tied_head(module.lm) or any(extra.trains_embedding for extra in module.extras)
        return is_end and trains_copy and module.lm.get_input_embeddings().weight.requires_grad

    def _sum_over_ranks(self, values: torch.Tensor, *, copies: int) -> list[float]:
        """Sum `values`, fp64, over all ranks. Each value is replicated on `copies` ranks and counts once."""
        dist.all_reduce(values)
        return (values / copies).tolist()
