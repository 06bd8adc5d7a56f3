"""The hosts of a job and the ranks on each: `-H node1,node2:4` or a hosts file."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipress.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
_MAX_SLOTS = 1024
_FIELDS = ("host", "slots", "ssh_port", "user", "address")


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a job."""

    name: str
    """The name that ssh knows."""
    slots: int = 1
    """The number of ranks on it."""
    ssh_port: int | None = None
    """Where its sshd listens; None leaves that to ssh's own settings."""
    user: str | None = None
    """The user to log in as; None leaves that to ssh too."""
    address: str = ""
    """The address by which other hosts reach it; its name if not given."""

    def __post_init__(self) -> None:
        for what, text in (("host", self.name), ("address", self.address or self.name)):
            if not (_NAME.fullmatch(text) or ":" in text and _IPV6.fullmatch(text)):
                raise UsageError(
                    f"{what} {text!r} is neither a name nor an address; write node1, 10.0.0.1 or "
                    f"[fe80::1]."
                )
        if self.user is not None and not _NAME.fullmatch(self.user):
            raise UsageError(
                f"user {self.user!r} of host {self.name} is not one; write e.g. me@{self.name}."
            )
        if not 1 <= self.slots <= _MAX_SLOTS:
            raise UsageError(
                f"host {self.name} has {self.slots} slots; it must have from 1 to {_MAX_SLOTS}, "
                f"or be left out."
            )
        if self.ssh_port is not None:
            check_port(self.ssh_port, f"the ssh port of host {self.name}")
        if not self.address:
            object.__setattr__(self, "address", self.name)


def check_port(port: int, what: str) -> None:
    """Raise a `UsageError` if a number cannot be a port.

    Args:
        port: The number.
        what: What the error message calls it.
    """
    if not 1 <= port <= 65535:
        raise UsageError(f"{what} is {port}; it must be from 1 to 65535.")


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of an option such as `node1,me@node2:4`.

    Args:
        text: Names with commas between them, each with `:SLOTS` if it has more than one.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"hosts {text!r} has an empty name; write node1,node2:4.")
    return _checked([_parse_word(word) for word in words])


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file that holds a JSON list.

    Args:
        path: A list of texts as on the command line and of objects with `host` and, if need be,
            `slots`, `ssh_port`, `user` and `address`.
    """
    try:
        entries = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(
            f"hosts file {str(path)!r} cannot be read ({error.strerror}); give a JSON file."
        ) from None
    except ValueError as error:
        raise UsageError(
            f"hosts file {str(path)!r} is not JSON ({error}); write a list such as "
            f'["node1", "node2:4"].'
        ) from None
    if not isinstance(entries, list):
        raise UsageError(
            f'hosts file {str(path)!r} holds no list; write one such as ["node1", "node2:4"].'
        )
    return _checked([_parse_entry(entry) for entry in entries])


def _parse_entry(entry: Any) -> Host:
    if isinstance(entry, str):
        return _parse_word(entry)
    if not isinstance(entry, dict) or "host" not in entry:
        raise UsageError(
            f"entry {json.dumps(entry)} of the hosts file is neither a name nor an object with "
            f'"host"; write "node2:4" or {{"host": "node2", "slots": 4}}.'
        )
    for field, value in entry.items():
        kind = int if field in ("slots", "ssh_port") else str
        if field not in _FIELDS:
            raise UsageError(
                f"field {field!r} of host {entry['host']!r} is unknown; choose from "
                f"{', '.join(_FIELDS)}."
            )
        if not isinstance(value, kind) or isinstance(value, bool):
            wanted = "a whole number" if kind is int else "a text"
            raise UsageError(
                f"field {field!r} of host {entry['host']!r} is {json.dumps(value)}; it must be "
                f"{wanted}."
            )
    rest = {field: entry[field] for field in _FIELDS[1:] if field in entry}
    return Host(name=entry["host"], **rest)


def _parse_word(word: str) -> Host:
    match = re.fullmatch(r"(?:([^@]*)@)?(?:\[([^\]]*)\]|([^:\[\]]*))(?::(.*))?", word.strip())
    if match is None:
        raise UsageError(f"host {word!r} is not one; write node1, node1:4, me@node1:4 or [::1]:4.")
    user, bracketed, plain, slots = match.groups()
    name = bracketed if bracketed is not None else plain
    if slots is not None and not (slots.isascii() and slots.isdecimal()):
        raise UsageError(
            f"host {word!r} has slots {slots!r}, which is not a whole number; write {name}:4."
        )
    return Host(name=name, user=user, slots=1 if slots is None else int(slots))


def _checked(hosts: Sequence[Host]) -> tuple[Host, ...]:
    if not hosts:
        raise UsageError("there is no host in the list; name at least one, such as node1:4.")
    seen: set[str] = set()
    for host in hosts:
        if _same(host.name) in seen:
            raise UsageError(
                f"host {host.name} is there twice; name it once, with as many slots as it shall "
                f"have ranks."
            )
        seen.add(_same(host.name))
    first = hosts[0]
    # An address that was given explicitly may lead through a tunnel.
    if len(hosts) > 1 and first.address == first.name and _is_loopback(first.name):
        raise UsageError(
            f"the first host is {first.name}, which the other hosts cannot reach; call it by the "
            f"name or address that they know."
        )
    return tuple(hosts)


def _same(name: str) -> str:
    """Return one spelling for all spellings of a name or an address."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.casefold().rstrip(".")


def _is_loopback(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        # 127.1 is one for the resolver only.
        return re.fullmatch(r"localhost(\..*)?|127\.[0-9.]*", _same(name)) is not None
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified
