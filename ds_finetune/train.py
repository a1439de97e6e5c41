"""The script that launchers start; it has the arguments of `ds-finetune train`.

Python puts the folder of a started file first on `sys.path`, where this package's modules would hide others of the
same name, so the folder is replaced by the repository's. The module is never imported: Python would then set it as the
attribute `train` of the package, and `from ds_finetune import train` would no longer give the function of the API.
"""

import sys
from pathlib import Path

# The children of `multiprocessing` run it as `__mp_main__`.
assert __name__ != "ds_finetune.train", "start this file; the function is `from ds_finetune import train`"

_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent)] + [
    entry for entry in sys.path if Path(entry or ".").resolve() not in (_HERE, _HERE.parent)
]

from ds_finetune.system.processes import ended_by_interrupt  # noqa: E402 - only importable from here on

with ended_by_interrupt():
    from ds_finetune.cli.main import run_and_exit

if __name__ == "__main__":
    run_and_exit(["train", *sys.argv[1:]])
