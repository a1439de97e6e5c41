"""`ds-finetune bench`: the speed of the training step."""

from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, positive, read_run
from ds_finetune.console.tables import show_line, show_pairs


def add_commands(commands: Commands) -> None:
    """Add `bench`."""
    bench = add_run_command(
        commands, "bench", "time the training step beside a plain PyTorch loop on the same documents", _bench
    )
    bench.add_argument("--steps", type=positive, default=5, help="timed steps of each loop (default 5)")


def _bench(arguments: Arguments) -> None:
    config = read_run(arguments)
    from ds_finetune.reference.bench.step_speed import compare_step_speed

    contest = compare_step_speed(config, steps=arguments.steps, say=show_line)
    show_pairs("one optimizer step, supervised tokens a second", contest.lines())
