"""Tiny models with a multi-token prediction layer, and a plain loop that trains one."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM

from ds_finetune.config.sections import MtpConfig, TrainConfig
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora import initial_factors
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.mtp import set_mtp_layers
from ds_finetune.model.weights.names import hub_pieces, is_table
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.reference.selftest import plain_features
from ds_finetune.reference.selftest.cells import Cell, hf_config, run_tree, samples
from ds_finetune.reference.selftest.reference_loop import BETAS
from tests.parity.choices import EPS, NearestChoice

WEIGHT = 0.3
LR = 1e-2
"""So large that the second step shows whether the layer reads the embedding as it is by then."""
STEPS = 2
_SEEDS = {"glm4_moe_lite": 24, "deepseek_v4": 24, "deepseek_v4_sparse": 25, "deepseek_v32_sparse": 33}
_SEEDS |= {"glm_moe_dsa_sparse": 36}
"""Of folders, where 23 has choices that are nearer than `NEAREST` to others in a layout of the default suite."""
RANK, ALPHA = 8, 32
"""Of adapters, in all modules that have them by default."""


@dataclass(frozen=True)
class MtpLayout:
    """A cell on a number of ranks, whether the layer's loss trains it alone, whether a run without the layer is
    compared, and how adapters are trained: not at all, as `lora`, or as `nf4` over weights in four bits.
    """

    cell: Cell
    world: int
    detach: bool = True
    is_compared: bool = True
    adapters: str = ""

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        cell = self.cell
        rows, how = "packed" if cell.packing else "padded", "alone" if self.detach else "all"
        kind = f"{cell.family}-{cell.precision}{'-balanced' if cell.balances else ''}"
        return (
            f"{cell.layout}-z{cell.stage}-{cell.offload}-{kind}-{rows}-acc{cell.accumulation}-{how}-{self.world}{'-' * bool(self.adapters)}{self.adapters}"
        ).replace(" ", "")


def mtp_tree(layout: MtpLayout, model: Path, out: Path) -> dict[str, Any]:
    """The run file of a layout."""
    tree = run_tree(layout.cell, model, out, dp=layout.world // layout.cell.sharing)
    quantised = {"quantize": "nf4"} if layout.adapters == "nf4" else {}
    lora = {"lora": {"rank": RANK, "alpha": ALPHA} | quantised} if layout.adapters else {}
    tree["optim"]["eps"] = EPS
    return tree | lora | {"mtp": {"train": True, "weight": WEIGHT, "detach": layout.detach}}


def write_mtp_model(family: str, folder: Path, *, sizes: Mapping[str, int] | None = None, copies: bool = True) -> None:
    """Write a tiny model of `family` with a multi-token prediction layer as it would be published.

    `sizes` are keys of its configuration that differ. `copies` are those of embedding and head in the layer.
    """
    config = hf_config(family)
    for key, size in (sizes or {}).items():
        setattr(config, key, size)
    tree = config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
    set_mtp_layers(config, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEEDS.get(folder.name, 23))
        lm = build_skeleton(config, attention="eager", dtype=torch.float32, device="cpu")
        tensors = {}
        for name, tensor in lm.state_dict().items():
            noise = torch.zeros_like(tensor) if is_table(name) else torch.randn_like(tensor) * 0.1
            value = tensor if is_table(name) else noise + 1 if "norm" in name else noise
            for piece in hub_pieces(name, tuple(tensor.shape), family_of(config.model_type)):
                tensors[piece.key] = value[piece.index].clone()
    number = config.num_hidden_layers
    if copies and not family_of(config.model_type).compresses:
        tensors[f"model.layers.{number}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{number}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(tree))


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """What blocks in NF4 hold of a weight; rows that blocks would cross stay as they are."""
    if weight.shape[1] % 64:
        return weight
    four_bit = pytest.importorskip("bitsandbytes").functional
    return four_bit.dequantize_4bit(*four_bit.quantize_4bit(weight, compress_statistics=True, quant_type="nf4"))


class _LowRank(torch.nn.Module):
    """A weight W [..., out, in] becomes W + alpha / rank x B A."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return weight + ALPHA / RANK * (self.b @ self.a)


class PlainMtp(torch.nn.Module):
    """transformers' model and transformers' multi-token prediction module with the weights of a folder, which are
    trained themselves or by adapters.
    """

    def __init__(self, folder: Path, *, adapters: str = "", detach: bool = True) -> None:
        super().__init__()
        self.main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.mtp = plain_features.PlainMtp(self.main, folder, MtpConfig(train=True, weight=WEIGHT, detach=detach))
        self._adapters: dict[str, torch.nn.Parameter] = {}
        if adapters:
            self._adapt(in_four_bits=adapters == "nf4")

    def _adapt(self, *, in_four_bits: bool) -> None:
        """Freeze all weights and add adapters to matrices but embedding, head, routers and indexers, in place. In four
        bits those of attention and MLPs are rounded first, as bitsandbytes does.
        """
        names = {param: name for name, param in self.trained().items()}
        self.requires_grad_(False)
        for module in list(self.modules()):
            for leaf, param in list(module.named_parameters(recurse=False)):
                name = names.get(param, "")
                if (
                    param.dim() < 2
                    or not name
                    or name.endswith((".gate.weight", "embed_tokens.weight", "lm_head.weight"))
                ):
                    continue
                if in_four_bits and re.search(r"\.(self_attn|mlp)\.(shared_experts\.)?\w+\.weight$", name):
                    param.data = _rounded(param.data)
                first = initial_factors(name, tuple(param.shape), RANK, TrainConfig().seed)
                low_rank = _LowRank(first["A"], first["B"])
                register_parametrization(module, leaf, low_rank)
                prefix = name.removesuffix("weight") if leaf == "weight" else f"{name}_"
                self._adapters |= {f"{prefix}lora_A": low_rank.a, f"{prefix}lora_B": low_rank.b}

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """What is trained by its name in the program's model: the adapters, or all parameters but those of indexers,
        which no loss reaches.
        """
        if self._adapters:
            return self._adapters
        return {name: param for name, param in self.main.named_parameters() if ".indexer." not in name}

    def logits(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the next token [tokens, vocabulary] and of the one after it [tokens - 1, vocabulary] of one
        document.
        """
        return self.main(input_ids=ids[None], use_cache=False).logits[0], self.mtp.logits(ids)

    def mtp_states(self, ids: torch.Tensor) -> torch.Tensor:
        """States of the layer for one document before the head, [tokens - 1, width]."""
        self.main(input_ids=ids[None], use_cache=False)
        return self.mtp.states(ids)


@dataclass
class PlainSteps:
    """Numbers of each step, and the gradients of the first one by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    mtp_norms: list[float] = field(default_factory=list)
    """Norms of the gradient of the layer where its loss trains it alone, which is then clipped by them."""
    mtp_losses: list[float] = field(default_factory=list)
    mtp_accuracies: list[float] = field(default_factory=list)
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    nearest: float = math.inf
    """The least distance of a choice to another, as of `NearestChoice`."""


def plain_steps(layout: MtpLayout, models: Path) -> PlainSteps:
    """Steps on all samples, one unpadded sample at a time, for the settings of a layout that change them."""
    cell = layout.cell
    settings = (layout.detach, cell.max_grad_norm, cell.weight_decay, layout.adapters)
    return _plain_steps(models / cell.family, *settings)


@cache
def _plain_steps(folder: Path, detach: bool, max_grad_norm: float, weight_decay: float, adapters: str) -> PlainSteps:
    model, found = PlainMtp(folder, adapters=adapters, detach=detach), PlainSteps()
    trained = model.trained()
    matrices = [param for name, param in trained.items() if param.dim() > 1 and not name.endswith("bias")]
    vectors = [param for param in trained.values() if not any(param is each for each in matrices)]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=BETAS,
        eps=EPS,
    )
    for _ in range(STEPS):
        with NearestChoice() as choices:
            found = _add_step(model, found)
        found.nearest = min(found.nearest, choices.distance)
        is_apart = [detach and name.startswith(model.mtp.prefix) for name in trained]
        for norms, own in ((found.norms, False), (found.mtp_norms, True)):
            part = [param for param, apart in zip(trained.values(), is_apart, strict=True) if apart == own]
            norms.append(clip(part, max_grad_norm))
        found.gradients = found.gradients or {name: param.grad.clone() for name, param in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
    return found


def clip(params: list[torch.nn.Parameter], max_norm: float) -> float:
    """The norm of the gradients, which are scaled down where it is larger than `max_norm`."""
    norm = float(torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None]))
    if max_norm and norm > max_norm:
        for param in params:
            assert param.grad is not None
            param.grad *= max_norm / norm
    return norm


def _add_step(model: PlainMtp, found: PlainSteps) -> PlainSteps:
    supervised = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in samples())
    loss, mtp_loss, correct, number = 0.0, 0.0, 0, 0
    for ids, labels in samples():
        own, ahead = model.logits(torch.from_numpy(ids).long())
        targets = torch.from_numpy(np.asarray(labels)).long()
        first = functional.cross_entropy(own, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        second = functional.cross_entropy(ahead, targets[1:], ignore_index=IGNORE_INDEX, reduction="sum")
        ((first + WEIGHT * second) / supervised).backward()
        is_counted = targets[1:] != IGNORE_INDEX
        loss, mtp_loss = loss + first.item(), mtp_loss + second.item()
        correct += int((ahead.argmax(-1) == targets[1:])[is_counted].sum())
        number += int(is_counted.sum())
    found.losses.append(loss / supervised)
    found.mtp_losses.append(mtp_loss / number)
    found.mtp_accuracies.append(correct / number)
    return found
