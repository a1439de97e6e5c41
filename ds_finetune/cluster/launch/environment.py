"""Chooses the environment variables that `launch` passes to ranks: those that a list in this module names, those of the
option --env, and those of files `.deepspeed_env`.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_finetune.errors import LaunchError

_PREFIXES = (
    # Environment variables of accelerators, compilers and number formats.
    *("CUDA_", "NVIDIA_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "DS_", "DEEPSPEED_"),
    # Environment variables of networks: FI_ is libfabric (EFA, Slingshot), IBV_ and RDMAV_ are InfiniBand verbs.
    *("NCCL_", "GLOO_", "UCX_", "FI_", "IBV_", "RDMAV_"),
    # Threads.
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_"),
    # Environment variables of the Hugging Face hub and of experiment trackers.
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "MLFLOW_"),
    "PYTHON",
)
"""Environment variables whose names begin with one of these prefixes are passed to the hosts."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_NAMES = {
    # Search paths for compilers, CUDA libraries and network plugins, and the folder of compiled extensions.
    *("PATH", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"),
    # Certificates and proxies for downloads from the Hugging Face hub.
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *_PROXIES,
    *map(str.upper, _PROXIES),
}
"""Names of further environment variables that are passed to the hosts, besides those with a prefix of `_PREFIXES`."""
_PER_RANK = re.compile(
    r"(?:RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|NODE_RANK|CROSS_RANK|CROSS_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|(?:GROUP|ROLE|PET|TORCHELASTIC|OMPI|PMI|PMIX|PRTE|SLURM|SSH|ACCELERATE)_\w+)$"
)
"""Matches environment variables that launchers set for each rank. They are not passed, because values of another launch
would be wrong.
"""
_LOCAL_ONLY = ("DS_ENV_FILE", "DS_FINETUNE_SSH_ARGS", "PYTHON_HISTORY", "PYTHONSTARTUP")
"""Environment variables that are never passed to hosts, because only `launch` or a person at a terminal uses them."""
_DEVICES = "_VISIBLE_DEVICES"
"""End of the names of variables that choose GPUs, such as CUDA_VISIBLE_DEVICES. Their values hold for this host only;
the option `--include` chooses GPUs of other hosts.
"""
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:(?!PKEY)[A-Z]*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|KEY)S?"
    r"|(?:USER|DB)?PASS|PWD|AUTH(?:ORIZATION)?|CREDS?|COOKIES?|JWT)(?:_|$)"
)
"""Matches names of variables with secrets, but not NCCL_IB_PKEY or TOKENIZERS_PARALLELISM."""
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/\s@]*:[^/\s@]+@")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True)
class CarriedVariables:
    """Environment variables that `launch` passes to ranks, and variables of this shell that it withholds."""

    values: dict[str, str]
    """Values of the variables that are passed to ranks, by name in alphabetical order."""
    withheld: tuple[str, ...]
    """Names of variables that are not passed although they are listed, because they look secret or choose GPUs."""

    def lines(self) -> list[str]:
        """Text for the user: the names of the variables that ranks get, and a line for each withheld variable with the
        reason.
        """
        devices, secret = "the hostfile sets devices: choose them with --include or --exclude", "looks like a secret"
        reasons = {
            name: devices if name.endswith(_DEVICES) else f"{secret}; --env {name} passes it" for name in self.withheld
        }
        withheld = [f"withheld: {name} ({reason})" for name, reason in reasons.items()]
        return [f"environment variables of the ranks: {', '.join(self.values) or 'none'}", *withheld]


def carried_variables(
    environ: Mapping[str, str], named: Sequence[str] = (), files: Iterable[Path] = (), *, is_local: bool = False
) -> CarriedVariables:
    """Collect the environment variables that ranks get: listed ones of `environ`, all of `files`, and all of `named`.

    Later sources override earlier ones. Variables that choose devices are passed only if all ranks run on this host
    (`is_local`). An item of `named` is `NAME`, whose value is taken from `environ`, or `NAME=VALUE`. Secrets are passed
    only from a file or `named`. LaunchError if a named variable is not set, if a file cannot be read, or if a named
    variable is one that the launcher sets for each rank (RANK, MASTER_ADDR, SLURM_*, ...).
    """
    listed = {name: value for name, value in environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
    listed = {name: value for name, value in listed.items() if not _PER_RANK.match(name) and name not in _LOCAL_ONLY}
    withheld = {
        name
        for name, value in listed.items()
        if (name.endswith(_DEVICES) and not is_local)
        or _SECRET_NAME.search(name.upper())
        or _PASSWORD_IN_ADDRESS.search(value)
    }
    values = {name: value for name, value in listed.items() if name not in withheld}
    for path in files:
        values |= read_environment_file(path)
    values |= dict(_assignment(text, "--env", environ) for text in named)
    return CarriedVariables(dict(sorted(values.items())), tuple(sorted(withheld - values.keys())))


def environment_files(environ: Mapping[str, str], *, home: Path, directory: Path) -> tuple[Path, ...]:
    """The existing `.deepspeed_env` files of the home folder and of the working directory, in this order.

    The environment variable DS_ENV_FILE replaces this file name, as in DeepSpeed 0.19.8 (launcher/runner.py:37 and
    :604). LaunchError if DS_ENV_FILE is set and neither folder has such a file (DeepSpeed reports no error).
    """
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    paths = dict.fromkeys(folder / name for folder in (home, directory))
    files = tuple(path for path in paths if path.is_file())
    if "DS_ENV_FILE" in environ and not files:
        raise LaunchError(
            f"DS_ENV_FILE names the file `{name}`, but there is no {' or '.join(map(str, paths))}",
            hint="create the file, or unset DS_ENV_FILE",
        )
    return files


def read_environment_file(path: Path) -> dict[str, str]:
    """Variables of a file with lines `NAME=VALUE` or `export NAME=VALUE`, quoted as for a shell; a line that begins
    with `#` is a comment. LaunchError names a line that is wrong.

    DeepSpeed 0.19.8 (launcher/runner.py:610) fails on comments and blank lines. It passes values to a shell, which
    expands `$` and backticks. This function refuses lines with `$` or backticks.
    """
    values = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as unreadable:
        raise LaunchError(
            f"the file of environment variables `{path}` cannot be read: {unreadable}",
            hint="make it a text file with lines such as `NCCL_DEBUG=INFO`",
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line)
        except ValueError:
            words = []
        words = words[1:] if words[:1] == ["export"] else words
        if len(words) != 1 or "=" not in words[0] or re.search("[$`]", line):
            raise LaunchError(
                f"{path} line {number} is not one `NAME=VALUE` without `$` and backticks",
                hint="put quotes around a value with blanks, write values expanded, and pass others by --env",
            )
        name, value = _assignment(words[0], f"{path} line {number}", {})
        values[name] = value
    return values


def _assignment(text: str, source: str, environ: Mapping[str, str]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not _NAME.match(name):
        raise LaunchError(f"{source}: `{name}` cannot name an environment variable", hint="write NAME=VALUE")
    if _PER_RANK.match(name):
        raise LaunchError(f"{source} sets {name}, which the launcher sets for each rank", hint=f"leave {name} out")
    if name.endswith(_DEVICES):
        raise LaunchError(
            f"{source} sets {name}, which would choose the same devices on every host",
            hint="choose devices with --include or --exclude",
        )
    if not equals and name not in environ:
        raise LaunchError(
            f"{source} names the variable {name}, which is not set in this shell",
            hint=f"export the variable, or write --env {name}=VALUE",
        )
    return name, value if equals else environ[name]
