"""The attention of a model on this rank's GPU."""

import torch
from transformers import PretrainedConfig

from ds_finetune.config.sections import OWN_ATTENTIONS
from ds_finetune.errors import ModelError
from ds_finetune.plan.packed_attention import varlen_problem


def packs_documents(attention: str, hf_config: PretrainedConfig, *, device: str, precision: str) -> bool:
    """Whether attention takes all documents of a forward in one call on this rank's `device`, `cpu` or `cuda`.

    ModelError where the run file names that kernel and this GPU does not have it.
    """
    if attention not in OWN_ATTENTIONS or attention == "by_document":
        return False
    if device == "cpu":
        gpu, problem = device, "its kernel runs on GPUs alone"
    else:
        gpu, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        problem = varlen_problem(hf_config.to_dict(), precision=precision, capability=capability)
    if problem and attention == "varlen":
        raise ModelError(
            f"model.attention varlen with model_type `{hf_config.model_type}` on {gpu}: {problem}",
            hint="set model.attention: sdpa, which attends document by document there",
        )
    return not problem
