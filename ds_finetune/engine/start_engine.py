"""Starts the engine of a plan: builds the modules, fills in the weights, and passes the model to DeepSpeed."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.console.quiet import deepspeed_level
from ds_finetune.engine.attention_kernel import packs_documents
from ds_finetune.engine.devices import device_of_rank
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.process_groups import Groups, open_groups
from ds_finetune.engine.ops.nvme import check_buffers, check_nvme
from ds_finetune.engine.patches.deepspeed_clipping import OwnClipping
from ds_finetune.engine.patches.deepspeed_engine import count_whole_experts_once, undo_constructor_step
from ds_finetune.engine.patches.deepspeed_gathering import single_gathers_without_waits
from ds_finetune.engine.patches.deepspeed_inexact import forget_second_copies, zenflow_keeps_matrices
from ds_finetune.engine.patches.deepspeed_init import zero_init
from ds_finetune.engine.patches.deepspeed_waits import HalfPrecisionNorms, ZeroNorms, has_zero_norms
from ds_finetune.engine.state.parameter_tags import (
    experts_marker,
    is_copy,
    is_trained_expert,
    local_shape,
    loss_of,
    mark_copy,
    parameter_groups,
    tag_apart,
    tag_expert,
)
from ds_finetune.engine.state.zero3_partition import partition
from ds_finetune.engine.teacher import start_teacher
from ds_finetune.families.table import family_of
from ds_finetune.foreign.torch_nn import linears_without_memory
from ds_finetune.model.adapters.lora import AdapterPlacement, install_lora
from ds_finetune.model.attention.indexed_attention import DivergenceCollector, expect_documents
from ds_finetune.model.attention.indexer_loss import IndexerLoss
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.encoder import encoder_of
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import Where, build_skeleton, model_class, resolve_folder, whole
from ds_finetune.model.experts.balance_loss import BalanceLoss
from ds_finetune.model.experts.routers import RouterCollector
from ds_finetune.model.loss.cross_entropy import KERNELS, Kernel, chunked_cross_entropy, liger_cross_entropy
from ds_finetune.model.loss.distillation import DistilledModel
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.score_config import fresh_parameters
from ds_finetune.model.loss.score_head import (
    head_parameters,
    initialise_score_head,
    install_encoder_head,
    install_score_head,
)
from ds_finetune.model.loss.token_loss import HeadGroups, TrainedModel, install_loss_head
from ds_finetune.model.memory.activation_offload import CudaTransfer, PlainTransfer, offload_layer_inputs
from ds_finetune.model.memory.tiled_mlp import install_tiled_mlps
from ds_finetune.model.mtp.layer import mtp_layers
from ds_finetune.model.mtp.mtp_loss import MtpLoss
from ds_finetune.model.parallel.expert import (
    build_local_experts,
    install_expert_parallel,
    install_overlapped_exchange,
)
from ds_finetune.model.parallel.interleaving import ModelChunks
from ds_finetune.model.parallel.pipeline import (
    PipelineGroup,
    build_meta_model,
    build_only_layers,
    has_embedding_copy,
    has_tied_head,
    install_pipeline_stage,
)
from ds_finetune.model.parallel.sharding import ModelShard
from ds_finetune.model.parallel.tensor import install_tensor_parallel, local_config
from ds_finetune.model.quantised.four_bit import four_bit_or, install_four_bit
from ds_finetune.model.weights.load import clear_weights, initialise_weights, load_weights, seed_of
from ds_finetune.model.weights.vocabulary import Growth
from ds_finetune.objectives.balance import Balance
from ds_finetune.objectives.distill import Distillation
from ds_finetune.objectives.extra import Extra
from ds_finetune.objectives.indexing import Indexing
from ds_finetune.objectives.multi_token import MultiTokenPrediction
from ds_finetune.objectives.objective import is_of_scores
from ds_finetune.plan.head_chunk import head_chunk
from ds_finetune.plan.plan import Plan


@contextmanager
def start_engine(plan: Plan, model: ModelPlan, *, loads_weights: bool = True) -> Iterator[Engine]:
    """Build `model` under the ZeRO stage of `plan` and yield the engine; needs an open process group.

    Without `loads_weights` parameters hold zeros, into which a checkpoint is restored. Weights are loaded all the same
    where some parameters are not trained, because checkpoints do not hold them.
    """
    import deepspeed
    from deepspeed.utils import set_log_level_from_string

    level = deepspeed_level()
    set_log_level_from_string("warning" if level == "quiet" else level)
    check_nvme(plan)
    check_buffers(plan, model)
    with (
        open_groups(
            plan.mesh,
            shares_embedding=bool(model.hf_config.tie_word_embeddings or mtp_layers(model.hf_config)),
            vpp=len(model.stages[0].chunks) if model.stages[0] is not None else 1,
            timeout=timedelta(seconds=plan.collective_seconds),
        ) as groups,
        start_teacher(plan, model, groups) as teacher,
        zenflow_keeps_matrices() if plan.has_zenflow else nullcontext(),
        single_gathers_without_waits() if plan.zero_stage == 3 else nullcontext(),
    ):
        lm, drawn = _build(plan, model, groups, loads_weights=loads_weights)
        plan = replace(plan, frozen=_saved_frozen(lm, model))
        trained = TrainedModel(lm, groups.sequence, groups.stage)
        if isinstance(model.objective, Distillation):
            trained = DistilledModel(trained, model.objective, teacher)
        trained.chunks = _chunks(lm, model, groups.stage)
        trained.packs_documents = packs_documents(
            model.attention, model.hf_config, device=plan.device, precision=plan.precision
        )
        if groups.experts is not None and plan.zero_stage < 3 and any(map(is_trained_expert, trained.parameters())):
            trained.has_experts = experts_marker(groups.experts.size)
        wrapped, optimizer, _, _ = deepspeed.initialize(
            model=trained,
            model_parameters=parameter_groups(trained, plan, groups),
            config=plan.deepspeed,
            dist_init_required=False,
            mpu=groups.mpu,
        )
        _add_extra_losses(trained, model, groups, torch.device(wrapped.device))
        _correct_start(trained, optimizer, plan, groups)
        engine = Engine(wrapped, plan, groups, model.objective)
        _set_norms(engine, optimizer, model, groups)
        engine.drawn = drawn
        # Dropout draws from torch's own generator: other numbers on ranks with other rows, the same on ranks that share
        # them. A resumed run restores its state.
        torch.manual_seed(seed_of(plan.seed, f"dropout.{plan.mesh.place('dp')}"))
        try:
            with engine.meter.counting():
                yield engine
        finally:
            wrapped.destroy()


def _chunks(lm: PreTrainedModel, model: ModelPlan, stage: PipelineGroup | None) -> ModelChunks | None:
    """The chunks of this rank; None where it has one."""
    layers = model.stages[stage.group_rank] if stage is not None else None
    if stage is None or layers is None or len(layers.chunks) == 1:
        return None
    return ModelChunks(lm, stage, layers.chunks)


def _correct_start(trained: TrainedModel, optimizer: object, plan: Plan, groups: Groups) -> None:
    """Undo what DeepSpeed did wrong at this stage when it took over the model and wrapped the optimizer."""
    if plan.zero_stage == 0 and plan.precision != "fp32":
        undo_constructor_step(optimizer)
    if plan.zero_stage == 3:
        forget_second_copies(trained)
    if plan.zero_stage == 3 and groups.tensor is not None and groups.experts is not None:
        count_whole_experts_once(optimizer)


def _set_norms(engine: Engine, optimizer: Any, model: ModelPlan, groups: Groups) -> None:  # noqa: ANN401 - DeepSpeed's
    """Let norms of the gradient be read once, and clip parameters that an auxiliary loss trains alone by a norm of
    their own; at stage 0 the engine does so.
    """
    engine.own_norms = dict.fromkeys(model.apart_losses, 0.0)
    if not engine.plan.zero_stage:
        if engine.plan.precision != "fp32":
            engine.norms = HalfPrecisionNorms(optimizer, lambda: engine.has_bad_gradient)
        return
    norms = None
    if has_zero_norms(optimizer):
        engine.norms = norms = ZeroNorms(optimizer, lambda: engine.has_bad_gradient)
    if engine.own_norms:
        OwnClipping(
            optimizer,
            loss_of,
            losses=model.apart_losses,
            shards=groups.tensor.group if groups.tensor is not None else None,
            norms=norms,
            has_bad_gradient=lambda: engine.has_bad_gradient,
            report=partial(setattr, engine, "own_norms"),
        )


def _build(
    plan: Plan, model: ModelPlan, groups: Groups, *, loads_weights: bool
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The part of the model that this rank holds, with its weights, adapters and loss head; and the names of parameters
    that were drawn because the model's folder does not have them.
    """
    lm = _build_modules(plan, model, groups)
    kernel = _install_groups(lm, plan, model, groups)
    share = partial(_partition_like_model, lm) if plan.zero_stage == 3 else None
    where, lora = four_bit_or(partition if share else whole, share), model.lora
    drawn = _fill_weights(lm, plan, model, where=where, loads_weights=loads_weights or lora is not None)
    if lora is not None:
        # After the weights, because loading checks every parameter against the files.
        placement = AdapterPlacement(
            where,
            ModelShard.of(plan.mesh, family_of(lm.config.model_type)),
            tp_group=groups.tensor,
            mark_expert=partial(tag_expert, groups=groups),
        )
        if share is not None:
            placement = replace(placement, share=share)
        install_lora(lm, lora.targets, lora.section, seed=plan.seed, placement=placement)
        for name in head_parameters(lm):
            lm.get_parameter(name).requires_grad_(True)
    _mark_parameters(lm, plan, model, groups)
    if groups.stage is None or groups.stage.is_last:
        _install_head(lm, model, groups, kernel)
    _arrange_forward(lm, plan, model)
    return lm, drawn


def _arrange_forward(lm: PreTrainedModel, plan: Plan, model: ModelPlan) -> None:
    """Recompute layers, with their inputs on the host, and compute MLPs in tiles, as the run file says; else shared
    experts beside the exchange of rows.
    """
    from deepspeed.utils import set_z3_leaf_module

    if plan.activation_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    if plan.activation_offload:
        device = torch.device(device_of_rank(plan.device, plan.world.local_rank))
        offload_layer_inputs(lm, PlainTransfer() if plan.device == "cpu" else CudaTransfer(device))
    for module in install_tiled_mlps(lm, tiles=model.mlp_tiles) if model.mlp_tiles > 1 else ():
        # ZeRO-3 gathers all matrices of an MLP before its first tile, and releases them after its last.
        set_z3_leaf_module(module, True)
    if plan.mesh.ep > 1 and model.mlp_tiles == 1:
        # Tiles of routed experts run without shared ones, and again in backward.
        install_overlapped_exchange(lm)


def _mark_parameters(lm: PreTrainedModel, plan: Plan, model: ModelPlan, groups: Groups) -> None:
    """Mark parameters that are not trained, that another stage holds too, and that a loss of their own trains."""
    for name, param in lm.named_parameters():
        if name in plan.frozen or model.is_untrained(name):
            param.requires_grad_(False)
        loss = model.loss_apart(name)
        if loss is not None:
            tag_apart(param, loss)
    if groups.stage is not None and has_embedding_copy(lm, groups.stage):
        mark_copy(lm.get_input_embeddings().weight)
        if not has_tied_head(lm) and (model.mtp is None or model.mtp.detach):
            lm.get_input_embeddings().weight.requires_grad_(False)


def _saved_frozen(lm: PreTrainedModel, model: ModelPlan) -> tuple[str, ...]:
    """Names of this rank's frozen parameters that checkpoints hold: none with LoRA, where all are in the model's
    folder.
    """
    if model.lora is not None:
        return ()
    return tuple(name for name, param in lm.named_parameters() if not param.requires_grad and not is_copy(param))


def _add_extra_losses(trained: TrainedModel, model: ModelPlan, groups: Groups, device: torch.device) -> None:
    """Let the forward compute the auxiliary losses of `model` and count its routers' choices.

    After `deepspeed.initialize`, whose hooks must run before those of the collector.
    """
    if model.router is not None:
        trained.routers = RouterCollector(trained.lm, model.router, device=device)
    trained.extras = tuple(_extra_loss(extra, trained, model, groups) for extra in model.extras)


def _extra_loss(extra: Extra, trained: TrainedModel, model: ModelPlan, groups: Groups) -> ExtraLoss:
    if isinstance(extra, MultiTokenPrediction):
        assert model.mtp is not None
        return MtpLoss(extra, trained.lm, trained.document_arguments, detach=model.mtp.detach)
    if isinstance(extra, Indexing):
        assert model.indexer is not None
        ranks = tuple(group for group in (groups.tensor, groups.sequence) if group is not None)
        collector = DivergenceCollector(ranks, attends_to_all=model.indexer.is_alone)
        return IndexerLoss(extra, trained.lm, collector)
    assert isinstance(extra, Balance), type(extra)
    assert trained.routers is not None
    return BalanceLoss(extra, trained.routers, groups.sequence)


def _install_head(lm: PreTrainedModel, model: ModelPlan, groups: Groups, kernel: Kernel) -> None:
    head_groups = HeadGroups(tp=groups.tensor, sp=groups.sequence, pp=groups.stage)
    if is_of_scores(model.objective) and encoder_of(model.hf_config) is not None:
        install_encoder_head(lm, model.objective)
    elif is_of_scores(model.objective):
        install_score_head(lm, model.objective, head_groups)
    else:
        install_loss_head(lm, kernel=kernel, objective=model.objective, groups=head_groups)


def _build_modules(plan: Plan, model: ModelPlan, groups: Groups) -> PreTrainedModel:
    """The modules of this rank's layers and experts, without weights, partitioned already under ZeRO-3."""
    hf_config, kind = model.hf_config, model_class(model.hf_config, model.task)
    device = device_of_rank(plan.device, plan.world.local_rank)
    local_experts = build_local_experts(
        kind, family_of(hf_config.model_type), ep_size=plan.mesh.ep, mark=partial(tag_expert, groups=groups)
    )
    partitioned = zero_init(plan.deepspeed, data_parallel_group=groups.same_part, mpu=groups.mpu)
    without_linears = linears_without_memory() if model.quantised else nullcontext()
    with local_experts, build_only_layers(kind, model.stages[plan.mesh.place("pp")]):
        lm = build_skeleton(
            local_config(hf_config, plan.mesh.tp),
            attention=model.attention,
            dtype=PRECISION_DTYPES[plan.precision],
            device=device,
            task=model.task,
            init_context=partitioned if plan.zero_stage == 3 else without_linears,
        )
    expect_documents(lm, longest=plan.batch.max_seq_len)
    if model.quantised:
        install_four_bit(lm, model.quantised, device=device)
    return lm


def _install_groups(lm: PreTrainedModel, plan: Plan, model: ModelPlan, groups: Groups) -> Kernel:
    """Make `lm` communicate in its stage, tensor and expert parallel groups; returns the loss kernel that fits."""
    kernel, hf_config = KERNELS[plan.loss_kernel], model.hf_config
    if model.task == "causal_lm":
        rows = hf_config.vocab_size // plan.mesh.tp
        chunk = head_chunk(rows, precision=plan.precision, device=plan.device)
        if kernel is liger_cross_entropy:
            kernel = partial(liger_cross_entropy, chunk=chunk)
        else:
            kernel = partial(chunked_cross_entropy, chunk=chunk, tp_group=groups.tensor)
    if groups.stage is not None:
        install_pipeline_stage(lm, groups.stage, outputs=model.head_outputs)
    if groups.tensor is not None:
        pad = hf_config.pad_token_id
        # nn.Embedding counts a negative index from the end of the whole vocabulary.
        padding_idx = pad + hf_config.vocab_size if pad is not None and pad < 0 else pad
        install_tensor_parallel(lm, groups.tensor, padding_idx=padding_idx)
    if groups.experts is not None:
        install_expert_parallel(lm, groups.experts)
    return kernel


def _fill_weights(
    lm: PreTrainedModel, plan: Plan, model: ModelPlan, *, where: Where, loads_weights: bool
) -> tuple[str, ...]:
    """Load or draw the weights; returns the names of parameters that were drawn because the model's folder does not
    have them.
    """
    family = family_of(lm.config.model_type)
    model_shard = ModelShard.of(plan.mesh, family)
    for name, param in lm.named_parameters():
        # DeepSpeed 0.19.8 counts other parameters once in norms (runtime/utils.py:134).
        param.model_parallel = model_shard.tensor_shard(name, tuple(local_shape(param))).dim is not None  # type: ignore[attr-defined]
    if not loads_weights and all(param.requires_grad for param in lm.parameters()):
        clear_weights(lm, where=where)
        return ()
    if model.has_random_weights:
        initialise_weights(lm, seed=plan.seed, where=where, model_shard=model_shard)
        initialise_score_head(lm, model.objective, head_parameters(lm), seed=plan.seed, where=where)
        return ()
    skeleton = build_meta_model(model.hf_config, model.task) if plan.mesh.pp > 1 else None
    folder = resolve_folder(model.path)
    growth = _growth(model, plan.seed)
    report = load_weights(
        lm,
        folder,
        family=family,
        where=where,
        model_shard=model_shard,
        skeleton=skeleton,
        growth=growth,
        may_be_missing=fresh_parameters(model.hf_config, model.task, head_parameters(lm)),
    )
    initialise_score_head(lm, model.objective, report.missing, seed=plan.seed, where=where)
    return report.missing


def _growth(model: ModelPlan, seed: int) -> Growth | None:
    """Sizes of the published and of the enlarged vocabulary; None where it is not enlarged."""
    before, after = model.published_vocab_size, model.hf_config.vocab_size
    return Growth(before, after, partial(seed_of, seed)) if before < after else None


def _partition_like_model(lm: PreTrainedModel, params: list[nn.Parameter]) -> None:
    """Partition new parameters like the others of `lm`, with the `zero.Init` context that made those (DeepSpeed 0.19.8,
    zero/partition_parameters.py:1660).
    """
    partitioned: Any = next(param for param in lm.parameters() if hasattr(param, "ds_tensor"))
    partitioned.convert_to_zero_parameters(param_list=params)
