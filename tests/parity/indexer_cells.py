"""The layouts in which trained indexers are compared with a plain loop, and that loop: transformers' model on one
unpadded document at a time, and the loss of DeepSeek-V3.2's report written out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as compressed
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from ds_finetune.model.experts import spread_ids
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.reference.selftest.cells import Cell, hf_config, run_tree, samples
from ds_finetune.reference.selftest.reference_loop import BETAS
from tests.parity.choices import EPS, NEAREST, NearestChoice
from tests.parity.mtp_cells import clip

WEIGHT = 0.5
LR = 1e-2
STEPS = 2
_SEEDS = {"glm_moe_dsa_sparse": 32, "deepseek_v4_sparse": 36}
"""With 29 the first has nearer scores, and the second a scalar whose gradient is a small difference of sums, which fp32
rounds by 1e-4.
"""
ROTATIONS = {
    "deepseek_v32": deepseek.apply_rotary_pos_emb,
    "glm_moe_dsa": glm.apply_rotary_pos_emb_interleave,
}


@dataclass(frozen=True)
class IndexerLayout:
    """A cell on a number of ranks, the stage of training, and whether a run with frozen indexers is compared."""

    cell: Cell
    world: int
    stage: str = "sparse"
    is_compared: bool = False

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        cell = self.cell
        rows = f"{'packed' if cell.packing else 'padded'}{'-recomputed' if cell.checkpointing else ''}"
        kind = f"{cell.family}-{cell.precision}-{self.stage}"
        return f"{cell.layout}-z{cell.stage}-{cell.offload}-{kind}-{rows}-acc{cell.accumulation}-{self.world}".replace(
            " ", ""
        )


def indexer_tree(layout: IndexerLayout, model: Path, out: Path) -> dict[str, Any]:
    """The run file of a layout."""
    tree = run_tree(layout.cell, model, out, dp=layout.world // layout.cell.sharing)
    tree["optim"]["eps"] = EPS
    return tree | {"indexer": {"train": True, "weight": WEIGHT, "stage": layout.stage}}


def write_indexed_model(family: str, folder: Path) -> None:
    """Write a tiny model of `family` whose norms are no ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEEDS.get(family, 29))
        model = AutoModelForCausalLM.from_config(hf_config(family)).float()
        for name, param in model.named_parameters():
            if "norm" in name:
                nn.init.normal_(param, 0.0 if name.endswith("bias") else 1.0, 0.2)
            elif name.endswith(("sinks", "position_bias")):
                nn.init.normal_(param)
        spread_ids(model, getattr(model.config, "n_routed_experts", 0))
    model.save_pretrained(folder)


class PlainIndexers:
    """Hooks on the attention of a transformers model that give the loss of its indexers for one document."""

    def __init__(self, model: Any, *, is_dense: bool) -> None:
        self._config, self._is_dense = model.config, is_dense
        self._inputs: dict[str, torch.Tensor] = {}
        self.layers: list[list[torch.Tensor]] = []
        """Divergences of the layers that share the choice of each indexer, fp32 [tokens]."""
        self._kind = model.config.model_type
        for layer in model.model.layers:
            attention = layer.self_attn
            if self._kind == "deepseek_v4":
                self._watch_entries(attention)
                continue
            attention.q_a_layernorm.register_forward_hook(self._see_queries)
            attention.register_forward_hook(self._see_attention, with_kwargs=True)

    def take_loss(self) -> torch.Tensor:
        """The sum over tokens and indexers since the last call."""
        total = torch.stack([torch.stack(shared).mean(0).sum() for shared in self.layers]).sum()
        self.layers.clear()
        return total

    def _watch_entries(self, attention: Any) -> None:
        """Hooks on DeepSeek-V4's attention, where it has an indexer."""
        if hasattr(attention.compressor, "indexer"):
            attention.compressor.indexer.register_forward_hook(self._see_indexer)
            attention.register_forward_hook(self._see_weights)

    def _see_indexer(self, indexer: Any, given: tuple[Any, ...], chosen: torch.Tensor) -> None:
        """Scores I_ts of entries by transformers' own modules, and which entries are seen, both [tokens, entries]."""
        hidden, low_rank = given[0].detach(), given[1].detach()
        rate, width, tokens = indexer.compress_rate, indexer.head_dim, hidden.shape[1]
        entries, made = tokens // rate, []
        value, gate = indexer.kv_proj(hidden)[0], indexer.gate_proj(hidden)[0]
        bias = indexer.position_bias
        for number in range(entries):
            here = range(number * rate, (number + 1) * rate)
            values, gates = [value[t, width:] for t in here], [gate[t, width:] + bias[t % rate, width:] for t in here]
            for t in range(max(0, here[0] - rate), here[0]):
                values.append(value[t, :width])
                gates.append(gate[t, :width] + bias[t % rate, :width])
            made.append((torch.stack(values) * torch.stack(gates).softmax(0)).sum(0))
        keys = indexer.kv_norm(torch.stack(made)[None]) if made else value.new_zeros(1, 0, width)
        places = torch.arange(entries)[None] * rate
        turn, rotary = compressed.apply_rotary_pos_emb, indexer.rotary_emb
        key = turn(keys[:, None], *rotary(keys, position_ids=places, layer_type="compress"))[0, 0]
        query = indexer.q_b_proj(low_rank).view(1, tokens, -1, width).transpose(1, 2)
        turned = turn(query, *rotary(hidden, position_ids=torch.arange(tokens)[None], layer_type="compress"))[0]
        weight = indexer.scorer.weights_proj(hidden)[0] / indexer.num_heads**0.5
        products = torch.relu(torch.einsum("jtd,sd->tjs", turned, key) / width**0.5)
        self._scores = torch.einsum("tj,tjs->ts", weight, products)
        self._seen = torch.zeros(tokens, entries + 1, dtype=torch.bool).scatter(
            1, chosen[0] % (entries + 1), value=True
        )[:, :entries]

    def _see_weights(self, _: nn.Module, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """The weights of entries come after those of tokens; the softmax has a sink too."""
        tokens, entries = self._scores.shape
        weights = output[1][0, :, :, tokens:].detach().sum(0)
        assert weights.shape == (tokens, entries)
        assert (weights[~self._seen] == 0).all(), "attention is to other entries"
        found = []
        for t in range(tokens):
            p, seen = weights[t], self._seen[t]
            logs = self._scores[t][seen].log_softmax(0)
            found.append(functional.kl_div(logs, p[seen] / p.sum(), reduction="sum") if seen.any() else p.sum())
        self.layers.append([torch.stack(found)])

    def _see_queries(self, _: nn.Module, __: Any, low_rank: torch.Tensor) -> None:
        self._inputs["low_rank"] = low_rank.detach()

    def _see_attention(self, module: Any, args: Any, kwargs: Mapping[str, Any], output: tuple[Any, ...]) -> None:
        if module.indexer is not None:
            hidden = kwargs.get("hidden_states", args[0] if args else None).detach()
            self._scores = self._score(module.indexer, hidden, kwargs["position_embeddings"])
            self.layers.append([])
        self.layers[-1].append(self._divergence(output[1][0].detach()))

    def _score(self, indexer: Any, hidden: torch.Tensor, position_embeddings: Any) -> torch.Tensor:
        """I_ts = sum over heads of w_tj ReLU(q_tj k_s), [tokens, tokens]."""
        rope, heads, width = indexer.qk_rope_head_dim, indexer.n_heads, indexer.head_dim
        query = indexer.wq_b(self._inputs["low_rank"]).view(1, -1, heads, width)
        key = indexer.k_norm(indexer.wk(hidden)).view(1, -1, 1, width)
        rotate = ROTATIONS[self._config.model_type]
        query_turned, key_turned = rotate(query[..., :rope], key[..., :rope], *position_embeddings, unsqueeze_dim=2)
        query = torch.cat([query_turned, query[..., rope:]], -1)[0]
        key = torch.cat([key_turned, key[..., rope:]], -1)[0, :, 0]
        weight = indexer.weights_proj(hidden)[0] / heads**0.5
        return torch.einsum("tj,tjs->ts", weight, torch.relu(torch.einsum("tjd,sd->tjs", query, key) / width**0.5))

    def _divergence(self, weights: torch.Tensor) -> torch.Tensor:
        """Of each token, from attention's weights [heads, tokens, tokens]."""
        tokens, limit = len(self._scores), self._config.index_topk
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if not self._is_dense and tokens > limit:
            best = self._scores.detach().masked_fill(~seen, -torch.inf).topk(limit).indices
            seen &= torch.zeros_like(seen).scatter(1, best, value=True)
        target = weights.sum(0) / weights.sum((0, 2))[:, None]
        assert (target[~seen] == 0).all(), "attention is to other tokens"
        logs = self._scores.masked_fill(~seen, -torch.inf).log_softmax(1).masked_fill(~seen, 0)
        return functional.kl_div(logs, target, reduction="none").sum(1)


@dataclass
class PlainSteps:
    """Numbers of each step, and the gradients of the first one by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    indexer_norms: list[float] = field(default_factory=list)
    """Norms of the gradient of indexers where they are trained beside the other weights, and clipped by themselves."""
    indexer_losses: list[float] = field(default_factory=list)
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)


@cache
def plain_steps(folder: Path, *, stage: str, max_grad_norm: float, weight_decay: float) -> PlainSteps:
    """Steps on all samples, one unpadded sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    is_dense = stage == "dense_warmup"
    if is_dense:
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = 10**6
        for name, param in model.named_parameters():
            param.requires_grad_(".indexer." in name)
    indexers, found = PlainIndexers(model, is_dense=is_dense), PlainSteps()
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    decayed = [param for name, param in trained.items() if param.dim() > 1 and not name.endswith("bias")]
    others = [param for param in trained.values() if not any(param is each for each in decayed)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    own = [param for name, param in trained.items() if ".indexer." in name and not is_dense]
    rest = [param for name, param in trained.items() if is_dense or ".indexer." not in name]
    for _ in range(STEPS):
        with NearestChoice() as choices:
            _add_step(model, indexers, found)
        assert choices.distance > NEAREST, f"{folder.name}: take another seed, whose choices do not depend on rounding"
        found.norms.append(clip(rest, max_grad_norm))
        found.indexer_norms.append(clip(own, max_grad_norm))
        found.gradients = found.gradients or {name: param.grad.clone() for name, param in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
    return found


def _add_step(model: Any, indexers: PlainIndexers, found: PlainSteps) -> None:
    supervised = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in samples())
    tokens, loss, indexer_loss, number = sum(len(ids) for ids, _ in samples()), 0.0, 0.0, 1
    for ids, labels in samples():
        logits = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0]
        targets = torch.from_numpy(labels).long()
        own = functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        number = len(indexers.layers)
        divergence = indexers.take_loss()
        total = own / supervised + WEIGHT * divergence / tokens
        # With indexers alone, a document without entries has no gradient.
        if total.requires_grad:
            total.backward()
        loss, indexer_loss = loss + own.item(), indexer_loss + divergence.item()
    found.losses.append(loss / supervised)
    found.indexer_losses.append(indexer_loss / tokens / number)
