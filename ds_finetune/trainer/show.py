"""Shows a run on the console: its plan, its summary, its verified exports, and the next command."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_finetune.console.tables import OUT, show_line, show_pairs

if TYPE_CHECKING:
    from ds_finetune.export.verify.verify import VerificationResult
    from ds_finetune.trainer.prepare import PreparedRun
    from ds_finetune.trainer.train import Report


def show_plan(run: "PreparedRun") -> None:
    """Print the plan and the training data of a run; rank 0 calls this before anything is loaded."""
    import torch

    from ds_finetune.data.row_report import server_prompt_line
    from ds_finetune.trainer.batches import mixture_lines
    from ds_finetune.trainer.dry_run import model_lines

    inputs, rows = run.inputs, list(run.plan.decisions)
    shape = inputs.shape
    if shape is not None:
        rows.append(
            ("parameters", f"{shape.total_params / 1e6:,.3f} M, {shape.active_params / 1e6:,.3f} M active per token")
        )
    capability = torch.cuda.get_device_capability() if run.plan.device != "cpu" else None
    rows += model_lines(inputs.model, run.plan, capability=capability)
    rows.append(("data", inputs.train.summary()))
    rows += [("data.train", line) for line in mixture_lines(run)]
    limit = run.config.eval.limit
    for name, held_out in inputs.held_out.items():
        rows.append((f"held-out data{name.removeprefix('eval').replace('/', ' ')}", held_out.summary()))
        if limit and limit < len(held_out):
            rows.append(("evaluation", f"the first {limit:,} of {len(held_out):,} rows (eval.limit)"))
    if run.config.objective.name != "classification" and inputs.train.counts.server_prompt_differs:
        rows.append(("prompts", server_prompt_line(inputs.train.counts)))
    show_pairs("plan", rows)
    if inputs.model.has_random_weights:
        OUT.print(
            f"[bold]RANDOM WEIGHTS[/bold]: {inputs.model.path} is built from its config.json; nothing "
            "pre-trained is loaded"
        )
    for note in (*run.plan.notes, *inputs.notes, *inputs.data_notes()):
        OUT.print(note, markup=False)


def show_report(report: "Report") -> None:
    """Print the summary of a run at its end."""
    rows = []
    if report.last is not None:
        values = report.last.values
        best = f", the best is step {report.last.best_step}" if report.last.best_step else ""
        told = (name for name in values if name.startswith("eval/") or name == "rollout/reward")
        shown = ("train/loss", *told)
        rows += [("steps", f"{report.last.step} ({values['train/skipped_steps']:.0f} skipped){best}")]
        rows += [("metrics", "  ".join(f"{name} {values[name]:.4f}" for name in shown))]
        rows += [("stopped", report.last.stop)] if report.last.stop and not report.interrupted else []
    rows += [("interrupted", report.interrupted)] if report.interrupted else []
    rows += [("run", str(report.output_dir)), *(("export", str(path)) for path in report.exports)]
    rows += [("report", str(report.page))] if report.page else []
    done = "finished before, checked in" if report.was_finished else "done in"
    show_pairs(f"{'interrupted after' if report.interrupted else done} {report.seconds:.0f} s", rows)


def show_next(report: "Report") -> None:
    """Print the next command: to chat with the exported model or to score it, or to export the run. With a model that
    was trained without a chat template, also what it gets for a text.
    """
    from ds_finetune.data.prompt_format import PlainFormat, served_prompt
    from ds_finetune.data.tokenizer_files import load_tokenizer
    from ds_finetune.export.classifiers import holds_classifier

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


def show_verifications(results: "Sequence[VerificationResult]") -> None:
    """Print the results of verifying exported folders, once for those that share their files."""
    said: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        state = "verified" if result.is_verified else "not checked" if result.skipped else "UNVERIFIED"
        texts = (*result.lines, *result.problems, *([result.skipped] if result.skipped else []))
        said.setdefault((state, *texts), []).append(str(result.folder))
    for (state, *lines), folders in said.items():
        show_line(f"{state}: {', '.join(folders)}\n  {'; '.join(lines)}")
