"""Lists of codec expressions on the command line."""


def split_expressions(text: str) -> list[str]:
    """Codec expressions out of a comma-separated list; commas inside brackets do not split.

    >>> split_expressions("none, topk(ratio=0.01,exact=true)")
    ['none', 'topk(ratio=0.01,exact=true)']
    """
    pieces, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces]
