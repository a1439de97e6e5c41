"""`ds-finetune rewards`: tries the rewards of a run before training."""

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, positive, read_run, zero_or_more
from ds_finetune.console.tables import OUT, show_line
from ds_finetune.errors import ConfigError

if TYPE_CHECKING:
    from ds_finetune.objectives.rewards.pool import Part

_SHOWN_ANSWERS, _CHARACTERS = 3, 300


def add_commands(commands: Commands) -> None:
    """Add the command `rewards` to the program."""
    text = "score reference answers and a few answers of the model, and find rewards that never fire"
    parser = add_run_command(commands, "rewards", text, _try)
    text = "number of prompts whose reference answers are scored (default 20)"
    parser.add_argument("--records", type=positive, default=20, help=text)
    text = "number of prompts that the model answers; 0 loads no model (default 4)"
    parser.add_argument("--samples", type=zero_or_more, default=4, help=text)


def _try(arguments: Arguments) -> None:
    config = read_run(arguments)
    from ds_finetune.evaluation.dry_rewards import faults, try_rewards
    from ds_finetune.plan.settings import RunSettings

    names = [section.shown_name for section in config.rewards]
    scored = try_rewards(RunSettings.of(config), records=arguments.records, samples=arguments.samples)
    for each in scored:
        table = Table(title=each.title, title_justify="left")
        for column in ("reward", "mean", "with a result", "not applicable", "errors", "seconds each"):
            table.add_column(column, justify="left" if column == "reward" else "right")
        for number, name in enumerate(names):
            table.add_row(escape(name), *each.numbers(number))
        OUT.print(table)
    for each in scored[1:]:
        for answer, parts in list(zip(each.answers, each.parts, strict=True))[:_SHOWN_ANSWERS]:
            results = ((name, part or {}) for name, part in zip(names, parts, strict=True))
            scores = ", ".join(f"{name} {_result_text(part)}" for name, part in results)
            show_line(f"\n{answer.where}: {scores} ({answer.finish})")
            show_line(f"  prompt: {answer.prompt[-_CHARACTERS:]!r}\n  answer: {answer.text[:_CHARACTERS]!r}")
    if arguments.samples and len(scored) == 1:
        show_line(f"the model is not asked: model.weights is {config.model.weights}")
    if problems := list(faults(config.rewards, scored)):
        raise ConfigError(
            f"rewards from which nothing would be learned: {'; '.join(problems)}",
            hint="correct these reward functions, their key `column`, or the rows",
        )


def _result_text(part: "Part") -> str:
    if "error" in part:
        return str(part["error"])
    read = {None: "", False: " (no result read)", True: f" (read {part.get('read')!r})"}
    return f"{part.get('score')}{read[part.get('has_result')]}"
