"""The mathematics of docstrings, written for Sphinx, as mkdocs renders it."""

import re

import griffe


class Mathematics(griffe.Extension):
    """Turns `:math:` roles and directives into dollars."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrites the docstring of an object, if it has one."""
        if obj.docstring is None:
            return
        text = re.sub(r":math:`(.+?)`", r"$\1$", obj.docstring.value, flags=re.DOTALL)
        obj.docstring.value = re.sub(
            r"^( *)\.\. math:: (.+?)(?=\n\s*\n|\Z)",
            lambda found: f"{found[1]}$$ {' '.join(found[2].split())} $$",
            text,
            flags=re.DOTALL | re.MULTILINE,
        )
