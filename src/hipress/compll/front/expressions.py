"""Expressions and lambdas in, values out.

`Expressions` does not know statements of functions and payloads; `check` adds those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from hipress.compll.front import ast, operators
from hipress.compll.front.arrays import ArrayValue, Computed, Sliced, SlicedRow
from hipress.compll.front.draft import Draft
from hipress.compll.front.graph import BOOL, FLOAT, INT, ElemType, TooDeep, convert
from hipress.compll.front.parse import fail
from hipress.compll.front.scope import Binding, Env, Func, Scalar, Struct, Unset
from hipress.compll.ir import Blocks, Expr

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
MAX_DEPTH = 100
MAX_BLOCKS = 40
MAX_WORK = 100_000
"""Expressions and statements evaluated for one function; built-in programs need under 500."""

LEAVES = "only numbers, and arrays as long as the block or with a fixed number of places, leave it"


class Expressions:
    """Turns the expressions of one function into values."""

    def __init__(self, source: ast.Source, draft: Draft) -> None:
        self.source = source
        self.draft = draft
        self.graph = draft.graph
        self.position: Expr | None = None
        """Index that `random` draws for: set while a lambda runs over an array."""
        self.depth = 0
        self.blocks = 0
        self.lambdas = 0
        """Number of lambdas around the expression being evaluated."""
        self.calls: list[Func] = []
        """Lambdas that were called by name and have not returned."""
        self.decoding = False
        self.reducing = False
        self.work = 0
        self.turns: tuple[int, ...] = ()
        """The turns of the `repeat`s around the statement being evaluated."""
        self._sites: dict[object, int] = {}

    @contextmanager
    def nested(self, body: Sequence[ast.Statement]) -> Iterator[None]:
        """Counts statements inside statements."""
        self.blocks += 1
        if self.blocks > MAX_BLOCKS and body:
            self.fail(body[0], f"statements are nested more than {MAX_BLOCKS} deep")
        try:
            yield
        finally:
            self.blocks -= 1

    def fail(self, node: ast.Node, message: str) -> NoReturn:
        fail(self.source.file, self.source.text, node.pos, message)

    def site(self, pos: ast.Pos) -> int:
        """Each `random` in the text draws its own numbers, in each turn of a `repeat` others."""
        return self._sites.setdefault((pos, self.turns), len(self._sites))

    def elem(self, type_: ast.TypeName, env: Env) -> ElemType:
        if type_.width is not None and type_.base != "uint":
            self.fail(type_, f"{type_.base!r} takes no width; write uint<...>")
        if type_.base == "uint":
            if type_.width is None:
                return ElemType("uint", 32)
            width = self.scalar(type_.width, env)
            if width.op != "const" or width.type != "int":
                self.fail(type_.width, "a width is made of integer parameters and literals")
            if width.attr not in WIDTHS:
                choices = ", ".join(map(str, WIDTHS))
                self.fail(type_.width, f"a uint cannot have {width.attr} bits; allowed: {choices}")
            return ElemType("uint", width.attr)
        if type_.base.startswith("uint"):
            return ElemType("uint", int(type_.base[4:]))
        if type_.base in ("float", "int", "float16", "bfloat16"):
            return ElemType(type_.base)
        self.fail(type_, f"{type_.base!r} is not the type of a value; use float, int or uint<...>")

    def declare(self, s: ast.Declare, env: Env) -> None:
        if s.name in env.names:
            self.fail(s, f"{s.name!r} is declared twice")
        if s.type.base == "lambda_func":
            assert isinstance(s.value, ast.Lambda)
            env.names[s.name] = Func(s.value, env)
            return
        if isinstance(s.value, ast.Lambda):
            self.fail(s, "a lambda is declared with lambda_func")
        elem = self.elem(s.type, env)
        if s.value is None:
            length = None if s.size is None else self.size(s.size, env)
            env.names[s.name] = Unset(elem, s.type.array or s.size is not None, length)
        else:
            env.names[s.name] = self.typed(s.value, elem, s.type.array, s.name, env)

    def merge(
        self, node: ast.Node, cond: Expr, yes: list[dict[str, Binding]], env: Env | None
    ) -> None:
        for frame in yes:
            assert env is not None
            for name, a in frame.items():
                b = env.names[name]
                if a is b or a == b:
                    continue
                if isinstance(a, Unset) or isinstance(b, Unset):
                    self.fail(node, f"{name!r} gets a value in one branch only; give it one before")
                if not (isinstance(a, Scalar) and isinstance(b, Scalar)):
                    self.fail(
                        node,
                        f"{name!r} would be an array that depends on the gradient; "
                        "choose between arrays by parameters only, or inside a lambda",
                    )
                env.names[name] = Scalar(self.graph.select(cond, a.value, b.value), a.elem)
            env = env.outer

    def count_work(self, node: ast.Node) -> None:
        """Counts one expression, statement or turn of a `repeat`."""
        self.work += 1
        if self.work > MAX_WORK:
            self.fail(
                node,
                f"the program is too large: more than {MAX_WORK:,} expressions and statements, "
                "those of lambdas counted at each call, of arrays at each use, and of a repeat at "
                "each turn",
            )

    def value(self, node: ast.Expr, env: Env) -> Binding:
        self.depth += 1
        self.count_work(node)
        if self.depth > MAX_DEPTH:
            self.fail(node, "expressions or lambdas are nested too deeply; name the inner ones")
        try:
            return self._value(node, env)
        except TooDeep as error:
            self.fail(node, str(error))
        finally:
            self.depth -= 1

    def _value(self, node: ast.Expr, env: Env) -> Binding:
        if isinstance(node, ast.Number):
            return self.number(self.graph.const(node.value))
        if isinstance(node, ast.Name):
            return self._name(node, env)
        if isinstance(node, ast.Lambda):
            return Func(node, env)
        if isinstance(node, ast.Call):
            return self._call(node, env)
        if isinstance(node, ast.Member):
            return self._member(node, env)
        if isinstance(node, ast.Index):
            array = self.array(node.value, env)
            index = self.scalar(node.index, env)
            if index.type != "int":
                self.fail(node.index, "an index is an int; this is a float")
            return Scalar(operators.element(self, array, index), array.elem)
        if isinstance(node, ast.Ternary):
            cond = self.graph.to_bool(self.scalar(node.cond, env))
            yes, no = self.same(self.scalar(node.yes, env), self.scalar(node.no, env))
            return self.number(self.graph.select(cond, yes, no))
        if isinstance(node, ast.Unary):
            return self.number(self._unary(node, self.scalar(node.value, env)))
        return self.number(self._binary(node, env))

    def number(self, value: Expr) -> Scalar:
        """Returns a scalar with the type that its value has by itself."""
        elem = {"float": FLOAT, "int": INT, "bool": BOOL}[value.type]
        return Scalar(value, elem)

    def _name(self, node: ast.Name, env: Env) -> Binding:
        home = env.home(node.id)
        if home is None:
            self.unknown(node, node.id, env)
        found = home.names[node.id]
        scope = env.per()
        if scope is None or home.within(scope):
            return found
        if isinstance(found, Scalar | Func | Struct | Unset):
            return found
        assert scope.block is not None
        if found.length is scope.count:
            return self._used_part(found, scope)
        if found.length is scope.block.length:
            return Sliced(self.graph, found, scope.block)
        if found.length is self.graph.blocks(scope.block):
            return Scalar(found.at(self.graph.block("bnum", scope.block)), found.elem)
        count = self._row_count(found.length, scope.block)
        return found if count is None else SlicedRow(self.graph, found, scope.block, count)

    def _used_part(self, array: ArrayValue, scope: Env) -> ArrayValue:
        """Returns a block's part of a filtered array: a row, of which some elements are in use."""
        g, block = self.graph, scope.block
        assert block is not None
        length, start = self.used(scope), g.block("bstart", block)
        self.draft.limits[length] = g.const(block.size)
        return Computed(length, array.elem, lambda ix: array.at(g.binary("add", start, ix)))

    def used(self, scope: Env) -> Expr:
        """Returns how many elements of a filtered array are in this block."""
        g = self.graph
        assert scope.block is not None and scope.count is not None
        left = g.binary("sub", scope.count, g.block("bstart", scope.block))
        return g.binary("min", g.binary("max", left, g.const(0)), g.const(scope.block.size))

    def _row_count(self, length: Expr, block: Blocks) -> int | None:
        """Returns the elements for each block of an array that has some for each."""
        blocks = self.graph.blocks(block)
        if length.op != "mul" or blocks not in length.args:
            return None
        [count] = [a for a in length.args if a is not blocks] or [blocks]
        return int(count.attr) if count.op == "const" and count.attr > 0 else None

    def _member(self, node: ast.Member, env: Env) -> Binding:
        value = self.value(node.value, env)
        if isinstance(value, Struct):
            if node.field not in value.fields:
                known = ", ".join(value.fields)
                self.fail(node, f"the param block has no parameter {node.field!r}; it has: {known}")
            return value.fields[node.field]
        if isinstance(value, Unset) and value.array and value.length is not None:
            length = value.length
            scope = env.per()
            if scope is not None and scope.block is not None and length is scope.block.length:
                length = self.graph.block("blen", scope.block)
        elif isinstance(value, Scalar | Func | Unset):
            self.fail(node, f"only arrays have members, and only .size; this has no {node.field!r}")
        else:
            length = value.length
        if node.field != "size":
            self.fail(node, f"an array has no {node.field!r}, only .size")
        return Scalar(length, INT)

    def _unary(self, node: ast.Unary, value: Expr) -> Expr:
        if node.op == "!":
            return self.graph.unary("not", self.graph.to_bool(value))
        if node.op == "~":
            return self.graph.unary("inv", self._whole(node.value, value))
        if value.type == "bool":
            value = self.graph.to_int(value)
        return value if node.op == "+" else self.graph.unary("neg", value)

    def _whole(self, node: ast.Node, value: Expr) -> Expr:
        if value.type == "float":
            self.fail(node, "an int is needed here; this is a float")
        return self.graph.to_int(value)

    def _binary(self, node: ast.Binary, env: Env) -> Expr:
        g = self.graph
        a, b = self.scalar(node.left, env), self.scalar(node.right, env)
        if node.op in ("&&", "||"):
            return g.logic("land" if node.op == "&&" else "lor", g.to_bool(a), g.to_bool(b))
        if node.op in ("%", "<<", ">>", "&", "|", "^"):
            op = {"%": "imod", "<<": "shl", ">>": "shr", "&": "and", "|": "or", "^": "xor"}[node.op]
            return g.binary(op, self._whole(node.left, a), self._whole(node.right, b))
        a, b = self.same(a, b)
        if node.op in ("<", "<=", "==", "!="):
            return g.binary({"<": "lt", "<=": "le", "==": "eq", "!=": "ne"}[node.op], a, b)
        if node.op in (">", ">="):
            return g.binary("lt" if node.op == ">" else "le", b, a)
        if node.op == "/":
            return g.binary("div" if a.type == "float" else "idiv", a, b)
        return g.binary({"+": "add", "-": "sub", "*": "mul"}[node.op], a, b)

    def same(self, a: Expr, b: Expr) -> tuple[Expr, Expr]:
        """Returns two numbers in their common type: float if one is, else int."""
        g = self.graph
        if "float" in (a.type, b.type):
            return g.to_float(a), g.to_float(b)
        return g.to_int(a), g.to_int(b)

    def scalar(self, node: ast.Expr, env: Env) -> Expr:
        """Returns a number; raises an error at `node` if it is not one."""
        value = self.value(node, env)
        if isinstance(value, Scalar):
            return value.value
        what = self.what(value)
        self.fail(node, f"a number is needed here, this is {what}; index it or reduce it")

    def array(self, node: ast.Expr, env: Env) -> ArrayValue:
        """Returns an array; raises an error at `node` if it is not one."""
        value = self.value(node, env)
        if isinstance(value, Scalar | Func | Struct | Unset):
            self.fail(node, f"an array is needed here, this is {self.what(value)}")
        return value

    @staticmethod
    def what(value: Binding) -> str:
        if isinstance(value, Func):
            return "a lambda"
        if isinstance(value, Struct):
            return "a param block"
        if isinstance(value, Unset):
            return "a name without a value yet"
        return str(value.elem) if isinstance(value, Scalar) else f"an array ({value.elem}*)"

    def size(self, node: ast.Expr, env: Env) -> Expr:
        """Returns the length of an array, which only sizes and parameters may determine."""
        value = self.scalar(node, env)
        if value.type != "int":
            self.fail(node, "a size is an int; this is a float (use floor and an int variable)")
        in_row = value.variance == 1 and value in self.draft.limits
        if not (value.host or value.op in ("count", "blen") or in_row):
            self.fail(node, "a size is made of sizes and parameters; this depends on the gradient")
        return value

    def show(self, length: Expr) -> str:
        """Returns a length in words for an error message."""
        if length.op == "const":
            return f"{length.attr} elements"
        known = {"n": "the gradient", "count": "a filter let through", "blen": "the block"}
        of = known.get(length.op)
        return f"as many elements as {of}" if of else "another number of elements"

    def typed(
        self, node: ast.Expr, elem: ElemType, array: bool, name: str, env: Env
    ) -> Scalar | ArrayValue:
        value = self.value(node, env)
        if isinstance(value, Scalar):
            if array:
                self.fail(node, f"{name!r} is an array ({elem}*); this is a number")
            return Scalar(convert(self.graph, value.value, elem), elem)
        if isinstance(value, Func | Struct | Unset):
            self.fail(node, f"{name!r} cannot hold {self.what(value)}")
        if not array:
            self.fail(node, f"{name!r} is a number; this is an array ({value.elem}*)")
        return operators.retyped(self, value, elem)

    def _call(self, node: ast.Call, env: Env) -> Binding:
        home = env.home(node.name)
        if home is not None:
            func = home.names[node.name]
            if not isinstance(func, Func):
                self.fail(node, f"{node.name!r} is {self.what(func)} here, not a function")
            args = [self.scalar(a, env) for a in node.args]
            if any(f.code is func.code and f.env is func.env for f in self.calls):
                self.fail(node, f"{node.name!r} calls itself; a lambda cannot, use reduce or scan")
            self.calls.append(func)
            try:
                return self.apply(node, func, args, None)
            finally:
                self.calls.pop()
        return operators.call(self, node, env)

    def apply(
        self, node: ast.Node, func: Func, args: Sequence[Expr], position: Expr | None
    ) -> Scalar:
        """Calls a lambda; `position` is the index it runs at, if it runs over an array."""
        code = func.code
        if len(args) != len(code.args):
            self.fail(node, f"the lambda takes {len(code.args)} arguments; {len(args)} were given")
        env = Env(outer=func.env)
        for arg, value in zip(code.args, args, strict=True):
            if arg.type.array or arg.inout or arg.size is not None:
                self.fail(arg, "a lambda takes numbers; capture arrays by name instead")
            elem = self.elem(arg.type, func.env)
            env.names[arg.name] = Scalar(convert(self.graph, value, elem), elem)
        saved = self.position
        self.position = position if position is not None else saved
        self.lambdas += 1
        try:
            done, result = self._outcome(code.body, env, env)
        finally:
            self.position = saved
            self.lambdas -= 1
        if done is not self.graph.const(True):
            self.fail(code, "the lambda may end without a return")
        returns = self.elem(code.returns, func.env)
        if code.returns.array:
            self.fail(code.returns, "a lambda returns a number")
        return Scalar(convert(self.graph, result, returns), returns)

    def _outcome(self, body: Sequence[ast.Statement], env: Env, top: Env) -> tuple[Expr, Expr]:
        """Whether a lambda's statements return, and what; both may depend on the element.

        Every statement is evaluated once, also after an `if` that returns: work grows with the
        length of the text, not with the number of ways through it.
        """
        g = self.graph
        done, result = g.const(False), g.const(0)
        with self.nested(body):
            for s in body:
                if isinstance(s, ast.Return):
                    if s.value is None:
                        self.fail(s, "a lambda returns a value")
                    returns, value = g.const(True), self.scalar(s.value, env)
                elif isinstance(s, ast.If):
                    returns, value = self._branch(s, env, top)
                else:
                    self._inner_statement(s, env, top)
                    continue
                if done is g.const(False):
                    result = value
                else:
                    result = g.select(done, *self.same(result, value))
                done = g.logic("lor", done, returns)
                if done is g.const(True):
                    break
        return done, result

    def _branch(self, s: ast.If, env: Env, top: Env) -> tuple[Expr, Expr]:
        g = self.graph
        cond = g.to_bool(self.scalar(s.cond, env))
        before = env.snapshot()
        yes_done, yes = self._outcome(s.yes, Env(outer=env), top)
        after = env.snapshot()
        env.restore(before)
        no_done, no = self._outcome(s.no, Env(outer=env), top)
        self.merge(s, cond, after, env)
        if no_done is g.const(False):
            return g.logic("land", cond, yes_done), yes
        if yes_done is g.const(False):
            return g.logic("land", g.unary("not", cond), no_done), no
        return g.select(cond, yes_done, no_done), g.select(cond, *self.same(yes, no))

    def _inner_statement(self, s: ast.Statement, env: Env, top: Env) -> None:
        if isinstance(s, ast.Declare):
            if s.type.array or s.size is not None or s.type.base == "lambda_func":
                self.fail(s, "inside a lambda only numbers can be declared")
            self.declare(s, env)
        elif isinstance(s, ast.Assign):
            home = env.home(s.name)
            if home is None:
                self.unknown(s, s.name, env)
            old = home.names[s.name]
            if not home.within(top) or isinstance(old, Func | Struct):
                self.fail(s, f"a lambda can only assign its own names; {s.name!r} is captured")
            home.names[s.name] = self.typed(s.value, old.elem, False, s.name, env)
        else:
            self.fail(s, "a lambda may hold only declarations, assignments, if and return")

    def unknown(self, node: ast.Node, name: str, env: Env) -> NoReturn:
        if any(name in scope.ended for scope in env.scopes()):
            self.fail(node, f"{name!r} is known inside its per scope alone: {LEAVES}")
        names = ", ".join(env.visible()) or "none"
        self.fail(node, f"{name!r} is not defined; names in scope: {names}")
