"""Independent implementations for the reference loop: multi-token prediction layers, routers, adapters and teachers."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from ds_finetune.config.objectives import DistillObjective
from ds_finetune.config.sections import LoraConfig, MtpConfig
from ds_finetune.data.teacher_scores import DocumentScores, ScoreIdentity, StoredScores, write_manifest, write_shard
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.foreign.auto_models import AutoModelForCausalLM
from ds_finetune.foreign.transformers_attention import CACHE
from ds_finetune.model.adapters.lora import initial_factors
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.build.skeleton import Task
from ds_finetune.model.mtp import SkippedLayer, add_mtp_modules, more_layers, set_mtp_layers
from ds_finetune.model.weights.names import hub_pieces
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.plan.trained_parts import RouterPlan
from ds_finetune.reference.selftest.cells import SAMPLES, TINY_MODELS, samples


def add_layer(model: PreTrainedModel) -> nn.Module:
    """Add a multi-token prediction layer with uninitialised weights to `model`, under its published names. Returns
    transformers' module of the layer, which shares these weights. The forward pass of `model` does not run the layer.
    """
    config: Any = model.config
    layers: Any = model.get_decoder().layers
    if family_of(config.model_type).compresses:
        # transformers 5.23 has no module for DeepSeek-V4's multi-token prediction layer.
        with more_layers(config, 1):
            compressed: nn.Module = type(layers[0])(config, len(layers))
        add_mtp_modules(compressed, config)
        layers.append(SkippedLayer(compressed))
        return compressed
    # These keys of a multi-token prediction layer are set here, because transformers 5.23 has them only for some types.
    config.num_mtp_layers = 1
    for key in ("layer_types", "mlp_layer_types"):
        if getattr(config, key, None):
            setattr(config, f"mtp_{key}", getattr(config, key)[-1:])
    # MtpModel builds its layer with index 0, so the layer has an indexer of its own, as the first layer does.
    layer: Any = MtpModel(model, 1).layers[0]
    block = layer.mtp_block
    # Layers of glm_moe_dsa also return the tokens that their indexer chose. Only hidden states are passed on.
    block.register_forward_hook(lambda _, __, out: out[0] if isinstance(out, tuple) else out)
    block.enorm, block.hnorm, block.eh_proj = layer.enorm, layer.hnorm, layer.eh_proj
    block.shared_head = nn.Module()
    block.shared_head.norm = layer.post_norm
    layers.append(block)
    return layer  # type: ignore[no-any-return]


def _compressed_states(model: Any, block: Any, embedded: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Output of DeepSeek-V4's prediction layer for a document, from next tokens' embeddings and residual streams."""
    projected = [block.h_proj(block.hnorm(streams[:, :, n])) for n in range(streams.shape[2])]
    inputs = torch.stack(projected, dim=2) + block.e_proj(block.enorm(embedded)).unsqueeze(2)
    tokens, rotary = embedded.shape[1], model.get_decoder().rotary_emb
    positions, position = torch.arange(tokens)[None], torch.arange(tokens)
    distance = position[:, None] - position
    mask = torch.zeros(tokens, tokens).masked_fill(
        (distance < 0) | (distance >= model.config.sliding_window), -torch.inf
    )
    out = block(
        inputs,
        position_embeddings={
            kind: rotary(embedded, position_ids=positions, layer_type=kind) for kind in ("main", "compress")
        },
        position_ids=positions,
        attention_mask=mask[None, None],
    )
    states: torch.Tensor = block.norm(block.hc_head(out))
    return states[0]


class PlainMtp:
    """Multi-token prediction layer of a transformers model, for forward passes of one unpadded document each."""

    def __init__(self, model: PreTrainedModel, folder: Path, section: MtpConfig) -> None:
        self._model: Any = model
        self._section, self._sum, self._tokens = section, 0.0, 0
        self._layer = add_layer(model)
        self.prefix = f"model.layers.{model.config.num_hidden_layers}."
        stored, family = load_file(folder / "model.safetensors"), family_of(model.config.model_type)
        block = model.get_submodule(self.prefix[:-1])
        with torch.no_grad():
            for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
                for piece in hub_pieces(self.prefix + name, tuple(tensor.shape), family):
                    tensor[piece.index] = stored[piece.key]
        # The config gets the number of prediction layers, so that their adapters are planned too.
        set_mtp_layers(model.config, 1)
        if family.compresses:
            model.get_decoder().hc_head.register_forward_pre_hook(self._keep_streams)
        else:
            model.get_decoder().register_forward_hook(self._keep)

    def parameters_apart(self) -> Iterator[nn.Parameter]:
        """Parameters that only the multi-token prediction loss trains; their gradient norm is clipped separately."""
        if self._section.detach:
            yield from self._model.get_submodule(self.prefix[:-1]).parameters()

    def loss(self, ids: np.ndarray, labels: np.ndarray) -> torch.Tensor:
        """Weighted multi-token prediction loss (scalar), summed over tokens of `ids`, the latest forward pass's input.
        It is the cross entropy of the token after the next one (DeepSeek-V3, arXiv 2412.19437, eq. 24).
        """
        logits = self.logits(torch.from_numpy(ids).long())
        targets = torch.from_numpy(labels).long()[1:]
        out = functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        self._sum, self._tokens = self._sum + out.item(), self._tokens + int((targets != IGNORE_INDEX).sum())
        return self._section.weight * out

    def take_loss(self) -> float:
        """Mean multi-token prediction loss in nats, unweighted, over all predictions since the last call."""
        mean, self._sum, self._tokens = self._sum / self._tokens, 0.0, 0
        return mean

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the token after the next, [tokens - 1, vocabulary], for `ids` of the latest forward pass."""
        head = self._model.lm_head.weight
        return functional.linear(self.states(ids), head.detach() if self._section.detach else head)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Output of the prediction layer before the head, [tokens - 1, width], for `ids` of the latest forward pass."""
        embedded, hidden = self._model.get_input_embeddings()(ids[None, 1:]), self._hidden[:, :-1]
        if self._section.detach:
            embedded, hidden = embedded.detach(), hidden.detach()
        if family_of(self._model.config.model_type).compresses:
            return _compressed_states(self._model, self._layer, embedded, hidden)
        positions = torch.arange(len(ids) - 1)[None]
        # Only the indexers of DeepSeek sparse attention read this causal mask.
        mask = torch.ones(len(ids) - 1, len(ids) - 1, dtype=torch.bool).tril()[None, None]
        out: torch.Tensor = self._layer(
            inputs_embeds=embedded,
            previous_hidden_state=hidden,
            position_embeddings=self._model.get_decoder().rotary_emb(embedded, positions),
            attention_mask=mask,
            position_ids=positions,
            **{CACHE: None},
        )
        return out[0]

    def _keep(self, _: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401 - of transformers
        self._hidden: torch.Tensor = output.last_hidden_state

    def _keep_streams(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        (self._hidden,) = inputs


class PlainRouters:
    """Hooks that balance the routers of a transformers model. A forward pass must have one unpadded document."""

    def __init__(self, model: nn.Module, plan: RouterPlan) -> None:
        self._plan = plan
        self._layers = [model.get_submodule(f"model.layers.{layer}") for layer in plan.layers]
        self._balanced = [layer in plan.balanced for layer in plan.layers]
        self.counts = torch.zeros(len(plan.layers), plan.experts, dtype=torch.int64)
        self._losses: list[torch.Tensor] = []
        for number, layer in enumerate(self._layers):
            module = layer.get_submodule(plan.kind.module)
            module.requires_grad_(plan.section.train)
            module.register_forward_hook(lambda _, __, output, number=number: self._see(number, output))
        if not plan.section.train:
            for name, parameter in model.named_parameters():
                # With router.train false, a prediction layer's router is frozen too, although it is not balanced.
                if f".{plan.kind.module}." in name:
                    parameter.requires_grad_(False)

    def take_loss(self) -> torch.Tensor:
        """Balance loss, `sum_i f_i P_i`, summed over layers and documents since the last call (scalar)."""
        total = torch.stack(self._losses).sum()
        self._losses.clear()
        return total

    def take_counts(self) -> torch.Tensor:
        """Number of tokens routed to each expert since the last call, int64 [layers, experts]."""
        counts = self.counts.clone()
        self.counts.zero_()
        return counts

    def update_biases(self, counts: torch.Tensor) -> None:
        """Move each router's bias against the load of its experts in a step. `counts` is [layers, experts]."""
        for layer, chosen, is_balanced in zip(self._layers, counts, self._balanced, strict=True):
            if not is_balanced:
                continue
            bias: Any = layer.get_buffer(str(self._plan.kind.bias))
            load = chosen.double()
            bias -= self._plan.section.bias_update * torch.sign(load - load.mean()).float()

    def _see(self, number: int, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        logits, _, chosen = output
        tokens, experts = logits.shape
        self.counts[number] += torch.bincount(chosen.flatten(), minlength=experts)
        if not self._balanced[number]:
            return
        if self._plan.kind.scores != "softmax":
            is_root = self._plan.kind.scores == "sqrtsoftplus"
            scores = functional.softplus(logits.float()).sqrt() if is_root else logits.float().sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True)
            chosen = scores.topk(chosen.shape[1]).indices
        else:
            probabilities = logits.float().softmax(-1)
        often = torch.bincount(chosen.flatten(), minlength=experts)
        f = often * experts / (chosen.shape[1] * tokens)
        self._losses.append((f * probabilities.mean(0)).sum())


_FACTOR = re.compile(r"\.parametrizations\.(\w+)\.0\.(lora_[AB])$")


@dataclass(frozen=True)
class PlainAdapters:
    """Section `lora` of a run file, applied to the reference loop's model. `seed` initialises the adapters."""

    section: LoraConfig
    seed: int

    def freeze(self, model: PreTrainedModel, task: Task) -> None:
        """Freeze all parameters except a classification head, and round the weights that the run stores in 4 bits."""
        lora = plan_lora(model.config, self.section, task)
        model.requires_grad_(False)
        for name in lora.fully_trained:
            model.get_parameter(name).requires_grad_(True)
        for target in lora.quantised:
            weight = model.get_parameter(f"{target.name}.weight")
            weight.data = _rounded_to_four_bits(weight.data)

    def add(self, model: PreTrainedModel, task: Task) -> None:
        """Add LoRA adapters, in their initial state, to `model`."""
        for target in plan_lora(model.config, self.section, task).targets:
            for leaf, shape in target.shapes.items():
                factors = initial_factors(f"{target.name}.{leaf}", shape, self.section.rank, self.seed)
                parametrization = _LowRankSum(factors, self.section.scale)
                parametrize.register_parametrization(model.get_submodule(target.name), leaf, parametrization)


class _LowRankSum(nn.Module):
    """Parametrisation of a weight [..., out, in]: weight + scale x B A, with A [..., rank, in], B [..., out, rank]."""

    def __init__(self, factors: Mapping[str, torch.Tensor], scale: float) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(factors["A"]), nn.Parameter(factors["B"])
        self._scale = scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self._scale * (self.lora_B @ self.lora_A)


def trained_name(name: str) -> str:
    """Name that the engine gives to a parameter of the reference model. Adapters are named after their weight."""
    return _FACTOR.sub(lambda match: f".{'' if match[1] == 'weight' else f'{match[1]}_'}{match[2]}", name)


def _rounded_to_four_bits(weight: torch.Tensor) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    quantised: Any = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    return dequantize_4bit(*quantised).to(weight.dtype)  # type: ignore[no-any-return]


_TOP_K = 5
_DENSE = next(
    name
    for name, family in FAMILIES.items()
    if family.tiny_models and family.expert_keys is None and "sp" in family.parallel_axes
)
_TEACHER, _SCORES = "teacher", "scores"
SoftTarget = tuple[torch.Tensor, torch.Tensor | None]
"""Teacher's log-probabilities at a sample's supervised positions, and the token ids if only the top k are stored."""


def with_teacher(section: DistillObjective, model: Path) -> DistillObjective:
    """Set the path of the teacher, or of its stored scores, in a section `objective`. The student is in `model`."""
    folder = Path(f"{model}-teacher")
    has_scores = section.scores is not None
    paths = {"scores": str(folder / _SCORES), "teacher": None} if has_scores else {"teacher": str(folder / _TEACHER)}
    return section.model_copy(update=paths)


def write_teacher(model: PretrainedConfig, section: DistillObjective) -> None:
    """Write the teacher that `section` names, or the teacher's stored scores of the samples. The teacher is a dense
    model with confident predictions. It has the vocabulary and the number of heads of `model`.
    """
    heads = model.num_attention_heads
    sizes = {"vocab_size": model.vocab_size, "num_attention_heads": heads, "num_key_value_heads": heads}
    sizes |= {"hidden_size": 12 * heads, "initializer_range": 0.3}
    config = AutoConfig.for_model(**TINY_MODELS[_DENSE] | sizes)
    with torch.random.fork_rng(devices=[]):
        # With seed 5, a gpt_oss student would score two experts equally, up to rounding, in its second step.
        torch.manual_seed(6)
        lm = AutoModelForCausalLM.from_config(config).float().eval()
    if section.scores is None:
        lm.save_pretrained(Path(str(section.teacher)))
        return
    identity = ScoreIdentity("", "", model.vocab_size, "", "fp32", _TOP_K, SAMPLES)
    write_shard(Path(section.scores), 0, [_scores(log_probs) for log_probs in _log_probs(lm, 1.0)], identity)
    write_manifest(Path(section.scores), identity, 1, {})


def _scores(log_probs: torch.Tensor) -> DocumentScores:
    top, best = log_probs.topk(_TOP_K, dim=-1)
    others = log_probs.scatter(1, best, float("-inf")).logsumexp(-1, keepdim=True)
    return DocumentScores(best.int().numpy(), torch.cat([top, others], dim=-1).half().numpy())


@cache
def soft_targets(section: DistillObjective) -> list[SoftTarget]:
    """The teacher's target distributions for each sample."""
    if section.scores is not None:
        stored = StoredScores.open(Path(section.scores))
        return [_stored(stored[number]) for number in range(SAMPLES)]
    lm = AutoModelForCausalLM.from_pretrained(section.teacher, dtype=torch.float32, trust_remote_code=False).eval()
    return [(log_probs, None) for log_probs in _log_probs(lm, section.temperature)]


def _stored(scores: DocumentScores) -> SoftTarget:
    return torch.from_numpy(np.array(scores.log_probs)).float(), torch.from_numpy(np.array(scores.ids)).long()


@torch.no_grad()
def _log_probs(lm: torch.nn.Module, temperature: float) -> list[torch.Tensor]:
    """Log-probabilities over the vocabulary at the supervised positions of each sample, fp32 [tokens, vocabulary]."""
    log_probs = []
    for ids, labels in samples():
        logits = lm(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0].float()
        log_probs.append(torch.log_softmax(logits[torch.from_numpy(labels != IGNORE_INDEX)] / temperature, dim=-1))
    return log_probs
