"""The page of `sync.report`: what is in it, what it loads, and what is refused."""

import html
import importlib.util
import re
import shutil
import subprocess

import pytest
import torch
import torch.distributed as dist

from hipress import session
from hipress.errors import MissingDependencyError, UsageError
from hipress.session import report, report_page
from hipress.session.policy import Trial

SECTIONS = (
    "Where the time went", "Step time over the run", "The plan, and why", "Layers",
    "Residual norms", "Decisions",
)  # fmt: skip
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
HOSTILE = "<img src=http://x/y onerror=alert(1)>.weight"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(1)
    values = {"big": torch.randn(64, 80), HOSTILE: torch.randn(64, 64), "bias": torch.randn(9)}
    made = session.start(values, codec="onebit", guard=True)
    for _ in range(12):
        made.average({name: value.clone() for name, value in values.items()})
    made.monitor.note(7, "guard", "from onebit to int4: big (cosine 0.1)")
    yield made
    dist.destroy_process_group()


def page_of(run, tmp_path):
    path = tmp_path / "run.html"
    run.report(path)
    return path.read_text("utf-8")


def test_the_numbers_are_those_of_the_session(run):
    """Catches: residuals of another layer, bytes of all ranks, a split that does not add up."""
    made = report.collect(run, [report._own(run)])
    assert [layer.name for layer in made.layers] == ["big", HOSTILE, "bias"]
    big, _, bias = made.layers
    (held,) = [
        state["residual"] for key, state in run.engine.states.partitions_of("big").items()
        if key.kind.value == "frame"
    ]  # fmt: skip
    assert big.residual == pytest.approx(float(held.norm()), rel=1e-5) and big.residual > 0
    assert big.frame_bytes == run.gradients["big"].choice.codec.wire_bytes(64 * 80)
    assert big.gradient_bytes == 4 * 64 * 80
    assert 0 < big.coding_s < big.under_way_s < 10
    assert "cosine" in big.accuracy
    assert (bias.codec, bias.residual) == ("none", None)
    assert bias.reason == "one dimension (norm or bias)"
    (rank,) = made.ranks
    assert rank.split == run.monitor.totals.split()
    assert rank.split.num_steps + rank.setup_steps == 12
    assert [step for step, _ in made.points][-1] == 12
    assert sum(split.num_steps for _, split in made.points) == rank.split.num_steps


def test_a_page_has_all_sections(run, tmp_path):
    """Catches: a section that is lost, a layer without its row, a decision that is not told."""
    text = page_of(run, tmp_path)
    assert re.findall(r"<h2>(.*?)</h2>", text) == list(SECTIONS)
    for wanted in (
        "onebit (ps) for 2 of 3 gradients", "the codec was given to attach", "<td>big</td>",
        "one dimension (norm or bias)", "from onebit to int4: big", "12", "of set-up, not counted",
        *report_page.MEANINGS.values(),
    ):  # fmt: skip
        assert wanted in text, wanted


def test_a_page_loads_nothing_and_runs_no_name(run, tmp_path):
    """Catches: a request to another machine, a layer whose name is taken for a program."""
    text = page_of(run, tmp_path)
    own = re.sub(r"<script>.*?</script>", "", text, count=1, flags=re.DOTALL)  # plotly's program
    assert len(own) < 200_000 < len(text)
    assert "default-src 'none'" in own
    assert html.escape(HOSTILE) in own and HOSTILE not in own
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)", own)
    markup = re.sub(r"<script.*?</script>", "", own, flags=re.DOTALL)
    without_names = markup.replace(html.escape(HOSTILE), "")
    assert not re.search(r"(src|href)\s*=|@import|url\(", without_names)


def test_the_times_of_auto_are_in_a_table(run):
    """Catches: a plan without the times that it was chosen for."""
    made = report.collect(run, [report._own(run)])
    trials = (
        Trial(label="int8 ps", step_s=0.004, num_steps=8, predicted_s=0.003, is_chosen=True),
        Trial(label="plain", step_s=0.012, num_steps=5, predicted_s=None, is_chosen=False),
    )
    text = report_page._plan(report.Report(**{**vars(made), "trials": trials}))
    rows = re.findall(r"<tr(.*?)</tr>", text)
    assert 'class="chosen"' in rows[1] and "int8 ps" in rows[1]
    assert "4.00 ms" in rows[1] and "3.00 ms" in rows[1] and "12.00 ms" in rows[2]


def test_a_page_can_be_made_before_the_first_step(tmp_path, monkeypatch):
    """Catches: a division by no steps."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = session.start({"w": torch.ones(64, 64)}, codec="int8(ef=false)")
        text = page_of(run, tmp_path)
        assert "No step has been finished" in text
        assert "No codec of this run keeps a residual" in text
    finally:
        dist.destroy_process_group()


def test_what_is_refused(run, tmp_path, monkeypatch):
    """Catches: an error after the others have gone on, and one of Python's own."""
    with pytest.raises(UsageError, match="^folder .*gone does not exist; make it"):
        run.report(tmp_path / "gone" / "run.html")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name)
    )
    with pytest.raises(MissingDependencyError, match="pip install plotly"):
        run.report(tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()


COUNT = """
<script>
addEventListener("error", () => document.body.dataset.errors = "some");
addEventListener("securitypolicyviolation", () => document.body.dataset.refused = "some");
addEventListener("load", () => {
  const box = (one) => one.getBoundingClientRect();
  const wide = [...document.querySelectorAll("section, .main-svg")]
    .filter((one) => box(one).right > innerWidth);
  document.body.dataset.charts = document.querySelectorAll(".plotly-graph-div .main-svg").length;
  document.body.dataset.bars = document.querySelectorAll(".bars .point").length;
  document.body.dataset.loaded = performance.getEntriesByType("resource").length;
  document.body.dataset.wide = wide.length;
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here to open the page with")
def test_a_browser_draws_the_page(run, tmp_path):
    """Catches: a chart that plotly refuses, an error on the page, a request, a part beside it."""
    page = tmp_path / "counted.html"
    page.write_text(page_of(run, tmp_path).replace("<main>", f"{COUNT}<main>", 1), "utf-8")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    body = re.search(r"<body([^>]*)>", done.stdout)[1]
    told = dict(re.findall(r'data-(\w+)="(\w+)"', body))
    assert int(told.pop("charts")) >= 3 and int(told.pop("bars")) >= 5 + 2
    assert told == {"loaded": "0", "wide": "0"}
