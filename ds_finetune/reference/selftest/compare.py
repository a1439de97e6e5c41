"""Compares one parallel layout with the reference loop: loss, gradients, gradient norm, resuming and export."""

import copy
import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from ds_finetune.checkpoint.folder import open_checkpoint_folder
from ds_finetune.checkpoint.restore import newest_checkpoint, restore_engine
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.saver import Saver
from ds_finetune.config.objectives import ObjectiveConfig
from ds_finetune.config.sections import LoraConfig
from ds_finetune.config.units import GIB
from ds_finetune.data.answer_batches import ScoredAnswer, answer_batch
from ds_finetune.data.batches import Batch, BatchPlan, eval_baseline, eval_batches, training_batches
from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.teacher_scores import StoredScores, with_scores
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.ops.deepspeed_ops import build_ops
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.errors import CheckpointError
from ds_finetune.export.safetensors_folder import FolderParts, write_folder
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora import factors_of, merge_adapters
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.model_plan import task_of
from ds_finetune.model.build.skeleton import FACTORIES, read_hf_config
from ds_finetune.model.experts import spread_ids
from ds_finetune.model.mtp import PREDICTION_LAYERS
from ds_finetune.model.weights.names import is_adapter
from ds_finetune.objectives.objective import AnswerObjective, Distillation, Objective
from ds_finetune.plan.model_checks import check_model
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.settings import ModelSettings, RunSettings
from ds_finetune.reference.selftest.cells import (
    all_reference_log_probs,
    answer_advantages,
    answer_log_probs,
    mismatched_answers,
    parts_of,
    rows,
)
from ds_finetune.reference.selftest.plain_features import PlainAdapters, add_layer
from ds_finetune.reference.selftest.reference_loop import (
    BETAS,
    LIMITS,
    LR,
    PROMPTS,
    SFT,
    Steps,
    mean_loss,
    reference_loop,
)
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import complete_features, plan_model


def batch_plan(plan: Plan, objective: Objective | None = None) -> BatchPlan:
    """Distribute the samples over ranks for `objective`; without an objective, no samples are paired or grouped."""
    is_compared = objective is not None and objective.needs_reference
    return BatchPlan(
        global_batch_size=plan.train.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        rank=plan.mesh.coordinate("dp"),
        dp=plan.dp,
        seed=0,
        shuffle=False,
        pad_token_id=0,
        row_len=plan.train.max_seq_len if plan.data.packing else None,
        multiple=plan.mesh.sp,
        looks_ahead=plan.mtp.train,
        documents_per_unit=objective.documents_per_unit if objective is not None else 0,
        reference=all_reference_log_probs() if is_compared else None,
    )


def take_steps(engine: Engine, steps: int) -> Iterator[Steps]:
    """Take optimizer steps on all samples, and yield the results so far after each step.

    Gradients are recorded only for AdamW in fp32: all gradients in the first step, and those of adapters in the second.
    Answers are generated after the last step.
    """
    plan, results = engine.plan, Steps()
    has_gradients = plan.optimizer == "adamw" and plan.precision == "fp32"
    for step in range(steps):
        result = engine.step(whole_batch(engine), lr=LR)
        results.losses.append(result.loss)
        results.norms.append(result.grad_norm)
        results.balances += [result.metrics["balance_loss"]] if "balance_loss" in result.metrics else []
        results.mtp_losses += [result.metrics["mtp_loss"]] if "mtp_loss" in result.metrics else []
        results.mtp_norms += [result.metrics["mtp_grad_norm"]] if "mtp_grad_norm" in result.metrics else []
        results.choices += [result.counted["routers"].counts] if "routers" in result.counted else []
        if step == 0 and has_gradients:
            results.gradients = first_gradients(engine)
        if step == 1 and any(map(is_adapter, results.gradients)):
            # After two steps, Adam's first moment is (1 - beta1) x (beta1 x g1 + g2) with the gradients g1 and g2.
            moments = of_all_stages(engine, first_moments(engine))
            results.later_gradients = {
                name: moment / (1 - BETAS[0]) - BETAS[0] * results.gradients[name]
                for name, moment in moments.items()
                if is_adapter(name)
            }
        lm: Any = engine.lm
        # The engine samples no answers from models whose layers have a recurrent state.
        is_sampled = engine.objective.head != "scores" and not family_of(lm.config.model_type).has_state
        if step == steps - 1 and is_sampled:
            answers = engine.generate(PROMPTS, LIMITS)
            assert answers is not None
            results.answers = answers
        yield results


def eval_loss(engine: Engine) -> float:
    """Mean loss of the engine's model over all samples."""
    if isinstance(engine.objective, AnswerObjective):
        answered = engine.evaluate([whole_batch(engine)])
        assert answered is not None
        return answered.loss
    all_rows = rows(engine.plan.data.packing, engine.objective.documents_per_unit)
    plan, mismatched = batch_plan(engine.plan, engine.objective), _mismatched(engine)
    baseline = () if mismatched is None else eval_baseline(mismatched, plan)
    evaluation = engine.evaluate(_with_scores(engine, eval_batches(all_rows, plan)), baseline=baseline)
    assert evaluation is not None
    return evaluation.loss


def whole_batch(engine: Engine) -> Batch:
    """This rank's part of the single batch that contains all samples."""
    all_rows = rows(engine.plan.data.packing, engine.objective.documents_per_unit)
    plan = batch_plan(engine.plan, engine.objective)
    if isinstance(engine.objective, AnswerObjective):
        rows_of_batch = []
        for number, advantage in enumerate(answer_advantages().tolist()):
            old, sampled, reference = answer_log_probs(number)
            prompt, ids = parts_of(number)
            rows_of_batch.append(ScoredAnswer(prompt.tolist(), ids, advantage, number, sampled, old, reference))
        return answer_batch(rows_of_batch, plan)
    batches = training_batches(all_rows, plan, start_step=0, total_rows=len(all_rows), mismatched=_mismatched(engine))
    return next(_with_scores(engine, batches))


def _mismatched(engine: Engine) -> MismatchedAnswers | None:
    is_packed = engine.plan.data.packing
    return mismatched_answers(packing=is_packed) if engine.objective.needs_baseline else None


def _with_scores(engine: Engine, batches: Iterator[Batch]) -> Iterator[Batch]:
    objective = engine.objective
    if not isinstance(objective, Distillation) or objective.section.scores is None:
        return batches
    return with_scores(batches, StoredScores.open(Path(objective.section.scores)))


def first_moments(engine: Engine) -> dict[str, torch.Tensor]:
    """Adam's first moments by parameter name, fp32 on the CPU, on the first rank of each pipeline stage."""
    moments = {}
    for name, param in engine.lm.named_parameters():
        assert isinstance(param, nn.Parameter)
        if param.requires_grad:
            moments[name] = engine.gather_shards(name, engine.state.first_moment(param)).clone().cpu()
    return moments


def first_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Compute the gradients of the first step from Adam's first moments, by parameter name."""
    return of_all_stages(engine, {name: moment / (1 - BETAS[0]) for name, moment in first_moments(engine).items()})


def of_all_stages(engine: Engine, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Collect tensors by parameter name from the first rank of each pipeline stage; collective with several stages."""
    mesh = engine.plan.mesh
    if mesh.pp == 1:
        return tensors
    stages = all_gather_object(tensors if mesh.rank == mesh.leader else {})
    for earlier, later in itertools.combinations(stages, 2):
        assert all(torch.equal(earlier[name], later[name]) for name in earlier.keys() & later.keys()), (
            "tied weights have two gradients"
        )
    return {name: tensor for stage in stages for name, tensor in stage.items()}


_cached_steps = cache(reference_loop)
"""Results of the reference loop, cached by folder, because all layouts of a model are compared with the same loop."""
_FEW_STEPS = 3
_LONG_RUN = 2e-4
"""Tolerance for losses over more than _FEW_STEPS steps, over which rounding errors grow."""
_LEAST_FRACTION = 1e-3
"""Errors of a gradient are relative to its norm. In a one-element gradient, e.g. of DeepSeek-V4's `hc_head.hc_scale`,
summands may cancel, so its norm counts as at least this fraction of the global gradient norm.
"""
_EXACT = {"loss": 1e-5, "gradient": 1e-4, "norm": 1e-4, "resume": 1e-5, "export": 1e-5, "answers": 0.0}
_OF_ROUTERS = {"balance": 1e-4, "choices": 0.0}
_OF_ADAPTERS = {"adapters": 2e-3}
"""Tolerance for gradients of LoRA adapters in the second step; matrix A has no earlier gradient, because B is zero at
first. AdamW divides by |gradient| + 1e-8. If B's first gradient is as small as a rounding error, its first update is
arbitrary, and so A's second gradient differs.
"""
_ROUNDED = {"loss": 1.5e-2, "norm": 2e-2, "resume": 1e-3, "export": 1.5e-2}
"""Tolerances in 16 bits. Rounding changes the third digit of a loss, a missing gradient would change the second."""


@dataclass(frozen=True)
class LayoutComparison:
    """Differences between a layout and the reference loop, and their tolerances, by name.

    `loss` (largest over all steps), `resume`, `export` and `mtp` (the multi-token prediction loss, largest over all
    steps) are in nats. `gradient`, `norm`, and `adapters` (gradients of adapters in the second step) are relative.
    `answers` is the number of different answers, `balance` the largest difference of the balance loss, and `choices`
    the number of different choices of experts in the first step.
    """

    differences: dict[str, float]
    limits: dict[str, float]

    @property
    def is_equal(self) -> bool:
        """Whether no difference exceeds its tolerance. NaN exceeds any tolerance."""
        return all(self.differences[name] <= limit for name, limit in self.limits.items())

    def text(self) -> str:
        """One line with all differences. It shows exceeded tolerances, and always the tolerance of adapters."""
        limits = {
            name: f" (limit {limit:.0e})" if self.differences[name] > limit or name in _OF_ADAPTERS else ""
            for name, limit in self.limits.items()
        }
        return ", ".join(f"{name} {self.differences[name]:.1g}{limits[name]}" for name in self.limits)


def write_model(
    config: PretrainedConfig,
    folder: Path,
    *,
    objective: ObjectiveConfig = SFT,
    has_mtp: bool = False,
    router_scale: float = 1.0,
) -> None:
    """Write to `folder` a model of `config` with random weights, identical on every machine. With `has_mtp` it
    has a multi-token prediction layer. `router_scale` multiplies the weights of routers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = FACTORIES[task_of(objective)].from_config(copy.deepcopy(config)).float()
        for name, param in model.named_parameters():
            if name.endswith("_proj.bias"):
                # transformers initialises biases with zeros, which would hide a bias that is left out or added twice.
                nn.init.normal_(param, std=0.1)
            if name.endswith((".gate.weight", ".router.weight")):
                param.data.mul_(router_scale)
        spread_ids(model, getattr(config, "n_routed_experts", 0))
        if has_mtp:
            add_layer(model)
            layer = model.get_decoder().layers[-1]
            for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
                nn.init.normal_(tensor, mean=float("norm" in name), std=0.1)
        model.save_pretrained(folder)
    if has_mtp:
        tree = config.to_dict() | {"architectures": [type(model).__name__], PREDICTION_LAYERS: 1}
        (folder / "config.json").write_text(json.dumps(tree), encoding="utf-8")


def compare_layout(run: RunSettings, world: World, device: str, folder: Path, *, steps: int) -> LayoutComparison | None:
    """Take `steps` optimizer steps (2 or more) in the layout of `run` with its tiny model, and compare them with the
    reference loop. All ranks call this with a shared `folder`. Rank zero returns the comparison, other ranks None.
    """
    plan = make_plan(run, world=world, device=device)
    hf_config = read_hf_config(run.model.path, task=task_of(run.objective))
    check_model(ModelSettings(plan, hf_config.to_dict()), "sizes of the model")
    model = plan_model(hf_config, run)
    # Notes on compiled operators were printed before the first layout, so they are not printed again.
    plan = complete_features(build_ops(plan, all_gather_object, lambda _: None), model)
    router = model.router if run.router is not None else None
    adapters = PlainAdapters(run.lora, plan.train.seed) if run.lora is not None else None
    # The reference model is built before any engine is started: in the first model that from_pretrained builds after
    # DeepSpeed 0.19.8's zero.Init, rotary frequencies are uninitialised memory.
    reference = Steps()
    if world.rank == 0:
        reference = _cached_steps(
            Path(run.model.path),
            steps=steps,
            max_grad_norm=run.train.max_grad_norm,
            objective=run.objective,
            router=router,
            adapters=adapters,
            mtp=run.mtp if run.mtp.train else None,
        )
    with start_engine(plan, model) as engine:
        taken_steps = _steps_with_checkpoint(engine, folder, steps)
        loss = eval_loss(engine)
        _export(engine, Path(run.model.path), run.lora, folder / "export")
    with start_engine(plan, model, loads_weights=False) as engine:
        resumed = _steps_after_resume(engine, folder, steps - 1)
    if world.rank:
        return None
    base = (Path(run.model.path), adapters) if adapters is not None else None
    reloaded = mean_loss(folder / "export", PRECISION_DTYPES[plan.precision], run.objective, base=base)
    return compare_steps(reference, taken_steps, resumed, abs(reloaded - loss))


def compare_steps(reference: Steps, steps: Steps, resumed: Steps, export: float) -> LayoutComparison:
    """Compare the layout's `steps` with those of the reference loop, and with the layout's `resumed` steps.

    `resumed` steps were taken from the checkpoint of the first step on. `export` is the difference between the losses
    of the model and of its export.
    """
    actual, expected = [*steps.norms, *steps.mtp_norms], [*reference.norms, *reference.mtp_norms]
    norms = zip(actual, expected, strict=True)
    differences = {
        "loss": _largest_difference(steps.losses, reference.losses),
        "norm": _largest(abs(norm - other) / other for norm, other in norms),
        "resume": _largest_difference(resumed.losses, steps.losses[1:]),
        "export": export,
        "answers": float(sum(one != other for one, other in zip(steps.answers, reference.answers, strict=True))),
    }
    is_exact = bool(steps.gradients)
    if is_exact:
        differences["gradient"] = _gradient_difference(steps.gradients, reference.gradients)
    limits = _EXACT if is_exact else _ROUNDED
    if is_exact and reference.later_gradients:
        differences["adapters"] = _gradient_difference(steps.later_gradients, reference.later_gradients)
        limits = limits | _OF_ADAPTERS
    if is_exact and reference.choices:
        of_routers = {"choices": float((steps.choices[0] - reference.choices[0]).abs().sum() / 2)}
        if steps.balances:
            of_routers["balance"] = _largest_difference(steps.balances, reference.balances)
        differences |= of_routers
        limits = limits | {name: _OF_ROUTERS[name] for name in of_routers}
    if reference.mtp_losses:
        differences["mtp"] = _largest_difference(steps.mtp_losses, reference.mtp_losses)
        limits = limits | {"mtp": limits["loss"]}
    if len(steps.losses) > _FEW_STEPS:
        long = {"loss": _LONG_RUN, "mtp": _LONG_RUN, "norm": _LONG_RUN * 10}
        limits = {name: max(limit, long.get(name, 0.0)) for name, limit in limits.items()}
    return LayoutComparison(differences, limits)


def _gradient_difference(gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    assert gradients.keys() == reference.keys(), "the layout has other parameters"
    total = torch.stack([other.norm() for other in reference.values()]).norm()
    differences = []
    for name, other in reference.items():
        least = _LEAST_FRACTION * total if other.numel() == 1 else 1e-12
        differences.append(float((gradients[name] - other).norm() / other.norm().clamp_min(least)))
    return _largest(differences)


def _largest_difference(values: list[float], reference: list[float]) -> float:
    return _largest(abs(one - other) for one, other in zip(values, reference, strict=True))


def _largest(values: Iterable[float]) -> float:
    return float(torch.tensor([*values], dtype=torch.float64).max())


def _steps_with_checkpoint(engine: Engine, folder: Path, steps: int) -> Steps:
    saver = Saver(
        engine.state.groups, open_checkpoint_folder(folder, rank=engine.plan.world.rank, node_local=False), False, {}
    )
    with closing(saver):
        taking = take_steps(engine, steps)
        next(taking)
        state = RunState(1, 0, 0, (0, 0), engine.state.scalars(), {}, {}, "", {}, {}, {})
        saver.save(1, state.text(), rank_state={})
        outcome = saver.settle(wait=True)
        if outcome is None or outcome.has_failed:
            raise CheckpointError(
                f"the checkpoint in {folder} could not be saved: {outcome}",
                hint="start the selftest in a folder that all hosts share and can write to",
            )
        steps_taken = list(taking)
        engine.check_replicas()
        return steps_taken[-1]


def _steps_after_resume(engine: Engine, folder: Path, steps: int) -> Steps:
    checkpoint_folder = open_checkpoint_folder(folder, rank=engine.plan.world.rank, node_local=False)
    checkpoint = newest_checkpoint(checkpoint_folder, folder)
    assert checkpoint is not None
    restore_engine(engine, checkpoint_folder, checkpoint)
    return list(take_steps(engine, steps))[-1]


def _export(engine: Engine, model: Path, lora: LoraConfig | None, out: Path) -> None:
    tree = json.loads((model / "config.json").read_text(encoding="utf-8"))
    parts = FolderParts(
        family=family_of(tree["model_type"]),
        config=tree,
        architecture=type(engine.lm).__name__,
        dtype=PRECISION_DTYPES[engine.plan.precision],
        files=(),
    )
    tensors = engine.tensors()
    if lora is not None:
        adapters = {name: tensor.clone() for name, tensor in engine.adapters() if tensor is not None}
        tensors = merge_adapters(tensors, factors_of(adapters, lora.scale), parts.family)
    write_folder(tensors, engine.tensor_specs(), out, parts, max_shard_bytes=GIB)
    dist.barrier()
