"""The feature that trains a published multi-token prediction layer. It checks the model's folder for the layer and
computes the layer's loss; `model/mtp.py` builds the layer.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.config.sections import ModelConfig, MtpConfig
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.families.text_part import is_composite
from ds_finetune.features.feature import Feature, RankParts
from ds_finetune.model.adapters.lora_plan import LoraPlan
from ds_finetune.model.attention.by_document import Documents, mask_context
from ds_finetune.model.build.hub_folder import INDEX, HubFolder, has_weights
from ds_finetune.model.build.skeleton import TOKENIZER_PATTERNS, head_of, resolve_folder
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.model.mtp import (
    PREDICTION_LAYERS,
    SkippedLayer,
    is_mtp_tensor,
    mtp_layer_inputs,
    mtp_layers,
    run_mtp_layer,
    set_mtp_layers,
)
from ds_finetune.model.parallel.pipeline import MissingLayer, ReceiveHiddenStates
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import LossAndSums, Term
from ds_finetune.plan.settings import RunSettings

_UNKNOWN = re.compile(r"^mtp\.0\.(.*\.)?(compressor|indexer|tid2eid)\b|^mtp\.(?!0\.)")
"""Matches unsupported `mtp.*` tensors of DeepSeek-V4: those of compressed entries, expert tables or a second layer."""
DocumentArguments = Callable[[tuple[Documents, ...] | None, torch.device], dict[str, Any]]
"""Makes the arguments by which attention separates packed documents, from their lengths and a device."""


class MtpLoss(ExtraLoss):
    """Loss of multi-token prediction: cross entropy of the token after the next, if it is supervised and in the same
    document. With `detach` its gradient reaches only the prediction layer.

    The sum is divided by the number of supervised tokens, as in DeepSeek-V3's report (arXiv 2412.19437, eq. 24). The
    number of predictions is smaller: a document of n supervised tokens has n - 1 predictions, or n if a prompt precedes
    these tokens.
    """

    name = "mtp"
    sum_names = ("mtp_loss", "mtp_correct", "mtp_tokens")

    def __init__(self, lm: PreTrainedModel, arguments: DocumentArguments, *, weight: float, detach: bool) -> None:
        self.terms = (Term("supervised_tokens", weight),)
        self.trains_embedding = not detach
        self._lm, self._arguments, self._detach = lm, arguments, detach
        self._streams: torch.Tensor | None = None

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the prediction layer: loss in nats per prediction, and accuracy against the text's tokens.

        The acceptance rate of speculative decoding may differ, because a server compares with the model's own choice.
        """
        tokens = max(sums["mtp_tokens"], 1)
        return {"mtp_loss": sums["mtp_loss"] / tokens, "mtp_accuracy": sums["mtp_correct"] / tokens}

    @contextmanager
    def listen(self, rows: ForwardRows, *, is_counting: bool, is_first: bool) -> Iterator[None]:
        """Context of a forward that records the residual streams for DeepSeek-V4's prediction layer."""
        if not family_of(self._lm.config.model_type).compresses:
            yield
            return

        def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            (self._streams,) = inputs

        hook = self._lm.base_model.hc_head.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def loss(self, rows: ForwardRows, hidden: torch.Tensor, weights: torch.Tensor) -> LossAndSums | None:
        """Loss of a forward's predictions times its weight. `hidden` [rows, tokens, width] is the normed output."""
        (number,) = mtp_layers(self._lm.config)
        layer = self._lm.base_model.layers[number]
        streams, self._streams = self._streams, None
        if isinstance(layer, MissingLayer):
            return None
        if isinstance(layer, SkippedLayer):
            assert streams is not None, "no forward was listened to"
            layer, hidden = layer.mtp, streams
        assert rows.next_ids is not None, "the batch does not look ahead; set looks_ahead in its BatchPlan"
        assert rows.next_labels is not None
        with torch.no_grad() if self._detach else nullcontext():
            embedding: Any = self._lm.get_input_embeddings()
            embed = embedding.embed if isinstance(embedding, ReceiveHiddenStates) else embedding
            embedded = embed(rows.next_ids)
        joined = mtp_layer_inputs(layer, embedded, hidden.detach() if self._detach else hidden)
        arguments = self._arguments(rows.documents, joined.device)
        with mask_context(self._lm):
            states = run_mtp_layer(self._lm, layer, joined, rows.position_ids, **arguments)
        options = {"supervised": rows.next_supervised, "is_trained": not self._detach}
        out: LossAndSums = head_of(self._lm)(states, rows.next_labels, **options)
        number_of = (rows.next_labels != IGNORE_INDEX).sum(dtype=torch.float64)[None]
        return LossAndSums(out.loss * weights[0].to(out.loss.dtype), torch.cat([out.sums, number_of]))


class MtpFeature(Feature):
    """Trains the multi-token prediction layer that is published with the model."""

    name = "mtp"

    settings: MtpConfig

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> MtpConfig | None:
        """Plan the training of the multi-token prediction layer if `mtp.train` is set, else None."""
        return plan_mtp(hf_config, run.model, run.mtp)

    @property
    def own_loss(self) -> str:
        """With `mtp.detach`: name of the prediction layer's loss, the only one that trains the layer. Else empty."""
        return MtpLoss.name if self.settings.detach else ""

    def lines(self) -> list[tuple[str, str]]:
        """Line of the printed plan about the prediction layer and the parameters that its loss trains."""
        trained = "only this layer" if self.settings.detach else "all that is trained"
        layer = f"layer {self.model.hf_config.num_hidden_layers} is trained with weight {self.settings.weight:g}"
        return [("mtp", f"{layer}; its loss trains {trained}")]

    def owns(self, name: str) -> bool:
        """Whether `name` is a parameter of the prediction layer; false without `mtp.detach`."""
        return bool(self.own_loss) and is_mtp_tensor(name, self.model.hf_config)

    def extra_loss(self, trained: TrainedModel, parts: RankParts) -> ExtraLoss:
        """Make the loss of the multi-token prediction layer."""
        weight, detach = self.settings.weight, self.settings.detach
        return MtpLoss(trained.lm, trained.document_arguments, weight=weight, detach=detach)


def plan_mtp(hf_config: PretrainedConfig, model: ModelConfig, section: MtpConfig) -> MtpConfig | None:
    """Check that the model has one multi-token prediction layer, and make `hf_config` build models with it. Returns the
    settings, or None if `mtp.train` is off.

    ModelError if the model has no such layer or several. The number of these layers is read from the published
    config.json, because transformers' configurations have 1 by default.
    """
    if not section.train:
        return None
    folder = resolve_folder(model.path, files=TOKENIZER_PATTERNS)
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _check_config(tree, hf_config, f"mtp.train true: {folder}/config.json")
    # Weights that are not downloaded yet, or will be randomly initialised, have no tensors to check.
    if model.weights == "load" and has_weights(folder):
        _check_tensors(folder, hf_config)
    set_mtp_layers(hf_config, 1)
    return section


def check_adapted(hf_config: PretrainedConfig, mtp: MtpConfig, lora: LoraPlan) -> None:
    """ConfigError if `mtp.train` would train nothing, because LoRA adapts no module of the prediction layer. It is
    raised too if the objective would train nothing, because LoRA adapts only this layer and `mtp.detach` is on.
    """
    is_inside = {is_mtp_tensor(target.name, hf_config) for target in lora.targets}
    (number,) = mtp_layers(hf_config)
    setting = f"mtp.train true with lora.target_modules {list(lora.section.target_modules or ())}"
    if True not in is_inside:
        raise ConfigError(
            f"{setting}: no adapter is in the multi-token prediction layer, model.layers.{number}",
            hint="name modules of this layer too, such as eh_proj, or leave the section mtp out",
        )
    if mtp.detach and False not in is_inside:
        raise ConfigError(
            f"{setting} and mtp.detach true: all adapters are in the multi-token prediction layer, "
            f"model.layers.{number}, so the objective trains nothing",
            hint="name modules of other layers too, such as o_proj, or set mtp.detach: false",
        )


def _check_config(tree: dict[str, Any], hf_config: PretrainedConfig, label: str) -> None:
    kind = hf_config.model_type
    if not family_of(kind).has_mtp or is_composite(tree):
        legal = ", ".join(name for name, row in FAMILIES.items() if row.has_mtp)
        kind = tree.get("model_type", kind)
        raise ModelError(
            f"{label} has model_type {kind}, with which mtp.train is not tested", hint=f"it is tested with {legal}"
        )
    layers = tree.get(PREDICTION_LAYERS) or 0
    if layers != 1:
        raise ModelError(
            f"{label} has {PREDICTION_LAYERS} {layers}, but only 1 multi-token prediction layer is supported",
            hint="leave the section mtp out; exports then get these layers' tensors from the model's folder",
        )
    if hf_config.tie_word_embeddings:
        raise ModelError(
            f"{label} has tie_word_embeddings true, with which mtp.train is not tested",
            hint="leave the section mtp out to train without multi-token prediction",
        )

    further = (tree.get("compress_ratios") or ())[hf_config.num_hidden_layers :]
    if any(further):
        raise ModelError(
            f"{label}: compress_ratios has {further[0]} for the prediction layer, but only a prediction layer that "
            "compresses nothing (0) is supported",
            hint="leave the section mtp out; exports then get the layer's tensors from the model's folder",
        )


def _check_tensors(folder: Path, hf_config: PretrainedConfig) -> None:
    is_apart, index = family_of(hf_config.model_type).compresses, folder / INDEX
    key = "mtp.0.e_proj.weight" if is_apart else f"model.layers.{hf_config.num_hidden_layers}.eh_proj.weight"
    is_indexed = index.is_file()
    keys = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}) if is_indexed else ()
    keys = keys if key in keys or is_indexed else HubFolder(folder).shapes
    others = [name for name in keys if name.startswith("mtp.") and _UNKNOWN.search(name)] if is_apart else []
    if others:
        raise ModelError(
            f"mtp.train true: {folder} has the tensor `{others[0]}`, but only one prediction layer is supported, "
            "without compressed entries and without experts chosen by token ids",
            hint="leave the section mtp out; exports then get the layer's tensors from the model's folder",
        )
    if key not in keys:
        raise ModelError(
            f"mtp.train true: {folder} has no tensor `{key}`, although {PREDICTION_LAYERS} is 1 in its config.json",
            hint="leave the section mtp out, or download the published weights, which include the prediction layer",
        )
