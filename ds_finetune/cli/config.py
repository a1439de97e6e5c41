"""The commands `ds-finetune config` and `data`, which show run files, their schema, and a run's training data."""

import json

from ds_finetune.cli.arguments import Arguments, Commands, add_command, add_run_command, positive, read_run
from ds_finetune.config.schema import RunConfig, dump_config
from ds_finetune.console.tables import OUT


def add_commands(commands: Commands) -> None:
    """Add the commands `config show`, `config schema` and `data show` to the program."""
    data = commands.add_parser("data", help="show the training data of a run")
    actions = data.add_subparsers(required=True, metavar="WHAT")
    rows = add_run_command(actions, "show", "print rows of a run with supervised tokens marked, and counts", _show_rows)
    rows.add_argument("--samples", type=positive, default=3, help="number of rows to print (default 3)")
    config = commands.add_parser("config", help="show a run file with its defaults, or its schema")
    actions = config.add_subparsers(required=True, metavar="WHAT")
    add_run_command(actions, "show", "print a run file with its overrides and defaults", _show)
    add_command(actions, "schema", "print the JSON schema of a run file", _print_schema)


def _show_rows(arguments: Arguments) -> None:
    config = read_run(arguments)
    from ds_finetune.plan.settings import RunSettings
    from ds_finetune.trainer.preview import preview_of

    OUT.print(preview_of(RunSettings.of(config), samples=arguments.samples))


def _show(arguments: Arguments) -> None:
    OUT.print(dump_config(read_run(arguments)), markup=False, end="")


def _print_schema(_: Arguments) -> None:
    OUT.print(json.dumps(RunConfig.model_json_schema(by_alias=True), indent=2), markup=False)
