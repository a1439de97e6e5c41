"""Started inside an allocation of Slurm: becomes the srun command of the job whose values are a JSON in the arguments."""

import json
import os
import sys

from ds_finetune.cluster.launch.commands import Job, srun_command, starting_environment
from ds_finetune.config.hostfile import Host

if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    job = Job(
        **values
        | {name: tuple(values[name]) for name in ("overrides", "entry")}
        | {"hosts": tuple(Host(**host) for host in values["hosts"])}
    )
    os.execvpe("srun", srun_command(job, os.environ), starting_environment(job, os.environ, slurm=True))
