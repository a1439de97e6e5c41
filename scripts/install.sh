# Sourced with the extras to install ("" for none): makes or enters .venv, installs this project, sets PATH for the caller.
extras="$1"
if [ ! -d .venv ]; then python3 -m venv .venv; fi
. .venv/bin/activate
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
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    # torch first and pinned: a machine that keeps a CPU build of it gets that one, a GPU machine the CUDA build.
    python -c 'import torch' 2>/dev/null || pip install --quiet -c constraints.txt torch
    pip install --quiet -c constraints.txt setuptools wheel ninja
    pip install --quiet -c constraints.txt -e ".${extras:+[$extras]}"
    echo "$wanted" > .venv/installed
fi
