"""Why a program could not be started on a host, from the exit code and the output of ssh or of the remote shell."""

import re

from ds_finetune.cluster.hosts.check_result import Check

_SSH_FAILED = 255
_NO_COMMAND = (126, 127)
_SAME_ENVIRONMENT = "install the same environment at the same path on every host"


def unreachable_check(host: str, code: int | None, stderr: str, python: str) -> Check:
    """The failed check of a `host` on which `python` could not be started; `code` None where it did not answer in time.

    The patterns are the messages of OpenSSH 9 (ssh.c and sshconnect.c).
    """
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "nothing")
    if code is None:
        hint = "check the load and the disks of the host; launch.greeting_seconds gives a slow host more time"
        return Check("ssh", host, "fail", f"no answer in time; last output: {last}", hint)
    if code != _SSH_FAILED:
        return _not_started_check(host, code, last, python)
    for pattern, what, hint in (
        (
            "IDENTIFICATION HAS CHANGED",
            "its host key has changed",
            f"if the host was reinstalled: ssh-keygen -R {host}; otherwise find out why",
        ),
        (
            "Host key verification failed",
            "its host key is not known here",
            f"connect once by hand and compare the key: ssh {host}",
        ),
        (
            "Permission denied",
            f"it does not accept our key: {last}",
            f"ssh-copy-id {host}, or name key and user in ssh_config or --ssh-args",
        ),
        ("Could not resolve", "its name does not resolve", "correct the hostfile, or the name service"),
        ("refused", "no sshd listens there", "start sshd, or give its port as host:port in the hostfile"),
        (
            "timed out|No route to host|unreachable|not responding",
            f"it does not answer: {last}",
            "switch it on, check cable and firewall, or leave it out with --exclude",
        ),
    ):
        if re.search(pattern, stderr):
            return Check("ssh", host, "fail", what, hint)
    return Check("ssh", host, "fail", f"ssh failed: {last}", f"try it by hand: ssh {host} true")


def other_program_check(host: str) -> Check:
    """The failed check of a host whose answer has other fields than this version of the program expects."""
    return Check(
        "versions", host, "fail", "it has another version of ds_finetune", "install the same source on every host"
    )


def _not_started_check(host: str, code: int, last: str, python: str) -> Check:
    if code in _NO_COMMAND:
        return Check("python", host, "fail", f"no Python at {python}: {last}", _SAME_ENVIRONMENT)
    if "can't cd to" in last or "cd:" in last:
        return Check(
            "python",
            host,
            "fail",
            f"the working folder does not exist: {last}",
            "start in a folder that every host has at the same path",
        )
    if "No module named" in last:
        return Check("python", host, "fail", last, _SAME_ENVIRONMENT)
    return Check(
        "python", host, "fail", f"exit code {code}: {last}", f"try `{python} -m ds_finetune --help` on the host"
    )
