"""Commands of helper processes: this project is found, and no file of the working directory is imported."""

import os
import subprocess
from pathlib import Path

from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.serving.serve import Address, ServeOptions, server_command
from ds_finetune.system.processes import python_module, with_package


def test_helper_processes_import_no_file_of_the_working_directory(tmp_path: Path) -> None:
    for name in ("secrets", "platform", "shutil", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(99)")
    program = tmp_path / "package" / "helper.py"
    program.parent.mkdir()
    program.write_text("import secrets, platform, shutil, ds_finetune.errors; print(secrets.__file__)")
    environ = with_package({"PATH": os.environ["PATH"], "PYTHONPATH": str(program.parent)})
    done = subprocess.run(python_module("helper"), cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith(str(tmp_path))


def test_servers_and_processes_of_launch_are_such_commands() -> None:
    serve = server_command(ServeOptions("transformers"), Path("x"), Address("127.0.0.1", 1))
    with Remote(python="/bin/echo").open(
        Host("localhost", slots=1, line=1), "ds_finetune.cluster.host_functions"
    ) as host:
        assert host.stdout
        here = ["/bin/echo", *host.stdout.read().decode().split()]
    for command in (serve, here):
        assert command[1:4] == ["-P", "-u", "-m"]
