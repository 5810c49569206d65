"""Words of a shell script: quoted, unless they are shell text already."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


class Shell(str):
    """Shell text, which is not quoted. A value of any other type becomes one quoted word."""


def quote_word(value: object) -> str:
    """Return a value as one word of a shell script, without line breaks."""
    if isinstance(value, Shell):
        return value
    # Line breaks become bash's $'\n', so that no line of the script begins with the user's text.
    return shlex.quote(str(value)).replace("\n", "'$'\\n''")


def quote_words(words: Iterable[object]) -> Shell:
    """Return values as words of a shell script, separated by spaces."""
    return Shell(" ".join(quote_word(word) for word in words))
