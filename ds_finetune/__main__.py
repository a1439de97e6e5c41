"""`python -m ds_finetune ...` is the console script."""

import sys

from ds_finetune.cli.main import run_and_exit

if __name__ == "__main__":
    run_and_exit(sys.argv[1:])
