# pyright: basic
"""Fetches files of datasets from the Hugging Face hub. Requires huggingface_hub."""

from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from stepspec.errors import StepSpecError

TIMEOUT_S = 20.0
"""Timeout of the hub's first response. A download may take longer."""


class FetchError(StepSpecError):
    """A file could not be downloaded. The message is the reason: a clause without a period."""


def fetch_file(repository: str, revision: str, path: str) -> Path:
    """Return the path of a dataset's file at a commit, from the cache of huggingface_hub or else downloaded.

    Raises:
        FetchError: the file is not in the cache and cannot be downloaded.
    """
    try:
        cached = huggingface_hub.try_to_load_from_cache(repository, path, revision=revision, repo_type="dataset")
        if isinstance(cached, str):
            return Path(cached)
        # Request the metadata first, because without a network a download retries for half a minute.
        url = huggingface_hub.hf_hub_url(repository, path, revision=revision, repo_type="dataset")
        huggingface_hub.get_hf_file_metadata(url, timeout=TIMEOUT_S)
        return Path(huggingface_hub.hf_hub_download(repository, path, revision=revision, repo_type="dataset"))
    except errors.OfflineModeIsEnabled as error:
        raise FetchError("it is not in the cache, and HF_HUB_OFFLINE disables downloads") from error
    except errors.GatedRepoError as error:
        raise FetchError("the hub restricts access to it; request access and log in with `hf auth login`") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError) as error:
        raise FetchError("the hub has no such file at this revision") from error
    except (OSError, ValueError, errors.XetDownloadError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise FetchError(f"the download failed ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0].removesuffix(".")
