"""Files that are flushed to the disk."""

import errno
import os
from pathlib import Path

import pytest

from ds_finetune.errors import OutputError
from ds_finetune.export.output_folder import as_output_errors
from ds_finetune.system.whole_file import synchronise


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_refuses_fsync_of_a_folder_is_named(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OutputError, match=f"its file system refuses fsync of {tmp_path}"), as_output_errors(tmp_path):
        synchronise(tmp_path)
