"""Losses of TRL's trainers on given token ids, as one full forward: `python trl_worker.py FOLDER`, in an environment
with TRL.

Reads the models `policy` and `reference` and `cases.json` of FOLDER and writes `losses.json`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

FOLDER = Path(sys.argv[1])
TEXTS = {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]}
MARKED = {"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]}
IGNORE_INDEX = -100


def main() -> None:
    """Compute every case."""
    given = json.loads((FOLDER / "cases.json").read_text())
    losses = [_loss(case, given) for case in given["cases"]]
    (FOLDER / "losses.json").write_text(json.dumps(losses))


def _loss(case: dict[str, Any], given: dict[str, Any]) -> float:
    name, keys = case["trainer"], case["keys"]
    if name == "kto":
        return _marked_loss(keys, given["marked"])
    if name == "dpo":
        return _dpo_loss(keys, given["pairs"])
    return _reference_free_loss(name, keys, given["pairs"])


def _model(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32)


def _options(keys: dict[str, Any]) -> dict[str, Any]:
    quiet = {"output_dir": str(FOLDER / "out"), "report_to": "none", "use_cpu": True, "bf16": False, "fp16": False}
    return {**quiet, "per_device_train_batch_size": 2, "gradient_checkpointing": False, "max_length": 64, **keys}


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdef"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<eos>"
    )


def _padded(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> tuple[torch.Tensor, ...]:
    """Ids, attention mask and completion mask, [documents, tokens], padded on the right."""
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids, attention, completion = (torch.zeros(len(prompts), longest, dtype=torch.long) for _ in range(3))
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        attention[row, :end] = 1
        completion[row, len(prompt) : end] = 1
    return ids, attention, completion


def _dpo_loss(keys: dict[str, Any], pairs: Sequence[Sequence[list[int]]]) -> float:
    trainer = DPOTrainer(
        _model("policy"),
        ref_model=_model("reference"),
        args=DPOConfig(**_options(keys)),
        train_dataset=Dataset.from_dict(TEXTS),
        processing_class=_tokenizer(),
    )
    prompts = [pair[0] for pair in pairs]
    ids, attention, completion = _padded(prompts * 2, [pair[1] for pair in pairs] + [pair[2] for pair in pairs])
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}
    return float(trainer._compute_loss(trainer.model, inputs, False))


def _marked_loss(keys: dict[str, Any], marked: Sequence[Any]) -> float:
    trainer = KTOTrainer(
        _model("policy"),
        ref_model=_model("reference"),
        args=KTOConfig(**_options(keys)),
        train_dataset=Dataset.from_dict(MARKED),
        processing_class=_tokenizer(),
    )
    prompts, answers, labels, others = zip(*marked, strict=True)
    names = ("input_ids", "attention_mask", "completion_mask")
    inputs = dict(zip(names, _padded(prompts, answers), strict=True))
    inputs |= {f"KL_{name}": part for name, part in zip(names, _padded(prompts, others), strict=True)}
    inputs["label"] = torch.tensor(labels)
    return float(trainer._compute_loss(trainer.model, inputs, False))


def _reference_free_loss(name: str, keys: dict[str, Any], pairs: Sequence[Sequence[list[int]]]) -> float:
    """For ORPO without the cross entropy, which TRL takes of the prompt too."""
    kinds: dict[str, Any] = {"cpo": (CPOTrainer, CPOConfig), "orpo": (ORPOTrainer, ORPOConfig)}
    trainer_class, config_class = kinds[name]
    trainer = trainer_class(
        _model("policy"),
        args=config_class(**_options(keys)),
        train_dataset=Dataset.from_dict(TEXTS),
        processing_class=_tokenizer(),
    )
    batch = {}
    for side, place in (("chosen", 1), ("rejected", 2)):
        ids, attention, completion = _padded([pair[0] for pair in pairs], [pair[place] for pair in pairs])
        batch |= {f"{side}_input_ids": ids, f"{side}_attention_mask": attention}
        batch[f"{side}_labels"] = ids.masked_fill(completion == 0, IGNORE_INDEX)
    loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
    return float(loss) - (metrics["nll_loss"] if name == "orpo" else 0.0)


if __name__ == "__main__":
    main()
