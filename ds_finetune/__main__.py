"""The program: `ds-finetune ...`, also as `python -m ds_finetune ...`."""

import sys
from typing import NoReturn

from ds_finetune.system.processes import ended_by_interrupt


def main() -> NoReturn:
    """Run the command that the arguments of this process name, and end the process."""
    with ended_by_interrupt():
        from ds_finetune.cli.main import run_and_exit
    run_and_exit(sys.argv[1:])


if __name__ == "__main__":
    main()
