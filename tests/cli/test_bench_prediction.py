"""`hipress bench prediction`: what it refuses, and one whole run."""

import json

import pytest
from typer.testing import CliRunner

from hipress.cli.bench import app
from hipress.errors import UsageError
from tests.grid import full


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--hosts", "2,x"], "--hosts 'x' is not a whole number from 2 to 64; write 4, or 2,4,8."),
        (["--hosts", "1"], "--hosts '1' is not a whole number from 2 to 64"),
        (["--model", "nothing"], "'nothing'"),
        (["--codec", "onebot"], "onebot"),
        (["--rate", "fast"], "fast"),
    ],
    ids=["no number", "one host", "model", "codec", "rate"],
)
def test_bad_input_is_one_sentence(options, text):
    result = CliRunner().invoke(app, ["prediction", *options])
    assert isinstance(result.exception, UsageError)
    assert text in str(result.exception)


@pytest.mark.alone
@full
def test_it_simulates_and_measures(tmp_path):
    """Catches: a simulator that is shown what it must predict, or rows that are missing."""
    path = tmp_path / "rows.json"
    CliRunner().invoke(
        app,
        [
            "prediction", "--hosts", "2", "--rate", "100mbit", "--model", "cnn", "--codec", "int8",
            "--strategy", "ps", "--repeats", "2", "--steps", "2", "--json", str(path),
        ],
    )  # fmt: skip
    found = json.loads(path.read_text())["rows"]
    assert [row["codec"] for row in found] == [None, "int8"]
    # The bar is for a quiet machine; this is only to see that both speak of the same step.
    assert all(abs(row["error"]) < 0.6 for row in found)
