"""What griffe does with docstrings beyond its own rules: `Example:` is a section of code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension


class Examples(Extension):
    """Names the section as griffe knows it, so that its lines are shown as code."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            value = obj.docstring.value
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", value, flags=re.M)
