"""The version of this package, as pyproject.toml has it, and where its documentation is."""

__version__ = "0.1.0"

DOCS = "https://hipress.readthedocs.io/en/latest/"


def docs_url(page: str, section: str = "") -> str:
    """Returns the address of a page of the documentation, and of a section of it.

    Example:
        >>> docs_url("pytorch", "adam")
        'https://hipress.readthedocs.io/en/latest/pytorch/#adam'
    """
    return f"{DOCS}{page}/" + (f"#{section}" if section else "")
