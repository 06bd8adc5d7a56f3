"""`hipress bench gradient`: a real gradient, rows that make sense, the missing-package error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from hipress.bench.codecs import digits_gradient, gradient_row, line_up
from hipress.cli.main import main
from hipress.errors import MissingDependencyError


@pytest.fixture(scope="module")
def gradient() -> torch.Tensor:
    return digits_gradient(width=128)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of any backend make these rows, and these need not be compiled."""
    monkeypatch.setenv("HIPRESS_BACKEND", "reference")


def test_gradient_is_real_and_repeatable(gradient: torch.Tensor) -> None:
    assert gradient.numel() == 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10
    assert bool(gradient.isfinite().all()) and float(gradient.norm()) > 0
    assert torch.equal(gradient, digits_gradient(width=128))


def test_rows_tell_what_feedback_does(gradient: torch.Tensor) -> None:
    rows = {name: gradient_row(name, gradient) for name in line_up()}
    assert rows["none"]["error"] == 0.0
    assert rows["fp16"]["error"] < 2**-10
    for name in ("none", "terngrad", "minmax(bits=2)"):
        assert rows[name]["mean_error"] is None
    for name in ("ef(onebit)", "ef(topk(ratio=0.01, exact=true))"):
        # The mean of k messages misses only residual / k.
        assert rows[name]["mean_error"] < rows[name]["error"]
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["size_bytes"] / row["wire_bytes"])
        assert min(row["encode_gb_per_s"], row["decode_gb_per_s"], row["memcpy_gb_per_s"]) > 0


def test_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hipress.cli.bench.WIDTH", 128)
    path = tmp_path / "gradient.json"
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "gradient", "--json", str(path)])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "Error is ||decoded - gradient|| / ||gradient||: 0 is exact" in out
    assert "as the mean of 20 shows" in out and "dithering are unbiased" in out
    assert "ef(onebit)" in out and out.rpartition("\n\n")[2].startswith("Next: ")
    document = json.loads(path.read_text())
    assert document["command"] == "bench gradient" and len(document["rows"]) >= 8


def test_missing_scikit_learn_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install scikit-learn"):
        digits_gradient(width=8)
