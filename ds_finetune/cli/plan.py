"""`ds-finetune plan`: computes the layout of a run for GPUs that this machine does not have."""

from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, positive, read_run
from ds_finetune.console import OUT


def add_commands(commands: Commands) -> None:
    """Add `plan`."""
    plan = add_run_command(commands, "plan", "show the layout of a run for GPUs that this machine does not have", _plan)
    plan.add_argument("--gpus", type=positive, required=True, help="number of GPUs of the run")
    plan.add_argument("--gpus-per-node", type=positive, default=8, help="number of GPUs of a node (default 8)")
    plan.add_argument(
        "--dry-run",
        action="store_true",
        required=True,
        help="compute the layout from config.json alone, without weights and data",
    )


def _plan(arguments: Arguments) -> None:
    config = read_run(arguments)
    from ds_finetune.trainer.dry_run import plan_run

    OUT.print(plan_run(config, gpus=arguments.gpus, gpus_per_node=arguments.gpus_per_node))
