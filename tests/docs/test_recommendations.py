"""Advice has one source, which follows from results, and what it recommends is run."""

from __future__ import annotations

import ast
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hipress
import hipress.torch
from hipress import recommendations
from hipress.recommendations import ADAM, RECOMMENDED, SGD, SGD_MOMENTUM, UNKNOWN
from hipress.train.config import TrainConfig
from hipress.version import DOCS, docs_url
from tests.docs.test_codec_tables import generator
from tests.docs.test_docs import PAGES, ROOT, anchors, rows

SRC = Path(hipress.__file__).parent
HEADER = ("optimizer", "write", "times fewer bytes", "reached", "with")


# --- from results ---------------------------------------------------------------------------------


def test_nothing_generated_is_stale() -> None:
    stale = [path.name for path, text in generator.made().items() if path.read_text() != text]
    assert stale == [], "run python docs/generate.py"


def test_the_wheel_holds_the_figures() -> None:
    (line,) = re.findall(r"^hipress = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert f'"{recommendations.FIGURES.name}"' in line


@pytest.mark.parametrize("page", ["README.md", "docs/pytorch.md"])
def test_the_table_has_every_kind(page: str) -> None:
    found = rows(PAGES[page], *HEADER)
    assert [row[0] for row in found] == [one.title for one in RECOMMENDED.values()]
    for row, one in zip(found, RECOMMENDED.values(), strict=True):
        assert re.findall(r"[^`]*hipress\.attach[^`]*", row[1]) == [one.lines()[-1]]
        assert one.measured[0].result in row[3] and one.measured[0].task in row[4]


def changed(folder: Path, files: str, sent: str, **values: object) -> Path:
    """Copies the results, with other values in the row of a file."""
    results = folder / "results"
    results.mkdir()
    for path in generator.RESULTS.glob("convergence-*"):
        shutil.copy(path, results)
    (path,) = results.glob(files)
    document = json.loads(path.read_text())
    (row,) = (r for r in document["rows"] if r.get("sent", f"{r['codec']} of gradients") == sent)
    row.update(values)
    path.write_text(json.dumps(document))
    return results


def test_another_result_makes_them_stale(tmp_path: Path) -> None:
    """Catches: figures that do not come from the results."""
    results = changed(tmp_path, "convergence-gpt-*", "onebit of momentum", ratio_out=12.0)
    assert generator.figures(generator.RESULTS) == recommendations.FIGURES.read_text()
    assert generator.figures(results) != recommendations.FIGURES.read_text()


def test_results_that_no_longer_support_the_advice(tmp_path: Path) -> None:
    """Catches: a codec that is recommended, or warned of, against what was measured."""
    worse = changed(tmp_path, "convergence-gpt-*", "onebit of momentum", losses=[1.6, 1.6, 1.6])
    with pytest.raises(ValueError, match="onebit on GPT is not within 1 point or 1 %"):
        generator.figures(worse)
    shutil.rmtree(worse)
    good = {"accuracies": [98.66, 98.66, 98.66]}
    better = changed(tmp_path, "convergence-cnn-*", "onebit of gradients", **good)
    with pytest.raises(ValueError, match="onebit on CNN is within 1 point or 1 %"):
        generator.figures(better)
    (gone,) = better.glob("convergence-plain-sgd-*")
    gone.unlink()
    with pytest.raises(ValueError, match="no file of results is called convergence-plain-sgd"):
        generator.figures(better)


def test_what_was_measured_is_what_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: figures beside a codec that was not run, such as the other kind of momentum."""
    for kind, one in RECOMMENDED.items():
        assert {measured.codec for measured in one.measured} == {one.codec}
        run = {hipress.codec(found.codec).name for found in generator.EVIDENCE[kind]}
        assert run == {hipress.codec(one.codec).name}
    (cnn,) = (e for e in generator.EVIDENCE[SGD_MOMENTUM] if e.model == "cnn")
    assert cnn.codec == "momentum(onebit, mu=0.9, nesterov=false)"
    nesterov = generator.Evidence(
        files=generator._TABLE,
        **generator._MLP,
        optimizer="sgd",
        sent="momentum(onebit) of gradients",
    )
    monkeypatch.setitem(generator.EVIDENCE, SGD_MOMENTUM, [nesterov])
    with pytest.raises(
        ValueError, match=r"momentum\(onebit\) was run and momentum\(ef\(onebit\), "
    ):
        generator.figures()


@pytest.mark.parametrize(
    "number, digits, text",
    [(1.5105, 3, "1.511"), (2.5, 0, "3"), (16.0, 0, "16"), (0.125, 2, "0.13"), (3.94, 1, "3.9")],
)
def test_halves_are_rounded_up(number: float, digits: int, text: str) -> None:
    """Catches: a half that is rounded as its binary digits happen to fall."""
    assert recommendations.rounded(number, digits) == text


@pytest.mark.parametrize("kind", [ADAM, UNKNOWN])
def test_both_tables_of_the_readme_round_a_run_alike(kind: str) -> None:
    """Catches: one run with two losses on one page."""
    header = ("codec", "what is sent", "times smaller", "error feedback", "trained: GPT / ResNet")
    trained = {row[0]: row[-1].partition(" / ")[0] for row in rows(PAGES["README.md"], *header)}
    (gpt,) = (m for m in RECOMMENDED[kind].measured if m.model == "GPT")
    assert gpt.result == f"loss {trained[gpt.codec]}, uncompressed {trained['none']}"


def test_all_name_one_codec_for_sgd_with_momentum() -> None:
    codec = RECOMMENDED[SGD_MOMENTUM].codec
    assert TrainConfig(model="cnn").with_default_codec(4).codec == codec
    assert recommendations.momentum_codec(0.9, nesterov=False) == codec
    assert codec in PAGES["docs/train.md"]


def test_the_scores_of_a_warning_have_the_same_seeds() -> None:
    """Catches: the mean of three seeds beside that of one."""
    assert recommendations.warning(ADAM) == (
        "GPT on tiny-shakespeare, AdamW, 1 seed: loss 2.039 with onebit on gradients, 1.507 as "
        "recommended, 1.511 uncompressed"
    )


# --- run ------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(128, 128))
    dist.destroy_process_group()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


USUAL = {
    SGD: "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    UNKNOWN: "optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)",
}


@pytest.mark.parametrize("kind", RECOMMENDED)
def test_what_is_recommended_runs_without_a_warning(
    kind: str, model: DistributedDataParallel, caplog: pytest.LogCaptureFixture
) -> None:
    lines = RECOMMENDED[kind].lines()
    names = {"torch": torch, "hipress": hipress, "model": model}
    exec("\n".join([USUAL.get(kind, ""), *lines]), names)
    for _ in range(2):
        model(torch.randn(4, 128)).square().mean().backward()
        names["optimizer"].step()  # type: ignore[attr-defined]
        names["optimizer"].zero_grad()  # type: ignore[attr-defined]
    assert names["sync"].stats().num_compressed == 1  # type: ignore[attr-defined]
    assert warnings_of(caplog) == []


def adamw(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def sgd(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("bare", [False, True], ids=["attach", "comm_hook"])
@pytest.mark.parametrize(
    "make, codec, text",
    [
        (adamw, "onebit", recommendations.warning(ADAM)),
        (adamw, "momentum(ef(onebit))", "AdamW averages gradients again"),
        (sgd, "onebit", recommendations.warning(SGD_MOMENTUM)),
        (sgd, "momentum(ef(onebit))", "so it counts twice"),
        (None, "onebit", "onebit depends on the optimizer, which could not be checked"),
        (None, "momentum(ef(onebit))", "which could not be checked: pass optimizer=optimizer"),
        (sgd, "int8", ""),
        (adamw, "int4", ""),
        (None, "bf16", ""),
    ],
)
def test_a_pair_that_does_not_train_well_is_told_once(
    make, codec, text, bare, model: DistributedDataParallel, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = None if make is None else make(model.parameters())
    if bare:
        model.register_comm_hook(*hipress.torch.comm_hook(codec=codec, optimizer=optimizer))
    else:
        hipress.attach(model, codec=codec, optimizer=optimizer)
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(4, 128)).sum().backward()
    said = warnings_of(caplog)
    assert len(said) == bool(text) and all(text in one for one in said)


# --- pages and texts ------------------------------------------------------------------------------


def constants(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module that are not docstrings or comments under a name."""
    tree = ast.parse(path.read_text("utf-8"))
    bare = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.lineno, node.value


def cited(path: Path) -> Iterator[tuple[str, ...]]:
    """The pages and sections that a module gives the address of."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "docs_url":
            yield tuple(ast.literal_eval(argument) for argument in node.args)


def test_messages_name_no_file_of_the_repository() -> None:
    found = [
        f"{path.relative_to(SRC)}:{line}"
        for path in SRC.rglob("*.py")
        for line, text in constants(path)
        if re.search(r"\bdocs/|\.md\b", text)
    ]
    assert found == []


def test_every_page_that_is_cited_exists() -> None:
    pages = {call for path in SRC.rglob("*.py") for call in cited(path)}
    assert len(pages) > 5
    for page, *section in pages:
        text = PAGES[f"docs/{page}.md"]
        assert set(section) <= anchors(text), (page, section)
    assert docs_url("train") == f"{DOCS}train/" and docs_url("a", "b") == f"{DOCS}a/#b"


CLAIMS = (
    r"[Aa]ll other codecs work",
    r"(attach|comm_hook)\(((?!optimizer)[^)])*codec=\"onebit\"\)",
    r"attach\(model, codec=\"momentum\(ef\(onebit\)\)\"\)",
    r"hipress train [^\n]*--codec '?onebit",
)
"""What must not be written: a codec that depends on the optimizer, without the optimizer."""


def test_nothing_recommends_a_codec_without_its_optimizer() -> None:
    texts = {**PAGES, **{p.name: p.read_text() for p in (ROOT / "examples").rglob("*.py")}}
    found = [
        (name, claim) for name, text in texts.items() for claim in CLAIMS if re.search(claim, text)
    ]
    assert found == []
    bad = 'sync = hipress.attach(model, codec="onebit")'
    assert any(re.search(claim, bad) for claim in CLAIMS)
