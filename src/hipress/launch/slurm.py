"""The two small languages in Slurm's variables: lists of hosts, and counts per host."""

from __future__ import annotations

import re

from hipress.errors import UsageError

_MOST_HOSTS = 100_000


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a compressed list.

    Args:
        text: As in SLURM_STEP_NODELIST.

    Example:
        >>> expand_hosts("n[01-03,7],gpu1")
        ['n01', 'n02', 'n03', 'n7', 'gpu1']
    """
    words = _split_outside_brackets(text.strip())
    if not text.strip() or not all(words):
        raise _refusal(text)
    return [host for word in words for host in _expand_word(word, text)]


def expand_counts(text: str) -> list[int]:
    """Return the tasks of each host.

    Args:
        text: As in SLURM_STEP_TASKS_PER_NODE.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for word in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if match is None:
            raise UsageError(
                f"the tasks per node {text!r} are not counts such as 2(x3),1; Slurm sets them, "
                f"so start the script with srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_word(word: str, text: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)(?:\[([^\[\]]+)\](.*))?", word)
    if match is None:
        raise _refusal(text)
    head, ranges, tail = match.groups()
    if ranges is None:
        return [head]
    tails = _expand_word(tail, text)
    hosts = [f"{head}{number}{rest}" for number in _expand_ranges(ranges, text) for rest in tails]
    if len(hosts) > _MOST_HOSTS:
        raise _refusal(text)
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise _refusal(text)
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + _MOST_HOSTS:
            raise _refusal(text)
        # Zeros in front belong to the name: 01-03 is 01, 02, 03.
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text)


def _refusal(text: str) -> UsageError:
    return UsageError(
        f"the node list {text!r} is not one that Slurm writes, such as n[01-03,7],gpu1; "
        f"set MASTER_ADDR to the first host yourself"
    )
