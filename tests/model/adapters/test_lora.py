"""Adapters: which modules have them, that they are peft's numbers in forward and backward, and what they add to
weights.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import LoraConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.configs import VOCAB
from ds_finetune.families.table import FAMILIES as TABLE
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora import Factors, factors_of, merge_adapters
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.weights.names import is_adapter
from ds_finetune.reference.selftest.cells import hf_config
from tests.checking import check, settings_of
from tests.lora_twin import adapted, base_model, by_our_names, in_peft, named_in, write_adapter_of
from tests.rounding import rounding, rounding_of_outputs

LORA = LoraConfig(rank=8, alpha=32)
FAMILIES = tuple(name for name, family in TABLE.items() if family.has_lora)
MIXED = [name for name in FAMILIES if TABLE[name].expert_keys]
"""Families with routed experts."""


def _ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 17), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("family", "is_named"), [*((family, False) for family in FAMILIES), *((family, True) for family in MIXED)]
)
def test_forward_and_gradients_are_those_of_peft(family: str, is_named: bool, tmp_path: Path) -> None:
    lora = LORA.model_copy(update={"target_modules": named_in(family) if is_named else None})
    base = base_model(family)
    base.save_pretrained(tmp_path / "base")
    ours = adapted(copy.deepcopy(base), lora)
    write_adapter_of(ours, lora, tmp_path / "adapter", base=tmp_path / "base")
    theirs = in_peft(base, tmp_path / "adapter", trainable=True)
    logits = [model(input_ids=_ids(), use_cache=False).logits for model in (ours, theirs)]
    assert (logits[0] - logits[1]).abs().max() < rounding_of_outputs(base.config, logits[1], tokens=17)
    for each in logits:
        each.logsumexp(-1).square().mean().backward()
    gradients = {name: param.grad for name, param in ours.named_parameters() if param.grad is not None}
    assert gradients.keys() == {name for name, _ in ours.named_parameters() if is_adapter(name)}
    peft_gradients = {name: param.grad for name, param in theirs.named_parameters() if param.grad is not None}
    wanted = by_our_names(peft_gradients, gradients)
    assert len(peft_gradients) == len(wanted)
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).norm() <= 1e-4 * wanted[name].norm(), name
        assert gradient.norm() > 0, name


# peft 0.21 warns of patterns that it has added itself for the parameters of experts.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_names_what_it_does_in_peft_or_is_refused(family: str) -> None:
    """peft 0.21 adds routed experts and routers, which transformers 4 had as linear layers, and then leaves dense MLPs
    and shared experts out; kimi_k2 and sarvam_mla, which it does not know, have the modules of deepseek_v3.
    """
    row = TABLE[family]
    assert row.tiny_models is not None
    config = AutoConfig.for_model(row.built_as or family, **row.tiny_models.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {name for name, each in model.named_modules() if isinstance(each, nn.Linear)} - {"lm_head"}
    theirs = get_peft_model(model, PeftConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    wanted = linear | {name.rpartition(".")[0] for name in theirs.targeted_parameter_names}
    assert set(theirs.targeted_module_names) <= linear
    every = {target.name for target in plan_lora(hf_config(family), LORA).adaptable}
    lora = LORA.model_copy(update={"target_modules": ("all-linear",)})
    if family == "gpt_oss":
        assert wanted == linear < every
        with pytest.raises(ConfigError, match="all-linear leaves out the routed experts of gpt_oss in peft"):
            plan_lora(hf_config(family), lora)
        return
    if wanted <= every:
        assert {target.name for target in plan_lora(hf_config(family), lora).targets} == wanted
        return
    left = sorted({name.rpartition(".")[2] for name in linear - every})
    with pytest.raises(ConfigError, match=f"of {family} that cannot be adapted: {', '.join(left)}"):
        plan_lora(hf_config(family), lora)


@pytest.mark.parametrize("shape", [(6, 5), (4, 6, 5)])
def test_the_sum_in_pieces_is_the_whole_sum(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    *experts, out, width = shape
    adapter = Factors(
        torch.randn(*experts, 3, width, generator=generator), torch.randn(*experts, out, 3, generator=generator), 0.5
    )
    assert adapter.shape == shape
    whole = (0.5 * adapter.b @ adapter.a).view(-1)
    for start in range(whole.numel()):
        for end in range(start + 1, whole.numel() + 1):
            apart = adapter.delta(start, end - start) - whole[start:end]
            assert apart.abs().max() < rounding(
                float((0.5 * adapter.b.abs() @ adapter.a.abs()).max()), adapter.b.shape[-1]
            )


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_merged_weights_compute_as_adapters_do_and_the_model_stays(family: str) -> None:
    model = adapted(base_model(family), LORA)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    factors = factors_of(
        {name: param.detach() for name, param in model.named_parameters() if is_adapter(name)}, LORA.scale
    )
    weights = dict(
        merge_adapters(
            ((name, param.detach()) for name, param in model.named_parameters() if not is_adapter(name)),
            factors,
            family_of(family),
        )
    )
    plain = base_model(family)
    plain.load_state_dict(weights, strict=False)
    merged, wanted = plain(input_ids=_ids()).logits, model(input_ids=_ids()).logits
    assert (merged - wanted).abs().max() < rounding_of_outputs(plain.config, wanted, tokens=17)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_a_merged_tensor_is_released_before_the_next_one_is_gathered() -> None:
    """Rank zero would need memory for two tensors, which for fused experts are large."""
    written: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            alive.extend(each() is not None for each in written)
            yield f"{number}.weight", torch.ones(4, 6)

    factors = {f"{number}.weight": Factors(torch.ones(2, 6), torch.ones(4, 2), 0.5) for number in range(3)}
    for _, merged in merge_adapters(gathered(), factors, family_of("llama")):
        assert merged is not None
        assert torch.equal(merged, torch.full((4, 6), 2.0))
        written.append(weakref.ref(merged))
        del merged
    assert alive == [False] * 3


def test_new_adapters_change_nothing_and_are_initialised_as_in_peft() -> None:
    model = adapted(base_model("deepseek_v3"), LORA, trained=False)
    assert torch.equal(
        model(input_ids=_ids()).logits, adapted(base_model("deepseek_v3"), LORA, trained=False)(input_ids=_ids()).logits
    )
    wanted = base_model("deepseek_v3")(input_ids=_ids()).logits
    assert (model(input_ids=_ids()).logits - wanted).abs().max() < rounding_of_outputs(model.config, wanted, tokens=17)
    for name, param in model.named_parameters():
        if name.endswith("lora_A"):
            bound = param.shape[-1] ** -0.5
            assert 0.7 * bound < param.detach().abs().max().item() <= bound
            assert param.detach().std().item() == pytest.approx(bound / 3**0.5, rel=0.2)
    skeleton = build_skeleton(hf_config("llama"), attention="sdpa", dtype=torch.bfloat16, device="cpu")
    assert {param.dtype for param in adapted(skeleton, LORA).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("patterns", "kinds"),
    [
        (None, {"attention": 10, "dense MLP": 3, "shared experts": 3, "routed experts": 1}),
        (("q_b_proj",), {"attention": 2}),
        (("gate_proj", "experts"), {"dense MLP": 1, "shared experts": 1, "routed experts": 1}),
        ((r"model\.layers\.1\..*",), {"attention": 5, "shared experts": 3, "routed experts": 1}),
        ((r".*gate",), None),
        (("gate",), {"router": 1}),
        ((r".*\.mlp\.gate",), {"router": 1}),
        (("lm_head",), None),
        (("embed_tokens",), None),
        (("q_proj",), None),
        (("o_proj", "o_prj"), None),
    ],
)
def test_what_patterns_adapt(patterns: tuple[str, ...] | None, kinds: dict[str, int] | None) -> None:
    lora = LoraConfig(rank=8, target_modules=patterns)
    if kinds is None:
        with pytest.raises(ConfigError, match="matches no module") as refused:
            plan_lora(hf_config("deepseek_v3"), lora)
        assert "q_b_proj" in refused.value.hint
        return
    assert Counter(target.kind for target in plan_lora(hf_config("deepseek_v3"), lora).targets) == kinds


def test_the_lines_count_what_is_trained() -> None:
    model = adapted(base_model("deepseek_v3"), LORA)
    rows = plan_lora(model.config, LORA).lines()
    assert f"{sum(param.numel() for param in model.parameters() if param.requires_grad):,} parameters" in rows[0][1]
    assert ("  router", "none of 1 modules") in rows


def test_models_and_ranks_that_are_not_compared_are_refused() -> None:
    config = RunConfig.model_validate({"model": "m", "data": {"train": "t"}, "output_dir": "o", "lora": {}})
    with pytest.raises(ConfigError, match="qwen2_moe is not tested"):
        check(settings_of(config, model_json={"model_type": "qwen2_moe"}), "type of the model")
    with pytest.raises(ConfigError, match="not a multiple of 8"):
        plan_lora(hf_config("deepseek_v3"), LoraConfig(rank=4))
    assert plan_lora(hf_config("llama"), LoraConfig(rank=3)).targets
