"""CompLL: a compression program in, kernels out.

The rooms in walking order; each imports only from rooms above it and from `ir`:

    ir          the values and passes that every room works on
    front/      text to checked values: parse (with ast and grammar.lark), check (statements, with
                expressions, operators, scope), arrays and graph (what values are made of)
    passes/     values to kernels: derive (encode, decode, merge, with feedback and momentum),
                schedule (the fewest passes over memory), cost (what a kernel moves)
    backends/   kernels to source: render and host (shared), reference (NumPy), cpu (numba, with
                threads), gpu (Triton)
    build       the whole way, with the cache on disk; a program of one function alone
    tools/      what `hipress compll` needs besides: show (each stage as text), emit (an importable
                package)
"""
