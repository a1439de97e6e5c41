"""DeepSeek-V4 on packed rows is transformers' eager model on each document alone, in values and all gradients."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.attention import compressed_attention, compressed_layout
from ds_finetune.model.attention.compressed_layout import RowShards, entries_of, tokens_of
from ds_finetune.model.attention.indexed_attention import expect_documents, longest_document
from ds_finetune.model.build.meta_model import described
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.kept_outputs import layer_contexts
from ds_finetune.model.loss.forward_rows import ForwardRows, RealTokens, find_real_tokens
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.model.routers import RouterCollector
from ds_finetune.model.weights.load import initialise_weights
from ds_finetune.plan.trained_parts import plan_routers
from ds_finetune.reference.selftest.cells import TINY_MODELS
from tests.rounding import rounding_of_outputs

ROWS = ((1, 61, 2, 3, 13), (4, 12, 1, 24, 39), (80,))
"""Documents shorter and longer than the window of 5, the windows of 4 and 12 tokens of an entry, and the 19 tokens of
the 4 entries that an indexer chooses; odd lengths, and single tokens.
"""
EDGES = ((1, 4, 5, 6, 3, 11, 12, 13, 7, 18), (2, 3, 5, 7, 11, 13, 17, 19, 3), (79, 1), (1, 79), (48, 24, 8), (1,) * 80)
"""Documents one shorter, as long and one longer than windows; primes; a long one beside a single token; 80 tokens alone.
"""
HOSTILE: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one stream": {"hc_mult": 1},
    "three streams of 36 columns": {"hc_mult": 3, "hidden_size": 36},
    "each token sees itself": {"sliding_window": 1},
    "one entry chosen": {"index_topk": 1},
    "all entries chosen": {"index_topk": 100},
    "windows of 2 and 3": {"compress_rate_csa": 2, "compress_rate_hca": 3},
    "a window longer than rows": {"sliding_window": 100, "compress_rate_hca": 81},
    "all layers choose": {"compress_ratios": [4, 4, 4, 4]},
    "all layers compress much": {"compress_ratios": [128, 128, 128, 128], "compress_rate_hca": 79},
    "no hash table, one expert": {"num_hash_layers": 0, "num_experts_per_tok": 1},
}
BY_DEFAULT = ("as it is", "three streams of 36 columns", "each token sees itself", "windows of 2 and 3")
Models = tuple[TrainedModel, PreTrainedModel]


def fill(lm: PreTrainedModel) -> None:
    """Values for what begins as zeros or ones in all layers."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in [*lm.named_parameters(), *lm.named_buffers()]:
        leaf = name.rpartition(".")[2]
        if leaf == "tid2eid":
            chosen = torch.rand(len(tensor), lm.config.n_routed_experts, generator=generator)
            tensor.copy_(chosen.topk(tensor.shape[1]).indices)
        elif leaf in ("sinks", "position_bias", "base", "scale", "hc_base", "hc_scale", "e_score_correction_bias"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
        elif "norm" in name:
            tensor.copy_(1 + torch.randn(tensor.shape, generator=generator) * 0.1)


@pytest.fixture
def make() -> Callable[..., Models]:
    """Makes a model as it is trained, and transformers' own with the same weights."""

    def models(*, longest: int = 80, changes: Mapping[str, Any] | None = None) -> Models:
        configs = [AutoConfig.for_model(**TINY_MODELS["deepseek_v4_sparse"] | (changes or {})) for _ in range(2)]
        ours = build_skeleton(configs[0], attention="sdpa", dtype=torch.float32, device="cpu")
        initialise_weights(ours, seed=2)
        with torch.no_grad():
            fill(ours)
        expect_documents(ours, longest=longest)
        plain = AutoModelForCausalLM.from_config(configs[1], attn_implementation="eager").float()
        plain.load_state_dict(ours.state_dict())
        return TrainedModel(ours), plain

    return models


@pytest.mark.parametrize("documents", [ROWS, EDGES], ids=["mixed", "edges"])
@pytest.mark.parametrize("sp", [2, 4, 8, 16])
def test_ranks_that_share_rows_see_what_one_rank_sees(sp: int, documents: tuple[tuple[int, ...], ...]) -> None:
    """Shards of 40 to 5 tokens, so that windows of tokens and of entries cross several borders."""
    window, rate, before, cpu = 9, 4, 7, torch.device("cpu")
    tokens, whole = tokens_of(RowShards(documents), window, cpu), entries_of(RowShards(documents), rate, before, cpu)
    rows, size = torch.arange(len(documents))[:, None] * 80, 80 // sp
    made = {}
    for rank in range(sp):
        shards, begin = RowShards(documents, sp, rank), rank * size
        own = (rows + torch.arange(begin, begin + size)).flatten()
        held, for_entries = (
            (rows + torch.arange(max(0, begin - number), begin + size)).flatten() for number in (window - 1, before)
        )
        seen, entries = tokens_of(shards, window, cpu), entries_of(shards, rate, before, cpu)
        assert torch.equal(held[seen.own], own)
        assert torch.equal(held[seen.first], tokens.first[own])
        assert torch.equal(entries.first, whole.first[own])
        assert torch.equal(entries.end, whole.end[own])
        numbers = [
            (entries.order == rank * entries.most + place).nonzero().item() for place in range(len(entries.windows))
        ]
        for place, number in enumerate(numbers):
            made[number] = for_entries[entries.windows[place]]
            assert entries.positions[place] == whole.positions[number]
            if not (is_first := entries.is_first[place]):
                assert torch.equal(for_entries[entries.windows[place] - rate], whole.windows[number] - rate)
            assert is_first == whole.is_first[number]
    assert torch.equal(torch.stack([made[number] for number in range(len(whole.windows))]), whole.windows)


def _ids(rows: int = len(ROWS)) -> torch.Tensor:
    return torch.randint(3, 90, (rows, 80), generator=torch.Generator().manual_seed(1))


def _losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")


def _assert_equal(models: Models, rows: tuple[tuple[int, ...], ...] = ROWS, *, share: float = 0.0) -> None:
    """The sum of all documents' losses, and its gradient of every parameter, relative to `share` of that of all where
    it is less than that.
    """
    ours, plain = models
    ids = _ids(len(rows))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    logits = ours.lm.lm_head(ours.hidden(ids, positions, rows))
    pairs = [(row, part) for row, lengths in enumerate(rows) for part in ids[row].split(lengths)]
    packed = [part for row, lengths in zip(logits, rows, strict=True) for part in row.split(lengths)]
    loss = sum(_losses(part, of_ids) for part, (_, of_ids) in zip(packed, pairs, strict=True))
    wanted = sum(_losses(plain(part[None], use_cache=False).logits[0], part) for _, part in pairs)
    assert abs(loss - wanted) < 1e-6 * wanted
    for total in (loss, wanted):
        total.backward()
    gradients = {name: param.grad for name, param in ours.lm.named_parameters()}
    least = max(1e-30, share * float(torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()))
    for name, param in plain.named_parameters():
        if param.grad is None:
            assert gradients[name] is None or not gradients[name].any(), name
        else:
            apart = (gradients[name] - param.grad).norm() / param.grad.norm().clamp_min(least)
            assert apart < 1e-4, (name, apart)
    without = {name.rpartition(".layers.")[2] for name, gradient in gradients.items() if gradient is None}
    assert all("indexer" in name for name in without)


@pytest.mark.parametrize("at_once", [2**26, 4 * 30 * 3])
def test_documents_of_packed_rows_are_those_of_transformers_alone(
    at_once: int, make: Callable[..., Models], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_attention, "PRODUCTS_AT_ONCE", at_once)
    monkeypatch.setattr(compressed_layout, "_CACHED_PAIRS", 2**20 if at_once > 2**20 else 0)
    _assert_equal(make())


@pytest.mark.parametrize(
    "options", [{}, {"context_fn": partial(layer_contexts, is_selective=True)}], ids=["full", "selective"]
)
def test_recomputed_layers(
    options: dict[str, Any], make: Callable[..., Models], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selectively, attention is computed once for each layer, in five parts: of whole documents, and halves of 80."""
    calls: list[int] = []
    attend = compressed_attention._attend
    monkeypatch.setattr(compressed_attention, "_attend", lambda *given: calls.append(1) or attend(*given))
    models = make()
    models[0].lm.gradient_checkpointing_enable({"use_reentrant": False, **options})
    _assert_equal(models)
    assert len(calls) == 4 * 5 * (1 if options else 2)


@torch.no_grad()
def test_one_token_more_than_the_chosen_entries_needs_the_indexer(make: Callable[..., Models]) -> None:
    models = make(longest=0)
    limit = longest_document(models[1].config)
    assert limit == 4 * 4 + 3
    ids, positions = _ids(1), torch.arange(80)[None]
    wanted = models[1].model(ids, use_cache=False).last_hidden_state
    whole = models[0].hidden(ids, positions, None)
    rounding = rounding_of_outputs(models[1].config, wanted, tokens=80)
    assert (whole - wanted)[:, :limit].abs().max() < rounding
    assert (whole - wanted)[:, limit].abs().max() > 4 * rounding
    expect_documents(models[0].lm, longest=limit)
    assert torch.equal(models[0].hidden(ids, positions, None), whole)
    expect_documents(models[0].lm, longest=limit + 1)
    assert (models[0].hidden(ids, positions, None) - wanted).abs().max() < rounding


@pytest.mark.parametrize("use_cache", [True, False])
def test_answers_are_those_of_transformers(use_cache: bool, make: Callable[..., Models]) -> None:
    """Without a cache where ranks wait for each other's weights."""
    ids = _ids(1)[:, :30]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    ours, plain = (model.eval() for model in (make()[0].lm, make()[1]))
    assert torch.equal(ours.generate(ids, **options, use_cache=use_cache), plain.generate(ids, **options))


def _count(count: torch.Tensor, *given: Any) -> None:
    """A forward hook of a router."""
    count += given[2][2].reshape(-1).bincount(minlength=8)


@torch.no_grad()
def test_choices_of_routers_are_counted(make: Callable[..., Models]) -> None:
    """By the table in the layer that has one, and by scores in the others."""
    ours, plain = make()
    plan = plan_routers(None, described(plain.config))
    assert plan is not None
    assert plan.layers == (0, 1, 2, 3)
    collector = RouterCollector(ours.lm, plan, device=torch.device("cpu"))
    ids, wanted = _ids(), [torch.zeros(8, dtype=torch.int64) for _ in plan.layers]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS])
    real = RealTokens(*find_real_tokens((80, 80, 80), ROWS, 80))
    rows = ForwardRows(ids, positions, ids, ROWS, real=real._replace(document=real.document.reshape(-1)))
    with collector.listen(rows, is_counting=True):
        ours.hidden(ids, positions, ROWS)
    for count, layer in zip(wanted, plain.model.layers, strict=True):
        layer.mlp.gate.register_forward_hook(partial(_count, count))
    for row, lengths in zip(ids, ROWS, strict=True):
        for part in row.split(lengths):
            plain(part[None], use_cache=False)
    assert torch.equal(collector.counts, torch.stack(wanted))
    of_table = ours.lm.model.layers[0].mlp.gate.tid2eid[ids.reshape(-1)].reshape(-1).bincount(minlength=8)
    assert torch.equal(collector.counts[0], of_table)
    assert (collector.entropy > 0).all()


def test_documents_without_entries(make: Callable[..., Models]) -> None:
    """All parameters but the indexer's get gradients, or ranks that have entries would wait for them."""
    _assert_equal(make(), ((3, 2, 1, 1, 3) * 8,))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow, id=name) for name in HOSTILE]
)
def test_documents_at_the_edges_of_windows(name: str, make: Callable[..., Models]) -> None:
    """The gradient of one expert's share, which is always 1, and of what scales the input of a norm is rounding only."""
    _assert_equal(make(changes=HOSTILE[name]), EDGES, share=1e-4)


def test_a_table_that_names_an_expert_twice(make: Callable[..., Models]) -> None:
    """Both times it is computed, with half of the weight each."""
    models = make()
    for lm in (models[0].lm, models[1]):
        for table in (buffer for name, buffer in lm.named_buffers() if name.endswith("tid2eid")):
            table[::2, 1] = table[::2, 0]
    _assert_equal(models)


def test_weights_are_rounded_once_in_bf16() -> None:
    """As in transformers' eager attention, whose output is that of normalised weights; a division of the rounded output
    would make the error a fifth larger.
    """
    generator = torch.Generator().manual_seed(0)
    query, keys, sinks = (torch.randn(*size, generator=generator).bfloat16() for size in ((256, 4, 32), (64, 32), (4,)))
    nothing = keys.new_zeros(0, 32)
    attended = compressed_attention._Keys(keys, nothing, slice(0, 0), None)
    ours = compressed_attention._attend(query, attended, sinks, torch.zeros(256, 1, 64), 0.2)[0].bfloat16()
    logits = (query @ keys.T).float() * 0.2
    weights = torch.cat([logits, sinks.float()[:, None].expand(256, 4, 1)], -1).softmax(-1)[..., :-1]
    eager, exact = weights.bfloat16() @ keys, weights @ keys.float()
    of_ours, of_eager = ((found.float() - exact).norm() for found in (ours, eager))
    assert of_ours < 1.05 * of_eager
