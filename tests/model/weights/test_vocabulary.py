"""A vocabulary larger than the published one: old rows as they are, new ones the same for any layout, and what is
refused.
"""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PhiConfig, PretrainedConfig, PreTrainedModel

from ds_finetune.cli.demo import write_demo
from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError, DataError, ModelError
from ds_finetune.families.table import family_of
from ds_finetune.model.build.skeleton import Fragment, build_skeleton, in_memory, read_hf_config
from ds_finetune.model.parallel.sharding import ModelShard
from ds_finetune.model.parallel.tensor import local_config
from ds_finetune.model.weights.load import load_weights, seed_of
from ds_finetune.model.weights.vocabulary import Growth, grow_vocabulary, untrained_rows
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.dry_run import model_lines
from ds_finetune.trainer.inputs import config_tree
from ds_finetune.trainer.preview import preview_of
from ds_finetune.trainer.resolve import make_model_plan, model_config
from tests.checking import check, settings_of
from tests.described import described_tree
from tests.model.fp8_folder import MTP, V3, dequantised, in_fp8, master, publish
from tests.model.tiny import CONFIGS
from tests.model.weights.test_weights import published

BEFORE, AFTER = 96, 102
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def config_of(folder: Path) -> PretrainedConfig:
    config = read_hf_config(str(folder))
    grow_vocabulary(config, AFTER)
    return config


def loaded(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    where: Any = None,
    model_shard: ModelShard | None = None,
) -> PreTrainedModel:
    config = config_of(folder) if model_shard is None else local_config(config_of(folder), model_shard.tp_size)
    model = build_skeleton(config, attention="sdpa", dtype=dtype, device="cpu")
    given = ({} if where is None else {"where": where}) | ({} if model_shard is None else {"model_shard": model_shard})
    growth = Growth(BEFORE, AFTER, partial(seed_of, seed))
    load_weights(model, folder, family=family_of(config.model_type), growth=growth, **given)
    return model


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_transformers_resizes_it(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Shapes of all tensors, the old rows and all other tensors bit by bit; new rows as the old ones are spread."""
    published(family, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    theirs.resize_token_embeddings(AFTER)
    if getattr(theirs.config, "hidden_size_per_layer_input", 0):
        with pytest.raises(ModelError, match="has token embeddings for each layer"):
            grow_vocabulary(theirs.config, AFTER + 1)
        return
    ours = loaded(tmp_path, dtype=dtype)
    wanted, found = theirs.state_dict(), ours.state_dict()
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in wanted.items()}
    grown = [key for key, value in found.items() if len(value) == AFTER]
    assert grown == [EMBEDDING, HEAD]
    for key, value in found.items():
        rows = slice(0, BEFORE) if key in grown else slice(None)
        if key.endswith("e_score_correction_bias"):
            # In fp32 here; transformers 5.23 casts MiniMax M2's.
            value = value.to(wanted[key].dtype)
        assert torch.equal(value[rows], wanted[key][rows].to(value.dtype)), key
    assert ours.config.tie_word_embeddings == torch.equal(found[EMBEDDING], found[HEAD])
    for key in grown:
        old, new = found[key][:BEFORE].double(), found[key][BEFORE:].double()
        assert len(torch.unique(new, dim=0)) == AFTER - BEFORE
        assert new.mean().item() == pytest.approx(old.mean().item(), abs=4 * old.std().item() / math.sqrt(new.numel()))
        assert new.std().item() == pytest.approx(old.std().item(), rel=0.3)


def test_new_rows_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    published("llama", tmp_path)
    one, again, other = (loaded(tmp_path, seed=seed).state_dict() for seed in (1, 1, 2))
    for key in (EMBEDDING, HEAD):
        assert torch.equal(one[key], again[key])
        assert not torch.equal(one[key][BEFORE:], other[key][BEFORE:])
    assert not torch.equal(one[EMBEDDING][BEFORE:], one[HEAD][BEFORE:])


@pytest.mark.parametrize("ranks", [2, 7])
def test_fragments_of_a_grown_tensor_are_its_parts(ranks: int, tmp_path: Path) -> None:
    """As ZeRO-3 lays them out; a fragment may begin among the old rows, the new ones, or in the middle of a row."""
    published("llama", tmp_path)
    whole = dict(loaded(tmp_path).named_parameters())
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in whole}
    for rank in range(ranks):
        held: dict[int, torch.Tensor] = {}

        def where(param: torch.Tensor, held: dict[int, torch.Tensor] = held, rank: int = rank) -> Fragment:
            size = math.ceil(param.numel() / ranks)
            return in_memory(held.setdefault(id(param), torch.zeros(size)), start=rank * size, shape=tuple(param.shape))

        for name, param in loaded(tmp_path, where=where).named_parameters():
            parts[name].append(held[id(param)])
    for name, param in whole.items():
        assert torch.equal(torch.cat(parts[name])[: param.numel()].view_as(param), param), name


@pytest.mark.parametrize("parts", [2, 3])
def test_tensor_parallel_parts_of_a_grown_tensor(parts: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 36}
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIGS["llama"] | sizes)).save_pretrained(tmp_path)
    whole = dict(loaded(tmp_path).named_parameters())
    for key in (EMBEDDING, HEAD):
        shards = [
            dict(loaded(tmp_path, model_shard=ModelShard(parts, place)).named_parameters())[key]
            for place in range(parts)
        ]
        assert torch.equal(torch.cat(shards), whole[key])


def test_a_head_with_a_bias_grows_with_it(tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {
        key: CONFIGS["llama"][key]
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    model = AutoModelForCausalLM.from_config(PhiConfig(**sizes, eos_token_id=2, bos_token_id=1))
    torch.nn.init.normal_(model.lm_head.bias, mean=3, std=0.1)
    model.save_pretrained(tmp_path)
    found = loaded(tmp_path).state_dict()["lm_head.bias"]
    assert torch.equal(found[:BEFORE], model.lm_head.bias.detach())
    assert found[BEFORE:].mean().item() == pytest.approx(3, abs=0.3)


def test_an_fp8_base_grows_as_its_bf16_copy(tmp_path: Path) -> None:
    tensors = {key: value for key, value in in_fp8(master()).items() if f"layers.{MTP}." not in key}
    published_fp8 = publish(tmp_path / "fp8", tensors)
    plain = {key: value for key, value in V3.items() if key != "quantization_config"}
    copied = publish(tmp_path / "copy", dequantised(tensors, torch.float32), config=plain)
    one, other = loaded(published_fp8).state_dict(), loaded(copied).state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_tensors_that_would_not_fit_any_more_are_refused(tmp_path: Path) -> None:
    """Copies of embedding and head in a multi-token prediction layer go to the export as they are."""
    folder = publish(tmp_path / "model", master())
    with pytest.raises(
        ModelError, match=rf"enlarges 96 rows to 102, .* 2 tensors .*model\.layers\.{MTP}\.embed_tokens\.weight"
    ) as caught:
        loaded(folder)
    assert "without its multi-token prediction layers" in caught.value.hint


def test_a_tied_head_that_is_published_too_is_still_compared(tmp_path: Path) -> None:
    published("qwen2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, file, metadata={"format": "pt"})
    assert loaded(tmp_path).state_dict()[HEAD].shape[0] == AFTER
    save_file(tensors | {HEAD: tensors[EMBEDDING] + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"but config\.json ties both"):
        loaded(tmp_path)


def test_a_padding_row_counted_from_the_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"model_type": "llama", "pad_token_id": -1}))
    with pytest.raises(
        ModelError, match=r"pad_token_id -1 counts from the end of the model's vocabulary, .* from 96"
    ) as caught:
        config_of(tmp_path)
    assert "write pad_token_id 95 in config.json" in caught.value.hint


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded example, whose tokenizer has ids up to 100, with a model of 96."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    (folder / "train.jsonl").write_text("".join((folder / "train.jsonl").read_text().splitlines(keepends=True)[:200]))
    shutil.copytree(folder / "model", folder / "tokenizer")
    (folder / "model" / "config.json").write_text(json.dumps(CONFIGS["deepseek_v3"] | {"model_type": "deepseek_v3"}))
    return folder


def run_of(demo: Path, **sections: Any) -> RunConfig:
    model = {"path": str(demo / "model"), "tokenizer": str(demo / "tokenizer")} | sections.pop("model", {})
    data = {"train": str(demo / "train.jsonl"), "cache_dir": str(demo / "cache"), "workers": 1}
    return RunConfig.model_validate(
        {"model": model, "data": data, "train": {"max_seq_len": 64}, "output_dir": "out"} | sections
    )


def test_without_the_key_the_tokenizer_is_refused_and_the_key_named(demo: Path) -> None:
    with pytest.raises(DataError, match="the tokenizer has ids up to 100 and the model a vocabulary of 96") as caught:
        preview_of(RunSettings.of(run_of(demo)), samples=1)
    assert "model.resize_vocabulary: true" in caught.value.hint
    assert preview_of(RunSettings.of(run_of(demo, model={"resize_vocabulary": True})), samples=1)


def test_the_plan_counts_the_new_rows(demo: Path) -> None:
    config = run_of(demo, model={"resize_vocabulary": True})
    hf_config = model_config(RunSettings.of(config), is_config_only=True)
    assert hf_config.vocab_size == 101
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu")
    model = make_model_plan(RunSettings.of(config, mesh=plan.mesh), is_config_only=True)
    tree = config_tree(demo / "model", model)
    assert tree == json.loads((demo / "model" / "config.json").read_text()) | {"vocab_size": 101}
    published = json.loads((demo / "model" / "config.json").read_text())
    total = model.described.tensors.numel
    assert total - described_tree(published).tensors.numel == 2 * 5 * CONFIGS["deepseek_v3"]["hidden_size"]
    text = dict(model_lines(model, plan))["vocabulary"]
    assert text.startswith("96 -> 101 tokens; 5 new rows")


def test_a_key_that_adds_nothing_says_so(demo: Path) -> None:
    fits = demo / "fits"
    shutil.copytree(demo / "tokenizer", fits, dirs_exist_ok=True)
    (fits / "config.json").write_text(
        json.dumps(CONFIGS["deepseek_v3"] | {"model_type": "deepseek_v3", "vocab_size": 128})
    )
    config = run_of(demo, model={"path": str(fits), "resize_vocabulary": True})
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu")
    text = dict(model_lines(make_model_plan(RunSettings.of(config, mesh=plan.mesh)), plan))["vocabulary"]
    assert text == "the tokenizer's ids fit the 128 tokens; model.resize_vocabulary adds nothing"


def test_sizes_that_do_not_divide_the_new_vocabulary_are_refused(demo: Path) -> None:
    config = run_of(demo, model={"resize_vocabulary": True})
    run = settings_of(config, mesh=Mesh(0, 2, tp=2), model_json=model_config(RunSettings.of(config)).to_dict())
    with pytest.raises(ConfigError, match=r"parallel\.tp 2 does not divide the 101 tokens of the vocabulary"):
        check(run, "sizes of the model")


def test_adapters_do_not_train_new_rows(demo: Path) -> None:
    config = run_of(demo, model={"resize_vocabulary": True}, lora={"rank": 8})
    with pytest.raises(ConfigError, match=r"lora with model\.resize_vocabulary true"):
        make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu")


@pytest.mark.parametrize(("unused_scale", "wanted"), [(0.01, [8]), (1.0, [])], ids=["published", "trained shortly"])
def test_added_tokens_that_the_base_has_not_trained(unused_scale: float, wanted: list[int], tmp_path: Path) -> None:
    """Ids 10 to 15 are unused. Token 8 was added but never trained, unlike token 9; in a model whose unused embeddings
    are as large as its trained ones nothing can be told.
    """
    scales = torch.tensor([1.0] * 8 + [unused_scale, 1.0] + [unused_scale] * 6)
    table = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) * scales[:, None]
    save_file({"model.embed_tokens.weight": table}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert untrained_rows(tmp_path, [8, 9], range(10)) == wanted
