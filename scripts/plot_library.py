"""Replace the plot library that comes with the package by another version of it:

    python scripts/plot_library.py 6.1.0

It is taken from npm's registry by `npm pack`. Licences of what is built into the library come with it. Then write the
printed version and digest into ds_finetune/runs/report/library.py.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "ds_finetune" / "runs" / "report" / "assets"
FILES = {
    "dist/echarts.min.js": "echarts.min.js",
    "LICENSE": "LICENSE",
    "NOTICE": "NOTICE",
    "licenses/LICENSE-d3": "LICENSE-d3",
}


def unpack(package: str, folder: Path) -> Path:
    """The unpacked npm package, such as `echarts@6.1.0`."""
    command = ["npm", "pack", package, "--silent", "--pack-destination", str(folder)]
    name = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder / package, filter="data")
    return folder / package / "package"


def main(version: str) -> None:
    """Copy the files of a version, and print its digest."""
    with tempfile.TemporaryDirectory() as folder:
        source = unpack(f"echarts@{version}", Path(folder))
        for name, kept in FILES.items():
            shutil.copyfile(source / name, ASSETS / kept)
        zrender = unpack(f"zrender@{version}", Path(folder))
        shutil.copyfile(zrender / "LICENSE", ASSETS / "LICENSE-zrender")
    print(version, hashlib.sha256((ASSETS / "echarts.min.js").read_bytes()).hexdigest())  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
