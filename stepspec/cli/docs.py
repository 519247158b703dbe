"""`stepspec docs`: where the documentation is."""

import sys

from stepspec.base.files import package_folder


def main() -> None:
    """Print where the documentation is."""
    checkout = package_folder().parent
    site, pages = checkout / "build" / "site" / "index.html", checkout / "docs" / "index.md"
    if site.is_file():
        print(site.as_uri())
    elif pages.is_file():
        print(pages)
        print("`make docs` builds a site of these pages.", file=sys.stderr)
    else:
        print("The documentation is in the docs folder of the stepspec source. Every command has --help.")
