#!/usr/bin/env bash
# Run the quick tests with other releases of the packages this one is built on, and write what fails.
#
#     bash scripts/next_versions.sh [newest|oldest|torch==VERSION] [TEST...]
#
# `newest` takes the newest releases, whatever pyproject.toml allows, and `oldest` the lowest it allows; torch is the one
# that is installed. `torch==2.11.0` takes that torch, and all other packages as they are installed. The releases go into
# an environment of their own below .cache/next_versions. The list is .cache/next_versions/MODE.txt: the releases that
# differ from constraints.txt, the cited places of foreign source that have moved or changed, and the tests that fail.
# Exit code 1 where there is any of the last two.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mode="${1:-newest}"
case "$mode" in newest | oldest | torch==*) ;; *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
tests=("${@:2}")
[ ${#tests[@]} -gt 0 ] || tests=(
    tests/foreign tests/config tests/model tests/data tests/objectives tests/serving tests/console
    tests/engine tests/export tests/parity tests/trainer
)
folder="$PWD/.cache/next_versions"
environment="$folder/$mode" list="$folder/$mode.txt"
rm -rf "$environment"
mkdir -p "$folder"
python3 -m venv "$environment"
own="$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# What is not installed below comes from the environment that this was started in.
python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$own/started_in.pth"
"$environment/bin/python" - "$mode" > "$folder/wanted.txt" <<'PYTHON'
import re, subprocess, sys, tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
lines = project["dependencies"] + sum(project["optional-dependencies"].values(), [])
if sys.argv[1].startswith("torch=="):
    lines = []
    print(sys.argv[1])
for wanted in map(Requirement, lines):
    if wanted.name in ("torch", project["name"]) or wanted.marker and not wanted.marker.evaluate():
        continue
    name = f"{wanted.name}[{','.join(wanted.extras)}]" if wanted.extras else wanted.name
    if sys.argv[1] == "newest":
        print(name)
        continue
    done = subprocess.run([sys.executable, "-m", "pip", "index", "versions", wanted.name], capture_output=True, text=True)
    known = re.search(r"Available versions: (.*)", done.stdout)
    allowed = [each for each in (known[1].split(", ") if known else []) if wanted.specifier.contains(each)]
    print(f"{name}=={min(allowed, key=Version)}" if allowed else name)
PYTHON
# By its metadata, with which pip compares: torch.__version__ may have another local part.
torch="$(python3 -c 'from importlib.metadata import version; print(version("torch"))')"
[ "${mode#torch==}" = "$mode" ] || torch="${mode#torch==}"
echo "torch==$torch" > "$folder/kept.txt"
"$environment/bin/python" -m pip install --quiet --upgrade -c "$folder/kept.txt" -r "$folder/wanted.txt"
export PYTHONPATH="$PWD" DS_FINETUNE_UNTESTED_VERSIONS=1 DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$environment/bin:$PATH"
if [ "${mode#torch==}" != "$mode" ]; then
    # DeepSpeed's operators are compiled for one torch, before the tests, which have time limits.
    export TORCH_EXTENSIONS_DIR="$folder/operators-$torch"
    for operator in cpu_adam async_io; do
        python -c "import sys; from ds_finetune.engine.ops.deepspeed_ops import build_op; build_op(sys.argv[1], print)" "$operator"
    done
fi
{
    echo "# releases other than those of constraints.txt ($mode, torch $torch)"
    python - <<'PYTHON'
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

for line in Path("constraints.txt").read_text().splitlines():
    name, _, tested = line.partition("==")
    try:
        found = version(name)
    except PackageNotFoundError:
        continue
    if found.partition("+")[0] != tested:
        print(f"{name} {tested} -> {found}")
PYTHON
    echo "# cited places of foreign source"
    python scripts/check_citations.py && echo "all as cited" || echo "READ THESE AGAIN"
    echo "# tests: ${tests[*]}"
    python -m pytest -q -rfE --tb=line --no-header --show-capture=no "${tests[@]}" > "$folder/pytest.txt" && passed=1 || passed=0
    # A line for the reason of each failure, then one for its test.
    grep -E "^/.*:[0-9]+: |^E  |^(FAILED|ERROR)|passed|failed" "$folder/pytest.txt" || tail -20 "$folder/pytest.txt"
    [ "$passed" = 1 ] || echo "TESTS FAILED"
} | tee "$list"
echo "written: $list"
! grep -qE "^(READ THESE AGAIN|TESTS FAILED)$" "$list"
