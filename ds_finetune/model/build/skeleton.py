"""Builds a model without weights: its configuration, its modules, and the fragment of each tensor on this rank."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ds_finetune.config.sections import OWN_ATTENTIONS
from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.families.text_part import TEXT_CONFIG
from ds_finetune.foreign.auto_configs import AutoConfig, without_types
from ds_finetune.foreign.auto_models import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
)
from ds_finetune.foreign.hub_access import hub_problem, without_password
from ds_finetune.foreign.transformers_elementwise import SOFT_CAP, computes
from ds_finetune.foreign.transformers_models import keep_in_fp32
from ds_finetune.model.attention.by_document import BY_DOCUMENT, FLASH
from ds_finetune.model.attention.compressed_attention import install_compressed_attention
from ds_finetune.model.attention.gated_delta import install_gated_delta
from ds_finetune.model.attention.indexed_attention import install_indexed_attention
from ds_finetune.model.build.hub_folder import check_folder
from ds_finetune.model.build.text_config import check_text_part, correct_decoder_name, text_config
from ds_finetune.model.experts import run_experts, spread_ids
from ds_finetune.model.hyper_connections import install_hyper_connections
from ds_finetune.model.mtp import build_mtp_layers
from ds_finetune.model.quantised.quantisation import check_no_other_format, check_readable
from ds_finetune.plan.config_json import check_model_path

Task = Literal["causal_lm", "sequence_classification"]
"""What a model computes: logits of the next token (causal LM), or scores of a document (sequence classification)."""
TOKENIZER_PATTERNS = ("*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt")
"""Patterns of a tokenizer's files in a hub repository."""
HUB_FILES = (*TOKENIZER_PATTERNS, "*.safetensors")
"""Patterns of a model's files in a hub repository. `*` also matches `/`."""
IGNORED_HUB_FILES = ("*/*.safetensors",)
"""Patterns of hub files that are not downloaded: weights in subfolders, such as a copy in `original/` of gpt-oss."""
_SOFT_CAP = "final_logit_softcapping"
_LOGIT_TRANSFORMS = (
    _SOFT_CAP,
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier_scale",
)
"""config.json keys that change logits after the head. The chunked loss supports only the soft cap's usual formula."""
_BALANCE_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
FACTORIES = {"causal_lm": AutoModelForCausalLM, "sequence_classification": AutoModelForSequenceClassification}
"""transformers' Auto class that makes the models of each task."""


@dataclass(frozen=True)
class Fragment:
    """This rank's part of a tensor of `shape`: elements `start` to `start + numel` of the flattened tensor.

    ZeRO-3's padding may follow the tensor's last element. The context `opened()` returns the elements (1-D). At its end
    it stores the values written to them. So a fragment on disk needs memory only while it is open.
    """

    start: int
    numel: int
    shape: tuple[int, ...]
    opened: Callable[[], AbstractContextManager[torch.Tensor]]

    @property
    def end(self) -> int:
        """Index after the fragment's last element in the flattened tensor; padding is excluded."""
        return min(self.start + self.numel, math.prod(self.shape))

    def write(self, values: torch.Tensor) -> None:
        """Copy this fragment's elements from the flattened full tensor `values`."""
        if self.end > self.start:
            with self.opened() as flat:
                flat[: self.end - self.start].copy_(values[self.start : self.end])


Where = Callable[[torch.Tensor], Fragment]
"""Function that returns this rank's fragment of a tensor of the model."""


def in_memory(flat: torch.Tensor, *, start: int, shape: tuple[int, ...]) -> Fragment:
    """The fragment whose elements are the tensor `flat` (1-D) in memory."""
    return Fragment(start, flat.numel(), shape, lambda: nullcontext(flat))


def full_fragment(tensor: torch.Tensor) -> Fragment:
    """The fragment of a tensor that this rank holds in full."""
    return in_memory(tensor.data.view(-1), start=0, shape=tuple(tensor.shape))


def resolve_folder(path: str, *, files: Sequence[str] = HUB_FILES) -> Path:
    """Local folder of a model or tokenizer. For a hub id, `files` are downloaded to the hub's cache."""
    folder = Path(path)
    if folder.is_dir():
        check_folder(folder)
        return folder
    check_model_path(path)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    problem = hub_problem()
    patterns = {"allow_patterns": list(files), "ignore_patterns": list(IGNORED_HUB_FILES)}
    try:
        folder = Path(snapshot_download(path, **patterns, local_files_only=bool(problem)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as missing:
        if problem:
            raise ModelError(
                f"model `{path}` is neither a folder nor in the hub's cache {constants.HF_HUB_CACHE}, and {problem}",
                hint="check the name, give a local folder, or run on a machine that can reach the hub",
            ) from missing
        raise ModelError(
            f"model `{path}` is neither a folder nor available from the hub: {without_password(missing)}",
            hint="check the name, or give a local folder",
        ) from missing
    check_folder(folder)
    return folder


def read_hf_config(path: str, *, files: Sequence[str] = HUB_FILES, task: Task = "causal_lm") -> PretrainedConfig:
    """Read the transformers configuration of a model folder or hub id; for a multimodal model, that of its text part.
    ModelError if there is none, or transformers has no model of this type for `task`.

    `quantization_config` is removed, because weights are dequantised when they are read. ModelError if the quantised
    format is not supported.
    """
    folder = resolve_folder(path, files=files)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model folder `{folder}` has no config.json", hint="name the folder that holds the model's config.json"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as unknown:
        raise ModelError(
            f"{folder}/config.json: {without_types(unknown)}",
            hint=f"model_type, also in sections, must be one that transformers {transformers.__version__} knows",
        ) from unknown
    except (OSError, TypeError, KeyError, ArithmeticError, RecursionError, StrictDataclassError) as wrong:
        reason = " ".join(str(wrong).split())
        raise ModelError(
            f"{folder}/config.json cannot be read: {reason}", hint="correct the file, or download the published one"
        ) from wrong
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check_text_part(config, tree, task, f"{folder}/config.json")
    config = text_config(config)
    _check_task(config, task, f"{folder}/config.json")
    _check_names(config, f"{folder}/config.json")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise ModelError(
            f"{folder}/config.json: use_bidirectional_attention is {config.use_bidirectional_attention!r}: a token "
            "that attends to later ones cannot learn to predict them",
            hint="train a model whose attention is causal",
        )
    check_vocabulary(config, f"{folder}/config.json")
    if task == "causal_lm":
        check_logits(config, f"{folder}/config.json")
    _check_balance_loss(config, task, f"{folder}/config.json")
    if getattr(config, "quantization_config", None) is not None:
        check_readable(config.quantization_config, f"{folder}/config.json", ModelError)
        del config.quantization_config
    check_no_other_format(folder, ModelError)
    return config


def has_class(config: PretrainedConfig, task: Task) -> bool:
    """Whether transformers has a model class for this configuration and task."""
    return type(config) in FACTORIES[task]._model_mapping


def _check_task(config: PretrainedConfig, task: Task, label: str) -> None:
    if has_class(config, task):
        return
    if task == "causal_lm":
        model = AutoModelForMultimodalLM._model_mapping.get(type(config), None)
        is_multimodal = model is not None and model.input_modalities != "text"
        raise ModelError(
            f"{label}: model_type `{config.model_type}` is not a causal LM"
            + f": it combines text with images or sound, and its config.json has no {TEXT_CONFIG}" * is_multimodal,
            hint="use a model with a language-model head",
        )
    raise ModelError(
        f"{label}: transformers {transformers.__version__} has no class of model_type `{config.model_type}` for "
        "sequence classification",
        hint="train a model of another type, such as llama, qwen3 or deepseek_v3",
    )


def _check_names(config: PretrainedConfig, label: str) -> None:
    rope: Any = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    kinds = ("default", *ROPE_INIT_FUNCTIONS)
    choices = [("rope_type", part["rope_type"], kinds) for part in parts if part.get("rope_type")]
    choices += [("hidden_act", config.hidden_act, tuple(ACT2FN))] if hasattr(config, "hidden_act") else []
    for key, name, supported in choices:
        if name not in supported and not family_of(config.model_type).is_generic:
            raise ModelError(
                f"{label}: {key} is {name!r}, which transformers does not have",
                hint=f"transformers has {', '.join(supported)}",
            )


def check_vocabulary(config: PretrainedConfig, label: str) -> None:
    """ModelError if the configuration has no vocabulary size, as in a multimodal model."""
    if not hasattr(config, "vocab_size"):
        raise ModelError(
            f"{label}: model_type `{config.model_type}` has no vocab_size of its own: it combines text with images or "
            "sound",
            hint="train a text model, whose model_type often ends in `_text`",
        )


def soft_cap(config: PretrainedConfig) -> float | None:
    """Soft cap of a causal LM's logits; None if its forward has none, or computes it by another formula."""
    cap = getattr(config, _SOFT_CAP, None)
    if not cap or not has_class(config, "causal_lm") or not computes(model_class(config).forward, SOFT_CAP):
        return None
    return float(cap)


def check_logits(config: PretrainedConfig, label: str) -> None:
    """ModelError if config.json changes logits in a way that the chunked loss does not support."""
    neutral = {_SOFT_CAP: (None, soft_cap(config))}
    transformed = [key for key in _LOGIT_TRANSFORMS if getattr(config, key, None) not in neutral.get(key, (None, 1))]
    if transformed:
        raise ModelError(
            f"{label}: `{transformed[0]}` = {getattr(config, transformed[0])} changes the logits after the head, "
            f"which the chunked loss of model_type `{config.model_type}` would not see",
            hint="train a model whose config.json does not have this key",
        )


def _check_balance_loss(config: PretrainedConfig, task: Task, label: str) -> None:
    weight = next((getattr(config, key) for key in _BALANCE_WEIGHTS if hasattr(config, key)), 1.0)
    has_loss = hasattr(sys.modules[model_class(config, task).__module__], "load_balancing_loss_func")
    if getattr(config, "output_router_logits", False) and weight and has_loss:
        raise ModelError(
            f"{label}: `output_router_logits` = true turns on transformers' load-balancing loss (weight {weight}), a "
            "mean over a micro-batch's tokens, which is not supported",
            hint="set output_router_logits to false in config.json; for supported model types `router.balance` in the "
            "run file trains a load-balancing loss",
        )


def model_class(hf_config: PretrainedConfig, task: Task = "causal_lm") -> type[PreTrainedModel]:
    """transformers' model class for a configuration and a task."""
    return FACTORIES[task]._model_mapping[type(hf_config)]  # type: ignore[no-any-return]


def head_of(lm: PreTrainedModel) -> Any:  # noqa: ANN401 - mostly a linear layer, whose class its users change
    """The module that reads the last hidden states: the language model head, or the head for classes or scores."""
    head = lm.get_output_embeddings()
    if head is not None:
        return head
    return lm.encoder_head if hasattr(lm, "encoder_head") else lm.score


def has_score_head(lm: PreTrainedModel) -> bool:
    """Whether the model scores or classifies documents instead of predicting tokens."""
    return lm.get_output_embeddings() is None


def check_attention(hf_config: PretrainedConfig, attention: str, task: Task = "causal_lm") -> None:
    """ModelError if the attention implementation `attention` is not available for the model type."""
    kind = model_class(hf_config, task)
    family = family_of(hf_config.model_type)
    has_sdpa = kind._supports_sdpa or family.has_sinks
    legal = [*(["sdpa"] if has_sdpa else []), "eager", *([FLASH] if kind._supports_flash_attn else [])]
    required = "sdpa" if attention in OWN_ATTENTIONS and not family.is_generic else attention
    if required in (*OWN_ATTENTIONS, "eager", FLASH) and required not in legal:
        raise ModelError(
            f"model.attention {attention} is not available for model_type `{hf_config.model_type}`, "
            f"for which transformers has {' and '.join(legal)}",
            hint=f"set model.attention: {legal[0]}",
        )
    has_window = "sliding_attention" in (getattr(hf_config, "layer_types", None) or ())
    if attention == FLASH and has_window and family.window_in_mask:
        raise ModelError(
            f"model.attention {attention} would ignore the sliding window of model_type `{hf_config.model_type}`, "
            "which transformers does not pass to it",
            hint="set model.attention: sdpa",
        )


def build_skeleton(  # noqa: PLR0913
    hf_config: PretrainedConfig,
    *,
    attention: str,
    dtype: torch.dtype,
    device: str,
    task: Task = "causal_lm",
    init_context: AbstractContextManager[object] | None = None,
) -> PreTrainedModel:
    """Build a model's modules in `dtype` on `device`. Buffers are initialised, parameters are not.

    Modules are constructed in `init_context`, for example one in which DeepSpeed partitions parameters. Model types of
    the table of families get attention by document if `attention` is in OWN_ATTENTIONS. Experts use grouped matrix
    products. The KV cache is off, because only then transformers separates packed documents (transformers 5.23,
    masking_utils.py:873).
    """
    check_attention(hf_config, attention, task)
    hf_config.use_cache = False
    is_by_document = attention in OWN_ATTENTIONS and not family_of(hf_config.model_type).is_generic
    hf_config._attn_implementation = BY_DOCUMENT if is_by_document else attention
    hf_config.dtype = dtype
    # The model class is imported outside of `init_context`, because DeepSpeed 0.19.8 drops decorators of classes that
    # are defined inside zero.Init (partition_parameters.py:581-622).
    kind = model_class(hf_config, task)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        building = build_mtp_layers(kind, hf_config)
        with building, no_init_weights(), init_context or nullcontext(), torch.device(device):
            model = kind(hf_config)
    except ImportError as missing:
        reason = str(missing).strip().splitlines()[0]
        raise ModelError(
            f"{kind.__name__} with model.attention {attention} cannot be built here: {reason}",
            hint="install what is missing, or choose another model.attention",
        ) from missing
    finally:
        torch.set_default_dtype(default)
    correct_decoder_name(model)
    model.tie_weights()
    family = family_of(hf_config.model_type)
    if family.fused_experts or family.transposed_experts:
        assert model.config._experts_implementation == "grouped_mm", model.config._experts_implementation
        ALL_EXPERTS_FUNCTIONS.register("grouped_mm", run_experts)
        spread_ids(model, family.expert_keys.number(hf_config.to_dict()) if family.expert_keys else 0)
    _set_dtypes(model, dtype, device)
    for install in (
        install_indexed_attention,
        install_compressed_attention,
        install_gated_delta,
        install_hyper_connections,
    ):
        install(model)
    return model.train()


def _set_dtypes(model: PreTrainedModel, dtype: torch.dtype, device: str) -> None:
    """Cast parameters to `dtype`, because transformers 5.24 constructs some in fp32
    (deepseek_v3/modeling_deepseek_v3.py:126). Tensors that a family keeps in fp32 become fp32 buffers.

    Untrained parameters (transformers 5.23, ernie4_5_moe/modeling_ernie4_5_moe.py:281) become buffers too, because
    DeepSpeed 0.19.8 casts all parameters, but not buffers that the model lists (runtime/keep_in_fp32.py).
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    fp32_names = family_of(model.config.model_type).fp32_buffers
    for module in model.modules():
        tensors = [*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)]
        for name, tensor in tensors:
            if name in fp32_names and not tensor.requires_grad:
                module._parameters.pop(name, None)
                shape = getattr(tensor, "ds_shape", tensor.shape)
                module.register_buffer(name, torch.zeros(shape, dtype=torch.float32, device=device))
    keep_in_fp32(model, fp32_names)
