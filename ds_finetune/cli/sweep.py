"""The commands `ds-finetune sweep` and `scaling`, which train a run file with several values or numbers of ranks."""

import argparse
from pathlib import Path

from rich.table import Table

from ds_finetune.cli.arguments import Arguments, Commands, add_command, add_overrides, add_run_command, positive
from ds_finetune.console.tables import OUT, show_line, show_pairs
from ds_finetune.errors import ConfigError
from ds_finetune.system.versions import require_extra


def add_commands(commands: Commands) -> None:
    """Add the commands `scaling` and `sweep` to the program."""
    text = "compare speed and losses on several numbers of ranks, and in several layouts"
    scaling = add_run_command(commands, "scaling", text, _scaling)
    text = "numbers of ranks to compare; the first one is the basis"
    scaling.add_argument("--ranks", type=_numbers, required=True, metavar="N,N,...", help=text)
    scaling.add_argument("--steps", type=positive, default=20, help="optimizer steps of each run (default 20)")
    text = "layouts to compare, such as zero1,zero3,tp2+zero1 (default: the run file's)"
    scaling.add_argument("--layouts", type=_names, default=(), metavar="L,L,...", help=text)
    scaling.add_argument("--hostfile", metavar="FILE", help="start ranks on these hosts instead of this machine")
    scaling.add_argument("-o", "--out", default="scaling", metavar="FOLDER", help="new folder (default scaling)")
    sweep = add_command(commands, "sweep", "search for better values of run-file keys", _sweep)
    sweep.add_argument("file", metavar="FILE.yaml", help="the sweep file; with --lr-range the run file")
    add_overrides(sweep)
    text = "instead show the loss over a learning rate that rises from LOW to HIGH, such as 1e-8,0.1"
    sweep.add_argument("--lr-range", type=_rates, metavar="LOW,HIGH", help=text)
    sweep.add_argument("--steps", type=positive, help="optimizer steps of --lr-range (default 100)")
    sweep.add_argument("--ranks", type=positive, help="ranks of --lr-range on this machine (default 1)")
    sweep.add_argument("-o", "--out", metavar="FOLDER", help="new folder of --lr-range (default lr_range)")


def _rates(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not LOW,HIGH, such as 1e-8,0.1") from None
    return low, high


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(positive(name) for name in text.split(","))
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"`{text}` names a number twice")
    return numbers


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in text.split(",") if name))


def _scaling(arguments: Arguments) -> None:
    from ds_finetune.runs.experiments.jobs import ShortRuns
    from ds_finetune.runs.experiments.scaling import COLUMNS, compare_scaling

    runs = ShortRuns(Path(arguments.run), tuple(arguments.overrides), arguments.steps, Path(arguments.out))
    variants = [(ranks, layout) for layout in arguments.layouts or ("",) for ranks in arguments.ranks]
    table = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0))
    for row in compare_scaling(runs, variants, hostfile=arguments.hostfile, say=show_line):
        table.add_row(*row)
    OUT.print(table)


def _sweep(arguments: Arguments) -> None:
    if arguments.lr_range is not None:
        _lr_range(arguments)
        return
    if options_given := [name for name in ("steps", "ranks", "out") if getattr(arguments, name) is not None]:
        hint = f"leave --{options_given[0]} out, or set a key of the sweep file"
        raise ConfigError(f"--{options_given[0]} has no effect without --lr-range", hint=hint)
    from ds_finetune.runs.experiments.sweep import run_sweep
    from ds_finetune.runs.experiments.sweep_file import read_sweep

    show_pairs("sweep", run_sweep(read_sweep(Path(arguments.file), arguments.overrides), show_line))


def _lr_range(arguments: Arguments) -> None:
    require_extra("pages", "the page of --lr-range")
    from ds_finetune.runs.experiments.jobs import ShortRuns
    from ds_finetune.runs.experiments.lr_range import run_range_test

    folder, steps = Path(arguments.out or "lr_range"), arguments.steps or 100
    runs = ShortRuns(Path(arguments.file), tuple(arguments.overrides), steps, folder)
    rows = run_range_test(runs, *arguments.lr_range, ranks=arguments.ranks or 1, say=show_line)
    hint = "as a hint: rates are often best well below these; compare some by a sweep"
    show_pairs("learning rates", [*rows, ("use", hint)])
