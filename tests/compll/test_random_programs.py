"""Random programs mean the same to the oracle, to `reference` and to `cpu`.

`HIPRESS_TEST_PROGRAMS` multiplies the number of programs: 1 is what CI runs; 20 is a night's hunt.
The programs are the same in every run with the same factor.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from hipress.compll.backends import threads
from hipress.compll.passes.derive import PLAIN, Variant
from hipress.compll.passes.schedule import NotFusable
from tests.compll.generate import Program, programs
from tests.compll.harness import Result, bound, run, run_oracle
from tests.grid import thinned

FACTOR = float(os.environ.get("HIPRESS_TEST_PROGRAMS", "1"))
SIZES = (1, 7, 8, 63, 64, 65, 200, 2047, 2048, 2049, 5000)
VARIANTS = (
    *(PLAIN, PLAIN, Variant(feedback=True), Variant(feedback=True)),
    *(Variant(momentum=True), Variant(feedback=True, momentum=True, nesterov=True)),
)
variants = st.sampled_from(VARIANTS)
OWN_PROGRAM = """
void OwnEncode(float* g, uint8* c) {
    c = concat(map(g, [&](float x) -> float { return x * 0.1875; }));
}
void OwnDecode(uint8* c, float* g) {
    extract(c, g);
}
"""
"""No other test loads its kernels, so this process has not loaded them yet."""


def quiet(num_examples: int) -> Any:
    """Settings of a run whose programs do not change from run to run."""
    return settings(
        max_examples=max(1, int(num_examples * FACTOR)),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kernels of random programs do not belong into the user's cache."""
    # One folder for the process: tests of other files may run in between, and a kernel that is
    # loaded already is not written again.
    folder = tmp_path_factory.getbasetemp() / "random-programs"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIPRESS_CACHE_DIR", str(folder))
        yield


def gradient(kind: str, n: int, seed: int) -> np.ndarray:
    """A gradient of a kind that programs stumble on."""
    rs = np.random.RandomState(seed)
    x = rs.standard_normal(n).astype(np.float32)
    if kind == "zeros":
        return np.zeros(n, np.float32)
    if kind == "denormal":
        x *= np.float32(1e-40)
    elif kind == "large":
        x *= np.float32(1e11)
    elif kind == "whole":
        x = np.round(x * 3)
    elif kind == "same":
        x[:] = x[0]
    elif kind == "mixed":
        scale = np.float32(10.0) ** rs.randint(-42, 11, n).astype(np.float32)
        x = (x * scale).astype(np.float32)
        x[rs.random_sample(n) < 0.2] = 0.0
    return x


KINDS = ("normal", "zeros", "denormal", "large", "whole", "same", "mixed")
cases = st.tuples(st.sampled_from(KINDS), st.sampled_from(SIZES), st.integers(0, 99))


def same(want: Result, got: Result, exact: bool) -> None:
    """Both made the same; where floats were summed, nearly the same."""
    assert bool(want.flag) == bool(got.flag)
    assert want.body.shape == got.body.shape
    if exact:
        # Bytes, but for the sign of a zero: what max(0.0, -0.0) is depends on the backend.
        assert equal_bytes(want.body, got.body), differing(want.body, got.body)
    pairs = [(want.decoded, got.decoded), (want.added, got.added)]
    for a, b in [*pairs, *zip(want.states, got.states, strict=True)]:
        if exact:
            np.testing.assert_array_equal(a, b)
        else:
            size = np.abs(a[np.isfinite(a)]).max(initial=0.0)
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * size + 1e-30)


def equal_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    differ = np.flatnonzero(a != b)
    return all(i % 2 == 1 and {int(a[i]), int(b[i])} == {0x00, 0x80} for i in differ)


def differing(a: np.ndarray, b: np.ndarray) -> str:
    at = np.flatnonzero(a != b)[:8]
    return f"bytes {at.tolist()}: {a[at].tolist()} against {b[at].tolist()}"


def start_states(program: Program, n: int, variant: Variant, seed: int) -> list[np.ndarray]:
    rs = np.random.RandomState(seed + 1)
    count = program.num_states + variant.feedback + variant.momentum
    return [rs.standard_normal(n).astype(np.float32) for _ in range(count)]


def show(program: Program, case: tuple[str, int, int]) -> None:
    note(f"{case}, {program.params}\n{program.text}")


def against_oracle(program: Program, case: tuple[str, int, int], variant: Variant) -> None:
    """`reference` makes what the oracle makes."""
    kind, n, seed = case
    x = gradient(kind, n, seed)
    states = start_states(program, n, variant, seed)
    into = gradient("normal", n, seed + 2)
    kernels = bound(program.text, program.params)
    got = run(kernels, "reference", x, states, into=into, variant=variant)
    want = run_oracle(program.text, program.params, x, states, into=into, variant=variant)
    same(want, got, program.exact)


def against_reference(program: Program, case: tuple[str, int, int], variant: Variant) -> None:
    """`cpu` makes what `reference` makes, and the same bits on one thread and on three."""
    kind, n, seed = case
    x = gradient(kind, n, seed)
    states = start_states(program, n, variant, seed)
    into = gradient("normal", n, seed + 2)
    kernels = bound(program.text, program.params)
    want = run(kernels, "reference", x, states, into=into, variant=variant)
    got = run(kernels, "cpu", x, states, into=into, variant=variant)
    same(want, got, program.exact)
    pool = threads.runner(3)
    shared = run(kernels, "cpu", x, states, into=into, variant=variant, pool=pool)
    assert shared.body.tobytes() == got.body.tobytes()
    assert shared.added.tobytes() == got.added.tobytes()
    for a, b in zip(shared.states, got.states, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("num_programs", thinned([60, 200], keep=(60,)))
def test_reference_means_what_the_oracle_means(num_programs: int) -> None:
    @quiet(num_programs)
    @given(program=programs(), case=cases, variant=variants)
    def holds(program: Program, case: tuple[str, int, int], variant: Variant) -> None:
        show(program, case)
        kind, n, seed = case
        try:
            against_oracle(program, (kind, min(n, 2049), seed), variant)
        except NotFusable:
            return

    holds()


@pytest.mark.parametrize("num_programs", thinned([2, 16], keep=(2,)))
def test_cpu_equals_reference(num_programs: int) -> None:
    quiet(num_programs)(
        given(program=programs(most=3), case=cases, variant=variants, more=st.sampled_from(SIZES))(
            _cpu_equals_reference
        )
    )()


def _cpu_equals_reference(
    program: Program, case: tuple[str, int, int], variant: Variant, more: int
) -> None:
    show(program, case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "MIN_TILES", 1)  # so that few elements are shared out too
        try:
            for each in (case, ("mixed", more, 5), ("normal", 65, 6)):
                against_reference(program, each, variant)
        except NotFusable:
            return


def test_the_kernels_went_to_their_own_cache() -> None:
    """Catches: a user's cache that fills with kernels of random programs."""
    folder = Path(os.environ["HIPRESS_CACHE_DIR"])
    assert folder.name == "random-programs"
    bound(OWN_PROGRAM).load("cpu")
    assert (folder / "kernels").is_dir()
