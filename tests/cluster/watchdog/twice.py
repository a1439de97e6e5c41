"""`twice.py RUN.yaml FOLDER`: `train` called twice in one process, into FOLDER/0 and FOLDER/1."""

import sys
from pathlib import Path

from ds_finetune import train
from ds_finetune.config.schema import read_config


def main() -> None:
    for number in (0, 1):
        report = train(read_config(sys.argv[1], [f"output_dir={Path(sys.argv[2]) / str(number)}"]))
        sys.stdout.write(f"RUN {number} {report.last.step}\n")


if __name__ == "__main__":
    main()
