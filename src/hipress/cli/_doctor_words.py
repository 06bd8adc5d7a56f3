"""What `hipress doctor --model` says of what it found."""

from __future__ import annotations

import contextlib
import math
import shlex
from typing import Any

from hipress.cli._doctor_job import MOST_RATE, PREDICTION_ERROR, Finding, fixed_choices
from hipress.cli._sweep import PLAN
from hipress.errors import UsageError
from hipress.secopa.budget import CAREFUL
from hipress.secopa.what_if import parse_rate, rate_text

LAB_HOSTS = 64
"""The most that `hipress bench train` takes."""


def as_json(found: Finding) -> dict[str, Any]:
    """Plain values."""
    model, best = found.profile.model, found.best
    assert model is not None
    rate = found.break_even_bits
    return {
        "command": "doctor",
        "model": found.job.model,
        "hosts": found.job.hosts,
        "rate": found.job.rate,
        "batch": model.batch,
        "timed_batch": found.timed_batch,
        "pays": found.pays,
        "speedup": best["speedup"],
        "error": found.error,
        "best": {key: best[key] for key in ("codec", "strategy", "step_s")},
        "limit": found.limit,
        "break_even_bits": None if rate is None or math.isinf(rate) else rate,
        "always_pays": rate is not None and math.isinf(rate),
        "advice": advice(found),
        "paragraph": paragraph(found),
        "rows": found.rows,
    }


def paragraph(found: Finding) -> str:
    """What compression would give this job, how sure that is, and what limits it."""
    job, best, model = found.job, found.best, found.profile.model
    assert model is not None
    plain = found.rows[0]
    low, high = best["speedup"] / (1 + found.error), best["speedup"] * (1 + found.error)
    what = _choice(found)
    text = (
        f"{job.model} (batch {model.batch}, {4e-6 * model.num_elements:.0f} MB of gradients) on "
        f"{job.hosts} hosts like this one at {job.rate}: plain all-reduce would take "
        f"{plain['step_s'] * 1e3:.0f} ms a step, of which {plain['exposed_s'] * 1e3:.0f} ms wait "
        f"for the network. "
    )
    if found.pays == "no":
        text += f"Compression would not shorten that (best: {what}, {best['speedup']:.2f} times)."
    else:
        sure = "" if found.pays == "yes" else ", which is within the error: try it"
        text += (
            f"With {what} it would take {best['step_s'] * 1e3:.0f} ms: {best['speedup']:.2f} times "
            f"as fast (between {low:.2f} and {high:.2f}, {found.error:.0%} either way: nine of ten "
            f"predictions of hipress bench prediction, on links that were measured, were within "
            f"{PREDICTION_ERROR:.0%} of the measured step, and timings here vary){sure}."
        )
    text += f" What then limits the step is {found.limit}. {_break_even_text(found)}"
    if found.timed_batch != model.batch:
        text += f" The model was timed with {found.timed_batch} of {model.batch} examples."
    return text


def _break_even_text(found: Finding) -> str:
    rate = found.break_even_bits
    if found.job.hosts == 1:
        return "One host has nobody to exchange gradients with."
    if rate is None:
        return "With these codecs compression pays at no rate."
    if math.isinf(rate):
        return f"Compression pays at any rate up to {rate_text(MOST_RATE)}."
    return f"Compression pays below about {rate_text(rate)}."


def _choice(found: Finding) -> str:
    best = found.best
    if best["codec"] == PLAN:
        return "the planner's mix"
    return (
        "nothing compressed" if best["codec"] == "none" else f"{best['codec']} {best['strategy']}"
    )


def advice(found: Finding) -> str:
    """What to run next."""
    job, best = found.job, found.best
    if found.pays == "no":
        return (
            "leave it uncompressed; hipress.attach(model) finds the same and stays out of the way"
        )
    codec, strategy = fixed_choices(found.rows)[0]
    call = f'codec="{codec}", strategy="{strategy}"' if best["codec"] != PLAN else ""
    hosts, rate = min(job.hosts, LAB_HOSTS), _lab_rate(job.rate)
    batch = "" if job.batch is None else f" --batch {job.batch}"
    limits = []
    if hosts < job.hosts:
        limits.append(f"of at most {hosts} hosts")
    if rate == "none":
        limits.append(f"with links that are not shaped, since none can be to {job.rate}")
    lab = " ".join(["a lab", " and ".join(limits)]).strip()
    return (
        f"hipress bench train --model {job.model} --hosts {hosts} --rate {rate}{batch} --codec "
        f"'{codec}' --strategy {strategy} measures it in {lab}; in a script of yours, "
        f"sync = hipress.attach(model) decides on the job itself{_or_by_name(codec, call)}"
    )


def _or_by_name(codec: str, call: str) -> str:
    """How to have the codec that was found, and what to mind."""
    if not call:
        return ""
    minds = "" if codec in CAREFUL else " (docs/convergence.md says what it does to accuracy)"
    return f", sync = hipress.attach(model, {call}) takes this codec{minds}"


def _lab_rate(text: str) -> str:
    """A rate as the lab takes it; none where it cannot shape links to it."""
    from hipress.lab import links

    for spelt in (text, rate_text(parse_rate(text))):
        with contextlib.suppress(UsageError):
            links.parse_rate(spelt)
            return shlex.quote(spelt)
    return "none"


def show(found: Finding) -> None:
    """Prints the paragraph and the table."""
    import textwrap

    from hipress.bench.table import Column, fixed, print_table

    print(textwrap.fill(paragraph(found), 96))
    print(f"Next: {advice(found)}.")
    columns = [
        Column(header="codec", show=lambda row: row["codec"], is_text=True),
        Column(header="strategy", show=lambda row: row["strategy"], is_text=True),
        Column(header="ms per\nstep", show=fixed("step_s", 1, scale=1e3)),
        Column(header="x\nplain", show=fixed("speedup", 2)),
        Column(header="exposed\nms", show=fixed("exposed_s", 1, scale=1e3)),
        Column(header="MB\nper host", show=fixed("bytes_per_rank", 3, scale=1e-6)),
        Column(header="scaling\n%", show=fixed("efficiency", 1, scale=100)),
    ]
    print_table(f"Predicted steps, {found.profile.made}", columns, found.rows)
