# pyright: basic
"""Files of datasets on the Hugging Face hub, for which huggingface_hub has to be installed."""

from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from stepspec.errors import StepSpecError

TIMEOUT_S = 20.0
"""For the first answer of the hub; a download may take longer."""


class FetchError(StepSpecError):
    """A file could not be downloaded; the message is the reason, a clause without a full stop."""


def fetch_file(repository: str, revision: str, path: str) -> Path:
    """A dataset's file at a commit, from the cache of huggingface_hub or else over the network.

    Raises:
        FetchError: it is not in the cache and the hub does not give it.
    """
    try:
        cached = huggingface_hub.try_to_load_from_cache(repository, path, revision=revision, repo_type="dataset")
        if isinstance(cached, str):
            return Path(cached)
        # Asked first, because a download that finds no network tries again for half a minute.
        url = huggingface_hub.hf_hub_url(repository, path, revision=revision, repo_type="dataset")
        huggingface_hub.get_hf_file_metadata(url, timeout=TIMEOUT_S)
        return Path(huggingface_hub.hf_hub_download(repository, path, revision=revision, repo_type="dataset"))
    except errors.OfflineModeIsEnabled as error:
        raise FetchError("it is not in the cache, and HF_HUB_OFFLINE forbids asking the hub") from error
    except errors.GatedRepoError as error:
        raise FetchError("the hub gives it to those who were granted access; log in with `hf auth login`") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError) as error:
        raise FetchError("the hub knows of no such file there") from error
    except (OSError, ValueError, errors.XetDownloadError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise FetchError(f"the hub did not give it ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0].removesuffix(".")
