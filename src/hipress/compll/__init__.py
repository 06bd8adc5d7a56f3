"""CompLL: a compression program in, kernels out.

The rooms, in walking order:

    parse, ast             text to tree (`grammar.lark` is the grammar)
    check, expressions,    tree to a checked graph of values: a function is played once with
    operators, scope       symbolic arguments
    arrays, graph, ir      what such values are, and the passes that backends see
    passes                 values to a short flat list of fused passes over memory
    derive                 the kernels of a program: plain, with feedback or momentum, adding
    render                 what backends share
    reference, cpu         passes to source: plain NumPy, and numba
    build                  the whole way, with the cache on disk
    threads                runs a CPU kernel on several threads
    lone, show, cost,      what `hipress compll` needs besides: one function alone, printing each
    emit*                  stage, counting bytes, writing an importable package
"""
