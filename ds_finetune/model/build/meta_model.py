"""Names and shapes of a model's tensors, read off modules on torch's meta device, which need no memory."""

from functools import partial

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import FinetuneError, ModelError
from ds_finetune.families.table import family_of
from ds_finetune.model.build.skeleton import Task, head_of
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.model.parallel.pipeline import build_meta_model, has_tied_head
from ds_finetune.model.parallel.sharding import tensor_of
from ds_finetune.plan.layer_stages import StageLayers, stages_of
from ds_finetune.plan.model_tensors import DescribedModel, ModelTensors


def read_tensors(hf_config: PretrainedConfig, task: Task = "causal_lm") -> ModelTensors:
    """Names and shapes of the tensors of the model with configuration `hf_config`. ModelError if it cannot be built."""
    try:
        lm = build_meta_model(hf_config, task)
    except FinetuneError:
        raise
    except Exception as broken:
        reason = " ".join(f"{type(broken).__name__}: {broken}".split())
        raise ModelError(
            f"a model of model_type `{hf_config.model_type}` cannot be built from its config.json: {reason}",
            hint="take the config.json published with the model",
        ) from broken
    is_transposed = family_of(hf_config.model_type).transposed_experts
    tensors = {
        name: tensor_of(name, tuple(parameter.shape), has_transposed_experts=is_transposed)
        for name, parameter in lm.named_parameters()
    }
    linears = linear_weights(lm) if family_of(hf_config.model_type).is_generic else ()
    return ModelTensors(tensors, has_tied_head(lm), len(mtp_layers(hf_config)), linears)


def linear_weights(lm: PreTrainedModel) -> tuple[str, ...]:
    """Names of the weights of a model's linear modules, without the head."""
    modules = ((name, each) for name, each in lm.named_modules() if isinstance(each, nn.Linear))
    return tuple(f"{name}.weight" for name, each in modules if each is not head_of(lm))


def described(
    hf_config: PretrainedConfig, task: Task = "causal_lm", *, teacher: PretrainedConfig | None = None
) -> DescribedModel:
    """Names and shapes of the tensors of a model, and of its teacher if one runs beside it."""
    return DescribedModel(
        hf_config.to_dict(),
        partial(read_tensors, hf_config, task),
        teacher=None if teacher is None else described(teacher),
    )


def layers_of_stages(
    hf_config: PretrainedConfig, parallel: ParallelConfig, task: Task = "causal_lm"
) -> tuple[StageLayers | None, ...]:
    """Layers of each pipeline stage; (None,) without pipeline parallelism."""
    return stages_of(read_tensors(hf_config, task), parallel) if parallel.pp > 1 else (None,)
