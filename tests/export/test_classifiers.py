"""Classifiers are exported with their head, classes and padding token; a folder that classifies otherwise is found."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    pipeline,
)

from ds_finetune.cli.main import main
from ds_finetune.config.sections import LoraConfig
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import ExportError
from ds_finetune.export.adapter import AdapterBase, write_adapter
from ds_finetune.export.fitted_tokenizer import check_tokenizer, fit_tokenizer
from ds_finetune.export.from_checkpoint import export_checkpoint
from ds_finetune.export.safetensors_folder import TOKENIZER_FILES, FolderParts, write_folder
from ds_finetune.export.verify.record import ExportRecord, classifier_prompts
from ds_finetune.export.verify.verify import VerificationResult, verify_exports
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora import AdapterPlacement, factors_of, install_lora
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.build.skeleton import full_fragment
from ds_finetune.model.loss.score_config import set_padding_token
from ds_finetune.model.weights.names import is_adapter
from tests.export.classifiers import BOS, CLASSES, EOS, PAD, TEXTS, classifier, write_tokenizer
from tests.export.rewriting import rewrite
from tests.export.test_safetensors_folder import specs_of, tensors_of
from tests.json_files import change_json, read_json

DECODERS = ("llama", "qwen2", "deepseek_v3")


def scores(model: PreTrainedModel, prompt: tuple[int, ...] | list[int]) -> torch.Tensor:
    """Logits of one text by plain transformers."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].float()  # type: ignore[no-any-return]


def plain(folder: Path) -> PreTrainedModel:
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] | report["unexpected_keys"]
    return model.eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", [*DECODERS, "bert"])
def test_a_classifier_of_transformers_is_exported(family: str, tmp_path: Path) -> None:
    model = classifier(family)
    model.save_pretrained(tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "out", dtype="fp32", max_shard_bytes=40_000, base=None)
    found = plain(tmp_path / "out")
    assert type(found) is type(model)
    assert found.config.id2label == CLASSES
    assert found.config.pad_token_id == PAD
    for prompt in ([5, 6, EOS], [*range(4, 30), EOS]):
        assert torch.equal(scores(found, prompt), scores(model, prompt))


def exported(folder: Path, *, family: str = "qwen2", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A classifier as a run exports it, with its logits of fixed texts that end with EOS."""
    model = classifier(family, **changes).to(dtype)
    model.save_pretrained(folder / "base")
    write_tokenizer(folder / "tokenizer", adds_eos=True)
    own = tuple((4, 5 + number, EOS) for number in range(3))
    prompts = (*classifier_prompts(model.config.vocab_size, pad=PAD, ending=(EOS,)), *own)
    # By the run's own rule, the last token, whatever the padding token is.
    taken = [model.score(model.model(torch.tensor([prompt])).last_hidden_state)[0, -1] for prompt in prompts]
    record = ExportRecord(
        str(folder / "base"),
        str(dtype).removeprefix("torch."),
        model.config.vocab_size,
        prompts,
        logits=torch.stack(taken).detach().float().flatten().numpy(),
        num_labels=3,
        texts=("a b", "a c", "a d"),
    )
    parts = FolderParts(
        family=family_of(family),
        config=read_json(folder / "base" / "config.json"),
        architecture=type(model).__name__,
        dtype=dtype,
        record=record,
        files=tuple((folder / "tokenizer").iterdir()),
    )
    write_folder(tensors_of(model), specs_of(model), folder / "out", parts, max_shard_bytes=10**9)
    return folder / "out"


def change_config(folder: Path, **values: object) -> None:
    change_json(folder / "config.json", values)


def _swap_classes(tensors: dict[str, torch.Tensor]) -> None:
    tensors["score.weight"] = tensors["score.weight"][[1, 0, 2]].contiguous()


def _drop_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["score.weight"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VerificationResult]:
    """The result for every folder below, all loaded by one process of plain transformers."""
    root = tmp_path_factory.mktemp("verify")
    right = exported(root / "right")
    folders = {
        "right": right,
        "bf16": exported(root / "bf16", dtype=torch.bfloat16),
        "experts": exported(root / "experts", family="deepseek_v3"),
        "no padding token": exported(root / "none", pad_token_id=None),
    }

    def spoilt(name: str) -> Path:
        folders[name] = Path(shutil.copytree(right, root / name.replace(" ", "-")))
        return folders[name]

    rewrite(spoilt("another order of classes"), _swap_classes)
    rewrite(spoilt("no head"), _drop_head)
    change_config(spoilt("padding ends texts"), pad_token_id=EOS)
    change_config(spoilt("padding inside texts"), pad_token_id=4)
    write_tokenizer(spoilt("a tokenizer without EOS"))
    return dict(zip(folders, verify_exports(list(folders.values())), strict=True))


# A padding token before the end changes nothing: transformers looks for the last other token.
@pytest.mark.parametrize("name", ["right", "bf16", "experts", "no padding token", "padding inside texts"])
def test_what_was_exported_is_verified(name: str, results: dict[str, VerificationResult]) -> None:
    assert results[name].is_verified, results[name]
    assert any("the tokenizer gives the ids of the run for 3 texts" in line for line in results[name].lines)
    padding = "classifies one text at a time" if name.startswith("no") else "logits of a padded batch deviate by"
    assert any(padding in line for line in results[name].lines), results[name].lines


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("another order of classes", "logits of 11 prompts deviate by"),
        ("no head", "plain transformers misses 1 tensors: score.weight"),
        ("padding ends texts", "logits of 11 prompts deviate by"),
        ("a tokenizer without EOS", "the tokenizer gives other ids than the run for 3 of 3 texts: 'a b' has []"),
    ],
)
def test_a_folder_that_classifies_otherwise_is_found(
    name: str, problem: str, results: dict[str, VerificationResult]
) -> None:
    assert any(text.startswith(problem) for text in results[name].problems), results[name]


def _adapted(model: PreTrainedModel, lora: LoraConfig) -> PreTrainedModel:
    install_lora(model, plan_lora(model.config, lora).targets, lora, seed=0, placement=AdapterPlacement(full_fragment))
    generator = torch.Generator().manual_seed(5)
    for name, param in model.named_parameters():
        if is_adapter(name) and name.endswith("lora_B"):
            param.data.uniform_(-0.05, 0.05, generator=generator)
    return model


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_an_adapter_with_its_head_is_read_by_peft_and_merged(family: str, tmp_path: Path) -> None:
    """The base is a language model, whose head the classifier does not have."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = LoraConfig(rank=8)
    model = classifier(family)
    language = AutoModelForCausalLM.from_config(model.config)
    language.model.load_state_dict(model.model.state_dict())
    language.save_pretrained(tmp_path / "base")
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    adapted = _adapted(model, lora)
    tensors = {name: param.detach() for name, param in adapted.named_parameters() if is_adapter(name)}
    base = AdapterBase(
        name=str(tmp_path / "base"),
        digest="",
        family=family_of(family),
        trained={"score.weight": model.score.weight.detach()},
        classifier_config=config,
    )
    write_adapter(factors_of(tensors, lora.scale), lora, tmp_path / "adapter", base)

    start = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3, pad_token_id=PAD)
    theirs = peft.PeftModel.from_pretrained(start, tmp_path / "adapter").eval()
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", dtype="fp32", max_shard_bytes=10**9, base=None)
    merged = plain(tmp_path / "out")
    assert merged.config.id2label == CLASSES
    for prompt in ([5, 6, EOS], [*range(4, 30), EOS]):
        expected = scores(adapted, prompt)
        torch.testing.assert_close(theirs(torch.tensor([prompt])).logits[0].detach(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(scores(merged, prompt), expected, atol=1e-5, rtol=0)


def test_a_classifier_that_peft_trained_is_merged_once_its_config_is_there(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = classifier("llama")
    language = AutoModelForCausalLM.from_config(model.config)
    language.model.load_state_dict(model.model.state_dict())
    language.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=4, init_lora_weights=False, target_modules=["q_proj", "up_proj"])
    theirs = peft.get_peft_model(model, settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    arguments = {"dtype": "fp32", "max_shard_bytes": 10**9, "base": tmp_path / "base"}
    with pytest.raises(ExportError, match=r"adapts a classifier \(task_type SEQ_CLS\) and holds no config.json"):
        export_checkpoint(tmp_path / "adapter", tmp_path / "out", **arguments)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    (tmp_path / "adapter" / "config.json").write_text(json.dumps(config))
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", **arguments)
    merged = plain(tmp_path / "out")
    prompt = [*range(4, 30), EOS]
    torch.testing.assert_close(scores(merged, prompt), scores(theirs, prompt), atol=1e-5, rtol=0)


def test_ask_prints_classes_and_the_others_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = classifier("llama")
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, adds_eos=True)
    assert main(["ask", str(tmp_path), *TEXTS[:2]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == [f"> {text}" for text in TEXTS[:2]]
    found = dict(entry.rsplit(" ", 1) for entry in lines[1].split(", "))
    wanted = scores(model, [30, 31, EOS]).softmax(-1).tolist()
    assert {name: float(score) for name, score in found.items()} == pytest.approx(
        dict(zip(CLASSES.values(), wanted, strict=True)), abs=1e-4
    )
    assert main(["chat", str(tmp_path)]) == 2
    assert "has a classifier (LlamaForSequenceClassification), which cannot generate text" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--engine", "transformers"]) == 2
    assert "holds a classifier, which generates no text" in capsys.readouterr().err


def test_the_exported_tokenizer_ends_and_pads_texts_as_training(tmp_path: Path) -> None:
    """Also of a pair, which is joined with the separator between, and an encoder's tokenizer stays as it is."""
    folder = write_tokenizer(tmp_path / "run")
    tokenizer = load_tokenizer(str(folder))

    def encode(text: str, pair: str | None) -> list[int]:
        return [BOS, *tokenizer(text if pair is None else f"{text} on {pair}")["input_ids"], EOS]

    files = {file.name: file for file in folder.iterdir()}
    config = classifier("llama").config.to_dict()
    fitted = fit_tokenizer(tokenizer, files, encode, config=config)
    assert (len(fitted.texts), fitted.notes) == (8, ())
    for name, text in fitted.changed.items():
        (folder / name).write_text(text)
    exported = AutoTokenizer.from_pretrained(folder)
    assert exported("charge twice")["input_ids"] == [BOS, *tokenizer("charge twice")["input_ids"], EOS]
    assert exported("it", "start")["input_ids"] == encode("it", "start")
    assert exported(["it", "charge twice"], padding=True)["input_ids"][0][-1] == PAD
    assert exported.padding_side == "right"
    kept = check_tokenizer(exported, files, encode, config=config)
    assert (kept.changed, len(kept.texts), kept.notes) == ({}, 8, ())
    # Ids in another order are no addition to a text's own; half of the texts are unknown words alone.
    other = fit_tokenizer(tokenizer, files, lambda text, pair: encode(text, pair)[::-1], config=config)
    assert "gives other tokens than training for 4 of 8 sample texts; training ends texts with '<s>'" in other.notes[0]


REAL = (
    "tokenizers/deepseek-llm",
    pytest.param("tokenizers/deepseek-r1-distill-qwen", marks=pytest.mark.slow),
    "models/stories260K",
)

PADDINGS = {
    "tokenizers/deepseek-llm": "<|pad|>, a new token (100015), since the tokenizer's own",
    "tokenizers/deepseek-r1-distill-qwen": "<|vision_pad|> (151654), since the tokenizer's own",
    "models/stories260K": "<unk> (0), since",
}


@pytest.mark.parametrize("name", REAL)
def test_a_pipeline_makes_the_tokens_of_training(name: str, shared_data: Path, tmp_path: Path) -> None:
    """The tokens of training are those of the tokenizer and EOS, which none of these adds by itself; the first has no
    token to spare for padding.
    """
    tokenizer = load_tokenizer(str(shared_data / name))
    eos = tokenizer.eos_token_id

    def encode(text: str, pair: str | None) -> list[int]:
        return [*tokenizer(text if pair is None else f"{text}\n{pair}")["input_ids"], eos]

    files = {file.name: file for file in (shared_data / name).iterdir() if file.name in TOKENIZER_FILES}
    # Beside a qwen2 config transformers would take another tokenizer class for the sentencepiece model.
    family = "llama" if "stories" in name else "qwen2"
    model = classifier(family, vocab_size=len(tokenizer) + 5, pad_token_id=None, eos_token_id=eos)
    assert set_padding_token(model.config, tokenizer).startswith(PADDINGS[name])
    config = model.config.to_dict()
    fitted = fit_tokenizer(tokenizer, files, encode, config=config)
    assert len(fitted.texts) == 8
    model.save_pretrained(tmp_path)
    for file in (shared_data / name).glob("*token*.json"):
        shutil.copy(file, tmp_path)
    for file_name, text in fitted.changed.items():
        (tmp_path / file_name).write_text(text)
    texts = [*fitted.texts, "charge twice</s> again", "  two  spaces \n"]
    classify = pipeline("text-classification", model=str(tmp_path), top_k=None, function_to_apply="none")
    for batch_size in (1, 4):
        found = classify(texts, batch_size=batch_size)
        for text, entries in zip(texts, found, strict=True):
            wanted = scores(model, encode(text, None)).tolist()
            assert {entry["label"]: entry["score"] for entry in entries} == pytest.approx(
                dict(zip(CLASSES.values(), wanted, strict=True)), abs=1e-5
            )
    joined = classify({"text": "charge twice", "text_pair": "on start"})
    is_same = {entry["label"]: entry["score"] for entry in joined} == pytest.approx(
        dict(zip(CLASSES.values(), scores(model, encode("charge twice", "on start")).tolist(), strict=True)), abs=1e-5
    )
    assert is_same or fitted.notes == (
        "the exported tokenizer joins a text and its text_pair otherwise than training: join them yourself",
    )


def test_a_deepspeed_checkpoint_of_a_classifier_is_read(tmp_path: Path) -> None:
    """The Hugging Face Trainer writes config.json beside it."""
    model = classifier("qwen2")
    model.config.architectures = [type(model).__name__]
    step = tmp_path / "checkpoint-3" / "global_step3"
    step.mkdir(parents=True)
    model.config.save_pretrained(step.parent)
    (step.parent / "latest").write_text(step.name)
    states = {"module": model.state_dict(), "buffer_names": [], "dp_world_size": 1, "param_shapes": None}
    torch.save(states | {"shared_params": {}}, step / "mp_rank_00_model_states.pt")
    export_checkpoint(step.parent, tmp_path / "out", dtype="fp32", max_shard_bytes=10**9, base=None)
    prompt = [*range(4, 30), EOS]
    assert torch.equal(scores(plain(tmp_path / "out"), prompt), scores(model, prompt))
