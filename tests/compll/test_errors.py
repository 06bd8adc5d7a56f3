"""Wrong programs: where the error points and what it says. And programs that try to break out.

In the programs below `@` marks the place that an error must point at; it is not part of them.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hipress.compll.build import parse_program
from hipress.compll.front.parse import MAX_CHARS
from hipress.compll.passes.derive import Variant
from hipress.errors import ProgramError, UsageError
from tests.compll.harness import bound, run
from tests.grid import thinned

SENT = "void XDecode(uint8* c, float* g) {\n    float* v;\n    extract(c, v);\n    g = v;\n}\n"
ID = "[&](float x) -> float { return x; }"


def encoder(*body: str, args: str = "", decoder: str = SENT) -> str:
    inside = "".join(f"    {line}\n" for line in body)
    return f"void XEncode(float* g, uint8* c{args}) {{\n{inside}}}\n{decoder}"


def decoder(*body: str, send: str = "g") -> str:
    inside = "".join(f"    {line}\n" for line in body)
    return encoder(
        f"c = concat({send});", decoder=f"void XDecode(uint8* c, float* g) {{\n{inside}}}\n"
    )


WRONG: dict[str, tuple[str, str]] = {
    # Syntax.
    "a missing semicolon": (
        encoder("float x = 1", "@c = concat(g);"),
        "found 'c'; expected ';', ')'",
    ),
    "a missing bracket": (encoder("float x = (1 + 2@;"), "found ';'; expected ')'"),
    "an end too early": ("void XEncode(float* g, uint8* c) {@", "found the end of the file"),
    "a number for a name": (encoder("float @1 = 1;"), "found '1'; expected "),
    "half an expression": (encoder("float x = 1 +@;"), "found ';'; expected '!' or '~', '(', "),
    "a statement outside": ("float x @= 1;", "found '='; expected '('"),
    "a lambda without its arrow": (
        encoder("float* v = map(g, [&](float x) @{ return x; });"),
        "'->'",
    ),
    "a lambda without its capture": (
        encoder("uint4* v = map(g, @(float x) -> uint4 { return x > 0.0; });"),
        "a lambda begins with [&]; write [&](float x) -> float { ... }",
    ),
    "a second argument that is one": (
        encoder("float s = reduce(map(g, abs), 0.0, @(float a, float b) -> float { return a; });"),
        "a lambda begins with [&]",
    ),
    "an empty capture": (
        encoder("uint4* v = map(g, @[](float x) -> uint4 { return 1; });"),
        "a lambda begins with [&]",
    ),
    "a capture by value": (
        encoder("uint4* v = map(g, @[=](float x) -> uint4 { return 1; });"),
        "a lambda begins with [&]",
    ),
    "a lambda without types": (
        encoder("uint4* v = map(g, @(x) -> uint4 { return 1; });"),
        "a lambda begins with [&]",
    ),
    "a lambda on arrays without its capture": (
        encoder("uint4* v = map(g, @(uint4* x) -> uint4 { return 1; });"),
        "a lambda begins with [&]",
    ),
    "a named lambda without its capture": (
        encoder("lambda_func f = @(float x) -> float { return x; }"),
        "a lambda begins with [&]",
    ),
    "a lambda of Python": (encoder("float* v = map(g, @lambda x: x);"), "a lambda begins with [&]"),
    "an array of a type that is one": (
        encoder("uint4* v = map(g, [&](float x) @{ return 1; });"),
        "found '{'; expected '->'",
    ),
    "an if without brackets": (encoder("if (1) @c = concat(g);"), "found 'c'; expected '{'"),
    "a sign the language has not": (encoder("float x = 1 @$ 2;"), "'$' has no meaning here"),
    "a letter of another alphabet": (encoder("float @\u03b1 = 1;"), "'\u03b1' has no meaning here"),
    "a string": (encoder('float x = @"1";'), "'\"' has no meaning here"),
    "a number and a name run together": (encoder("float x = @1x;"), "has no meaning here"),
    "a hexadecimal number": (encoder("int x = @0x10;"), "has no meaning here"),
    # Habits of other languages.
    "a for loop": (
        encoder("@for (int i = 0; i < g.size; i = i + 1) { c = concat(g); }"),
        "the language has no 'for'; map, reduce, filter and scan go over arrays, if and ?: choose",
    ),
    "a for loop over a name": (encoder("@for (i = 0; i < 3; i++) { }"), "has no 'for'; map, "),
    "a while loop": (encoder("int x = 1; @while (x) { c = concat(g); }"), "has no 'while'; map, "),
    "a do loop": (encoder("// do\n    @do { c = concat(g); } while (1);"), "has no 'do'; map, "),
    "a switch": (encoder("@switch (1) { }"), "has no 'switch'; map, "),
    "adding to a name": (
        encoder("float x = 1;", "@x += 2;"),
        "the language has no '+='; write x = x + ...",
    ),
    "shifting a name": (encoder("int x = 1;", "@x <<= 2;"), "has no '<<='; write x = x << ..."),
    "counting up": (encoder("int x = 1;", "@x++;"), "the language has no '++'; write x = x + 1"),
    "setting an element": (
        encoder("float* v = g;", "@v[g.size - 1] = 2.0;"),
        "an element cannot be set; make the whole array: v = map(range(n), ...), or scatter",
    ),
    "adding to an element": (encoder("@g[0] -= 1.0;"), "an element cannot be set; make the whole"),
    "a width that is no type": (
        encoder("@uint7 x = 1;"),
        "'uint7' is not a type; types: float, int, uint1, uint2, uint3, uint4, uint5, uint6, "
        "uint8, uint12, uint16, uint32, "
        "uint<...>, float16, bfloat16",
    ),
    "an array of such": (encoder("@uint7* x = g;"), "'uint7' is not a type; types: float, "),
    "a signed type": (encoder("@int8 x = 1;"), "'int8' is not a type; types: float, "),
    "a type of C": (encoder("@double x = 1;"), "'double' is not a type; types: float, "),
    "a word before a type": (encoder("@const float x = 1;"), "'const' is not a type; types: "),
    "an argument of such a type": (
        "void XEncode(@double* g, uint8* c) { c = concat(g); }" + SENT,
        "'double' is not a type; types: float, ",
    ),
    "a parameter of such a type": (
        encoder("c = concat(g);", args=", @uint7 b"),
        "'uint7' is not a type; param blocks in this file: none; types: float, int, uint1, ",
    ),
    "a field of such a type": (
        "param P { @bool b = 1; }\n" + encoder("c = concat(g);", args=", P p"),
        "'bool' is not a type; types: float, ",
    ),
    "a missing semicolon after a name": (
        encoder("float y = 1;", "float x = y", "@c = concat(g);"),
        "found 'c'; expected ';', ')'",
    ),
    # Names.
    "a name that is too long": (
        "@void " + "X" * 95 + "Encode(float* g, uint8* c) { c = concat(g); }\n" + SENT,
        "the name has 101 characters; at most 100",
    ),
    "an undefined name": (
        encoder("float x = @y + 1;"),
        "'y' is not defined; names in scope: c, g",
    ),
    "a name used before its line": (encoder("float x = @y;", "float y = 1;"), "'y' is not defined"),
    "a name of an inner scope": (
        encoder("if (g.size > 1) { float y = 1; }", "float x = @y;"),
        "'y' is not defined",
    ),
    "a name declared twice": (encoder("float x = 1;", "@int x = 2;"), "'x' is declared twice"),
    "an undefined function": (
        encoder("float x = @sin(1.0);"),
        "'sin' is not a function; operators: abs, bits, blocks, concat",
    ),
    "a number called": (encoder("float f = 1;", "float x = @f(2);"), "'f' is float here"),
    "assignment to an undefined name": (encoder("@x = 1;"), "'x' is not defined"),
    "a param block that is not there": (
        encoder("c = concat(g);", args=", @Nothing p"),
        "'Nothing' is not a type; param blocks in this file: none",
    ),
    "a field that is not there": (
        "param P { int bits = 2; }\n" + encoder("int x = @p.bit;", args=", P p"),
        "the param block has no parameter 'bit'; it has: bits",
    ),
    "two parameters of one name": (
        "param P { int bits = 2; }\nparam Q { int bits = 2; }\n@"
        + encoder("c = concat(g);", args=", P p, Q q"),
        "two parameters are called 'bits'; rename one",
    ),
    # Types.
    "a width of seven": (
        encoder("uint<@7> x = 1;"),
        "a uint cannot have 7 bits; allowed: 1, 2, 3, 4, 5, 6, 8, 12, 16, 32",
    ),
    "a width that varies": (
        encoder("int k = g.size;", "uint<@k> x = 1;"),
        "a width is made of integer parameters and literals",
    ),
    "a width of a float": (encoder("@float<8> x = 1;"), "'float' takes no width; write uint<...>"),
    "an array of lambdas": (encoder("@void x = 1;"), "'void' is not the type of a value"),
    "an array where a number is": (
        encoder("float x = @g + 1;"),
        "a number is needed here, this is an array (float*); index it or reduce it",
    ),
    "an array for a number": (
        encoder("float x = @g;"),
        "'x' is a number; this is an array (float*)",
    ),
    "a number for an array": (
        encoder("float* x = @1.0;"),
        "'x' is an array (float*); this is a number",
    ),
    "a number mapped": (
        encoder(f"float* v = map(@1.0, {ID});"),
        "an array is needed here, this is float",
    ),
    "a lambda for a number": (
        encoder(f"lambda_func f = {ID}", "float x = @f + 1;"),
        "a number is needed here, this is a lambda",
    ),
    "a lambda declared as a float": (
        encoder(f"@float f = {ID};"),
        "a lambda is declared with lambda_func",
    ),
    "a number where a lambda is": (encoder("float* v = map(g, @g[0]);"), "a lambda is needed here"),
    "a float as an index": (encoder("float x = g[@1.5];"), "an index is an int; this is a float"),
    "the bits of a float": (encoder("int x = 1 & @2.5;"), "an int is needed here; this is a float"),
    "the remainder of floats": (encoder("float x = @g[0] % 2;"), "an int is needed here"),
    "a name without a value": (
        encoder("float y;", "float x = @y;"),
        "a name without a value yet",
    ),
    "a member of a number": (
        encoder("float x = 1;", "float y = @x.size;"),
        "only arrays have members",
    ),
    "a member arrays have not": (
        encoder("int x = @g.length;"),
        "an array has no 'length', only .size",
    ),
    "random numbers of a code": (
        encoder("float x = random<@uint8>(0, 1);"),
        "random<uint8> is not known; allowed: random<float>, random<int>",
    ),
    # Lambdas.
    "too many arguments for a lambda": (
        encoder(f"lambda_func f = {ID}", "float x = @f(1, 2);"),
        "the lambda takes 1 arguments; 2 were given",
    ),
    "a lambda of one for two arrays": (
        encoder(f"float* v = map(g, g, @{ID});"),
        "a lambda of 2 arguments is needed; this takes 1",
    ),
    "max for one array": (encoder("float* v = map(g, @max);"), "max takes 2 arguments, not 1"),
    "a lambda that may not return": (
        encoder("float* v = map(g, @[&](float x) -> float { if (x > 0.0) { return x; } });"),
        "the lambda may end without a return",
    ),
    "a return without a value": (
        encoder("float* v = map(g, [&](float x) -> float { @return; });"),
        "a lambda returns a value",
    ),
    "an array inside a lambda": (
        encoder("float* v = map(g, [&](float x) -> float { @float* y = g; return x; });"),
        "inside a lambda only numbers can be declared",
    ),
    "an array as an argument": (
        encoder("float* v = map(g, [&](@float* x) -> float { return 1.0; });"),
        "a lambda takes numbers; capture arrays by name instead",
    ),
    "a captured name assigned": (
        encoder("float s = 0;", "float* v = map(g, [&](float x) -> float { @s = x; return x; });"),
        "a lambda can only assign its own names; 's' is captured",
    ),
    "a reduction inside a lambda": (
        encoder("float* v = map(g, [&](float x) -> float { return @reduce(g, 0.0, max); });"),
        "reduce works on whole arrays; call it before the lambda",
    ),
    # Operators.
    "too few arguments": (
        encoder("float x = @reduce(g, 0.0);"),
        "reduce takes 3 arguments; 2 were given",
    ),
    "too many arguments": (encoder("float x = @abs(1, 2);"), "abs takes 1 arguments; 2 were given"),
    "map without a lambda": (
        encoder("float* v = @map(g);"),
        "map takes at least 2 arguments; 1 were given",
    ),
    "arrays of two lengths": (
        encoder("float* v = map(g, @range(5), [&](float x, int i) -> float { return x; });"),
        "this array has 5 elements, the first has as many elements as the gradient; map goes over",
    ),
    "a filter of a filter": (
        encoder(
            "lambda_func big = [&](float x) -> uint1 { return x > 1.0; }",
            "float* v = @filter(filter(g, big, 5), big, 5);",
        ),
        "a filtered array cannot be filtered again; join the two conditions",
    ),
    "a filtered array sorted": (
        encoder("float* v = @sort(filter(g, [&](float x) -> uint1 { return x > 1.0; }, 5));"),
        "sort works on arrays whose length is known; this one is filtered",
    ),
    "a filtered array sampled": (
        encoder("float* v = @sample(filter(g, [&](float x) -> uint1 { return x > 1.0; }), 5);"),
        "sample works on arrays whose length is known; this one is filtered",
    ),
    "a capacity that depends on the gradient": (
        encoder("float* v = filter(g, [&](float x) -> uint1 { return x > 1.0; }, @k);").replace(
            "    float* v = filter", "    int k = g[0];\n    float* v = filter"
        ),
        "a size is made of sizes and parameters; this depends on the gradient",
    ),
    "a range of a float": (
        encoder("float* v = map(range(@2.5), abs);"),
        "a size is an int; this is a float",
    ),
    "float indices": (encoder("float* v = gather(g, @g);"), "indices are ints; this is float*"),
    "values for other indices": (
        encoder("float* v = @scatter(range(5), g, g.size);"),
        "the indices have 5 elements, the values as many elements as the gradient",
    ),
    "a start that varies": (
        encoder(
            "float* v = map(g, [&](float x) -> float { return x; });",
            "per (8) { float s = reduce(g, 0.0, max); }",
            "float t = reduce(g, @s, max);",
        ),
        "a number is needed here, this is an array (float*)",
    ),
    # Statements.
    "a value that is not used": (
        encoder("@g[0] + 1;"),
        "this value is not used; only extract(...) may stand on its own",
    ),
    "a return outside a lambda": (
        encoder("@return;"),
        "return is allowed in lambdas only; use if/else",
    ),
    "a function that returns": (
        encoder("@return g;"),
        "a function returns nothing; assign its output array",
    ),
    "an array chosen by the gradient": (
        encoder("float* v = g;", "@if (g[0] > 0.0) { v = map(g, abs); }"),
        "'v' would be an array that depends on the gradient",
    ),
    "an array of another length": (
        encoder("float v[g.size];", "@v = map(range(5), abs);"),
        "'v' has as many elements as the gradient, but the value assigned to it has 5 elements",
    ),
    "a lambda assigned": (encoder(f"lambda_func f = {ID}", "@f = 1;"), "'f' is not a variable"),
    # The per scope.
    "a block of twelve": (
        encoder("per (@12) { float s = g[0]; }"),
        "a block has 12 elements; that must be a positive multiple of 8",
    ),
    "a block too large for memory": (
        encoder("per (@2147483648) { float s = g[0]; }"),
        "a block has 2147483648 elements, of which arrays are held in memory at once",
    ),
    "a block of none": (encoder("per (@0) { float s = g[0]; }"), "a block has 0 elements"),
    "a block that varies": (
        encoder("per (@g.size) { float s = g[0]; }"),
        "a block size is made of integer parameters and literals",
    ),
    "a per scope in a per scope": (
        encoder("per (8) { @per (8) { float s = g[0]; } }"),
        "a per scope cannot stand inside another",
    ),
    "a number from outside assigned": (
        encoder("float s = 0;", "per (8) { @s = g[0]; }"),
        "'s' has one value for all blocks; declare a new name inside the per scope",
    ),
    "a per scope over no array": (
        encoder("per (@g.size, 8) { float s = g[0]; }"),
        "per cuts an array into blocks; this is int",
    ),
    "a per scope over an array without a length": (
        encoder("float* v;", "per (@v, 8) { float s = g[0]; }"),
        "per cuts an array into blocks; this one has no length yet",
    ),
    "a block of another array that is no multiple of 8": (
        encoder("per (range(20), @12) { float s = g[0]; }"),
        "a block has 12 elements; that must be a positive multiple of 8",
    ),
    "a per scope over another array in a per scope": (
        encoder("per (8) { @per (range(20), 8) { float s = g[0]; } }"),
        "a per scope cannot stand inside another",
    ),
    "an array of another length, assigned in a per scope": (
        encoder("float v[g.size];", "per (range(20), 8) { @v = map(range(20), abs); }"),
        "'v' has as many elements as the gradient, but the value assigned to it has another",
    ),
    "an outer number, assigned in a per scope over another array": (
        encoder("float s = 0;", "per (range(20), 8) { @s = g[0]; }"),
        "'s' has one value for all blocks; declare a new name inside the per scope",
    ),
    "a sample in a per scope": (
        encoder("per (8) { float* v = @sample(g, 2); }"),
        "sample works on whole arrays; it cannot stand in a per scope",
    ),
    "another length out of a per scope": (
        encoder(
            "int k = g.size / 2;",
            "per (8) { float* v = map(range(k), abs); }",
            "c = concat(map(g, [&](float x) -> float { return @v[0]; }));",
        ),
        "'v' is known inside its per scope alone: only numbers, and arrays as long as the block or "
        "with a fixed number of places, leave it",
    ),
    "a lambda out of a per scope": (
        encoder(
            f"per (8) {{ lambda_func f = {ID} float* v = map(g, f); }}", "c = concat(map(g, @f));"
        ),
        "'f' is known inside its per scope alone: only numbers, and arrays as long as the block",
    ),
    "another length for an outer array": (
        encoder("float* v;", "int k = g.size / 2;", "per (8) { @v = map(range(k), abs); }"),
        "'v' is declared outside the per scope: only numbers, and arrays as long as the block or "
        "with a fixed number of places, leave it",
    ),
    **{
        f"{what} of a block's values over another length": (
            encoder(
                "float* t = map(range(g.size / 4), abs);",
                f"per (8) {{ float m = g[0]; {made} = @{call}; }}",
            ),
            f"{what} of a block's values goes over the block or over a fixed number of places, and "
            "the length of this array is neither; take k elements of it with map(range(k), ...)",
        )
        for what, made, call in (
            ("reduce", "float v", "reduce(t, m, max)"),
            ("scan", "float* v", "scan(t, m, max)"),
            ("filter", "float* v", "filter(t, [&](float x) -> uint1 { return x > m; })"),
            ("sort", "float* v", "sort(t, [&](float x) -> float { return x * m; })"),
            ("store", "float* v", "store(map(t, [&](float x) -> float { return x * m; }))"),
            ("first", "float* v", "first(t, 2 * m > 1 ? 1 : 2)"),
            ("scatter", "float* v", "scatter(range(t.size), t, g.size)"),
        )
    },
    "the largest of a whole array": (
        encoder("int* v = @largest(g, 2);"),
        "largest works on a block, or on a fixed number of places in a per scope; of a whole array,"
        " filter the elements",
    ),
    "as many as the gradient says": (
        encoder("per (8) { int m = g[0]; int* v = largest(g, @m); }"),
        "the number of largest elements in a per scope is made of integer parameters and literals,"
        " from 1 to 131072",
    ),
    "a capacity that is a number of the block": (
        encoder(
            "per (8) { float* v = filter(g, [&](float x) -> uint1 { return x > 0.0; }, @g.size); }"
        ),
        "the capacity of a filter in a per scope is made of integer parameters and literals",
    ),
    "a scatter of another size in a per scope": (
        encoder(
            "per (8) { float* v = @scatter(map(g, [&](float x) -> int { return 0; }), g, n); }"
        ).replace("per", "int n = g.size; per", 1),
        "the size of a scatter in a per scope is that of the block, or fixed",
    ),
    "too many places in each block": (
        encoder(
            "per (8) { float s = reduce(@store(map(range(131073), [&](int i) -> float {"
            " return g[i]; })), 0.0, max); }"
        ),
        "an array has 131073 places in each block of 8 elements; at most 131072 are allowed",
    ),
    "a scatter of too many places in each block": (
        encoder("per (8) { float* v = @scatter(range(g.size), g, 131073); }"),
        "an array has 131073 places in each block of 8 elements; at most 131072 are allowed",
    ),
    "an array of too many places that leaves a per scope": (
        "@"
        + encoder(
            "per (8) { float* v = map(range(131073), [&](int i) -> float { return g[i]; }); }"
        ),
        "an array has 131073 places in each block of 8 elements; at most 131072 are allowed",
    ),
    "too many turns": (
        encoder("repeat (i, @65) { float x = i; }"),
        "the number of turns is made of integer parameters and literals, from 0 to 64",
    ),
    "turns that the gradient decides": (
        encoder("int m = g[0];", "repeat (i, @m) { float x = i; }"),
        "the number of turns is made of integer parameters and literals, from 0 to 64",
    ),
    "a store of a number": (encoder("float x = store(@1.0);"), "an array is needed here"),
    "a store inside a lambda": (
        encoder("float* v = map(g, [&](float x) -> float { return @store(g)[0]; });"),
        "store works on whole arrays; call it before the lambda",
    ),
    # Payloads.
    "concat inside an expression": (
        encoder("float x = @concat(g);"),
        "concat cannot stand inside an expression; write: compressed = concat(...);",
    ),
    "concat to another name": (
        encoder("float* v;", "@v = concat(g);").replace("float* v;", "float v[g.size];"),
        "concat(...) is assigned to the payload, once; 'v' is not it",
    ),
    "concat twice": (
        encoder("c = concat(g);", "@c = concat(g);"),
        "concat(...) is assigned to the payload, once",
    ),
    "concat in a per scope": (
        encoder("per (8) { @c = concat(g); }"),
        "concat(...) belongs after the per scope, not inside it",
    ),
    "concat never": ("@" + encoder("float x = 1;"), "XEncode never assigns 'c' = concat(...)"),
    "concat of a lambda": (
        encoder(f"lambda_func f = {ID}", "c = concat(@f);"),
        "concat takes numbers and arrays that have a value",
    ),
    "extract inside an expression": (
        decoder("float* v;", "float x = @extract(c, v);", "g = v;"),
        "extract cannot stand inside an expression; write it as a statement",
    ),
    "extract of another type": (
        decoder("uint8* v;", "extract(c, @v);", "g = v;"),
        "'v' reads uint8*; encode wrote float* here",
    ),
    "extract of a number for an array": (
        decoder("float v;", "extract(c, @v);", "g = map(range(g.size), abs);"),
        "'v' reads float; encode wrote float* here",
    ),
    "extract of another length": (
        decoder("float v[5];", "extract(c, @v);", "g = map(range(g.size), abs);"),
        "'v' has 5 elements; encode wrote as many elements as the gradient",
    ),
    "extract of an undefined name": (decoder("extract(c, @v);"), "'v' is not defined"),
    "decode that never assigns": (
        encoder(
            "c = concat(g);",
            decoder="@void XDecode(uint8* c, float* g) { float* v; extract(c, v); }\n",
        ),
        "XDecode never assigns 'g'",
    ),
    "a gradient of another length": (
        decoder("float* v;", "extract(c, v);", "@g = map(range(5), abs);"),
        "'g' has as many elements as the gradient, but the value assigned to it has 5 elements",
    ),
    # Functions.
    "two gradients": (
        encoder("c = concat(g);", args=", float* h").replace("void XEncode", "@void XEncode"),
        "XEncode takes 2 float* and 1 uint8* arguments; exactly one of each is needed",
    ),
    "no payload": (
        "@void XEncode(float* g) { }\n" + SENT,
        "XEncode takes 1 float* and 0 uint8* arguments",
    ),
    "an array of ints": (
        encoder("c = concat(g);", args=", @int* k"),
        "argument 'k': arrays are float* (gradient), uint8* (payload) or inout float* (state)",
    ),
    "a decode function with state": (
        encoder("c = concat(g);", decoder=SENT.replace("float* g)", "float* g, @inout float* u)")),
        "a decode function keeps no state; remove the inout argument",
    ),
    "a second encode function": (
        encoder("c = concat(g);") + "@void YEncode(float* g, uint8* c) { c = concat(g); }",
        "this is a second function ending in Encode; a file holds one program",
    ),
    "a default that is no literal": (
        "param P { int bits = @n; }\n" + encoder("c = concat(g);", args=", P p"),
        "'n' is not defined",
    ),
    # Limits.
    "a huge int": (
        encoder("float x = @99999999999999999999;"),
        "is too large: a float ends at 3.4e38",
    ),
    "a huge float": (encoder("float x = @1e39;"), "1e39 is too large: a float ends at 3.4e38"),
}


def marked(program: str) -> tuple[str, int, int]:
    """The program without its mark, and the mark's line and column."""
    before, after = program.split("@")
    return before + after, before.count("\n") + 1, len(before) - before.rfind("\n")


def error_of(text: str) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        parse_program(text, file="wrong.pse").bind({}).kernels()
    return caught.value


@pytest.mark.parametrize("name", WRONG)
def test_an_error_points_at_its_place_and_says_why(name: str) -> None:
    program, message = WRONG[name]
    text, line, column = marked(program)
    error = error_of(text)
    assert message in error.message
    assert (error.line, error.column) == (line, column), str(error)
    shown = str(error).splitlines()
    assert shown[0] == f"wrong.pse:{line}:{column}: {error.message}"
    assert error.source_line == (text.splitlines() or [""])[line - 1]
    assert shown[-1].strip() == "^"


# Limits.


def test_a_program_that_is_too_long() -> None:
    error = error_of(encoder("c = concat(g);") + "//" + "x" * MAX_CHARS)
    assert (error.line, error.column) == (1, 1)
    assert f"at most {MAX_CHARS}" in error.message
    assert parse_program((encoder("c = concat(g);") + "//").ljust(MAX_CHARS, "x")).name == "X"


ANY = "void XDecode(uint8* c, float* g) { g = map(range(g.size), abs); }\n"
# Statements of an encode function, nested k deep.
DEEP: dict[str, Callable[[int], str]] = {
    "parentheses": lambda k: "float x = " + "(" * k + "1" + ")" * k + ";",
    "ternaries": lambda k: "float x = " + "1 ? 2 : " * k + "3;",
    "choices": lambda k: "float x = " + "g[0] > 1.0 ? 2.0 : " * k + "3.0;",
    "signs": lambda k: "float x = " + "-" * k + "1;",
    "sums": lambda k: "float x = 0" + " + g[0]" * k + ";",
    "indices": lambda k: "int* r = range(9); float x = " + "r[" * k + "0" + "]" * k + ";",
    "calls": lambda k: "float x = " + "abs(" * k + "1" + ")" * k + ";",
    "ifs": lambda k: "if (g[0] > 0.0) {" * k + "float y = 1;" + "}" * k,
    "else ifs": lambda k: "if (0) { }" + " else if (0) { }" * k,
    "blocks of a lambda": lambda k: (
        "float* v = map(g, [&](float x) -> float { float t = 0.0; "
        + "if (x > t) { t = t + 1.0; } " * k
        + "return t; });"
    ),
    "lambdas that call each other": lambda k: (
        "lambda_func f0 = [&](float x) -> float { return x + 1.0; } "
        + " ".join(
            f"lambda_func f{j} = [&](float x) -> float {{ return f{j - 1}(f{j - 1}(x)); }}"
            for j in range(1, min(k, 60))
        )
        + f" float* v = map(g, f{min(k, 60) - 1});"
    ),
    "a lambda that calls itself": lambda k: (
        "lambda_func f = [&](float x) -> float { return f(x); } float* v = map(g, f);"
    ),
    "two lambdas that call each other": lambda k: (
        "lambda_func f = [&](float x) -> float { return h(x); } lambda_func h = [&]"
        "(float x) -> float { return f(x); } float* v = map(g, f);"
    ),
}


@pytest.mark.parametrize("name", thinned(DEEP, keep=("parentheses", "choices", "sums", "else ifs")))
def test_a_program_that_is_too_deep_is_refused_in_time(name: str) -> None:
    """No RecursionError, no endless compilation: a `ProgramError`, or the program compiles."""
    for k in (10, 50, 100, 150, 200, 301, 302, 303, 304, 307, 400, 501, 1000, 3000):
        text = encoder(DEEP[name](k), "c = concat(g);", decoder=ANY)
        if len(text) > MAX_CHARS:
            break
        try:
            parse_program(text).bind({}).source("reference")
        except ProgramError as error:
            assert re.search(
                "nested too deeply|too large|more than 40 deep|operations one after|calls itself",
                error.message,
            )


def test_as_deep_as_the_manual_allows() -> None:
    """A sum of 100 terms is nested 100 deep."""
    text = encoder(
        "float* v = map(g, [&](float x) -> float { return x" + " + x" * 80 + "; });",
        "c = concat(v);",
    )
    y = run(bound(text), "reference", np.ones(3, np.float32)).decoded
    assert y.tolist() == [81, 81, 81]


# Programs that try to break out.

WORDS = (
    *("import", "def", "lambda", "class", "None", "True", "exec", "eval", "os", "sys", "open"),
    *("__import__", "__builtins__", "__class__", "np", "math", "njit", "I", "F", "W", "body", "x"),
    *("n", "states", "out", "rng", "params", "f32", "i64", "u8", "scratch", "pool", "section0"),
    *("v1", "acc", "_max", "range", "len", "abs", "min", "encode", "decode", "print", "self"),
)


def hostile(words: tuple[str, ...]) -> str:
    """A program whose every name is a word that means something to Python or to our modules."""
    w = words
    return f"""
param {w[0]} {{ float {w[1]} = 2.0; int {w[2]} = 8; }}
void {w[3]}Encode(float* {w[4]}, uint8* {w[5]}, {w[0]} {w[6]}, float {w[7]}) {{
    lambda_func {w[8]} = [&](float {w[9]}, float {w[10]}) -> float {{ return {w[9]} + {w[10]}; }}
    float {w[11]} = reduce({w[4]}, 0.0, {w[8]});
    per ({w[6]}.{w[2]}) {{
        float {w[12]} = reduce({w[4]}, 0.0, {w[8]});
        float* {w[13]} = map({w[4]}, [&](float {w[14]}) -> float {{
            float {w[15]} = {w[14]} * {w[6]}.{w[1]} + {w[7]};
            return {w[15]} + {w[12]} - {w[11]};
        }});
    }}
    {w[5]} = concat({w[11]}, {w[13]}, {w[12]});
}}
void {w[3]}Decode(uint8* {w[5]}, float* {w[4]}) {{
    float {w[11]}; float* {w[13]}; float* {w[12]};
    extract({w[5]}, {w[11]}, {w[13]}, {w[12]});
    {w[4]} = {w[13]};
}}
"""


ORDINARY = tuple(f"name{k}" for k in range(16))


def rotated(start: int) -> tuple[str, ...]:
    return tuple(WORDS[(start + k) % len(WORDS)] for k in range(16))


def identifiers(source: str) -> set[str]:
    """The names that Python sees in a module: comments and texts are none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.string for t in tokens if t.type == tokenize.NAME}


@pytest.mark.parametrize("start", range(0, len(WORDS), 8))
def test_names_never_reach_the_generated_code(start: int) -> None:
    """The module is the one that harmless names give, but for its first line."""
    words = rotated(start)
    plain, odd = bound(hostile(ORDINARY), {"name7": 1.0}), bound(hostile(words), {words[7]: 1.0})
    for backend in ("reference", "cpu"):
        for variant in (Variant(), Variant(feedback=True, momentum=True)):
            ours = plain.source(backend, variant=variant).partition("\n")[2]
            theirs = odd.source(backend, variant=variant).partition("\n")[2]
            assert theirs == ours


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_names_of_pythons_own_have_their_plain_meaning(backend: str) -> None:
    words = ("class", "import", "None", "lambda", "os", "exec", "__import__", "eval")
    words += ("def", "True", "np", "__builtins__", "I", "f32", "x", "self")
    program = bound(hostile(words), {"eval": 1.0})
    x = np.arange(12, dtype=np.float32)
    y = run(program, backend, x).decoded
    sums = np.repeat([x[:8].sum(), x[8:].sum()], [8, 4])
    np.testing.assert_array_equal(y, x * 2 + 1 + sums - x.sum())
    source = program.source(backend)
    assert not identifiers(source) & {"class", "os", "exec", "__import__", "eval", "__builtins__"}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_long_and_strange_names(backend: str) -> None:
    long = "a" * 2000
    text = encoder(f"float* {long} = map(g, abs);", f"c = concat({long});")
    assert long not in bound(text).source(backend)
    under = encoder("float* __ = map(g, abs);", "float* _ = __;", "c = concat(_);")
    assert not identifiers(bound(under).source(backend)) & {"__"}


@pytest.mark.parametrize(
    "text",
    [
        'param P { int bits = 2; }\n"""\nimport os\n"""',
        "void XEncode\\n(float* g, uint8* c) { }",
        "void XEncode(float* g, uint8* c) { float x = 1; }\x00",
        "void X`id`Encode(float* g, uint8* c) { }",
        "#include <stdio.h>",
        "void XEncode(float* g, uint8* c) { float x = __import__('os').system('true'); }",
        "void XEncode(float* g, uint8* c) { float x = g.__class__; c = concat(x); }",
        "void XEncode(float* g, uint8* c) { c = concat(__import__); }",
        "void XEncode(float* g, uint8* c) { float x = eval(1); c = concat(x); }",
    ],
)
def test_python_is_not_the_language(text: str) -> None:
    with pytest.raises(ProgramError):
        parse_program(text + "\n" + SENT).bind({}).kernels()


def test_the_title_is_the_only_place_of_a_programs_name() -> None:
    """A function's name is letters, digits and underscores: it cannot end the text it stands in."""
    program = bound(
        encoder("c = concat(g);")
        .replace("XEncode", "Odd_1Encode")
        .replace("XDecode", "Odd_1Decode")
    )
    for backend in ("reference", "cpu"):
        source = program.source(backend)
        assert source.count("Odd_1") == 1
        docstring = ast.get_docstring(ast.parse(source))
        assert docstring is not None and "Odd_1" in docstring


def test_messages_of_a_program_are_texts_in_the_generated_code() -> None:
    """A parameter that decode checks is named in its refusal, quoted as a Python text."""
    text = """
void XEncode(float* g, uint8* c, uint8 exec) { c = concat(exec, g); }
void XDecode(uint8* c, float* g, uint8 exec) { float* v; extract(c, exec, v); g = v; }
"""
    program = bound(text, {"exec": 3})
    for backend in ("reference", "cpu"):
        source = program.source(backend)
        assert "exec" not in identifiers(source)
        constants = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
        assert "the payload was made with another 'exec'" in constants


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "2", None, [1], 2**70])
def test_values_of_parameters_are_numbers(value: Any) -> None:
    text = encoder(
        "float* v = map(g, [&](float x) -> float { return x * t; });",
        "c = concat(v);",
        args=", int t",
    )
    with pytest.raises(UsageError):
        bound(text, {"t": value})
