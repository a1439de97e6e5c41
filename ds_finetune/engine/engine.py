"""The engine: one `step` is one optimizer step, and its loss is the mean over the supervised tokens of the global
batch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.engine.collectives import all_gather_object
from ds_finetune.engine.finite_gradients import FiniteProbe
from ds_finetune.engine.generation import GenerationLimits, answer_prompt, prompts_of_rank
from ds_finetune.engine.gradient_norm import global_gradient_norm
from ds_finetune.engine.loss_normalisation import loss_and_correct, mean_per_token, normalise_loss
from ds_finetune.engine.pipeline_schedule import run_1f1b
from ds_finetune.engine.process_groups import Groups
from ds_finetune.engine.state import EngineState
from ds_finetune.engine.whole_tensors import WholeTensors, named_parameters
from ds_finetune.errors import RunError
from ds_finetune.model.lora import is_adapter
from ds_finetune.model.loss import TokenLoss
from ds_finetune.model.parallel.pipeline import PipelineGroup
from ds_finetune.patches.deepspeed_engine import gradients_reduced_at_end
from ds_finetune.plan.plan import Plan


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, the same on every rank. The loss is the mean in nats per supervised token of the
    global batch; `culprit` names the parameter and the rank of a non-finite gradient.
    """

    loss: float
    accuracy: float
    grad_norm: float
    num_tokens: int
    num_supervised_tokens: int
    skipped: bool
    culprit: str


@dataclass(frozen=True)
class HeldOutScores:
    """Mean loss in nats per supervised token and share of tokens predicted correctly, over every row once."""

    loss: float
    accuracy: float
    num_supervised_tokens: int


Normalise = Callable[[torch.Tensor], torch.Tensor]
"""Turns a micro-batch's summed loss into its contribution to the mean over the global batch."""


def _never() -> bool:
    return False


class Engine:
    """A model under DeepSpeed: `step`, `evaluate`, `generate`, `logits`, and its whole `tensors`."""

    def __init__(self, wrapped: Any, plan: Plan, groups: Groups) -> None:  # noqa: ANN401 - a DeepSpeedEngine
        self.plan = plan
        self._groups = groups
        self._stage = groups.stage
        self._ds = wrapped
        self._device = torch.device(wrapped.device)
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
        self._ds.train()
        tokens, supervised = self._sum_over_ranks(
            batch.num_tokens, batch.num_supervised_tokens, copies=self.plan.mesh.sharing
        )
        for group in self._ds.optimizer.param_groups:
            group["lr"] = lr
        self._probe.reset()
        normalise = partial(normalise_loss, num_supervised=supervised, zero_ranks=self.plan.zero_ranks)
        if self._stage is None:
            sums = self._run_micro_batches(batch, normalise)
        else:
            sums = self._run_pipeline(batch, normalise, self._stage)
        loss_sum, correct, bad = self._sum_over_ranks(
            *sums.tolist(), float(self._probe.is_bad()), copies=self.plan.mesh.tp
        )
        grad_norm, skipped = self._step_optimizer(bad > 0)
        return StepResult(
            loss=mean_per_token(loss_sum, supervised),
            accuracy=mean_per_token(correct, supervised),
            grad_norm=grad_norm,
            num_tokens=int(tokens),
            num_supervised_tokens=int(supervised),
            skipped=skipped,
            culprit=self._culprit() if skipped else "",
        )

    def evaluate(self, batches: Iterable[Batch], *, is_over: Callable[[], bool] = _never) -> HeldOutScores | None:
        """Mean loss and token accuracy over `batches`, which hold every row of the data once over all ranks.

        `is_over` is called before each batch and must return the same on every rank; where it is true, the result is
        None.
        """
        self._ds.eval()
        sums, counted = torch.zeros(2, dtype=torch.float64, device=self._device), 0
        with torch.no_grad():
            for batch in batches:
                if is_over():
                    return None
                for out in map(self._forward, batch.micro):
                    sums += loss_and_correct(out)
                counted += batch.num_supervised_tokens
        (supervised,) = self._sum_over_ranks(counted, copies=self.plan.mesh.sharing)
        loss_sum, correct = self._sum_over_ranks(*sums.tolist(), copies=self.plan.mesh.tp)
        return HeldOutScores(mean_per_token(loss_sum, supervised), mean_per_token(correct, supervised), int(supervised))

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
        for number, prompt in prompts_of_rank(prompts, self.plan):
            if is_over():
                return None
            mine[number] = answer_prompt(self.lm, prompt, limits, plan=self.plan, device=self._device)
        merged = {index: answer for part in all_gather_object(mine) for index, answer in part.items()}
        return [merged[index] for index in range(len(prompts))]

    def logits(self, prompts: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        """Logits of each prompt (token ids) in the run's precision, [tokens, vocabulary] as fp32, on every rank.

        Every rank must run the iterator to its end.
        """
        self._ds.eval()
        for prompt in prompts:
            with torch.no_grad():
                yield self.lm(input_ids=torch.tensor([prompt], device=self._device), use_cache=False).logits[0].float()

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

    def tensor_specs(self) -> dict[str, torch.Tensor]:
        """Shape and dtype of what `tensors` yields, in its order, as tensors on the meta device; nothing is
        gathered.
        """
        return {name: spec for name, spec in self._whole.specs().items() if not is_adapter(name)}

    def gather_shards(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which `part` is sharded like parameter `name`, on the first rank of its stage."""
        return self._whole.gather_shards(name, part)

    def _forward(self, micro: MicroBatch) -> TokenLoss | torch.Tensor:
        """The loss of a micro-batch, or hidden states on a pipeline stage before the last."""
        sequence = self._ds.module.sp_group
        rows = (micro.input_ids, micro.position_ids, micro.labels)
        parts = ((sequence.shard(part) if sequence else part).to(self._device, non_blocking=True) for part in rows)
        out: TokenLoss | torch.Tensor = self._ds(*parts, micro.documents)
        return out

    def _run_micro_batches(self, batch: Batch, normalise: Normalise) -> torch.Tensor:
        """Forward and backward of every micro-batch; returns summed loss and number of correct predictions of this
        rank, fp64 [2].
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for index, micro in enumerate(batch.micro, start=1):
            loss = self._forward(micro)
            assert isinstance(loss, TokenLoss)
            self._ds.backward(normalise(loss.loss_sum), scale_wrt_gas=False)
            sums += loss_and_correct(loss)
            if index < len(batch.micro):
                self._ds.step()
        return sums

    def _run_pipeline(self, batch: Batch, normalise: Normalise, stage: PipelineGroup) -> torch.Tensor:
        """The same on a pipeline stage; only the last stage has sums other than zeros."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)

        def forward(micro: MicroBatch) -> torch.Tensor:
            out = self._forward(micro)
            sums.add_(loss_and_correct(out))
            return normalise(out.loss_sum) if isinstance(out, TokenLoss) else out

        with gradients_reduced_at_end(self._ds, zero_stage=self.plan.zero_stage):
            run_1f1b(stage, batch.micro, forward, lambda scalar: self._ds.backward(scalar, scale_wrt_gas=False))
            if self._is_tied:
                stage.all_reduce_embedding_grad(self._ds.module.lm.get_input_embeddings().weight.grad)
        return sums

    def _step_optimizer(self, has_bad_gradient: bool) -> tuple[float, bool]:
        """Take the optimizer step of a whole batch; returns the gradient norm before clipping and whether the step was
        skipped.
        """
        if self.plan.is_engine_clipping:
            params = [param for param in self._ds.module.parameters() if param.grad is not None]
            norm = global_gradient_norm(params, self._groups, self._device)
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

    def _culprit(self) -> str:
        """The parameter with the first non-finite gradient, and its rank; collective."""
        names = all_gather_object(self._probe.first_bad())
        # The last stage of a pipeline sends a non-finite gradient on to the stages before it.
        ranks = sorted(range(len(names)), key=lambda rank: -self.plan.mesh.place("pp", rank))
        culprits = [f"{names[rank]} on rank {rank}" for rank in ranks if names[rank]]
        return culprits[0] if culprits else "no single gradient; the reduction overflowed"

    def _sum_over_ranks(self, *values: float, copies: int) -> list[float]:
        """Sums over all ranks, where each value is held by `copies` ranks and counts once."""
        summed = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(summed)
        return (summed / copies).tolist()
