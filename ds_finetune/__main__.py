"""`python -m ds_finetune ...` is the console script."""

import sys

from ds_finetune.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
