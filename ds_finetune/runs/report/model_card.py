"""The model card of an exported folder: its `README.md` in the format of the Hugging Face Hub."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_finetune import __version__
from ds_finetune.config.objectives import OBJECTIVES
from ds_finetune.export.formats import SAFETENSORS, format_of
from ds_finetune.export.kept_edits import CARD, MARK, is_generated_card, marked_card
from ds_finetune.families.table import family_of
from ds_finetune.families.text_part import is_composite
from ds_finetune.runs.folder import BEST_EXPORTS, RunFolder, base_model, is_run
from ds_finetune.runs.report.page import number_text, render_template
from ds_finetune.runs.status import read_object
from ds_finetune.system.whole_file import replace_file

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
_SETTINGS = ("objective.name", "train.", "optim.", "data.packing", "lora.rank", "lora.alpha", "lora.target_modules")
"""Prefixes of the keys of the run file that a model card lists with their values. No such value is a path."""


def write_model_cards(run: RunFolder) -> list[Path]:
    """Write the model card of each exported folder of a run, and return the paths of the written cards."""
    return [card for name in run.exports if (card := write_model_card(run, run.path / name)) is not None]


def write_card_of_source(source: Path, folder: Path, verified: Sequence[str] = ()) -> Path | None:
    """Write the model card of the exported `folder`, whose weights come from the run, checkpoint or adapter `source`.

    `verified` holds lines about the verification of `folder`. Returns the path of the card, or None if `source` belongs
    to no run or if a person has written a card in `folder`.
    """
    run_folder = next((each for each in (source, *source.absolute().parents[:2]) if is_run(each)), None)
    if run_folder is None:
        return None
    return write_model_card(RunFolder.read(run_folder), folder, verified, source)


def write_model_card(
    run: RunFolder, folder: Path, verified: Sequence[str] = (), source: Path | None = None
) -> Path | None:
    """Write the model card `README.md` into `folder`, an export of `run`. `source` is the run's export that was
    converted to `folder`, if any. Returns the path of the card, or None if a person has written one.
    """
    card = folder / CARD
    if card.exists() and not is_generated_card(card):
        return None
    replace_file(card, model_card(run, folder, verified, source).encode())
    return card


def model_card(run: RunFolder, folder: Path, verified: Sequence[str] = (), source: Path | None = None) -> str:
    """The text of the model card of `folder`, an export of `run`. `source` is the run's export that was converted to
    `folder`, if any.

    The text contains neither times nor paths of this machine, so that equal exports have equal cards.
    """
    from huggingface_hub import EvalResult, ModelCardData

    is_adapter, settings = (folder / "adapter_config.json").is_file(), run.settings
    export_format = format_of(folder)
    weights = source if source is not None and source.name in BEST_EXPORTS else folder
    step = run.export_step(weights) or run.metrics.last_step
    # Metrics of a named held-out set have a second slash in their names, such as eval/news/loss.
    over_all = {name: each for name, each in run.curves.items() if name.startswith("eval/") and name.count("/") == 1}
    values = {name.removeprefix("eval/"): dict(each.points()).get(step, math.nan) for name, each in over_all.items()}
    results = {name: value for name, value in values.items() if not math.isnan(value)}
    base, objective = base_model(run.config), settings.get("objective.name", "sft")
    is_scorer = objective in OBJECTIVES and OBJECTIVES[objective].head == "scores"
    # The folder of an adapter has no config.json, but the merged export beside it has.
    merged = folder.with_name(folder.name.replace("adapter", "export"))
    config = read_object(folder / "config.json") or read_object(merged / "config.json")
    family, auto_class = family_of(str(config.get("model_type"))), "AutoModelForCausalLM"
    built_as = "" if family.newer is not None else family.built_as or ""
    auto_class = "AutoModelForMultimodalLM" if is_composite(config) else auto_class
    task = "text-classification" if is_scorer else "text-generation"
    data = ModelCardData(
        base_model=base if _is_hub_id(base) else None,
        base_model_relation=("adapter" if is_adapter else "finetune") if _is_hub_id(base) else None,
        datasets=[name for name in _training_data(run.config) if _is_hub_id(name)] or None,
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type="held-out",
                dataset_name="held-out rows of the run",
                metric_type=name,
                metric_value=float(f"{value:.6g}"),
            )
            for name, value in results.items()
        ]
        or None,
        library_name="peft" if is_adapter else "transformers",
        model_name=run.name,
        pipeline_tag=task,
        tags=["ds_finetune", "deepspeed", objective, *(["lora"] if run.config.get("lora") else [])],
    )
    card = render_template(
        "model_card.md.j2",
        is_escaped=False,
        metadata=data.to_yaml(),
        mark=f"{MARK} {__version__} -->",
        name=run.name,
        base=base if _is_hub_id(base) else Path(base).name,
        objective=objective,
        task=task,
        is_adapter=is_adapter,
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        has_ends=(folder / "generation_config.json").is_file(),
        is_scorer=is_scorer,
        is_composite=is_composite(config),
        auto_class="AutoModelForSequenceClassification" if is_scorer else auto_class,
        verified=verified,
        prompts=[] if is_scorer else _prompt_lines(run, folder),
        uses=() if export_format.name == SAFETENSORS.name else export_format.uses,
        built_as=built_as,
        first_transformers=family.newer.since if family.newer is not None else "",
        new_in_tokenizer=_new_in_tokenizer(read_object(folder / "tokenizer_config.json")),
        type_argument=f', model_type="{built_as}"' if built_as else "",
        raw_score=', function_to_apply="none"' if objective == "reward" else "",
        step=step,
        ranks=run.last_start.get("ranks", 0),
        results=[(name, number_text(value, name)) for name, value in results.items()],
        data=str(run.recorded("data.json").get("summary", "")),
        settings=[(key, value) for key, value in settings.items() if key.startswith(_SETTINGS) and value != "null"],
        versions=run.versions,
    )
    return marked_card(card)


def _new_in_tokenizer(tokenizer_config: Mapping[str, Any]) -> str:
    """What transformers 4 cannot read in a tokenizer_config.json; empty if it reads the file."""
    if tokenizer_config.get("tokenizer_class") == "TokenizersBackend":
        return "the class `TokenizersBackend`"
    return "a list of `extra_special_tokens`" if isinstance(tokenizer_config.get("extra_special_tokens"), list) else ""


def _prompt_lines(run: RunFolder, folder: Path) -> list[str]:
    from ds_finetune.data.prompt_format import prompt_lines
    from ds_finetune.data.tokenizer_files import load_tokenizer

    for tokenizer_folder in (folder, run.path / "export"):
        if (tokenizer_folder / "tokenizer.json").is_file():
            return list(prompt_lines(tokenizer_folder, load_tokenizer(str(tokenizer_folder))))
    return []


def _training_data(config: Mapping[str, Any]) -> list[str]:
    section = config.get("data", {})
    sources = section.get("train", []) if isinstance(section, dict) else []
    sources = list(sources.values()) if isinstance(sources, dict) else sources
    return [source for source in (sources if isinstance(sources, list) else [sources]) if isinstance(source, str)]


def _is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name)) and not name.endswith(_FILES) and not Path(name).exists()
