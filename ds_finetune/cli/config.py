"""`ds-finetune config`: the run file with its defaults, and its schema."""

import json

from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, read_run
from ds_finetune.config.schema import RunConfig, dump_config
from ds_finetune.console.tables import OUT


def add_commands(commands: Commands) -> None:
    """Add `config show` and `config schema`."""
    config = commands.add_parser("config", help="show a run file with its defaults, or its schema")
    actions = config.add_subparsers(required=True, metavar="WHAT")
    add_run_command(actions, "show", "print a run file with its overrides and defaults", _show)
    schema = actions.add_parser("schema", help="print the JSON schema of a run file")
    schema.set_defaults(command=_print_schema)


def _show(arguments: Arguments) -> None:
    OUT.print(dump_config(read_run(arguments)), markup=False, end="")


def _print_schema(arguments: Arguments) -> None:
    OUT.print(json.dumps(RunConfig.model_json_schema(by_alias=True), indent=2), markup=False)
