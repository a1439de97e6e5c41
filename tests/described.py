"""Models that are only described: a config.json, with the names and shapes of the tensors that transformers builds."""

from collections.abc import Mapping
from typing import Any

from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.meta_model import described
from ds_finetune.model.build.skeleton import Task
from ds_finetune.model.mtp import set_mtp_layers
from ds_finetune.plan.model_tensors import DescribedModel, FullTensor, ModelTensors


def described_tree(
    tree: Mapping[str, Any], *, mtp_layers: int = 0, scores: int = 0, teacher: Mapping[str, Any] | None = None
) -> DescribedModel:
    """The model of a config.json, with a multi-token prediction layer or with so many scores of a document."""
    hf_config = AutoConfig.for_model(**{key: value for key, value in tree.items() if key != "quantization_config"})
    set_mtp_layers(hf_config, mtp_layers)
    if scores:
        hf_config.num_labels = scores
    task: Task = "sequence_classification" if scores else "causal_lm"
    return described(hf_config, task, teacher=None if teacher is None else AutoConfig.for_model(**teacher))


def one_tensor(numel: int) -> DescribedModel:
    """A model with one parameter tensor."""
    return DescribedModel({"model_type": "llama"}, lambda: ModelTensors({"weight": FullTensor((numel,))}))
