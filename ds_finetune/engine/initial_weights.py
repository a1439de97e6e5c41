"""Loads or initialises the weights of the part of a model that this rank holds."""

from functools import partial

from transformers import PreTrainedModel

from ds_finetune.engine.state.parameter_tags import local_shape
from ds_finetune.families.table import family_of
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import Where, resolve_folder
from ds_finetune.model.loss.score_config import fresh_parameters
from ds_finetune.model.loss.score_head import head_parameters, initialise_score_head
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.model.parallel.sharding import ModelShard
from ds_finetune.model.weights.load import clear_weights, initialise_weights, load_weights, seed_of
from ds_finetune.model.weights.vocabulary import Growth
from ds_finetune.plan.plan import Plan


def fill_weights(
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
