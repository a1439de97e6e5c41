"""From a plan to a running engine: skeleton, weights where they live, optimizer, DeepSpeed."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.engine.devices import visible_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.nvme import check_buffers, check_nvme
from ds_finetune.engine.parameter_tags import experts_marker, is_expert, local_shape, parameter_groups, tag_expert
from ds_finetune.engine.pipeline_schedule import mark_copy
from ds_finetune.engine.process_groups import Groups, open_groups
from ds_finetune.engine.zero3_partition import partition
from ds_finetune.families.table import family_of
from ds_finetune.model.build import Where, build_skeleton, model_class, read_hf_config, resolve_folder
from ds_finetune.model.cross_entropy import KERNELS, chunked_cross_entropy
from ds_finetune.model.four_bit import four_bit_or_whole, install_four_bit
from ds_finetune.model.lora import chosen_targets, install_lora, quantised_targets
from ds_finetune.model.loss import TrainedModel, install_loss_head
from ds_finetune.model.parallel.expert import fewer_experts, install_expert_parallel
from ds_finetune.model.parallel.pipeline import install_stage, is_copy_of_tied, only_layers, stages_of, without_memory
from ds_finetune.model.parallel.sharding import Cut
from ds_finetune.model.parallel.tensor import install_tensor_parallel, local_config
from ds_finetune.model.vocabulary import Growth
from ds_finetune.model.weights import clear_weights, initialise_weights, load_weights, seed_of
from ds_finetune.patches.deepspeed_engine import undo_constructor_step
from ds_finetune.patches.deepspeed_init import zero_init
from ds_finetune.patches.torch_nn import linears_without_memory
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.timeouts import collective_seconds

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@contextmanager
def start_engine(plan: Plan, hf_config: PretrainedConfig, *, has_weights: bool = True) -> Iterator[Engine]:
    """Build the model of `plan` under its ZeRO stage and yield the engine; needs an open process group.

    Without `has_weights` parameters hold zeros, for a checkpoint to be restored into; where some are not trained,
    and so in no checkpoint, weights are loaded all the same.
    """
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    check_nvme(plan)
    check_buffers(plan, local_config(hf_config, plan.mesh.tp))
    with open_groups(plan.mesh, timeout=timedelta(seconds=collective_seconds(plan.config.watchdog))) as groups:
        model = TrainedModel(_built(plan, hf_config, groups, has_weights=has_weights), groups.sequence, groups.stage)
        if groups.experts is not None and plan.zero_stage < 3 and any(is_expert(param) for param in model.parameters()):
            model.has_experts = experts_marker(groups.experts.size)
        wrapped, optimizer, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=parameter_groups(model, plan, groups),
            config=plan.deepspeed,
            dist_init_required=False,
            mpu=groups.mpu,
        )
        if plan.zero_stage == 0 and plan.config.train.precision != "fp32":
            undo_constructor_step(optimizer)
        engine = Engine(wrapped, plan, groups)
        try:
            yield engine
        finally:
            wrapped.destroy()


def _built(plan: Plan, hf_config: PretrainedConfig, groups: Groups, *, has_weights: bool) -> PreTrainedModel:
    model, stage3, kind = plan.config.model, plan.zero_stage == 3, model_class(hf_config)
    few = fewer_experts(
        kind, family_of(hf_config.model_type), parts=plan.mesh.ep, tag=partial(tag_expert, groups=groups)
    )
    device = "cpu" if plan.device == "cpu" else f"cuda:{visible_device(plan.world.local_rank)}"
    quantised = [target.name for target in quantised_targets(hf_config, plan.config.lora)]
    with few, only_layers(kind, stages_of(hf_config, plan.config.parallel)[plan.mesh.place("pp")]):
        lm = build_skeleton(
            local_config(hf_config, plan.mesh.tp),
            attention=model.attention,
            dtype=DTYPES[plan.config.train.precision],
            device=device,
            init_context=zero_init(plan.deepspeed, data_parallel_group=groups.same_part, mpu=groups.mpu)
            if stage3
            else linears_without_memory()
            if quantised
            else nullcontext(),
        )
    if quantised:
        install_four_bit(lm, quantised, device=device)
    kernel = KERNELS[plan.loss_kernel]
    if groups.stage is not None:
        install_stage(lm, groups.stage, vocabulary=hf_config.vocab_size)
    if groups.tensor is not None:
        pad = hf_config.pad_token_id
        # As nn.Embedding takes a negative one.
        install_tensor_parallel(
            lm, groups.tensor, padding_idx=pad + hf_config.vocab_size if pad is not None and pad < 0 else pad
        )
        kernel = partial(chunked_cross_entropy, tensor=groups.tensor)
    if groups.experts is not None:
        install_expert_parallel(lm, groups.experts)
    where, lora = partition if stage3 else four_bit_or_whole, plan.config.lora
    _fill(lm, plan, hf_config, where=where, has_weights=has_weights or lora is not None)
    if lora is not None:
        # After the weights, of which every one is accounted for; what is drawn for adapters depends on their names
        # alone.
        share = partial(_share, lm) if stage3 else _keep
        install_lora(lm, chosen_targets(hf_config, lora), lora, seed=plan.config.train.seed, where=where, share=share)
    for name in plan.frozen:
        lm.get_parameter(name).requires_grad_(False)
    if groups.stage is not None and is_copy_of_tied(lm, groups.stage):
        mark_copy(lm.get_input_embeddings().weight)
    if groups.stage is None or groups.stage.is_last:
        install_loss_head(lm, kernel=kernel, tensor=groups.tensor, stage=groups.stage)
    if plan.config.train.activation_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return lm


def _fill(lm: PreTrainedModel, plan: Plan, hf_config: PretrainedConfig, *, where: Where, has_weights: bool) -> None:
    model, cut = plan.config.model, Cut.of(plan.mesh)
    for name, param in lm.named_parameters():
        # DeepSpeed 0.19.8 counts other parameters once in norms (runtime/utils.py:134).
        param.model_parallel = cut.window(name, tuple(local_shape(param))).dim is not None  # type: ignore[attr-defined]
    if not has_weights and all(param.requires_grad for param in lm.parameters()):
        clear_weights(lm, where=where)
    elif model.weights == "random":
        initialise_weights(lm, seed=plan.config.train.seed, where=where, cut=cut)
    else:
        skeleton = without_memory(hf_config) if plan.mesh.pp > 1 else None
        folder, family = resolve_folder(model.path), family_of(lm.config.model_type)
        growth = _growth(plan, hf_config)
        load_weights(lm, folder, family=family, where=where, cut=cut, skeleton=skeleton, growth=growth)


def _growth(plan: Plan, hf_config: PretrainedConfig) -> Growth | None:
    """How the vocabulary of `hf_config` is larger than the published one; None where it is not."""
    config = plan.config
    if not config.model.resize_vocabulary:
        return None
    before, after = read_hf_config(config.model.path).vocab_size, hf_config.vocab_size
    return Growth(before, after, partial(seed_of, config.train.seed)) if before < after else None


def _share(lm: PreTrainedModel, params: list[nn.Parameter]) -> None:
    """Partition parameters like the others of `lm`, by the context that made those (DeepSpeed 0.19.8,
    zero/partition_parameters.py:1660).
    """
    known: Any = next(param for param in lm.parameters() if hasattr(param, "ds_tensor"))
    known.convert_to_zero_parameters(param_list=params)


def _keep(_: list[nn.Parameter]) -> None:
    """Below stage 3 every rank has adapters whole."""
