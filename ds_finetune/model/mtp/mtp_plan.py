"""Which multi-token prediction layers of a model a run trains, from its config.json and the tensors of its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ds_finetune.config.sections import ModelConfig, MtpConfig
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.model.adapters.lora_plan import LoraPlan
from ds_finetune.model.build.hub_folder import INDEX, HubFolder, has_weights
from ds_finetune.model.build.skeleton import TOKENIZER_PATTERNS, resolve_folder
from ds_finetune.model.mtp.layer import PREDICTION_LAYERS, is_mtp_tensor, mtp_layers, set_mtp_layers


@dataclass(frozen=True)
class MtpPlan:
    """How the multi-token prediction layer of a model is trained."""

    weight: float
    detach: bool
    """Whether its loss trains the layer alone."""

    def lines(self, hf_config: PretrainedConfig) -> list[tuple[str, str]]:
        """Name and text of the decision, for people."""
        trained = "it alone" if self.detach else "all that is trained"
        layer = f"layer {hf_config.num_hidden_layers} is trained with weight {self.weight:g}"
        return [("mtp", f"{layer}; its loss trains {trained}")]


def plan_mtp(hf_config: PretrainedConfig, model: ModelConfig, section: MtpConfig) -> MtpPlan | None:
    """The layer that is trained, which models of `hf_config` are built with from now on; None where none is.

    ModelError where the model has no such layer, or more than one. The number comes from the published config.json,
    because transformers' configurations say 1 where the file says nothing.
    """
    if not section.train:
        return None
    # Nothing but config.json is needed where weights are random, or have not been downloaded yet.
    folder = resolve_folder(model.path, files=TOKENIZER_PATTERNS)
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _check_config(tree, hf_config, f"mtp.train true: {folder}/config.json")
    if model.weights == "load" and has_weights(folder):
        _check_tensors(folder, hf_config.num_hidden_layers)
    set_mtp_layers(hf_config, 1)
    return MtpPlan(section.weight, section.detach)


def check_adapted(hf_config: PretrainedConfig, mtp: MtpPlan, lora: LoraPlan) -> None:
    """ConfigError where no adapter is in the layer, of which nothing would be trained; and with `mtp.detach` where all
    are, because the objective would then train nothing.
    """
    is_inside = {is_mtp_tensor(target.name, hf_config) for target in lora.targets}
    (number,) = mtp_layers(hf_config)
    given = f"mtp.train true with lora.target_modules {list(lora.section.target_modules or ())}"
    if True not in is_inside:
        raise ConfigError(
            f"{given}, which name no module of the layer, model.layers.{number}",
            hint="name modules of it too, such as eh_proj, or leave mtp out",
        )
    if mtp.detach and False not in is_inside:
        raise ConfigError(
            f"{given}, which name modules of the layer model.layers.{number} only, and mtp.detach true: the objective "
            "trains nothing",
            hint="name modules of other layers too, such as o_proj, or set mtp.detach to false",
        )


def _check_config(tree: dict[str, Any], hf_config: PretrainedConfig, label: str) -> None:
    kind = hf_config.model_type
    if not family_of(kind).has_mtp:
        legal = ", ".join(name for name, row in FAMILIES.items() if row.has_mtp)
        raise ModelError(f"{label} is of model_type {kind}, which is not tested", hint=f"tested: {legal}")
    layers = tree.get(PREDICTION_LAYERS) or 0
    if layers != 1:
        raise ModelError(
            f"{label} has {PREDICTION_LAYERS} {layers}, and a model with 1 layer can be trained",
            hint="leave mtp out: tensors of such layers are carried to exports",
        )
    if hf_config.tie_word_embeddings:
        raise ModelError(
            f"{label} has tie_word_embeddings {hf_config.tie_word_embeddings}, which is not tested",
            hint="leave mtp out",
        )


def _check_tensors(folder: Path, layer: int) -> None:
    key, index = f"model.layers.{layer}.eh_proj.weight", folder / INDEX
    is_listed = index.is_file() and key in json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
    if not is_listed and (index.is_file() or key not in HubFolder(folder).shapes):
        raise ModelError(
            f"mtp.train true: {folder} has no tensor `{key}`, though its config.json has {PREDICTION_LAYERS} 1",
            hint="leave mtp out, or get the published weights, which have the layer",
        )
