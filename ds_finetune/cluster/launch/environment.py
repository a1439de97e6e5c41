"""Chooses the environment variables that `launch` passes to ranks: those that a list in this module names, those of the
option --env, and those of files `.deepspeed_env`.
"""

import re
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
_SECRET_WORD = re.compile(
    r"(?:.*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASSCODE|CREDENTIAL|PWD|APIKEY)"
    r"|(?:USER|DB)?PASS|CREDS?|AUTH|AUTHORIZATION|BEARER|COOKIE"
    r"|JWT|PAT|(?:API|ACCESS|PRIVATE|SECRET|SIGNING|ENCRYPTION|ACCOUNT|SSH)?KEY)S?$|(?:SECRET|PASSWORD|CREDENTIAL)",
    re.IGNORECASE,
)
"""Matches a word of a variable's name that marks a secret, such as TOKEN or APIKEY. PKEY (in NCCL_IB_PKEY) and
TOKENIZERS (in TOKENIZERS_PARALLELISM) do not match.
"""
_BETWEEN_WORDS = re.compile(r"[_.\-]")
_FOLDERS = ("PWD", "OLDPWD")
"""Variables with working directories of the shell. They are no secrets, though PWD also stands for `password`."""
_SECRET_VALUE = re.compile(
    r"://[^/\s@]*:[^/\s@]+@|://[^/\s@:]{20,}@"
    r"|\b(?i:bearer|basic)\s+[\w.~+/=-]{8,}|(?i:\b(?:authorization|x-api-key)\s*:)"
    r"|(?i:(?:^|[^a-z])(?:\w*(?:token|secret|passw(?:or)?d|api_?key)|pass|pwd|sig)\s*=\s*[^\s&;]+)"
    r"|\bhf_[A-Za-z0-9]{16,}|\bsk-[\w-]{16,}|\bgh[pousr]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bxox[abprs]-[\w-]{10,}"
    r"|\bnvapi-[\w-]{16,}|\bAIza[\w-]{30,}|\bAKIA[0-9A-Z]{12,}|\beyJ[\w-]{10,}\.[\w-]{10,}|PRIVATE KEY-----"
)
"""Matches values that are secrets: a password in an address, a header or an assignment, and known kinds of tokens."""
HIDDEN = "***"
"""Text that is printed instead of a secret."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_WORD = re.compile(r"-{0,2}[A-Za-z_][\w.\-]*")
_LINE = re.compile(r"(?:export\s+)?(?P<name>[^=\s]+)\s*=\s*(?P<value>.*)$")
_QUOTED = re.compile(r"""(?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)")\s*(?:#.*)?$""")


@dataclass(frozen=True)
class CarriedVariables:
    """Environment variables that `launch` passes to ranks, and variables of this shell that it withholds."""

    values: dict[str, str]
    """Values of the variables that are passed to ranks, by name in alphabetical order."""
    withheld: tuple[str, ...]
    """Names of variables that are not passed although they are listed, because they look secret or choose GPUs."""

    def lines(self) -> list[str]:
        """Text for the user: a line `NAME=value` for each variable that ranks get, then a line for each withheld
        variable with the reason. Values of variables outside the list, and values that look secret, are not shown.
        """
        shown = [
            f"{name}={value}" if may_show(name, value) else f"{name} (its value is not shown)"
            for name, value in self.values.items()
        ]
        devices, secret = "the hostfile sets devices: choose them with --include or --exclude", "looks like a secret"
        for name in self.withheld:
            why = devices if name.endswith(_DEVICES) else f"{secret}; --env {name} passes it"
            shown.append(f"withheld: {name} ({why})")
        return shown


def carried_variables(
    environ: Mapping[str, str], named: Sequence[str] = (), files: Iterable[Path] = (), *, is_local: bool = False
) -> CarriedVariables:
    """Collect the environment variables that ranks get: listed ones of `environ`, all of `files`, and all of `named`.

    Later sources override earlier ones. Variables that choose devices are passed only if all ranks run on this host
    (`is_local`). An item of `named` is `NAME`, whose value is taken from `environ`, or `NAME=VALUE`. Secrets are passed
    only from a file or `named`. LaunchError if a named variable is not set, if a file cannot be read, or if a named
    variable is one that the launcher sets for each rank (RANK, MASTER_ADDR, SLURM_*, ...).
    """
    listed = {name: value for name, value in environ.items() if _is_listed(name)}
    listed = {name: value for name, value in listed.items() if not _PER_RANK.match(name) and name not in _LOCAL_ONLY}
    withheld = {
        name
        for name, value in listed.items()
        if (name.endswith(_DEVICES) and not is_local) or looks_secret(name, value)
    }
    values = {name: value for name, value in listed.items() if name not in withheld}
    for path in files:
        values |= read_environment_file(path)
    values |= dict(_named(text, environ) for text in named)
    return CarriedVariables(dict(sorted(values.items())), tuple(sorted(withheld - values.keys())))


def environment_files(environ: Mapping[str, str], *, home: Path, directory: Path) -> tuple[Path, ...]:
    """The existing `.deepspeed_env` files of the home folder and of the working directory, in this order.

    The environment variable DS_ENV_FILE replaces this file name, as in DeepSpeed 0.19.8 (launcher/runner.py:37 and
    :604). LaunchError if DS_ENV_FILE is set and neither folder has such a file, which DeepSpeed ignores.
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
    """Variables of a file with `NAME=VALUE` lines; LaunchError names the line that is wrong.

    Comments, blank lines, `export`, and single or double quotes are allowed. DeepSpeed 0.19.8 splits every line at `=`
    and fails on a comment or a blank line (launcher/runner.py:610). It also passes values to a shell, which would
    expand `$`; here such a value is refused, except in single quotes.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as unreadable:
        raise LaunchError(
            f"the file of environment variables `{path}` cannot be read: {unreadable}",
            hint="make it a text file with lines such as `NCCL_DEBUG=INFO`",
        ) from None
    values = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, value = _read_line(line.strip(), f"{path} line {number}")
            values[name] = value
    return values


def looks_secret(name: str, value: str = "") -> bool:
    """Whether a name has a word such as TOKEN, KEY or PASSWORD, or a value has a password or a known kind of token."""
    words = [] if name in _FOLDERS else _BETWEEN_WORDS.split(name)
    return any(_SECRET_WORD.match(word) for word in words) or bool(_SECRET_VALUE.search(value))


def may_show(name: str, value: str) -> bool:
    """Whether a variable's value may be printed: the name must be on the list of passed variables, and neither name nor
    value may look secret.
    """
    return _is_listed(name) and not looks_secret(name, value)


def redacted(words: Iterable[str]) -> list[str]:
    """The words of a command line, with `***` in place of values that look secret."""
    return [_redacted(word) for word in words]


def interface_variables(interface: str) -> dict[str, str]:
    """Environment variables that make gloo and NCCL use an interface such as `eth0`; none for an empty name."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}


def _redacted(word: str) -> str:
    name, equals, value = word.partition("=")
    # Overrides such as `data.pack_tokens=1` set keys of the run file, which are no secrets.
    if equals and _WORD.fullmatch(name) and looks_secret("" if "." in name else name, value):
        return f"{name}={HIDDEN}"
    return HIDDEN if _SECRET_VALUE.search(word) else word


def _is_listed(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)


def _named(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    _check_variable_name(name, "--env")
    if equals:
        return name, value
    if name not in environ:
        shown = _redacted(name)
        raise LaunchError(
            f"--env names the variable {shown}, which is not set in this shell",
            hint=f"export the variable, or write --env {shown}=VALUE",
        )
    return name, environ[name]


def _check_variable_name(name: str, source: str) -> None:
    if not _NAME.match(name):
        raise LaunchError(f"{source}: `{_redacted(name)}` cannot name an environment variable", hint="write NAME=VALUE")
    if _PER_RANK.match(name):
        raise LaunchError(f"{source} sets {name}, which the launcher sets for each rank", hint=f"leave {name} out")
    if name.endswith(_DEVICES):
        raise LaunchError(
            f"{source} sets {name}, which would choose the same devices on every host",
            hint="choose devices with --include or --exclude",
        )


def _read_line(line: str, source: str) -> tuple[str, str]:
    match = _LINE.match(line)
    if not match:
        shown = _redacted(line.split("=")[0])
        raise LaunchError(
            f"{source} is `{shown}` instead of `NAME=VALUE`", hint="write e.g. `NCCL_DEBUG=INFO`; `#` begins a comment"
        )
    name, text = match["name"], match["value"]
    _check_variable_name(name, source)
    quoted = _QUOTED.match(text)
    if not quoted and (text[:1] in ("'", '"') or re.search(r"\s#", text)):
        raise LaunchError(
            f"{source}: the value of {name} has an open quote, text after a quote, or a `#`",
            hint="put quotes around the whole value",
        )
    if quoted and quoted["single"] is not None:
        return name, quoted["single"]
    if re.search(r"(?<!\\)(?:\\\\)*[$`]", quoted["double"] if quoted else text):
        raise LaunchError(
            f"{source}: the value of {name} has `$` or a backtick, which are not expanded",
            hint="write the expanded value, or put the value in single quotes",
        )
    return name, re.sub(r'\\(["\\$`])', r"\1", quoted["double"]) if quoted else text
