"""The model of an engine as other programs have it: transformers' class, and peft's adapters around it."""

import copy
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_finetune.config.sections import LoraConfig
from ds_finetune.engine.engine import Engine
from ds_finetune.errors import ConfigError
from ds_finetune.export.adapter import AdapterBase, write_adapter
from ds_finetune.families.table import family_of
from ds_finetune.foreign.auto_models import AutoModelForCausalLM, AutoModelForSequenceClassification
from ds_finetune.foreign.bitsandbytes_linear import without_cpu_packing
from ds_finetune.model.adapters.lora import factors_of
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import resolve_folder
from ds_finetune.model.loss.teacher import TeacherPlan
from ds_finetune.model.parallel.pipeline import build_meta_model


def check_peft(model: ModelPlan) -> None:
    """ConfigError where the run has adapters that peft cannot hold here."""
    if model.lora is None:
        return
    rank, quantize = model.lora.section.rank, model.lora.section.quantize
    if find_spec("peft") is None:
        raise ConfigError(
            f"bench compares lora.rank {rank} with peft, which is not installed",
            hint="pip install peft, or leave `lora` out",
        )
    stored = json.loads((resolve_folder(model.path) / "config.json").read_text(encoding="utf-8"))
    if quantize is not None and "quantization_config" in stored:
        raise ConfigError(
            f"bench lets transformers load {model.path} in {quantize}, and its weights are stored in "
            f"{stored['quantization_config'].get('quant_method')}",
            hint="leave lora.quantize out, or name a copy in bf16",
        )


def plain_model(engine: Engine, model: ModelPlan) -> Any:  # noqa: ANN401 - of transformers or peft
    """transformers' model with the engine's weights as they are now, on its device.

    It is in fp32, for autocast. With LoRA peft's adapters are around it, and their frozen base is in the precision of
    the run, or loaded in four bits by transformers and bitsandbytes.
    """
    device, lora, in_four_bits = engine.plan.device, model.lora, {f"{name}.weight" for name in model.quantised}
    dtype = torch.float32 if lora is None else PRECISION_DTYPES[engine.plan.precision]
    lm = _four_bit_model(model, engine) if in_four_bits else _auto_class(model).from_config(_config(model)).to(dtype)
    lm.load_state_dict(
        {name: tensor for name, tensor in engine.tensors() if tensor is not None and name not in in_four_bits},
        strict=False,
    )
    return lm.to(device) if lora is None else _in_peft(lm, engine, model, lora.section).to(device)


def _auto_class(model: ModelPlan) -> Any:  # noqa: ANN401 - a class of transformers
    return AutoModelForCausalLM if model.task == "causal_lm" else AutoModelForSequenceClassification


def _config(model: ModelPlan) -> Any:  # noqa: ANN401 - of transformers
    config = copy.deepcopy(model.hf_config)
    config._attn_implementation = "sdpa"
    return config


def _four_bit_model(model: ModelPlan, engine: Engine) -> Any:  # noqa: ANN401 - of transformers
    """The model with the same weights in NF4 as the engine, computed in the run's precision."""
    from transformers import BitsAndBytesConfig

    dtype = PRECISION_DTYPES[engine.plan.precision]
    modules = build_meta_model(model.hf_config, model.task).named_modules()
    kept = [name for name, module in modules if isinstance(module, nn.Linear) and name not in model.quantised]
    asked: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantisation = BitsAndBytesConfig(**asked, bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=kept)
    lm = _auto_class(model).from_pretrained(
        resolve_folder(model.path),
        config=_config(model),
        dtype=dtype,
        quantization_config=quantisation,
        device_map={"": engine.plan.device},
        trust_remote_code=False,
    )
    for name in model.quantised:
        without_cpu_packing(lm.get_submodule(name))
    return lm


def _in_peft(lm: Any, engine: Engine, model: ModelPlan, lora: LoraConfig) -> nn.Module:  # noqa: ANN401
    """`lm` with the engine's adapters, which are trained."""
    from peft import PeftModel

    adapters = {name: tensor.clone() for name, tensor in engine.adapters() if tensor is not None}
    base = AdapterBase(
        name=model.path,
        digest="",
        family=family_of(model.hf_config.model_type),
        head={name: tensor.clone() for name, tensor in engine.score_head() if tensor is not None},
        classifier_config={} if model.task == "causal_lm" else model.hf_config.to_dict(),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapter"
        write_adapter(factors_of(adapters, lora.alpha / lora.rank), lora, path, base)
        return PeftModel.from_pretrained(lm, path, is_trainable=True)  # type: ignore[no-any-return]


def load_plain_teacher(teacher: TeacherPlan | None, device: str) -> nn.Module | None:
    """The teacher of a distillation as transformers loads it, in fp32 and evaluation mode; None where there is none."""
    if teacher is None:
        return None
    lm: nn.Module = AutoModelForCausalLM.from_pretrained(
        resolve_folder(teacher.path), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    return lm.to(device).eval()
