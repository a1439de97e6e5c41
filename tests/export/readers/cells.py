"""The checkpoints that DeepSpeed writes for the tests, and their tiny models of odd sizes."""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.model.tiny import CONFIGS

ODD = {"vocab_size": 97, "intermediate_size": 45}
FAMILIES = {
    "deepseek_v3": CONFIGS["deepseek_v3"] | ODD | {"kv_lora_rank": 15, "q_lora_rank": 23},
    "qwen2": CONFIGS["qwen2"] | ODD,
}


@dataclass(frozen=True)
class Cell:
    """One checkpoint: family, ZeRO stage, bf16 or fp32 parameters, whether the first layer is frozen, other ZeRO
    options.
    """

    family: str
    stage: int
    bf16: bool
    frozen: bool = False
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A name for folders and test ids."""
        return "-".join(
            (
                self.family,
                f"stage{self.stage}",
                "bf16" if self.bf16 else "fp32",
                *["frozen"] * self.frozen,
                *self.options,
            )
        )


CELLS = (
    *(
        Cell(family, stage, bf16, frozen)
        for stage in (1, 2, 3)
        for family, bf16, frozen in (("deepseek_v3", True, False), ("deepseek_v3", False, True), ("qwen2", True, True))
    ),
    Cell("deepseek_v3", 2, True, options=("parameter_alignment", "round_robin_gradients")),
    Cell("qwen2", 0, True),
)


def hf_config(family: str) -> PretrainedConfig:
    """The tiny model of a family; no number of ranks divides its sizes."""
    return AutoConfig.for_model(family, **FAMILIES[family])


def fresh(family: str) -> PreTrainedModel:
    """The model before training: the same weights each time, and a router bias that is not zero."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(hf_config(family)).float()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    return model
