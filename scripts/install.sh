# Sourced with the extras to install ("" for none): makes or enters an environment, installs this project, sets PATH for the caller.
# A torch that is there already and new enough is used: the one of the active environment, else the system's, else a new one is installed.
extras="$1"
usable='import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))'
if [ ! -d .venv ]; then
    if ! python3 -c "$usable" 2>/dev/null; then
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
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ "$extras" = test ]; then
    missing=()
    command -v mpirun >/dev/null || missing+=(openmpi-bin)
    command -v g++ >/dev/null || missing+=(g++)
    [ -e /usr/include/libaio.h ] || missing+=(libaio-dev)
    command -v ip >/dev/null || missing+=(iproute2)
    command -v pdsh >/dev/null || missing+=(pdsh)
    command -v shellcheck >/dev/null || missing+=(shellcheck)
    command -v slurmd >/dev/null || missing+=(slurmctld slurmd slurm-client munge)
    [ -x /usr/sbin/sshd ] || missing+=(openssh-server)
    if [ ${#missing[@]} -gt 0 ]; then apt-get update -qq && apt-get install -y -qq "${missing[@]}" >/dev/null; fi
fi
wanted="$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)-$extras"
if [ "$(cat "$environment/ds_finetune-installed" 2>/dev/null)" != "$wanted" ]; then
    constraints="$(mktemp)"
    if python3 -c "$usable" 2>/dev/null; then
        # Kept as it is, with its CUDA: pinned to another version, pip would replace it.
        torch="$(python3 -c 'import torch; print(torch.__version__)')"
        echo "using torch $torch, which is there"
        sed "s/^torch==.*/torch==$torch/" constraints.txt > "$constraints"
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
