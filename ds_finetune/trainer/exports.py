"""The exports of a run: what is written from the live engine, and how it is verified."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ds_finetune.config.schema import LoraConfig, RunConfig
from ds_finetune.engine.collectives import all_gather_object
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.start_engine import DTYPES
from ds_finetune.errors import OutputError, RunError
from ds_finetune.export.adapter import write_adapter
from ds_finetune.export.base_folder import BaseFolder, config_changes, with_stored_weights
from ds_finetune.export.folder import (
    TOKENIZER_FILES,
    FolderParts,
    has_same_weights,
    link_folder,
    write_folder,
)
from ds_finetune.export.interruption import Interruption
from ds_finetune.export.source import read_model_spec
from ds_finetune.export.verify.record import RECORD, UNVERIFIED, ExportRecord, fixed_prompts, sampled_logits
from ds_finetune.export.verify.verify import VerificationResult, mark_folder, verify_exports
from ds_finetune.families.table import family_of
from ds_finetune.model.hub_folder import has_weights
from ds_finetune.model.lora import Factors, factors_of, merged, quantised_targets
from ds_finetune.trainer.inputs import Material
from ds_finetune.trainer.resume import Say
from ds_finetune.trainer.run_dir import available_bytes
from ds_finetune.units import parse_bytes

GENERATION = "generation_config.json"


def files_beside(config: RunConfig, material: Material) -> dict[str, Path]:
    """Files that lie beside the weights in an export, by name, with where they come from."""
    found = {name: material.tokenizer_folder / name for name in TOKENIZER_FILES} | {
        GENERATION: material.folder / GENERATION
    }
    if config.data.template not in ("auto", "plain"):
        found["chat_template.jinja"] = Path(config.data.template)
    return {name: path for name, path in found.items() if path.is_file()}


def checked(config: RunConfig, exports: tuple[Path, ...], interruption: Interruption) -> tuple[VerificationResult, ...]:
    """The folders exported, and the best weights', held against what the run recorded with them, in one fresh process.

    VerificationError names them where a signal has come.
    """
    best = Path(config.output_dir) / "export-best"
    folders = [*exports, *([best] if (best / RECORD).is_file() and (best / UNVERIFIED).is_file() else [])]
    if not config.export.verify or not folders:
        return ()
    interruption.check(folders)
    torch.cuda.empty_cache()
    twins = [folder for folder in exports if has_same_weights(folder, best)]
    verdicts = verify_exports(
        [folder for folder in folders if not twins or folder != best], available_bytes=available_bytes()
    )
    for verdict in [verdict for verdict in verdicts if verdict.folder in twins]:
        shared = f"the files of {verdict.folder}, whose weights it shares"
        verdicts.append(replace(verdict, folder=best, lines=(shared, *verdict.lines)))
        mark_folder(verdicts[-1])
    return tuple(verdicts)


def recorded(engine: Engine, material: Material, *, step: int) -> ExportRecord:
    """Logits of the fixed prompts from the weights as they are now, after `step` steps; every rank takes part.

    None of weights in four bits: what is exported are others.
    """
    vocab_size = int(material.hf_config.vocab_size)
    prompts = fixed_prompts(vocab_size, material.tokenizer)
    is_quantised = bool(quantised_targets(material.hf_config, engine.plan.config.lora))
    return ExportRecord(
        base=str(material.folder.absolute()),
        dtype=str(DTYPES[engine.plan.config.train.precision]).removeprefix("torch."),
        vocab_size=vocab_size,
        prompts=prompts,
        step=step,
        logits=None if is_quantised else sampled_logits(engine.logits(prompts), prompts, vocab_size),
    )


@dataclass
class Exports:
    """The exports of a run as they are written: the weights of one step once, and each note said once."""

    engine: Engine
    material: Material
    say: Say
    _best_step: int = -1
    _said: set[str] = field(default_factory=set)

    def write_best(self, step: int) -> None:
        """Write the weights as they are now, after `step` steps, as the best; every rank takes part."""
        self._say(export(self.engine, self.material, self._folder / "export-best", step=step))
        self._best_step = step

    def write_last(self, step: int) -> Path:
        """Write those at the end of a run, and return the folder; weights that were written as the best are linked."""
        out = self._folder / "export"
        names = ("export", "adapter") if self.engine.plan.config.lora else ("export",)
        if self._best_step == step and self._links_to_best(names):
            self._say([f"{out} has the weights of {out}-best, which are of the same step, as hard links"])
        else:
            self._say(export(self.engine, self.material, out, step=step))
        return out

    @property
    def _folder(self) -> Path:
        return Path(self.engine.plan.config.output_dir)

    def _links_to_best(self, names: tuple[str, ...]) -> bool:
        """Whether rank zero could make the links; the same on every rank."""
        folder = self._folder
        made = (link_folder(folder / f"{name}-best", folder / name) for name in names)
        return all(all_gather_object(not self.engine.is_rank_zero or all(made)))

    def _say(self, notes: Iterable[str]) -> None:
        for note in notes:
            if self.engine.is_rank_zero and note not in self._said:
                self.say(note)
                self._said.add(note)


def export(engine: Engine, material: Material, out: Path, *, step: int) -> list[str]:
    """Write the weights as they are now, after `step` steps, to the Hugging Face folder `out`; every rank takes part,
    rank zero writes.

    Tensors of the model's folder that are not built, e.g. of multi-token prediction, are copied to it; returns notes on
    that.
    Adapters are added to the weights, and written in peft's format to a folder beside `out`: `adapter` or
    `adapter-best`.
    Weights that the engine has in four bits are read from the model's folder again.
    """
    config = engine.plan.config
    beside = files_beside(config, material)
    parts = FolderParts(
        family=family_of(material.hf_config.model_type),
        config=material.config_tree,
        architecture=type(engine.lm).__name__,
        dtype=DTYPES[config.train.precision],
        record=recorded(engine, material, step=step) if config.export.verify else None,
        files=tuple(path for name, path in beside.items() if path.name == name),
        texts={name: path.read_text(encoding="utf-8") for name, path in beside.items() if path.name != name},
    )
    notes: list[str] = []
    if config.model.weights == "load" and has_weights(material.folder):
        base = BaseFolder.read(material.folder, read_model_spec(material.folder))
        # Rank zero writes: it alone compares embeddings and heads, which may take seconds.
        parts, notes = base.with_base_tensors(parts) if engine.is_rank_zero else (parts, [])
    notes = [*notes, *config_changes(parts, (tensor.key for copied in parts.base_tensors for tensor in copied.tensors))]
    factors = (
        _exported_adapters(engine, material, out.with_name(out.name.replace("export", "adapter")), config.lora)
        if config.lora
        else {}
    )
    in_four_bit = {f"{target.name}.weight" for target in quantised_targets(material.hf_config, config.lora)}
    tensors = with_stored_weights(engine.tensors(), in_four_bit, material.folder) if in_four_bit else engine.tensors()
    try:
        write_folder(
            merged(tensors, factors),
            engine.tensor_specs(),
            out,
            parts,
            max_shard_bytes=parse_bytes(config.export.max_shard_size, name="export.max_shard_size"),
        )
    except OutputError as full:
        raise RunError(f"{full.message}; the run is done up to its export", hint=full.hint) from full
    return notes


def _exported_adapters(engine: Engine, material: Material, out: Path, lora: LoraConfig) -> dict[str, Factors]:
    """Write adapters to `out` and return them by the weight they adapt: all of them on rank zero, nothing on others."""
    # Cloned, because what is gathered goes, and a live tensor on the CPU changes with the next step.
    whole = {name: tensor.clone() for name, tensor in engine.adapters() if tensor is not None}
    factors = factors_of(whole, lora.alpha / lora.rank)
    if engine.is_rank_zero:
        family = family_of(material.hf_config.model_type)
        write_adapter(factors, lora, out, base=engine.plan.config.model.path, digest=material.base, family=family)
    return factors
