"""Options that commands share: how an object becomes options, and what they refuse."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from hipress.cli.options import (
    ClusterOptions,
    expressions,
    refuse,
    takes_options,
    whole_numbers,
)
from hipress.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Size:
    num_rows: Annotated[int, typer.Option("--rows", min=1, help="Rows.")] = 2
    wide: Annotated[bool, typer.Option("--wide", help="Wide.")] = False


def run(*argv: str) -> Any:
    """What a command with an options object, an option and an argument receives."""
    app, seen = typer.Typer(), []

    @app.command()
    @takes_options
    def draw(
        size: Size,
        words: Annotated[list[str] | None, typer.Argument()] = None,
        color: Annotated[str, typer.Option()] = "red",
    ) -> None:
        """Draw it."""
        seen.append((size, words, color))

    result = CliRunner().invoke(app, list(argv))
    return seen[0] if seen else result


def test_fields_of_an_object_are_options_of_the_command() -> None:
    assert run() == (Size(), None, "red")
    assert run("--rows", "5", "--color", "blue", "a", "b") == (
        Size(num_rows=5),
        ["a", "b"],
        "blue",
    )
    assert run("--wide")[0] == Size(wide=True)
    assert run("--rows", "0").exit_code == 2
    help_text = run("--help").output
    assert "Draw it." in help_text and "--rows" in help_text and "size" not in help_text


def test_a_cluster_has_a_benchmark_for_each_rate() -> None:
    found = ClusterOptions(hosts=2, rate="100mbit, 1gbit,100mbit").benchmarks()
    assert [(one["rate"], one["rate_bits"]) for one in found] == [
        ("100mbit", 10**8),
        ("1gbit", 10**9),
    ]
    assert all(one["is_shaped"] and one["num_hosts"] == 2 for one in found)
    (plain,) = ClusterOptions(loopback=True).benchmarks()
    assert (plain["rate"], plain["rate_bits"], plain["is_shaped"]) == ("none", None, False)
    assert ClusterOptions().one_benchmark()["rate"] == "1gbit"


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        (ClusterOptions(device="tpu"), "--device 'tpu' is neither cpu nor cuda"),
        (ClusterOptions(rate="1gb"), "rate '1gb' is not a number and a unit"),
        (ClusterOptions(delay="5"), "delay '5' is not a number and a unit"),
        (ClusterOptions(loopback=True, delay="1ms"), "--rate and --delay need a network"),
        (ClusterOptions(rate="1gbit,2gbit"), "--rate '1gbit,2gbit' names several rates; give one."),
    ],
)
def test_wrong_clusters_are_refused(cluster: ClusterOptions, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        cluster.one_benchmark()


def test_options_that_would_do_nothing_are_refused() -> None:
    refuse(Size(num_rows=None), "is not for this.")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="^--num-rows 2 is not for this.$"):
        refuse(Size(), "is not for this.")
    with pytest.raises(UsageError, match="^--wide is not for this.$"):
        refuse({"--rows": None, "--wide": True}, "is not for this.")


def test_lists() -> None:
    assert expressions("none, topk(ratio=0.1,exact=true),none") == (
        "none",
        "topk(ratio=0.1,exact=true)",
    )
    assert whole_numbers("--nodes", "4, 2,4", 1, 8) == [4, 2]
    for text in ("", "9", "0", "1,", "two", "-1", "1.5", "²"):
        with pytest.raises(UsageError, match="is not a whole number from 1 to 8; write 4, or 2,4"):
            whole_numbers("--nodes", text, 1, 8)
