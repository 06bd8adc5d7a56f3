"""One function of a program without its other half.

An encode function alone can be checked, shown and compiled. A decode function alone can be
checked where it declares the sizes of what it extracts; its kernels need the layout of the
payload, which the encode function defines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipress.compll import build
from hipress.compll.build import Bound, Program
from hipress.compll.front import ast, check
from hipress.compll.front.arrays import Draft
from hipress.compll.front.graph import Graph
from hipress.compll.ir import Kernel
from hipress.compll.passes import derive
from hipress.compll.passes.derive import PLAIN, Pair, Variant
from hipress.errors import UsageError


def read_any(path: str | Path) -> Program:
    """Reads the program in a file, or what there is of it (see `Half`)."""
    found = build.half_function(path)
    if found is None:
        return build.read_program(path)
    source, function = found
    have = "Encode" if function.name.endswith("Encode") else "Decode"
    params = check.signature(source, function).params
    # The pair holds the one function twice; `BoundHalf` never uses the one that is missing.
    pair = Pair(found, found)
    return Half(function.name.removesuffix(have) or "Program", pair, params, source.text)


@dataclass(frozen=True)
class Half(Program):
    """A program of which only one function is there."""

    @property
    def function(self) -> ast.Function:
        return self.pair.encode[1]

    @property
    def missing(self) -> str:
        is_encode = self.function.name.endswith("Encode")
        return self.function.name[:-6] + ("Decode" if is_encode else "Encode")

    def bind(self, values: Mapping[str, Any]) -> BoundHalf:
        bound = super().bind(values)
        return BoundHalf(self, bound.values)


@dataclass(frozen=True)
class BoundHalf(Bound):
    """Half of a program with its parameters, which makes one kernel at most."""

    program: Half

    def kernels(self, *, dtype: str = "f32", variant: Variant = PLAIN) -> tuple[Kernel, ...]:
        half = self.program
        if half.missing.endswith("Encode"):
            self.check()
            raise UsageError(
                f"{half.function.name} alone gives no kernel: the layout of the payload comes from "
                f"{half.missing}; put that into the same file or beside it."
            )
        if variant.feedback:
            raise UsageError(
                f"error feedback needs {half.missing} too; put it into the same file or beside it."
            )
        return (derive.encode_kernel(half.pair, self.static, dtype=dtype, variant=variant),)

    def check(self) -> None:
        source, function = self.program.pair.encode
        if self.program.missing.endswith("Decode"):
            derive.encode_kernel(self.program.pair, self.static)
        else:
            check.evaluate(source, function, Draft(Graph()), params=self.static)
