"""`python -m ds_finetune ...` is the console script."""

import sys

from ds_finetune.cli.main import run

if __name__ == "__main__":
    run(sys.argv[1:])
