"""A model whose rows are whole blocks of weights in four bits, and its twin with the weights that these stand for."""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.reference.selftest.cells import TINY_MODELS

WIDE = "llama_wide"
TWIN = f"{WIDE}-nf4"
HAS_FOUR_BIT = find_spec("bitsandbytes") is not None


def write_wide(models: Path) -> None:
    """Write the model to the folder `WIDE` of `models`, and its twin to `TWIN`, by bitsandbytes alone."""
    tree = TINY_MODELS["llama"] | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tree)).float()
    model.save_pretrained(models / WIDE)
    if not HAS_FOUR_BIT:
        return
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            held = quantize_4bit(module.weight.data, blocksize=64, compress_statistics=True, quant_type="nf4")
            module.weight.data = dequantize_4bit(*held).to(module.weight.dtype)
    model.save_pretrained(models / TWIN)
