"""Writes the exports of a run from its running engine, and verifies them."""

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ds_finetune.config.units import parse_bytes
from ds_finetune.console.phase_line import Say
from ds_finetune.data.prompt_format import served_generation
from ds_finetune.data.record_layouts import LabelledText
from ds_finetune.data.units import encode_labelled
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.errors import OutputError, RunError
from ds_finetune.export.adapter import AdapterBase, write_adapter
from ds_finetune.export.base_folder import BaseFolder, with_stored_weights
from ds_finetune.export.fitted_tokenizer import (
    Encode,
    FittedTokenizer,
    check_tokenizer,
    fit_tokenizer,
    with_padding,
)
from ds_finetune.export.formats import ExportOptions, format_named
from ds_finetune.export.kept_edits import kept_edits
from ds_finetune.export.model_config import TOKENIZER_CONFIG, config_changes
from ds_finetune.export.output_folder import RECORD
from ds_finetune.export.safetensors_folder import (
    CHAT_TEMPLATES,
    TOKENIZER_FILES,
    FolderParts,
    has_same_weights,
    link_folder,
    write_folder,
)
from ds_finetune.export.source import read_model_spec
from ds_finetune.export.verify.record import (
    PROMPT_TOKENS,
    TEXTS,
    UNVERIFIED,
    ExportRecord,
    classifier_prompts,
    fixed_prompts,
    sampled_logits,
)
from ds_finetune.export.verify.verify import SignalInterruption, VerificationResult, mark_folder, verify_exports
from ds_finetune.families.text_part import is_composite
from ds_finetune.model.adapters.lora import Factors, factors_of, merge_adapters
from ds_finetune.model.build.dtypes import PRECISION_DTYPES, dtype_name
from ds_finetune.model.build.encoder import encoder_of
from ds_finetune.model.build.hub_folder import has_weights
from ds_finetune.model.build.text_config import text_module
from ds_finetune.model.weights.names import published_names
from ds_finetune.system.free_memory import available_bytes
from ds_finetune.trainer.inputs import RunInputs
from ds_finetune.trainer.prepare import PreparedRun

_LONGEST = 2 * PROMPT_TOKENS
"""Maximum number of tokens of a text whose classifier scores are recorded for verification."""


def verify_run_exports(
    output_dir: Path, exports: tuple[Path, ...], interruption: SignalInterruption
) -> tuple[VerificationResult, ...]:
    """Compare the unverified exports of a run, including `export-best`, with their records, in one new process. If a
    signal has arrived, VerificationError names the folders that stay unverified.
    """
    best = output_dir / "export-best"
    folders = [path for path in (*exports, best) if (path / RECORD).is_file() and (path / UNVERIFIED).is_file()]
    if not folders:
        return ()
    interruption.check(folders)
    torch.cuda.empty_cache()
    linked_to_best = [folder for folder in folders if folder != best and has_same_weights(folder, best)]
    results = verify_exports(
        [folder for folder in folders if not linked_to_best or folder != best], available_bytes=available_bytes()
    )
    for result in [result for result in results if result.folder in linked_to_best]:
        results.append(replace(result, folder=best))
        mark_folder(results[-1])
    return tuple(results)


def write_formats(names: Sequence[str], export: Path, say: Say, *, keeps_written: bool) -> tuple[Path, ...]:
    """Convert the export of a run to the formats `names`. Returns the new folders, which are beside `export`. With
    `keeps_written`, formats that were already written are kept.
    """
    folders = []
    for row in map(format_named, names):
        out = export.with_name(f"{export.name}-{row.name}")
        folders.append(out)
        if keeps_written and (out / RECORD).is_file():
            continue
        with kept_edits(out, say):
            if (out / RECORD).is_file():
                # The existing folder was exported at an earlier end of the same run.
                shutil.rmtree(out)
            written = row.load().write(export, out, row.resolved(ExportOptions()))
        for line in written.lines():
            say(line)
    return tuple(folders)


@dataclass
class Exports:
    """Writes the exports of a run. The weights of one step are written once, and each note is printed once."""

    run: PreparedRun
    engine: Engine
    say: Say
    _best_step: int = -1
    _printed: set[str] = field(default_factory=set)

    def write_best(self, step: int) -> None:
        """Write the current weights, after `step` steps, to the folder of the best weights; collective."""
        with self._edits_kept("-best"):
            self._print(export(self.run, self.engine, self.run.output_dir / "export-best", step=step))
        self._best_step = step

    def write_last(self, step: int) -> Path:
        """Write the final weights, as links if they are already written as the best ones. Returns their folder."""
        out = self.run.output_dir / "export"
        names = ("export", "adapter") if self.run.config.lora else ("export",)
        with self._edits_kept(""):
            if self._best_step != step or not self._links_to_best(names):
                self._print(export(self.run, self.engine, out, step=step))
        return out

    @contextmanager
    def _edits_kept(self, ending: str) -> Iterator[None]:
        with ExitStack() as stack:
            for name in ("export", "adapter") if self.engine.is_rank_zero else ():
                stack.enter_context(kept_edits(self.run.output_dir / f"{name}{ending}", self.say))
            yield

    def _links_to_best(self, names: tuple[str, ...]) -> bool:
        folder = self.run.output_dir
        links = (link_folder(folder / f"{name}-best", folder / name) for name in names)
        return all(all_gather_object(not self.engine.is_rank_zero or all(links)))

    def _print(self, notes: Iterable[str]) -> None:
        for note in notes:
            if self.engine.is_rank_zero and note not in self._printed:
                self.say(note)
                self._printed.add(note)


def export(run: PreparedRun, engine: Engine, out: Path, *, step: int | None) -> list[str]:
    """Write the current weights, after `step` steps, to the Hugging Face folder `out`. Returns notes; collective.

    Rank zero writes. Tensors of the model's folder for which transformers' class has no module, e.g. of multi-token
    prediction, are copied. Adapters are merged into the weights, and also written in peft's format to a folder beside
    `out`: `adapter` or `adapter-best`. Weights that the engine has in four bits are read from the model's folder again.
    If `step` is None, the folder is a copy for a server. It then has no verification record, and there is no folder for
    adapters. With a step, replicas of a weight that differ between ranks are a RunError.
    """
    if step is not None:
        engine.check_replicas()
    model, folder = run.model, run.inputs.folder
    tokenizer = adapt_tokenizer(run) if engine.is_rank_zero else FittedTokenizer({})
    parts = _folder_parts(run, engine, tokenizer, step=step)
    notes = list(tokenizer.notes)
    shapes = {name: tuple(spec.shape) for name, spec in engine.tensor_specs().items()}
    trained = published_names(shapes, parts.family)
    # For a classifier, the base model's extra tensors belong to its language-model head and are not copied.
    if model.task == "causal_lm" and not model.has_random_weights and has_weights(folder):
        base = BaseFolder.read(folder, read_model_spec(folder))
        # Only rank zero does this, since it alone writes: comparing embedding and head may take seconds.
        parts, notes = base.with_base_tensors(parts, without=trained) if engine.is_rank_zero else (parts, [])
    keys = [*trained, *(tensor.key for tensor in parts.base_tensors)]
    notes = [*notes, *config_changes(parts.config, parts.files, keys)]
    adapter_folder = None if step is None else out.with_name(out.name.replace("export", "adapter"))
    factors = _write_adapters(run, engine, adapter_folder, parts)
    in_four_bit = {f"{name}.weight" for name in model.quantised}
    tensors = engine.tensors()
    if in_four_bit:
        tensors = with_stored_weights(tensors, in_four_bit, folder, parts.family)
    max_shard_bytes = parse_bytes(run.config.export.max_shard_size, name="export.max_shard_size")
    try:
        write_folder(
            merge_adapters(tensors, factors, parts.family),
            engine.tensor_specs(),
            out,
            parts,
            max_shard_bytes=max_shard_bytes,
        )
    except OutputError as full:
        raise RunError(f"training is finished, but its export is missing: {full.message}", hint=full.hint) from full
    return notes


def _folder_parts(run: PreparedRun, engine: Engine, tokenizer: FittedTokenizer, *, step: int | None) -> FolderParts:
    config, inputs = run.config, run.inputs
    record = None if step is None or not config.export.verify else export_record(run, engine, tokenizer, step=step)
    return FolderParts(
        family=inputs.model.family,
        config=inputs.config_tree,
        architecture=type(engine.lm).__name__,
        dtype=PRECISION_DTYPES[run.plan.precision],
        record=record,
        files=tuple(inputs.copied_files.values()),
        texts=dict(tokenizer.changed),
    )


def _write_adapters(run: PreparedRun, engine: Engine, out: Path | None, parts: FolderParts) -> dict[str, Factors]:
    """Gather all adapters on rank zero, keyed by the weight that they adapt; other ranks get an empty dictionary. If
    `out` is given, the adapters are also written to this folder in peft's format.
    """
    lora, inputs = run.config.lora, run.inputs
    if lora is None:
        return {}
    # Adapters are cloned, because gathered tensors are released, and the model's own (on CPUs) change in the next step.
    adapters = {name: tensor.clone() for name, tensor in engine.adapters() if tensor is not None}
    factors = factors_of(adapters, lora.scale)
    assert run.model.lora is not None
    trained = engine.named_tensors(run.model.lora.fully_trained)
    full_weights = {name: tensor.clone() for name, tensor in trained if tensor is not None}
    if engine.is_rank_zero and out is not None:
        base = AdapterBase(
            name=inputs.model.path,
            digest=inputs.base,
            family=inputs.model.family,
            module=text_module(inputs.folder) if is_composite(inputs.config_tree) else "model",
            trained=full_weights,
            classifier_config=inputs.config_tree if run.model.task == "sequence_classification" else {},
            files=parts.files,
            texts=parts.texts,
        )
        write_adapter(factors, lora, out, base)
    return factors


def adapt_tokenizer(run: PreparedRun) -> FittedTokenizer:
    """The tokenizer files of an export that differ from the run's. A language model gets the chat template, the ids
    that end an answer, and BOS as in training. A reward model of dialogues gets the chat template and the padding
    token. Tokenizers of other decoder classifiers add the special tokens of training; those of encoders are unchanged.
    """
    inputs = run.inputs
    template = {CHAT_TEMPLATES[0]: inputs.prompts.template} if inputs.prompts.template else {}
    if inputs.model.task == "causal_lm":
        ends = served_generation(inputs.folder, inputs.model.hf_config, inputs.stop_ids)
        return FittedTokenizer({**template, **ends, **_tokenizer_config(inputs), **inputs.beginning})
    files = {
        name: path for name in TOKENIZER_FILES if "/" not in name and (path := inputs.tokenizer_folder / name).is_file()
    }
    encode = _encode_of(run)
    if encode is None:
        text = with_padding(files, inputs.tokenizer, inputs.config_tree["pad_token_id"])
        return FittedTokenizer({**template, TOKENIZER_CONFIG: text})
    adapt = fit_tokenizer if encoder_of(inputs.model.hf_config) is None else check_tokenizer
    return adapt(inputs.tokenizer, files, encode, config=inputs.config_tree)


def _tokenizer_config(inputs: RunInputs) -> dict[str, str]:
    """Map the name tokenizer_config.json to the file's new text for an export; empty if the file does not change. The
    key `chat_template` is removed if the export has a template file, since some programs would read the key instead.
    `add_bos_token` is removed if training rows had no BOS.
    """
    file, tokenizer = inputs.tokenizer_folder / TOKENIZER_CONFIG, inputs.tokenizer
    published = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    has_bos = inputs.prompts.text_ids(tokenizer, "x")[:1] == [tokenizer.bos_token_id]
    left_out = {"chat_template": bool(inputs.prompts.template), "add_bos_token": not has_bos}
    tree = {key: value for key, value in published.items() if not (value and left_out.get(key))}
    return {} if tree == published else {TOKENIZER_CONFIG: json.dumps(tree, indent=2, ensure_ascii=False) + "\n"}


def _encode_of(run: PreparedRun) -> Encode | None:
    """Function that tokenises a text as training does; None if training renders dialogues with a chat template."""
    tokenizer, data = run.inputs.tokenizer, run.config.data
    if run.model.objective.name == "reward" and run.inputs.prompts.settings.chat_template is not None:
        return None
    # Texts are not truncated: transformers' pipelines do not truncate either, since they do not know max_seq_len.
    return lambda text, pair: encode_labelled(LabelledText(text, pair, 0.0), tokenizer, data.separator, sys.maxsize)[0]


def export_record(run: PreparedRun, engine: Engine, tokenizer: FittedTokenizer, *, step: int) -> ExportRecord:
    """The verification record of the current weights, after `step` steps; collective. It has the logits of fixed
    prompts; for a classifier or reward model these are the scores of fixed texts. If the run holds weights in four
    bits, logits and scores are left out, since the exported weights are not quantised.
    """
    hf_config = run.model.hf_config
    record = ExportRecord(
        base=str(run.inputs.folder.absolute()),
        dtype=dtype_name(PRECISION_DTYPES[run.plan.precision]),
        vocab_size=int(hf_config.vocab_size),
        prompts=(),
        step=step,
        logits=None,
    )
    if run.model.task == "causal_lm":
        record = replace(record, prompts=fixed_prompts(record.vocab_size, run.inputs.tokenizer))
        record = record.with_tokens(run.inputs.prompts, run.inputs.tokenizer)
    else:
        record = _with_texts(record, run, tokenizer)
    if run.model.quantised:
        return record
    computed = engine.logits(record.prompts)
    if run.model.task == "causal_lm":
        return replace(record, logits=sampled_logits(computed, record.prompts, record.vocab_size))
    return replace(record, logits=torch.cat(list(computed)).flatten().cpu().numpy())


def _with_texts(record: ExportRecord, run: PreparedRun, tokenizer: FittedTokenizer) -> ExportRecord:
    """Add token ids of prompts to the record of a classifier. The prompts' texts are added too if the exported
    `tokenizer`, which only rank zero has, converts all texts to these ids.
    """
    hf_config, encode = run.model.hf_config, _encode_of(run)
    limit = min(_LONGEST, run.plan.train.max_seq_len)
    encoded = {} if encode is None else {text: encode(text, None) for text in TEXTS}
    short = {text: tuple(ids) for text, ids in encoded.items() if len(ids) < limit}
    ending = next((ids[-1:] for ids in short.values()), ())
    prompts = classifier_prompts(record.vocab_size, pad=hf_config.pad_token_id, ending=ending)
    texts = tuple(short) if set(short) <= set(tokenizer.texts) else ()
    return replace(record, prompts=(*prompts, *short.values()), num_labels=int(hf_config.num_labels), texts=texts)
