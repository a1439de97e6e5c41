"""Uploads an exported folder to a new private repository of the Hub in one commit, for `export --push-to-hub`.

After an interruption, a second push sends only the missing files, because the Hub knows the others by their digests. A
repository without files is accepted as new.
"""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from ds_finetune.errors import ConfigError, ExportError
from ds_finetune.export.verify.record import UNVERIFIED
from ds_finetune.foreign.hub_access import without_password

_MADE_BY_HUB = {".gitattributes"}


def check_repository(name: str) -> None:
    """Raise ConfigError if `name` is not of the form OWNER/NAME. Called before the export begins."""
    try:
        validate_repo_id(name)
    except HFValidationError as wrong:
        raise ConfigError(f"--push-to-hub {name} is no repository name: {wrong}", hint="write OWNER/NAME") from None
    if name.count("/") != 1:
        raise ConfigError(f"--push-to-hub {name} names no owner", hint="write OWNER/NAME")


def push_to_hub(folder: Path, name: str) -> str:
    """Upload `folder` to the repository `name`, which is created as private. Returns the repository's URL. ExportError
    if the folder is not verified, the Hub refuses, or the repository already has files. Messages never contain the
    access token.
    """
    check_repository(name)
    if (folder / UNVERIFIED).is_file():
        raise ExportError(
            f"`{folder}` is not verified (it has a file {UNVERIFIED})",
            hint=f"verify it: ds-finetune export --check {folder}",
        )
    api, again = HfApi(), f"to send the missing files: ds-finetune export --check {folder} --push-to-hub {name}"
    try:
        url = str(api.create_repo(name, private=True, exist_ok=True))
        files = sorted(set(api.list_repo_files(name)) - _MADE_BY_HUB)
        if files:
            raise ExportError(
                f"the repository `{name}` exists and has {len(files)} files, e.g. {files[0]}",
                hint="name a new repository, or delete the existing one on its page",
            )
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by ds_finetune")
    except LocalTokenNotFoundError:
        raise ExportError(
            f"no access token for {without_password(api.endpoint)}", hint="run `hf auth login`, or set HF_TOKEN"
        ) from None
    except (HfHubHTTPError, RuntimeError, OfflineModeIsEnabled, HTTPError, OSError) as failed:
        # huggingface_hub 2.4 wraps errors of an upload in a RuntimeError (_commit_api.py:530).
        cause = failed.__cause__ if isinstance(failed, RuntimeError) else failed
        answer = cause.response.status_code if isinstance(cause, HfHubHTTPError) else type(cause).__name__
        raise ExportError(
            f"the push of `{name}` to {without_password(api.endpoint)} has failed: {answer}",
            hint=f"check HF_TOKEN and the network; {again}",
        ) from None
    return url
