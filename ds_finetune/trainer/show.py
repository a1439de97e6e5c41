"""Prints a run on the console: its plan, summary, verified exports, and the next command."""

import math
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ds_finetune.console.tables import OUT, show_line, show_pairs

if TYPE_CHECKING:
    from ds_finetune.export.verify.verify import VerificationResult
    from ds_finetune.trainer.prepare import PreparedRun
    from ds_finetune.trainer.run_records import Report


_FIRST = ("model", "parameters", "lora", "objective", "ranks", "layout", "memory of a rank", "data", "held-out data")
"""Plan lines that are printed first, in this order; all other lines follow."""
_DETAILS = {"communication", "loss", "recomputation", "attention", "experts", "kernels", "logits", "allocator"}
"""Plan lines that are written only to `log.txt`, and with `log.verbose` also to the console."""


def show_plan(run: "PreparedRun") -> None:
    """Print the plan and the training data of a run; called on rank 0 before anything is loaded."""
    is_verbose, shown = run.config.log.verbose, plan_lines(run)
    subjects = list[list[tuple[str, str]]]()
    for name, text in shown:
        # A plan line whose name begins with a space belongs to the line before it.
        if name.startswith(" ") and subjects:
            subjects[-1].append((name, text))
        else:
            subjects.append([(name, text)])
    printed = [lines for lines in subjects if is_verbose or lines[0][0] not in _DETAILS]
    printed.sort(key=lambda lines: _FIRST.index(lines[0][0]) if lines[0][0] in _FIRST else len(_FIRST))
    show_pairs("plan", [line for lines in printed for line in lines])
    if run.inputs.model.has_random_weights:
        OUT.print(
            f"[bold]RANDOM WEIGHTS[/bold]: {run.inputs.model.path} is built from its config.json; nothing "
            "pre-trained is loaded"
        )
    for note in plan_notes(run):
        if is_verbose or not note.startswith("rewritten: "):
            OUT.print(note, markup=False)


def plan_notes(run: "PreparedRun") -> "Iterable[str]":
    """Notes about what a user might not expect of the plan or the data."""
    return (*run.plan.notes, *run.inputs.notes, *run.inputs.data_notes())


def plan_lines(run: "PreparedRun") -> list[tuple[str, str]]:
    """Plan lines: name and text of all decisions about a run."""
    import torch

    from ds_finetune.data.row_report import server_prompt_line
    from ds_finetune.plan.model_shape import parameters_text
    from ds_finetune.trainer.batches import mixture_lines
    from ds_finetune.trainer.dry_run import model_lines

    inputs = run.inputs
    rows = [(name, _length(run) if name == "length" else text) for name, text in run.plan.decisions]
    rows.append(("parameters", parameters_text(inputs.model.described)))
    capability = torch.cuda.get_device_capability() if run.plan.device != "cpu" else None
    rows += model_lines(inputs.model, run.plan, capability=capability)
    rows.append(("data", inputs.train.summary()))
    rows += [("data.train", line) for line in mixture_lines(run)]
    limit = run.config.eval.limit
    for name, held_out in inputs.held_out.items():
        rows.append((f"held-out data{name.removeprefix('eval').replace('/', ' ')}", held_out.summary()))
        if limit and limit < len(held_out):
            rows.append(("evaluation", f"the first {limit:,} of {len(held_out):,} rows (eval.limit)"))
    for key, section in (("eval.every", run.config.eval), ("checkpoint.every", run.config.checkpoint)):
        if section.interval.epochs < math.inf:
            rows.append((key, f"{section.every}: {run.interval(section).steps:g} steps, each rounded up"))
    if run.config.objective.name != "classification" and inputs.train.counts.server_prompt_differs:
        rows.append(("prompts", server_prompt_line(inputs.train.counts)))
    return rows


def _length(run: "PreparedRun") -> str:
    from ds_finetune.data.stream import StreamedRows

    schedule, inputs = run.schedule, run.inputs
    rows = schedule.steps * run.plan.train.global_batch_size
    epochs = "" if isinstance(inputs.train, StreamedRows) else f" ({rows / inputs.train.rows_per_epoch:.3g} epochs)"
    rate = f"learning rate {schedule.lr:g}, {schedule.name}, {schedule.warmup_steps} steps of warm-up"
    interval = f"every {run.config.eval.every}" if run.config.eval.every else "at the end"
    return f"{schedule.steps:,} steps{epochs}, {rate}" + (f", evaluation {interval}" if inputs.held_out else "")


def show_report(report: "Report") -> None:
    """Print the final summary of a run."""
    rows = []
    if report.last is not None:
        values = report.last.values
        best = f", the best is step {report.last.best_step}" if report.last.best_step else ""
        evaluations = (name for name in values if name.startswith("eval/") or name == "rollout/reward")
        shown = ("train/loss", *evaluations)
        rows += [("steps", f"{report.last.step} ({values['train/skipped_steps']:.0f} skipped){best}")]
        rows += [("metrics", "  ".join(f"{name} {values[name]:.4f}" for name in shown))]
        rows += [("stopped", report.last.stop)] if report.last.stop and not report.interrupted else []
    rows += [("interrupted", report.interrupted)] if report.interrupted else []
    rows += [("run", str(report.output_dir)), *(("export", str(path)) for path in report.exports)]
    rows += [("report", str(report.page))] if report.page else []
    done = "finished before, checked in" if report.was_finished else "done in"
    show_pairs(f"{'interrupted after' if report.interrupted else done} {report.seconds:.0f} s", rows)


def show_next(report: "Report") -> None:
    """Print the next command: to chat with the exported model, to score it, or to export the run. If the model was
    trained without a chat template, also print the prompt that the model gets for a text.
    """
    from ds_finetune.data.prompt_format import PlainFormat, served_prompt
    from ds_finetune.data.tokenizer_files import load_tokenizer
    from ds_finetune.export.load import holds_classifier

    if report.interrupted:
        return
    command, sent = ["ds-finetune", "export", str(report.output_dir), "OUT"], ""
    for folder in report.exports[:1]:
        command = ["ds-finetune", "chat", str(folder)]
        if holds_classifier(folder):
            command = ["ds-finetune", "eval", str(folder), "--data", "FILE"]
            continue
        tokenizer = load_tokenizer(str(folder))
        if PlainFormat.of(tokenizer.chat_template) or not tokenizer.chat_template:
            command = ["ds-finetune", "ask", str(folder), "TEXT"]
            sent = f", which sends {served_prompt(tokenizer, 'TEXT')!r}"
    show_line(f"next: {shlex.join(command)}{sent}")


def show_verifications(results: "Sequence[VerificationResult]", *, is_short: bool = False) -> None:
    """Print the results of verifying exports, on one line for folders with equal results. `is_short` prints only the
    difference of logits for folders without faults.
    """
    folders_by_text: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        state = "verified" if result.is_verified else "not checked" if result.skipped else "UNVERIFIED"
        logits = [line for line in result.lines if "logits" in line]
        compared = logits[-1:] if is_short and result.is_verified and logits else result.lines
        texts = (*compared, *result.problems, *([result.skipped] if result.skipped else []))
        folders_by_text.setdefault((state, *texts), []).append(str(result.folder))
    for (state, *lines), folders in folders_by_text.items():
        show_line(f"{state}: {', '.join(folders)}\n  {'; '.join(lines)}")
