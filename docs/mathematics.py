"""The mathematics of docstrings and pages, as MathML, which browsers draw."""

import html
import re

import griffe
from latex2mathml.converter import convert


class Mathematics(griffe.Extension):
    """Turns the `:math:` roles and directives of docstrings into dollars."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrites the docstring of an object, if it has one."""
        if obj.docstring is None:
            return
        text = re.sub(r":math:`(.+?)`", r"$\1$", obj.docstring.value, flags=re.DOTALL)
        obj.docstring.value = re.sub(
            r"^( *)\.\. math:: (.+?)(?=\n\s*\n|\Z)",
            lambda match: f"{match[1]}$$ {' '.join(match[2].split())} $$",
            text,
            flags=re.DOTALL | re.MULTILINE,
        )


def on_page_content(content: str, *, page: object, **_: object) -> str:
    """A page of mkdocs with its formulas as MathML; notebooks have them in dollars."""
    if not page.file.src_uri.endswith(".ipynb"):
        content = re.sub(
            r'class="arithmatex">\\\((.*?)\\\)', _inline, content, flags=re.S
        )
        return re.sub(r'class="arithmatex">\\\[(.*?)\\\]', _block, content, flags=re.S)
    verbatim = r"(<(?P<tag>script|style|pre|code)\b.*?</(?P=tag)>)"
    parts, end = [], 0
    for match in re.finditer(verbatim, content, re.S):
        parts += [_dollars(content[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, _dollars(content[end:])])


def _dollars(text: str) -> str:
    text = re.sub(r">?\$\$([^$]+)\$\$", _block, text)
    return re.sub(r">?\$([^$\n]+)\$", _inline, text)


def _inline(match: re.Match) -> str:
    return _converted(match, "inline")


def _block(match: re.Match) -> str:
    return _converted(match, "block")


def _converted(match: re.Match, display: str) -> str:
    begin = match[0][: match.start(1) - match.start()].rstrip("\\([$")
    return begin + convert(html.unescape(match[1]).strip(), display=display)
