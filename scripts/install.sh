# Sourced with the extras to install ("" for none): makes or enters an environment, installs this project, sets PATH for the caller.
# A torch that is there already and tested is used: the one of the active environment, else the system's, else a new one is installed.
extras="$1"
# pip compares versions of metadata: torch.__version__ has `+cu130` where PyPI's build for CUDA 13 has none there.
torch_version='from importlib.metadata import version; print(version("torch"))'
usable='import re, torch
from importlib.metadata import version
found, *bounds = version("torch"), *re.findall(r"\"torch>=([\d.]+),<([\d.]+)\"", open("pyproject.toml").read())[0]
oldest, minor, newer = (tuple(map(int, text.split(".")[:2])) for text in (bounds[0], found, bounds[1]))
raise SystemExit(None if oldest <= minor < newer else f"torch {found} is here; tested are {bounds[0]} to below {bounds[1]}: installing one")'
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, and python3 is $(python3 -V)" >&2; exit 2; }
if [ ! -d .venv ]; then
    if ! why="$(python3 -c "$usable" 2>&1)"; then
        case "$why" in "torch "*) echo "$why" ;; esac
        python3 -m venv .venv
    elif python3 -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
        echo "using the active environment, which has torch: $(python3 -c 'import sys; print(sys.prefix)')"
    else
        python3 -m venv --system-site-packages .venv
    fi
fi
if [ -d .venv ]; then . .venv/bin/activate; fi
environment="$(python3 -c 'import sys; print(sys.prefix)')"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/.cache/torch_extensions}"
wanted="$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)-$extras"
if [ "$(cat "$environment/ds_finetune-installed" 2>/dev/null)" != "$wanted" ]; then
    constraints="$(mktemp)"
    if python3 -c "$usable" 2>/dev/null; then
        # Kept as it is, with its CUDA: pinned to another version, pip would replace it. It names its own Triton.
        torch="$(python3 -c "$torch_version")"
        echo "using torch $torch, which is there"
        sed "s/^torch==.*/torch==$torch/; /^triton==/d" constraints.txt > "$constraints"
    else
        cp constraints.txt "$constraints"
    fi
    # torch first: a machine that keeps a CPU build of it gets that one, a GPU machine the CUDA build.
    python3 -m pip install --quiet -c "$constraints" torch
    python3 -m pip install --quiet -c "$constraints" setuptools wheel ninja
    python3 -m pip install --quiet -c "$constraints" -e ".${extras:+[$extras]}"
    rm "$constraints"
    echo "$wanted" > "$environment/ds_finetune-installed"
fi
