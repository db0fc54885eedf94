"""Do kernels and towers agree: with fp64, with the unfused computation, with each other?

`kernels` and `towers` go through all cases and print the tables. `oracle` computes in fp64, and as
the unfused computation would round; `expected` is a workload with that answer. `metrics` says how
far a result is from another, and holds the rules of how far it may be.
"""
