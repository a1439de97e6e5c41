"""What is decided about the model of a run, as lines of the plan."""

from ds_finetune.features.table import features_of
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.plan.forward import attention_lines, experts_lines, head_line
from ds_finetune.plan.plan import Plan


def model_lines(model: ModelPlan, plan: Plan, *, capability: tuple[int, int] | None = None) -> list[tuple[str, str]]:
    """Name and text of what is decided about the model, for people: vocabulary, scores, stages, features.

    `capability` is the compute capability of this rank's GPU; None on CPUs and in a dry run.
    """
    tree = model.hf_config.to_dict()
    kernel = attention_lines(model.attention, tree, device=plan.device, precision=plan.precision)
    experts = experts_lines(tree, device=plan.device, precision=plan.precision, capability=capability)
    context = model.context.lines() if model.context is not None else []
    return [
        *context,
        *_vocabulary_lines(model),
        *_score_lines(model),
        *kernel,
        *experts,
        *_head_lines(model, plan),
        *([("MLPs", f"tokens in {model.mlp_tiles} tiles")] if model.mlp_tiles > 1 else []),
        *plan.stage_lines(model.stages),
        *(line for feature in features_of(model, plan) for line in feature.lines()),
    ]


def _score_lines(model: ModelPlan) -> list[tuple[str, str]]:
    if model.task == "causal_lm":
        return []
    names = model.hf_config.id2label.values()
    text = f"{len(names)}: {', '.join(names)}" if model.objective.name == "classification" else "1, the reward"
    return [("scores", text), *([("padding token", model.padding)] if model.padding else [])]


def _head_lines(model: ModelPlan, plan: Plan) -> list[tuple[str, str]]:
    """The logits that exist at a time on a GPU, where the head of a language model has this program's kernel."""
    if plan.device == "cpu" or plan.loss_kernel != "chunked" or not model.objective.is_per_token:
        return []
    rows = int(model.hf_config.vocab_size) // plan.mesh.tp
    return [head_line(rows, precision=plan.precision, device=plan.device)]


def _vocabulary_lines(model: ModelPlan) -> list[tuple[str, str]]:
    if not model.resizes_vocabulary:
        return []
    before, after = model.published_vocab_size, int(model.hf_config.vocab_size)
    drawn = f"{before} -> {after} tokens; {after - before} new rows of embedding and head are drawn like the old ones"
    fits = f"the tokenizer's ids fit the {before} tokens; model.resize_vocabulary adds nothing"
    return [("vocabulary", drawn if after > before else fits)]
