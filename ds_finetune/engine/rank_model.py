"""Builds the models of a rank: its shard of the trained model, with weights, features and loss head, and a teacher."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ds_finetune.engine.devices import device_of_rank
from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.patches.deepspeed_engine import destroyed_at_end
from ds_finetune.engine.patches.deepspeed_init import zero_init
from ds_finetune.engine.state.full_tensors import partition
from ds_finetune.engine.state.parameter_tags import is_copy, local_shape, mark_copy, tag_auxiliary, tag_expert
from ds_finetune.families.table import family_of
from ds_finetune.features.feature import Feature
from ds_finetune.foreign.torch_nn import linears_without_memory
from ds_finetune.model.activation_memory import (
    install_tiled_mlps,
    offload_layer_inputs,
    recompute_layers,
)
from ds_finetune.model.adapters.lora import AdapterPlacement
from ds_finetune.model.attention.indexed_attention import expect_documents
from ds_finetune.model.attention.kernels import choose_flash_attention, packs_documents
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.encoder import encoder_of
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import Where, build_skeleton, full_fragment, model_class, resolve_folder, soft_cap
from ds_finetune.model.experts import choose_product
from ds_finetune.model.fused.install import install_fused
from ds_finetune.model.loss.cross_entropy import Kernel, chunked_cross_entropy, liger_cross_entropy
from ds_finetune.model.loss.score_config import fresh_parameters
from ds_finetune.model.loss.score_head import (
    EncoderHead,
    head_parameters,
    initialise_score_head,
    install_score_head,
)
from ds_finetune.model.loss.teacher import Teacher, load_teacher
from ds_finetune.model.loss.token_loss import HeadGroups, TrainedModel, install_loss_head
from ds_finetune.model.parallel.expert import build_local_experts, compute_shared_experts_ahead, install_expert_parallel
from ds_finetune.model.parallel.pipeline import (
    ModelChunks,
    build_meta_model,
    build_only_layers,
    has_embedding_copy,
    has_tied_head,
    install_pipeline_stage,
)
from ds_finetune.model.parallel.sharding import ModelShard
from ds_finetune.model.parallel.tensor import install_tensor_parallel, local_config
from ds_finetune.model.quantised.four_bit import four_bit_or, install_four_bit
from ds_finetune.model.weights.fp32_weights import Fp32Weights
from ds_finetune.model.weights.load import initialise_weights, load_weights, seed_of
from ds_finetune.model.weights.vocabulary import Growth
from ds_finetune.objectives.objective import ScoreObjective
from ds_finetune.plan.forward import head_chunk
from ds_finetune.plan.plan import Plan, is_teacher_partitioned


def build_rank_model(
    plan: Plan, model: ModelPlan, groups: Groups, features: Sequence[Feature], *, loads_weights: bool
) -> tuple[PreTrainedModel, tuple[str, ...], Fp32Weights]:
    """Build this rank's shard of the model, with its weights, features and loss head. Also returns the names of
    randomly initialised parameters, which the model's folder lacks, and the weights that forwards use in fp32.
    """
    lm = build_modules(plan, model, groups)
    install_groups(lm, model, groups)
    placement = placement_of(lm, plan, groups)
    # Checkpoints lack frozen weights of the model's folder, so these are loaded even if a checkpoint is restored.
    loads_weights = loads_weights or not all(feature.saves_frozen for feature in features)
    in_fp32 = Fp32Weights(lm, placement.where)
    random_parameters = fill_weights(lm, plan, model, where=in_fp32.where, loads_weights=loads_weights)
    in_fp32.round_into_parameters()
    in_fp32.install(lm)
    for feature in features:
        feature.install(lm, placement)
    mark_parameters(lm, plan, model, groups, features)
    install_head(lm, plan, model, groups)
    arrange_forward(lm, plan, model)
    return lm, random_parameters, in_fp32


def install_groups(lm: PreTrainedModel, model: ModelPlan, groups: Groups) -> None:
    """Add the communication of pipeline, tensor and expert parallelism to the modules of a rank, in place."""
    if groups.stage is not None:
        install_pipeline_stage(lm, groups.stage, outputs=model.head_outputs)
    if groups.tensor is not None:
        hf_config, pad = model.hf_config, model.hf_config.pad_token_id
        # A negative padding id counts from the end of the full vocabulary, as in nn.Embedding.
        padding_idx = pad + hf_config.vocab_size if pad is not None and pad < 0 else pad
        install_tensor_parallel(lm, groups.tensor, padding_idx=padding_idx)
    if groups.experts is not None:
        install_expert_parallel(lm, groups.experts)


def placement_of(lm: PreTrainedModel, plan: Plan, groups: Groups) -> AdapterPlacement:
    """How features must shard and partition the parameters that they add to `lm`, as for its own parameters."""
    is_partitioned = plan.zero_stage == 3
    partition_like = partial(_partition_like_model, lm) if is_partitioned else None
    placement = AdapterPlacement(
        four_bit_or(partition if is_partitioned else full_fragment, partition_like),
        ModelShard.of(plan.mesh, family_of(lm.config.model_type)),
        tp_group=groups.tensor,
        mark_expert=partial(tag_expert, groups=groups),
    )
    return placement if partition_like is None else replace(placement, partition=partition_like)


def _partition_like_model(lm: PreTrainedModel, params: list[nn.Parameter]) -> None:
    """Partition new parameters by the `zero.Init` context that partitioned the parameters of `lm` (DeepSpeed 0.19.8,
    zero/partition_parameters.py:1660).
    """
    partitioned: Any = next(param for param in lm.parameters() if hasattr(param, "ds_tensor"))
    partitioned.convert_to_zero_parameters(param_list=params)


def mark_parameters(
    lm: PreTrainedModel, plan: Plan, model: ModelPlan, groups: Groups, features: Sequence[Feature]
) -> None:
    """Mark parameters that are frozen, that another pipeline stage also has, or that only an auxiliary loss trains."""
    for name, param in lm.named_parameters():
        if name in plan.frozen or model.is_untrained(name):
            param.requires_grad_(False)
        for feature in features:
            if feature.owns(name):
                tag_auxiliary(param, feature.own_loss)
    if groups.stage is not None and has_embedding_copy(lm, groups.stage):
        mark_copy(lm.get_input_embeddings().weight)
        if not has_tied_head(lm) and (model.mtp is None or model.mtp.detach):
            lm.get_input_embeddings().weight.requires_grad_(False)


def fill_weights(
    lm: PreTrainedModel, plan: Plan, model: ModelPlan, *, where: Where, loads_weights: bool
) -> tuple[str, ...]:
    """Load or randomly initialise the weights of this rank. Returns the names of parameters that were randomly
    initialised because the model's folder lacks them.
    """
    family = family_of(lm.config.model_type)
    model_shard = ModelShard.of(plan.mesh, family)
    for name, param in lm.named_parameters():
        # DeepSpeed 0.19.8 counts a parameter in norms on each tensor parallel rank only if `model_parallel` is true
        # (runtime/utils.py:134).
        param.model_parallel = model_shard.tensor_shard(name, tuple(local_shape(param))).dim is not None  # type: ignore[attr-defined]
    if not loads_weights and all(param.requires_grad for param in lm.parameters()):
        # Parameters are zeros until a checkpoint is restored, because uninitialised memory may contain NaN.
        for param in lm.parameters():
            with where(param).opened() as flat:
                flat.zero_()
        return ()
    if model.has_random_weights:
        initialise_weights(lm, seed=plan.train.seed, where=where, model_shard=model_shard)
        initialise_score_head(lm, model.objective, head_parameters(lm), seed=plan.train.seed, where=where)
        return ()
    skeleton = build_meta_model(model.hf_config, model.task) if plan.mesh.pp > 1 else None
    folder = resolve_folder(model.path)
    before, after = model.published_vocab_size, model.hf_config.vocab_size
    report = load_weights(
        lm,
        folder,
        family=family,
        where=where,
        model_shard=model_shard,
        skeleton=skeleton,
        growth=Growth(before, after, partial(seed_of, plan.train.seed)) if before < after else None,
        may_be_missing=fresh_parameters(model.hf_config, model.task, head_parameters(lm)),
    )
    initialise_score_head(lm, model.objective, report.missing, seed=plan.train.seed, where=where)
    return report.missing


def build_modules(plan: Plan, model: ModelPlan, groups: Groups) -> PreTrainedModel:
    """Build the modules of this rank's layers and experts, without weights. Under ZeRO-3 they are partitioned."""
    hf_config, kind = model.hf_config, model_class(model.hf_config, model.task)
    device = device_of_rank(plan.device, plan.world.local_rank)
    local_experts = build_local_experts(
        kind, family_of(hf_config.model_type), ep_size=plan.mesh.ep, mark=partial(tag_expert, groups=groups)
    )
    partitioned = zero_init(plan.deepspeed_config, data_parallel_group=groups.same_shard, mpu=groups.mpu)
    without_linears = linears_without_memory() if model.quantised else nullcontext()
    with local_experts, build_only_layers(kind, model.stages[plan.mesh.coordinate("pp")]):
        lm = build_skeleton(
            local_config(hf_config, plan.mesh.tp),
            attention=model.attention,
            dtype=PRECISION_DTYPES[plan.precision],
            device=device,
            task=model.task,
            init_context=partitioned if plan.zero_stage == 3 else without_linears,
        )
    expect_documents(lm, longest=plan.train.max_seq_len)
    if model.quantised:
        install_four_bit(lm, model.quantised, device=device)
    return lm


def install_head(lm: PreTrainedModel, plan: Plan, model: ModelPlan, groups: Groups) -> None:
    """Make the head of `lm` compute the loss of the objective, if this rank has the head."""
    if groups.stage is not None and not groups.stage.is_last:
        return
    head_groups = HeadGroups(tp=groups.tensor, sp=groups.sequence, pp=groups.stage)
    if isinstance(model.objective, ScoreObjective) and encoder_of(model.hf_config) is not None:
        lm.encoder_head = EncoderHead(lm, model.objective)
    elif isinstance(model.objective, ScoreObjective):
        install_score_head(lm, model.objective, head_groups)
    else:
        rows = model.hf_config.vocab_size // plan.mesh.tp
        chunk = head_chunk(rows, precision=plan.precision, device=plan.device)
        kernel: Kernel = partial(chunked_cross_entropy, chunk=chunk, tp_group=groups.tensor)
        if plan.loss_kernel == "liger":
            kernel = partial(liger_cross_entropy, chunk=chunk)
        install_loss_head(lm, kernel=kernel, objective=model.objective, groups=head_groups)


def arrange_forward(lm: PreTrainedModel, plan: Plan, model: ModelPlan) -> None:
    """Install in `lm` what the run file asks for: fused kernels, activation checkpointing, offload of activations, and
    tiled MLPs. Without tiled MLPs, shared experts are computed before routed experts.
    """
    from deepspeed.utils import set_z3_leaf_module

    choose_product(has_triton=plan.kernels.has_others)
    install_fused(lm, plan.kernels.of(model.family))
    if plan.recomputes:
        recompute_layers(lm, is_selective=plan.activation_checkpointing == "selective")
    if plan.mesh.pp > 1:
        # The first layers of an interleaved stage may have no trained parameters, but backward must pass through them.
        lm.enable_input_require_grads()
    if plan.train.activation_offload:
        offload_layer_inputs(lm)
    for module in install_tiled_mlps(lm, tiles=model.mlp_tiles) if model.mlp_tiles > 1 else ():
        # As a leaf module, an MLP is gathered by ZeRO-3 once before its first tile, and released after its last tile.
        set_z3_leaf_module(module, True)
    if model.mlp_tiles == 1 and not model.family.is_generic:
        # Not with tiled MLPs: they compute routed and shared experts separately, and again in backward.
        compute_shared_experts_ahead(lm)


def trained_model(
    lm: PreTrainedModel, plan: Plan, model: ModelPlan, groups: Groups, features: Sequence[Feature]
) -> TrainedModel:
    """Build the module that DeepSpeed wraps: `lm` with the losses of objective and `features`."""
    trained = TrainedModel(lm, groups.sequence, groups.stage)
    for feature in features:
        trained = feature.wrap(trained)
    layers = model.stages[groups.stage.group_rank] if groups.stage is not None else None
    if groups.stage is not None and layers is not None and len(layers.chunks) > 1:
        trained.chunks = ModelChunks(lm, groups.stage, layers.chunks)
    trained.packs_documents = packs_documents(
        model.attention, model.hf_config, device=plan.device, precision=plan.precision
    )
    choose_flash_attention(model.hf_config, is_wanted=trained.packs_documents and plan.kernels.has_others)
    return trained


def saved_frozen(lm: PreTrainedModel, features: Sequence[Feature]) -> tuple[str, ...]:
    """Names of this rank's frozen parameters that checkpoints contain although they are not trained."""
    if not all(feature.saves_frozen for feature in features):
        return ()
    return tuple(name for name, param in lm.named_parameters() if not param.requires_grad and not is_copy(param))


@contextmanager
def start_teacher(plan: Plan, model: ModelPlan, groups: Groups) -> Iterator[Teacher | None]:
    """Context with the teacher of `model`, ready to run; None without a teacher, and on pipeline stages before the
    last. At ZeRO stage 3, and with offload, a second DeepSpeed engine partitions the teacher's weights over all ranks
    and gathers them module by module. Otherwise each rank has all of the teacher's weights.
    """
    if model.teacher is None or not (groups.stage is None or groups.stage.is_last):
        yield None
        return
    device = device_of_rank(plan.device, plan.world.local_rank)
    load = partial(load_teacher, model.teacher, model.attention, plan.precision, device, sp_group=groups.sequence)
    if not is_teacher_partitioned(plan.zero_stage, model.teacher.offload):
        yield load().unsharded_teacher()
        return
    import deepspeed

    zero: dict[str, Any] = {"stage": 3}
    if model.teacher.offload != "none":
        zero["offload_param"] = {"device": model.teacher.offload, "pin_memory": plan.device != "cpu"}
    tree: dict[str, Any] = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
    if plan.precision != "fp32":
        tree[plan.precision] = {"enabled": True}
    states = load(where=partition, init_context=zero_init(tree))
    engine, *_ = deepspeed.initialize(model=states, config=tree, dist_init_required=False)
    engine.eval()
    with destroyed_at_end(engine, plan.world):
        yield Teacher(engine, states.head, deepspeed.zero.GatheredParameters, soft_cap(states.config))
