"""Starts the teacher of a distillation: a second model in evaluation mode, whole on each rank or partitioned."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ds_finetune.engine.attention_kernel import packs_documents
from ds_finetune.engine.devices import device_of_rank
from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.patches.deepspeed_init import zero_init
from ds_finetune.engine.state.zero3_partition import partition
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import whole
from ds_finetune.model.loss.teacher import HiddenStates, Teacher, load_teacher
from ds_finetune.plan.plan import Plan, is_teacher_partitioned


@contextmanager
def start_teacher(plan: Plan, model: ModelPlan, groups: Groups) -> Iterator[Teacher | None]:
    """The live teacher of `model`, None where it has none, and on pipeline stages before the last.

    At ZeRO stage 3, and where it is offloaded, its weights are partitioned over all ranks by a second DeepSpeed engine,
    which gathers them module by module. Otherwise each rank holds them whole.
    """
    if model.teacher is None or not (groups.stage is None or groups.stage.is_last):
        yield None
        return
    is_partitioned = is_teacher_partitioned(plan.zero_stage, model.teacher.offload)
    tree = _partitioned_tree(plan, model.teacher.offload)
    lm = load_teacher(
        model.teacher,
        attention=model.attention,
        dtype=PRECISION_DTYPES[plan.precision],
        device=device_of_rank(plan.device, plan.world.local_rank),
        where=partition if is_partitioned else whole,
        init_context=zero_init(tree) if is_partitioned else None,
    )
    states = HiddenStates(lm, groups.sequence)
    states.packs_documents = packs_documents(
        model.attention, model.teacher.hf_config, device=plan.device, precision=plan.precision
    )
    head: Any = lm.get_output_embeddings()
    if not is_partitioned:
        yield Teacher(states, head, nullcontext)
        return
    import deepspeed

    engine, *_ = deepspeed.initialize(model=states, config=tree, dist_init_required=False)
    engine.eval()
    try:
        yield Teacher(engine, head, deepspeed.zero.GatheredParameters)
    finally:
        engine.destroy()


def _partitioned_tree(plan: Plan, offload: str) -> dict[str, Any]:
    """The DeepSpeed configuration of a partitioned teacher: ZeRO-3 without an optimizer."""
    zero: dict[str, Any] = {"stage": 3}
    if offload != "none":
        zero["offload_param"] = {"device": offload, "pin_memory": plan.device != "cpu"}
    tree: dict[str, Any] = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
    if plan.precision != "fp32":
        tree[plan.precision] = {"enabled": True}
    return tree
