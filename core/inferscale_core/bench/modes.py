"""The ways to bring facts to a model that a quality benchmark compares, by name.

``none``, ``text`` and ``shuffle`` (prompt text, its facts in another order) inject nothing. Any
other name is a window, and what is added to it:

- ``w0``, ``w8``, ``w20`` ...: that many conversation turns, no anchor (arXiv:2607.27090);
- ``alone``: the anchor only; ``turns8``, ``preceding16``, ``neighbours16``: behind the anchor;
- ``default``: what the core's configuration says;
- ``+tail3``: the last three facts of a prompt are prefilled; ``+noanchor``.
"""

import re
from dataclasses import replace

from inferscale_core.bench.encoded import Encoding
from inferscale_core.bench.errors import BenchError
from inferscale_core.config import CoreConfig, WindowConfig

PLAIN = ("none", "text", "shuffle")
_WINDOW = re.compile(r"(w|turns|preceding|neighbours)(\d+)")


def encoding_of(mode: str, config: CoreConfig) -> Encoding:
    """The encoding that a mode's name stands for.

    Encodings that differ in nothing but the tail have the same ``name``, and so share their KV.

    Raises:
        BenchError: the name is not one of the above.
    """
    window, *options = mode.split("+")
    match = _WINDOW.fullmatch(window)
    if window == "default":
        encoding = Encoding(window, config.anchor, config.window, config.tail)
    elif window == "alone":
        encoding = Encoding(window, True, WindowConfig(kind="none", size=0))
    elif match and match[1] == "w":
        kind = {"kind": "turns"} if int(match[2]) else {"kind": "none"}
        size = WindowConfig.model_validate({**kind, "size": int(match[2]), "max_tokens": 4096})
        encoding = Encoding(window, False, size)
    elif match:
        fields = {"kind": match[1], "size": int(match[2]), "max_tokens": 4096}
        encoding = Encoding(window, True, WindowConfig.model_validate(fields))
    else:
        raise BenchError(
            f"no mode {mode!r}; known are {', '.join(PLAIN)}, default, w0, w8, alone, turns8, "
            "preceding16, neighbours16 (any number), and +tail3 or +noanchor behind them"
        )
    for option in options:
        if option == "noanchor":
            encoding = replace(encoding, name=f"{encoding.name}+noanchor", anchor=False)
        elif re.fullmatch(r"tail\d+", option):
            encoding = replace(encoding, tail=int(option[4:]))
        else:
            raise BenchError(f"no option {option!r} in mode {mode!r}; known are noanchor, tail3")
    return encoding
