"""Files of a data set on a Hugging Face hub, at one revision, as local files.

Only whole files are fetched, and read by our own readers: a loader that gives all rows one schema fails on rows
whose structs differ.
"""

from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import httpx
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from services.errors import UserError
from services.files import read_json, replace_json
from services.runs import Run
from services.settings import RowsSettings


class Fetched(NamedTuple):
    """Local files in the order of their names, and the commit that they are of (None: they were local)."""

    files: list[Path]
    commit: str | None


def locate_for(run: Run, shape: RowsSettings) -> Fetched:
    """The local files of a set of rows, at the commit that the run found its revision at the first time it asked.

    So a run that is taken up again, and whose branch has moved meanwhile, goes on with the rows that it began with.

    Raises:
        UserError: as `locate`.
    """
    revision = f"{shape.dataset}@{shape.revision}"
    commits = read_json(run.record).get("commits", {})
    fetched = locate(shape, commits.get(revision))
    if fetched.commit is not None and revision not in commits:
        replace_json(run.record, {**read_json(run.record), "commits": {**commits, revision: fetched.commit}})
    return fetched


def locate(shape: RowsSettings, commit: str | None = None) -> Fetched:
    """The local files of a set of rows; those of the hub are fetched, or found in its cache.

    Args:
        commit: take the files of this one, whatever commit the revision is at.

    Raises:
        UserError: the hub cannot be reached, or the data set, its revision or its files are not there or not open.
    """
    if shape.dataset is None:
        return Fetched(shape.files, None)
    where = f"{shape.name}: data set {shape.dataset} at {commit or shape.revision}"
    try:
        hub = HfApi()
        info = hub.dataset_info(shape.dataset, revision=commit or shape.revision)
        there = sorted(sibling.rfilename for sibling in info.siblings or [])
        names = [name for name in there if any(fnmatch(name, pattern) for pattern in shape.data_files)]
        for pattern in shape.data_files:
            if not any(fnmatch(name, pattern) for name in names):
                raise UserError(f"{where} has no file {pattern!r}; there are: {', '.join(there[:20]) or 'none'}")
        files = [
            Path(hub.hf_hub_download(shape.dataset, name, repo_type="dataset", revision=info.sha)) for name in names
        ]
    except GatedRepoError as error:
        raise UserError(
            f"{where} is gated: accept its terms on the hub, and give a token of that account in HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{where}: there is no such revision (any more); set revision to a commit that is") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{where}: no such data set, or it is private; check the name, and give a token in HF_TOKEN"
        ) from error
    except OfflineModeIsEnabled as error:
        raise UserError(
            f"{where}: HF_HUB_OFFLINE forbids fetching it; unset that, or give its files as files"
        ) from error
    except (httpx.HTTPError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{where}: the hub at {constants.ENDPOINT} gave nothing ({_one_line(error)}); try again, or give "
            "its files, fetched elsewhere, as files"
        ) from error
    return Fetched(files, info.sha)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
