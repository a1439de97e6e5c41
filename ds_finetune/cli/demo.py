"""`ds-finetune demo`: a small example to try."""

from pathlib import Path

from ds_finetune.cli.arguments import Arguments, Commands, positive
from ds_finetune.console.tables import OUT


def add_commands(commands: Commands) -> None:
    """Add `demo`."""
    demo = commands.add_parser("demo", help="write an example (model config, tokenizer, data, run file) to a folder")
    demo.add_argument("folder", metavar="FOLDER", help="folder to write; no other file there is replaced")
    demo.add_argument(
        "--ranks",
        type=positive,
        help="number of ranks that will train it (default: one per GPU here, or two on the CPU)",
    )
    demo.set_defaults(command=_write_demo)


def _write_demo(arguments: Arguments) -> None:
    from ds_finetune.cli.demo_files import write_demo

    run_file = write_demo(Path(arguments.folder), ranks=arguments.ranks or _num_gpus() or 2)
    OUT.print(f"wrote {run_file}", markup=False)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
